"""Prompts that one process computes and another one continues: through the files of a prompt cache that both share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localinfer.arguments import check_number, shown
from localinfer.engine.cache.block_hashes import NO_SALT, check_salt
from localinfer.errors import RequestError
from localinfer.generation.stream import TextStream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.engine import Engine
    from localinfer.engine.media import MediaRun
    from localinfer.generation.options import CheckedOptions
    from localinfer.models.load.loader import Model
    from localinfer.storage.fingerprint import Fingerprint, ModelIdentity
    from localinfer.storage.prompt_cache import DiskCache
    from localinfer.storage.restore import Tiers
    from localinfer.types import TokenIds

    _Ids = Sequence[int] | NDArray[np.integer]

_NO_CACHE = (
    "this model keeps no prompts on disk, where another process could find them; load it with disk_cache=True (without "
    "--no-disk-cache), from where its file lies, and with a folder that can be written"
)


@dataclass(frozen=True)
class Prefilled:
    """A prompt that was computed and written."""

    prompt_tokens: int
    """Its length."""
    cached_tokens: int
    """Ids of it that were known before."""
    stored_tokens: int
    """Leading ids that another process can continue from: all but the last, whose logits it computes."""
    problem: str | None = None
    """Reason why they are fewer."""
    has_failed: bool = False
    """True if the disk refused the rest, as it will with other prompts."""


class KVTransfer:
    """Computes prompts of an `LLM` for other processes, and resumes those that they have computed.

    Both processes have loaded the same model with the same settings, and `disk_cache_folder` is the same folder.
    Programs need `LLM.prefill` only: any call for text finds the files that it wrote. The other methods are the parts
    of it, and of the other side, for the server, which reports progress, and asks before it waits; they take token ids
    and salts (`localinfer.engine.cache.block_hashes`) in place of texts and names.
    """

    def __init__(
        self,
        engine: Engine,
        model: Model,
        identity: ModelIdentity | None,
        disk: DiskCache | None,
        check: Callable[[Mapping[str, Any]], CheckedOptions],
    ) -> None:
        self._engine, self._model, self._identity, self._disk = engine, model, identity, disk
        self._check = check

    def prefill(self, token_ids: _Ids, salt: bytes, media: Sequence[MediaRun] = ()) -> Prefilled:
        """Compute a prompt, with its pictures and sounds, and write it at once."""
        with self.stream_prefill(token_ids, salt=salt, media=media) as stream:
            cached_tokens = stream.result().stats.cached_tokens
            return self.store_prompt(stream.request.head, cached_tokens, salt)

    def stream_prefill(
        self,
        token_ids: _Ids,
        *,
        system_tokens: int = 0,
        branch_tokens: Sequence[int] = (),
        salt: bytes = NO_SALT,
        owner: Hashable = None,
        media: Sequence[MediaRun] = (),
    ) -> TextStream:
        """A stream of one token, after which a prompt is in the cache; to be closed before that to stop."""
        from localinfer.generation.text_generation import EncodedPrompt, TextGeneration

        system_tokens = check_number("system_tokens", system_tokens, 0)
        if isinstance(branch_tokens, str | bytes) or not isinstance(branch_tokens, Sequence):
            raise RequestError(
                f"branch_tokens is {shown(branch_tokens)}; give a list of lengths", field="branch_tokens"
            )
        branches = tuple(check_number("one of branch_tokens", one, 0, field="branch_tokens") for one in branch_tokens)
        options = self._check({"temperature": 0.0, "max_tokens": 1, "owner": owner})
        checked = replace(options, salt=check_salt(salt))
        prompt = EncodedPrompt(token_ids, system_tokens, branch_tokens=branches, is_handed_over=True, media=media)
        return TextStream(TextGeneration(self._engine, self._model.tokenizer, prompt, checked))

    def store_prompt(self, token_ids: _Ids, cached_tokens: int = 0, salt: bytes = NO_SALT) -> Prefilled:
        """Write what is cached of a prompt at once, in steps between those of the engine; return at its end."""
        checked, own_salt = self._checked_text(token_ids, salt)
        cached_tokens = check_number("cached_tokens", cached_tokens, 0)
        disk = self._shared_disk()
        disk.write_now(checked, own_salt)
        wanted = int(checked.size) - 1
        stored = self.stored_tokens(token_ids, salt)
        problem, failure = None, disk.last_failure if stored < wanted else None
        if stored < wanted:
            problem = f"of {wanted} tokens {stored} could be written" + ("" if failure is None else f": {failure}")
        return Prefilled(wanted + 1, cached_tokens, stored, problem, failure is not None)

    def cached_tokens(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """Number of leading ids of a prompt that are cached in memory, of all but the last, whose logits it needs."""
        token_ids, salt = self._checked_text(token_ids, salt)
        with self._engine.exclusive_cache() as cache:
            return cache.tree.match(token_ids[:-1], salt).usable

    def stored_tokens(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """The same on disk, by the names of files. Raises: RequestError if nothing is kept there, ClosedError."""
        from localinfer.storage.restore import stored_tokens

        token_ids, salt = self._checked_text(token_ids, salt)
        return stored_tokens(self._engine.pool, self._tiers(salt), token_ids[:-1])

    def fetch_prompt(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """Read a prompt from disk into memory, while others generate; return how many leading ids it then has."""
        from localinfer.storage.restore import prefetch

        token_ids, salt = self._checked_text(token_ids, salt)
        return prefetch(self._engine, self._tiers(salt), token_ids[:-1])

    def fingerprint(self) -> Fingerprint:
        """The fingerprint that both processes must share. The first call may have to read the weights, to hash them."""
        self._tiers(NO_SALT)
        found = None if self._identity is None else self._identity.known()
        if found is None:
            raise RequestError(_NO_CACHE)
        return found

    @property
    def folder(self) -> str:
        """The folder of the prompt cache, which both processes share. Raises: RequestError without one."""
        return str(self._shared_disk().folder)

    def _checked_text(self, token_ids: _Ids, salt: bytes) -> tuple[TokenIds, bytes]:
        checked = self._engine.check_prompt(token_ids, names_media=True, shifts_context=True)
        return checked, self._engine.text_salt(checked, check_salt(salt))

    def _shared_disk(self) -> DiskCache:
        if self._disk is None:
            raise RequestError(_NO_CACHE)
        return self._disk

    def _tiers(self, salt: bytes) -> Tiers:
        try:
            tiers = self._shared_disk().tiers(salt)
        except OSError as error:
            raise RequestError(_NO_CACHE) from error
        if tiers is None:
            raise RequestError(_NO_CACHE)
        return tiers
