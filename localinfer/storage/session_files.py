"""Conversations that a loaded model writes to files of their own, and goes on with from there."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localinfer.arguments import check_path
from localinfer.engine.cache.salt import salt_of
from localinfer.errors import SessionFileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.engine import Engine
    from localinfer.storage.fingerprint import ModelIdentity


class SessionFiles:
    """The part of an `LLM` that saves and loads the keys and values of conversations."""

    if TYPE_CHECKING:
        _engine: Engine
        _identity: ModelIdentity | None
        _session_lock: threading.Lock

    def save_session(
        self,
        path: str | os.PathLike[str],
        token_ids: Sequence[int] | NDArray[np.integer] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> int:
        """Write the keys and values of one conversation to a file, to go on with later; return its tokens.

        token_ids: the conversation; None takes the one that was answered last. What is not in memory of it is left
        out. cache_salt: with which the given conversation was generated. The file holds the text, as token ids: only
        its owner can read a new one; an old one keeps its mode.
        Raises: SessionFileError if nothing of it is in memory, the file cannot be written, or the model's has changed.
        """
        from localinfer.storage.sessions import save_session

        file = check_path("path", path)
        wanted, salt = None if token_ids is None else self._engine.check_prompt(token_ids), salt_of(cache_salt)
        identity = self._require_identity()
        with self._session_lock:
            return save_session(self._engine, identity, file, wanted, salt)

    def load_session(self, path: str | os.PathLike[str], *, cache_salt: str | None = None) -> list[int]:
        """Read a file that `save_session` wrote, so that a prompt that begins like it computes only what is new.

        Returns the token ids it holds. Nothing of the file is used before all of it is proven.
        cache_salt: of those prompts; a file says nothing of one.
        Raises: SessionFileError if it is missing or damaged; SessionMismatchError, naming what differs, if it was saved
            with another model, setting or version; OutOfMemoryError.
        """
        from localinfer.storage.sessions import load_session

        file, salt = check_path("path", path), salt_of(cache_salt)
        identity = self._require_identity()
        with self._session_lock:
            token_ids = load_session(self._engine, identity, file, salt)
        return [int(token_id) for token_id in token_ids]

    def _require_identity(self) -> ModelIdentity:
        self._engine.check_usable()
        if self._identity is None:
            raise SessionFileError(
                "this model's files cannot be told apart from others'; load it with localinfer.load from where it lies"
            )
        return self._identity
