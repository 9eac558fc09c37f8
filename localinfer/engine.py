"""The engine: token ids in, token ids out, over one model and the pages of its sequences.

It knows no text. A generation prefills its prompt in chunks, then decodes token by token; every step (one run of the
program and the choice that follows) holds the engine's lock, so generations of several threads, or several unfinished
ones of one thread, take turns by steps and never wait for each other's ends.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.cache_miss import CacheMiss
from localinfer.draft_depth import MAX_DEPTH
from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError, RequestError
from localinfer.kernels.ops import Batch, Program
from localinfer.kv_cache import KVCache
from localinfer.kv_window import PageWindow
from localinfer.page_pool import KVLayout, PagePool, default_kv_memory
from localinfer.prefix_cache import CacheUse, PrefixCache
from localinfer.sampling import Sampler, SamplingParams, SamplingPlan, TokenMask, not_finite_error
from localinfer.speculation import Speculation, SpeculationRecord, SpeculativeText, choose_verified

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


@dataclass
class GenerationRecord:
    """What a generation has cost so far, kept up to date while it runs.

    cached_tokens: of the prompt, not computed again. miss: why not more of them, None where nothing stood in the way.
    dropped_tokens: left out of the context, by `context_shift`. speculation: what drafts did, None where it is off.
    """

    cached_tokens: int = 0
    miss: CacheMiss | None = None
    dropped_tokens: int = 0
    speculation: SpeculationRecord | None = None


class Generation(Iterator[TokenEvent]):
    """The tokens of one generation as they are sampled, and what they cost; closing it cancels."""

    def __init__(self, events: Generator[TokenEvent], record: GenerationRecord) -> None:
        self.record = record
        self._events = events

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def close(self) -> None:
        """End the generation; what it computed stays in the cache. May be called again."""
        self._events.close()


@dataclass
class _Run:
    """One generation inside the engine: the ids it began its sequence with, and where in its history they end."""

    use: CacheUse
    head: NDArray[np.int32]
    history: NDArray[np.int32]
    base: int
    speculative: SpeculativeText | None = None
    is_prompt: bool = True
    sequence: KVCache | None = None

    def context_ids(self) -> NDArray[np.int32]:
        """The ids whose keys and values the sequence holds."""
        assert self.sequence is not None, "asked for before it began"
        after = max(0, self.sequence.length - self.head.size)
        return np.concatenate((self.head, self.history[self.base : self.base + after]))[: self.sequence.length]

    def make_room(self, length: int) -> None:
        """Let the history hold at least so many ids."""
        if length > self.history.size:
            self.history = np.concatenate((self.history, np.empty_like(self.history, shape=length)))


@dataclass(frozen=True)
class _Retired:
    """A sequence that has ended: its ids, how the cache is to keep them, and what drafted for it."""

    sequence: KVCache
    token_ids: NDArray[np.int32]
    use: CacheUse
    speculative: SpeculativeText | None


class _Turn:
    """The engine's lock; who holds it also closes the sequences that ended meanwhile."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._lock.acquire()
        self._engine._close_retired()

    def __exit__(self, *_: object) -> None:
        self._engine._lock.release()
        self._engine._settle()


_PLAIN_USE = CacheUse()


