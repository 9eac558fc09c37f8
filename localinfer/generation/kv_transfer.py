"""Prompts that one process computes and another one continues: through the files of a prompt cache that both share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localinfer.arguments import check_number, shown
from localinfer.engine.cache.salt import NO_SALT, check_salt, salt_of
from localinfer.errors import RequestError
from localinfer.generation.stream import TextStream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.engine import Engine
    from localinfer.generation.options import CheckedOptions
    from localinfer.generation.text_generation import EncodedPrompt
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
    """A prompt that was computed and written. cached_tokens: of it, that were known before. stored_tokens: leading
    ids that another process can continue from; all but the last, whose logits it computes, or `problem` says why not.
    has_failed: the disk refused the rest, which it will do with other prompts too.
    """

    prompt_tokens: int
    cached_tokens: int
    stored_tokens: int
    problem: str | None = None
    has_failed: bool = False


class KVTransfer:
    """The part of an `LLM` that computes prompts for other processes, and takes up what they have computed.

    Both processes have loaded the same model with the same settings, and `disk_cache_folder` is the same folder.
    Programs need `prefill` only: what it has written is found by any call for text. The other methods are the parts of
    it, and of the other side, for the server, which reports progress, and asks before it waits; they take token ids
    and salts (`localinfer.engine.cache.salt`) in place of texts and names.
    """

    if TYPE_CHECKING:
        _engine: Engine
        _model: Model
        _identity: ModelIdentity | None
        _disk: DiskCache | None

        def _checked(self, options: dict[str, Any]) -> CheckedOptions: ...
        def _encode(self, prompt: Any, parse_special: bool, max_tokens: int | None) -> EncodedPrompt: ...

    def prefill(
        self,
        prompt: str | Sequence[int] | NDArray[np.integer],
        *,
        parse_special: bool = False,
        cache_salt: str | None = None,
    ) -> Prefilled:
        """Compute a prompt and write it to the disk cache at once, for another process that shares the folder.

        What that generates then is, bit for bit, what it would have computed alone. prompt, parse_special, cache_salt:
        as of `complete`. Raises: RequestError without a disk cache; else as `complete`.
        """
        salt = salt_of(cache_salt)
        encoded = self._encode(prompt, parse_special, self._engine.context_length)
        with self.stream_prefill(encoded.token_ids, salt=salt) as stream:
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
    ) -> TextStream:
        """A stream of one token, after which a prompt is in the cache; to be closed before that to stop.

        system_tokens, branch_tokens: where other texts are likely to continue from, as of `CacheHints`.
        Raises: RequestError, ContextLengthError, ClosedError.
        """
        from localinfer.generation.text_generation import EncodedPrompt, TextGeneration

        system_tokens = check_number("system_tokens", system_tokens, 0)
        if isinstance(branch_tokens, str | bytes) or not isinstance(branch_tokens, Sequence):
            raise RequestError(
                f"branch_tokens is {shown(branch_tokens)}; give a list of lengths", field="branch_tokens"
            )
        branches = tuple(check_number("one of branch_tokens", one, 0, field="branch_tokens") for one in branch_tokens)
        options = self._checked({"temperature": 0.0, "max_tokens": 1, "owner": owner})
        checked = replace(options, salt=check_salt(salt))
        prompt = EncodedPrompt(token_ids, system_tokens, branch_tokens=branches, is_handed_over=True)
        return TextStream(TextGeneration(self._engine, self._model.tokenizer, prompt, checked))

    def store_prompt(self, token_ids: _Ids, cached_tokens: int = 0, salt: bytes = NO_SALT) -> Prefilled:
        """Write what is cached of a prompt at once, in steps between those of the engine; return at its end.

        cached_tokens: of it, known before, for the result. Raises: RequestError, ClosedError.
        """
        token_ids, salt = self._checked_text(token_ids, salt)
        cached_tokens = check_number("cached_tokens", cached_tokens, 0)
        disk = self._shared_disk()
        disk.write_now(token_ids, salt)
        wanted = int(token_ids.size) - 1
        stored = self.stored_tokens(token_ids, salt)
        problem, failure = None, disk.last_failure if stored < wanted else None
        if stored < wanted:
            problem = f"of {wanted} tokens {stored} could be written" + ("" if failure is None else f": {failure}")
        return Prefilled(wanted + 1, cached_tokens, stored, problem, failure is not None)

    def cached_tokens(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """How many leading ids of a prompt are cached in memory, of all but the last, whose logits are computed anyway.

        Waits for the step in progress. Raises: RequestError, ClosedError.
        """
        token_ids, salt = self._checked_text(token_ids, salt)
        with self._engine.exclusive_cache() as cache:
            return cache.tree.match(token_ids[:-1], salt).usable

    def stored_tokens(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """The same on disk, by the names of files. Raises: RequestError if nothing is kept there, ClosedError."""
        from localinfer.storage.restore import stored_tokens

        token_ids, salt = self._checked_text(token_ids, salt)
        return stored_tokens(self._engine.pool, self._tiers(salt), token_ids[:-1])

    def fetch_prompt(self, token_ids: _Ids, salt: bytes = NO_SALT) -> int:
        """Read what is on disk of a prompt into memory, while others generate; return how many leading ids it then has.

        Raises: RequestError, ClosedError.
        """
        from localinfer.storage.restore import prefetch

        token_ids, salt = self._checked_text(token_ids, salt)
        return prefetch(self._engine, self._tiers(salt), token_ids[:-1])

    def handover_fingerprint(self) -> Fingerprint:
        """What both processes must have alike. The first call may have to read the weights, to hash them.

        Raises: RequestError if nothing is kept on disk, or the model's file has changed.
        """
        self._tiers(NO_SALT)
        found = None if self._identity is None else self._identity.known()
        if found is None:
            raise RequestError(_NO_CACHE)
        return found

    @property
    def handover_folder(self) -> str:
        """The folder of the prompt cache, which both processes share. Raises: RequestError without one."""
        return str(self._shared_disk().folder)

    def _checked_text(self, token_ids: _Ids, salt: bytes) -> tuple[TokenIds, bytes]:
        return self._engine.check_prompt(token_ids, shifts_context=True), check_salt(salt)

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
