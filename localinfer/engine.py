"""The engine: token ids in, token ids out, over one model and the pages of its sequences.

It knows no text. A generation prefills its prompt in chunks, then decodes token by token; every step (one run of the
program and the choice that follows) holds the engine's lock, so generations of several threads, or several unfinished
ones of one thread, take turns by steps and never wait for each other's ends.
"""

import os
import threading
from collections.abc import Collection, Generator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError, RequestError
from localinfer.kernels.ops import Batch, Program, Segment
from localinfer.kv_cache import KVCache, KVLayout, PagePool
from localinfer.sampling import Sampler, SamplingParams, SamplingPlan, not_finite_error

FinishReason = Literal["stop", "length"]
"""stop: an end token or a stop string; length: max_tokens, or the end of the context."""

_HISTORY_ROOM = 512
"""Tokens a generation has room for before its list of ids first grows."""


class EngineConfig(Protocol):
    """What the engine reads of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...


class EngineModel(Protocol):
    """What the engine needs of a loaded model; `models.loader.Model` is one.

    `config.context_length` is the context this model was loaded with; `program` returns float32[rows, vocab_size].
    """

    @property
    def config(self) -> EngineConfig: ...

    @property
    def program(self) -> Program: ...

    @property
    def kv_layout(self) -> KVLayout: ...

    def close(self) -> None: ...


class TokenEvent(NamedTuple):
    """One sampled token: its id, its position in the sequence, and why it is the last one, if it is."""

    token_id: int
    position: int
    finish_reason: FinishReason | None


class Engine:
    """Owns a model and its pages. Not usable after `close`, nor in a forked child: threads do not survive a fork."""

    def __init__(self, model: EngineModel, *, kv_memory: int | None = None) -> None:
        self._model = model
        self._program = model.program
        self.vocab_size = model.config.vocab_size
        self.context_length = model.config.context_length
        self._pool = PagePool(model.kv_layout, max_bytes=kv_memory)
        self._sampler = Sampler(self.vocab_size)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._first_row = np.zeros(1, np.int32)
        self._no_rows = np.zeros(0, np.int32)

    @property
    def pool(self) -> PagePool:
        """The pages of every sequence."""
        return self._pool

    def plan(self, sampling: SamplingParams) -> SamplingPlan:
        """Check sampling parameters against the vocabulary and draw the seed."""
        return SamplingPlan(sampling, self.vocab_size)

    def check_prompt(self, prompt_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        """Return a prompt as int32[T], proven to be token ids that fit the context.

        Raises: RequestError naming the first wrong id; ContextLengthError with both lengths.
        """
        token_ids = self._check_ids(prompt_ids)
        if token_ids.size > self.context_length:
            raise ContextLengthError(
                f"the prompt has {token_ids.size} tokens, but the context holds {self.context_length}; shorten it, or "
                "load the model with a larger context_length"
            )
        return token_ids

    def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.integer],
        sampling: SamplingParams | SamplingPlan,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
    ) -> Generator[TokenEvent]:
        """Continue a prompt; yield each token as it is sampled. Closing the iterator cancels and frees its pages.

        max_tokens: None goes on until a stop token or the end of the context, 0 yields nothing.
        stop_token_ids: end the generation; the stop token is yielded, as the last one. ignore_eos: they do not.
        Raises: at once RequestError, ContextLengthError, ClosedError; while iterating ModelFileError for logits that
            are
            not finite, OutOfMemoryError, ClosedError. The engine stays usable after each but ClosedError.
        """
        self.check_usable()
        if max_tokens is not None and (
            not isinstance(max_tokens, int | np.integer) or isinstance(max_tokens, bool) or max_tokens < 0
        ):
            raise RequestError(
                f"max_tokens is {max_tokens!r}; it must be a whole number, 0 or more, or None for no limit"
            )
        token_ids = self.check_prompt(prompt_ids)
        if not token_ids.size:
            raise RequestError("the prompt has no tokens; give at least one, such as the beginning-of-text token")
        plan = self.plan(sampling) if isinstance(sampling, SamplingParams) else sampling
        stops = frozenset() if ignore_eos else frozenset(stop_token_ids)
        room = self.context_length - token_ids.size
        limit = room if max_tokens is None else min(int(max_tokens), room)
        return self._generate(token_ids, plan, limit, stops)

    def logits(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return float32[T, vocab_size]: for each position, the logits of the token that follows it.

        Raises: as `generate`; OutOfMemoryError if the machine cannot hold the result.
        """
        self.check_usable()
        tokens = self.check_prompt(token_ids)
        try:
            out = np.empty((tokens.size, self.vocab_size), np.float32)
        except MemoryError:
            raise OutOfMemoryError(
                f"the logits of {tokens.size} positions take {tokens.size * self.vocab_size * 4:,} bytes, which this "
                "machine does not have; ask for fewer positions"
            ) from None
        chunk = min(self._program.max_batch_rows, self._program.max_output_rows)
        rows = np.arange(chunk, dtype=np.int32)
        cache = KVCache(self._pool, max_length=self.context_length)
        try:
            for start in range(0, tokens.size, chunk):
                stop = min(start + chunk, tokens.size)
                self.check_usable()
                with self._lock:
                    out[start:stop] = self._forward(cache, tokens[start:stop], rows[: stop - start])
                if not np.isfinite(out[start:stop]).all():
                    raise not_finite_error(start + 1 + int(np.argmin(np.isfinite(out[start:stop]).all(axis=1))))
        finally:
            cache.close()
        return out

    def check_usable(self) -> None:
        """Raise ClosedError if the engine was closed, or belongs to the process that forked this one."""
        if self._closed:
            raise ClosedError("the model was closed; load it again")
        if os.getpid() != self._process:
            raise ClosedError(
                "the model was loaded before this process was forked, and its threads stayed behind; load it here, or "
                "start processes with the 'spawn' method"
            )

    def close(self) -> None:
        """Wait for the step in progress, then release model and pages; may be called again. A forked child forgets."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return
        with self._lock:
            self._pool.close()
            self._model.close()

    def _generate(
        self, prompt: NDArray[np.int32], plan: SamplingPlan, limit: int, stops: frozenset[int]
    ) -> Generator[TokenEvent]:
        if limit == 0:
            return
        lock, forward, choose = self._lock, self._forward, self._sampler.choose
        history = np.empty(prompt.size + min(limit, _HISTORY_ROOM), np.int32)
        history[: prompt.size] = prompt
        position = prompt.size
        last = position + limit - 1
        cache = KVCache(self._pool, max_length=self.context_length)
        try:
            start = self._prefill(cache, prompt)
            output_row = np.array([position - start - 1], np.int32)
            while True:
                self.check_usable()
                with lock:
                    logits = forward(cache, history[start:position], output_row)
                    token_id = choose(logits[0], plan, position, history)
                if token_id in stops:
                    yield TokenEvent(token_id, position, "stop")
                    return
                if position == last:
                    yield TokenEvent(token_id, position, "length")
                    return
                yield TokenEvent(token_id, position, None)
                if position == history.size:
                    history = np.concatenate((history, np.empty_like(history)))
                history[position] = token_id
                start, position, output_row = position, position + 1, self._first_row
        finally:
            cache.close()

    def _prefill(self, cache: KVCache, prompt: NDArray[np.int32]) -> int:
        """Compute all of the prompt but its last chunk, left for the step that samples; return where that begins."""
        start = 0
        chunk = self._program.max_batch_rows
        while prompt.size - start > chunk:
            self.check_usable()
            with self._lock:
                self._forward(cache, prompt[start : start + chunk], self._no_rows)
            start += chunk
        return start

    def _forward(
        self, cache: KVCache, token_ids: NDArray[np.int32], output_rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Compute the next positions of one sequence. The lock is held; the result is valid until it is released."""
        if self._closed:
            raise ClosedError("the model was closed while it was generating")
        start = cache.length
        stop = start + token_ids.size
        cache.reserve(stop)
        segment = Segment(start, token_ids.size, cache.page_addresses)
        logits = self._program.run(Batch(token_ids, (segment,), output_rows))
        cache.commit(stop)
        return logits

    def _check_ids(self, values: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        try:
            array = np.asarray(values)
        except (ValueError, OverflowError):
            array = np.zeros((0, 0))
        is_list = not isinstance(values, str | bytes) and array.ndim == 1
        if is_list and (array.dtype.kind in "iu" or array.size == 0):
            wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
            if not wrong.size:
                return np.ascontiguousarray(array, np.int32)
            index = int(wrong[0])
            raise RequestError(
                f"token id {array[index]} at index {index} is not in the vocabulary, which has ids 0 to "
                f"{self.vocab_size - 1}; encode the text with this model's tokenizer"
            )
        raise RequestError(
            f"the token ids are {_shorten(values)}; give a flat list or one-dimensional array of whole numbers"
        )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