class Engine:
    """Owns a model and its pages. Not usable after `close`, nor in a forked child: threads do not survive a fork."""

    def __init__(
        self,
        model: EngineModel,
        *,
        kv_memory: int | None = None,
        kv_window: PageWindow | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._model = model
        self._speculation = speculation
        self._program = model.program
        self.vocab_size = model.config.vocab_size
        self.context_length = model.config.context_length
        if kv_memory is None:
            kv_memory = default_kv_memory(model.kv_layout, self.context_length)
        self._cache = PrefixCache(
            model.kv_layout, max_bytes=kv_memory, context_length=self.context_length, window=kv_window
        )
        self._sampler = Sampler(self.vocab_size)
        self._lock = threading.Lock()
        self._retired: deque[_Retired] = deque()
        self._turn = _Turn(self)
        self._process = os.getpid()
        self._closed = False
        self._first_rows = np.arange(MAX_DEPTH + 1, dtype=np.int32)
        self._no_rows = np.zeros(0, np.int32)

    @property
    def pool(self) -> PagePool:
        """The pages of every sequence and of the cache."""
        return self._cache.pool

    @property
    def program(self) -> Program:
        """The model's program, for whoever has the cache to himself."""
        return self._program

    @contextmanager
    def exclusive_cache(self) -> Generator[PrefixCache]:
        """The cache of prefixes, for as long as no generation takes a step."""
        self.check_usable()
        with self._turn:
            yield self._cache

    def plan(self, sampling: SamplingParams, mask: TokenMask | None = None) -> SamplingPlan:
        """Check sampling parameters against the vocabulary and draw the seed; mask: what a grammar allows."""
        return SamplingPlan(sampling, self.vocab_size, mask)

    def check_prompt(
        self, prompt_ids: Sequence[int] | NDArray[np.integer], *, shifts_context: bool = False
    ) -> NDArray[np.int32]:
        """Return a prompt as int32[T], proven to be token ids that fit the context, unless it may be shifted.

        Raises: RequestError naming the first wrong id; ContextLengthError with both lengths.
        """
        token_ids = self._check_ids(prompt_ids)
        if token_ids.size > self.context_length and not shifts_context:
            raise ContextLengthError(
                f"the prompt has {token_ids.size} tokens, but the context holds {self.context_length}; shorten it, "
                "load the model with a larger context_length, or allow context_shift",
                num_tokens=token_ids.size,
                context_length=self.context_length,
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
        context_shift: bool = False,
        cache_use: CacheUse = _PLAIN_USE,
        prediction: Sequence[int] | NDArray[np.integer] = (),
    ) -> Generation:
        """Continue a prompt; yield each token as it is sampled. Closing the generation cancels it.

        What of the prompt is in the cache is not computed again; what is computed stays there.

        max_tokens: None goes on until a stop token or the end of the context, 0 yields nothing.
        stop_token_ids: end the generation; the stop token is yielded, as the last one. ignore_eos: they do not.
        context_shift: where prompt or completion outgrow the context, go on with the system tokens and the recent half
            of the rest, computed anew; then only a stop token or max_tokens ends it.
        cache_use: what the cache should know of the prompt.
        prediction: ids that the completion is likely to have; right or wrong, they change its speed only.
        Raises: at once RequestError, ContextLengthError, ClosedError, OutOfMemoryError for a prompt that can never
            fit; while iterating ModelFileError for logits that are not finite, OutOfMemoryError, ClosedError. The
            engine stays usable after each but ClosedError.
        """
        self.check_usable()
        if max_tokens is not None and (
            not isinstance(max_tokens, int | np.integer) or isinstance(max_tokens, bool) or max_tokens < 0
        ):
            raise RequestError(
                f"max_tokens is {max_tokens!r}; it must be a whole number, 0 or more, or None for no limit"
            )
        token_ids = self.check_prompt(prompt_ids, shifts_context=context_shift)
        if not token_ids.size:
            raise RequestError("the prompt has no tokens; give at least one, such as the beginning-of-text token")
        plan = self.plan(sampling) if isinstance(sampling, SamplingParams) else sampling
        stops = frozenset() if ignore_eos else frozenset(stop_token_ids)
        room = sys.maxsize - token_ids.size if context_shift else self.context_length - token_ids.size
        limit = room if max_tokens is None else min(int(max_tokens), room)
        head = token_ids if token_ids.size <= self.context_length else self._shortened(token_ids, cache_use)
        self._cache.check_fits(head.size)
        history = np.empty(token_ids.size + min(limit, _HISTORY_ROOM), np.int32)
        history[: token_ids.size] = token_ids
        record = GenerationRecord(dropped_tokens=token_ids.size - head.size)
        run = _Run(cache_use, head, history, token_ids.size)
        expected = self._check_ids(prediction)
        if self._speculation is not None:
            run.speculative = self._speculation.begin(plan, expected)
            record.speculation = run.speculative.record
        return Generation(self._generate(run, plan, limit, stops, record), record)

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
        self._cache.check_fits(tokens.size)
        sequence = self._cache.open()
        try:
            for start in range(0, tokens.size, chunk):
                stop = min(start + chunk, tokens.size)
                self.check_usable()
                with self._turn:
                    out[start:stop] = self._forward(sequence, tokens[start:stop], rows[: stop - start])
                if not np.isfinite(out[start:stop]).all():
                    raise not_finite_error(start + 1 + int(np.argmin(np.isfinite(out[start:stop]).all(axis=1))))
        finally:
            with self._turn:
                sequence.close()
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
            self._cache.pool.close()
            if self._speculation is not None:
                self._speculation.close()
            self._model.close()

    def _generate(
        self, run: _Run, plan: SamplingPlan, limit: int, stops: frozenset[int], record: GenerationRecord
    ) -> Generator[TokenEvent]:
        if limit == 0:
            return
        turn, forward, choose, first_row = self._turn, self._forward, self._sampler.choose, self._first_rows[:1]
        position = run.base
        last = position + limit - 1
        try:
            sequence, pending = self._begin(run, record)
            output_row = np.array([pending.size - 1], np.int32)
            while True:
                self.check_usable()
                run.make_room(position + 1)
                with turn:
                    if run.speculative is not None and position > run.base and run.speculative.is_awake():
                        token_ids = self._speculate(run, sequence, run.speculative, plan, position, last, stops)
                    else:
                        logits = forward(sequence, pending, output_row)
                        if position == run.base:
                            self._cache.publish(sequence, run.head, run.use)
                        run.history[position] = token_id = choose(logits[0], plan, position, run.history)
                        token_ids = [token_id]
                for token_id in token_ids:
                    if token_id in stops:
                        yield TokenEvent(token_id, position, "stop")
                        return
                    if position == last:
                        yield TokenEvent(token_id, position, "length")
                        return
                    yield TokenEvent(token_id, position, None)
                    position += 1
                pending, output_row = run.history[position - 1 : position], first_row
                if sequence.length == self.context_length:
                    sequence, pending = self._shift(run, position, record)
                    output_row = np.array([pending.size - 1], np.int32)
        finally:
            self._retire(run)

    def _speculate(
        self,
        run: _Run,
        sequence: KVCache,
        text: SpeculativeText,
        plan: SamplingPlan,
        position: int,
        last: int,
        stops: frozenset[int],
    ) -> list[int]:
        """Decode the next token and those of a draft that follow it, in one pass. It is the caller's turn."""
        room = min(last - position, self.context_length - sequence.length - 1)
        drafted = text.draft(run.history[:position], room)
        began = time.perf_counter()
        count = drafted.size
        try:
            sequence.reserve(sequence.length + 1 + count)
        except OutOfMemoryError:
            count = 0
        end = position + count
        run.make_room(end + 1)
        run.history[position:end] = drafted[:count]
        logits = self._forward(sequence, run.history[position - 1 : end], self._first_rows[: count + 1])
        guesses = drafted[:count].tolist()
        chosen = choose_verified(self._sampler.choose, logits, plan, position, run.history, guesses, stops)
        if len(chosen) <= count:
            sequence.truncate(sequence.length - (count + 1 - len(chosen)))
        text.observe(count, len(chosen) - 1, time.perf_counter() - began)
        return chosen

    def _begin(self, run: _Run, record: GenerationRecord) -> tuple[KVCache, NDArray[np.int32]]:
        """Compute what is not cached of a run's head, but its last chunk, left for the step that samples.

        Returns the sequence and the ids left. Every chunk is published at once, so that of two who want the same
        prompt one computes it.
        """
        self.check_usable()
        with self._turn:
            admission = self._cache.admit(run.head, run.use, is_prompt=run.is_prompt)
            sequence = run.sequence = admission.sequence
        record.cached_tokens, record.miss = admission.cached_tokens, admission.miss
        chunk = self._program.max_batch_rows
        while True:
            self.check_usable()
            with self._turn:
                record.cached_tokens += self._cache.extend(sequence, run.head)
                start = sequence.length
                if run.head.size - start <= chunk:
                    return sequence, run.head[start:]
                self._forward(sequence, run.head[start : start + chunk], self._no_rows)
                self._cache.publish(sequence, run.head, run.use)

    def _shift(self, run: _Run, position: int, record: GenerationRecord) -> tuple[KVCache, NDArray[np.int32]]:
        """Begin a run anew with its system tokens and the recent half of its context, at a full context."""
        context = np.concatenate((run.head, run.history[run.base : position]))
        self._retire(run)
        run.head, run.base, run.is_prompt = self._shortened(context, run.use), position, False
        record.dropped_tokens += context.size - run.head.size
        return self._begin(run, GenerationRecord())

    def _shortened(self, token_ids: NDArray[np.int32], use: CacheUse) -> NDArray[np.int32]:
        """The system tokens, at most half a context of them, and as many recent ids as half of the rest holds."""
        system = min(use.system_tokens, self.context_length // 2)
        recent = max(1, (self.context_length - system) // 2)
        return np.concatenate((token_ids[:system], token_ids[token_ids.size - recent :]))

    def _retire(self, run: _Run) -> None:
        """Leave what a run computed to the cache, now or when the step in progress ends.

        It may be called by the garbage collector in the midst of a step, so it never waits.
        """
        if run.sequence is not None:
            self._retired.append(_Retired(run.sequence, run.context_ids(), run.use, run.speculative))
            run.sequence = None
            self._settle()

    def _settle(self) -> None:
        """Close the sequences that ended, unless somebody is at work, who will do it."""
        while self._retired and os.getpid() == self._process and self._lock.acquire(blocking=False):
            try:
                self._close_retired()
            finally:
                self._lock.release()

    def _close_retired(self) -> None:
        while self._retired:
            retired = self._retired.popleft()
            if not self._closed:
                self._cache.retire(retired.sequence, retired.token_ids, retired.use)
                if retired.speculative is not None:
                    retired.speculative.close()

    def _forward(
        self, sequence: KVCache, token_ids: NDArray[np.int32], output_rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Compute the next positions of one sequence. It is the caller's turn; the result is valid until it ends."""
        if self._closed:
            raise ClosedError("the model was closed while it was generating")
        stop = sequence.length + token_ids.size
        sequence.reserve(stop)
        logits = self._program.run(Batch(token_ids, (sequence.segment(token_ids.size),), output_rows))
        sequence.commit(stop)
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
