"""The engine: token ids in, token ids out, over one model and the pages of its sequences.

It validates requests and owns what they share; `scheduler` decides whose rows the next step computes, and `runner`
computes them. Text is above this package.
"""

import sys
from collections.abc import Collection, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number, check_priority, shown
from localinfer.engine.admission import EngineLimits, TtftStats
from localinfer.engine.cache.block_hashes import NO_SALT, CacheObserver, salt_of_type
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import KVEviction, forward
from localinfer.engine.cache.stats import SnapshotStats
from localinfer.engine.media import DEFAULT_EMBEDDING_BYTES, EmbeddingStore, MediaRun, PlacedMedia
from localinfer.engine.request import HISTORY_ROOM, GenerationRecord, Request
from localinfer.engine.runner import ModelRunner, shifted
from localinfer.engine.sampling.params import SamplingParams
from localinfer.engine.sampling.sampler import SamplingPlan, TokenMask, not_finite_error
from localinfer.engine.scheduler import Generation, PolicyFactory, Scheduler
from localinfer.errors import ContextLengthError, OutOfMemoryError, RequestError, TokenIdError
from localinfer.kernels.program import Program
from localinfer.types import FloatArray, Record

if TYPE_CHECKING:
    from localinfer.engine.speculation.verify import Speculation
    from localinfer.models.load.loader import Model


_NO_HINTS = CacheHints()
_DEFAULT_LIMITS = EngineLimits()


class EngineStats(Record):
    """State of an engine at one moment."""

    running: int
    """Requests that take part in steps."""
    waiting: int
    """Requests without a slot or memory, preempted ones among them."""
    cache_fraction: float
    """Share of the memory for keys and values that running requests hold, from 0 to 1; pages that are only cached count
    as free, and without a limit all memory does."""
    preemptions: int
    """Number of preemptions since loading."""
    ttft: TtftStats
    """Accuracy of predicted times to the first token."""


class Engine:
    """Owns a model and its pages. Not usable after `close`, nor in a forked child: threads do not survive a fork.

    model: `config.context_length` is the context it was loaded with; `program` returns float32[rows, vocab_size].
    program: the model's, to be run under `exclusive_cache`. pool: the pages of every sequence and of the cache.
    observer: notified of pages that enter and leave the cache. make_policy: makes the policy that `ttft_objective` of
    requests is given to; without one, none is refused for it. embedding_bytes: of pictures and sounds that `embeddings`
    keeps, of a model that takes them.
    """

    def __init__(
        self,
        model: "Model",
        *,
        kv_memory: int | None = None,
        window: KVEviction | None = None,
        speculation: "Speculation | None" = None,
        limits: EngineLimits = _DEFAULT_LIMITS,
        observer: CacheObserver | None = None,
        make_policy: PolicyFactory | None = None,
        embedding_bytes: int = DEFAULT_EMBEDDING_BYTES,
    ) -> None:
        self._model = model
        self._speculation = speculation
        self.program = model.program
        self.vocab_size = model.config.vocab_size
        self._is_encoder = model.config.is_encoder
        self.context_length = model.config.context_length
        self._cache = PrefixCache.for_model(model, kv_memory, window)
        if observer is not None:
            self._cache.observe(observer)
        self.pool = self._cache.pool
        self.embeddings = EmbeddingStore(embedding_bytes)
        self._runner = ModelRunner(
            model.program, self._cache, speculation, vocab_size=self.vocab_size, context_length=self.context_length
        )
        self.scheduler = Scheduler(model.program, self._cache, self._runner, limits, make_policy)
        self.check_usable = self.scheduler.check_usable

    @contextmanager
    def exclusive_cache(self) -> Generator[PrefixCache]:
        """The prefix cache, while no request takes a step."""
        self.check_usable()
        with self.scheduler.exclusive():
            yield self._cache

    @property
    def stats(self) -> EngineStats:
        """Requests that run and wait now. Any thread may ask, during a step too."""
        requests = self.scheduler.requests()
        held = [sequence for request in requests if (sequence := request.sequence) is not None]
        fraction = self._cache.used_fraction(held)
        scheduler = self.scheduler
        return EngineStats(
            running=len(held),
            waiting=len(requests) - len(held),
            cache_fraction=fraction,
            preemptions=scheduler.admission.preemptions,
            ttft=TtftStats() if scheduler.policy is None else scheduler.policy.stats,
        )

    @property
    def snapshot_stats(self) -> SnapshotStats | None:
        """Figures of the snapshots of recurrent states in the cache; None for a model without recurrent layers."""
        return self._cache.snapshot_stats

    def check_generates(self) -> None:
        """Raise RequestError for an encoder, which has no next token, and for what only decides."""
        config = self._model.config
        if self._is_encoder or config.only_decides:
            does, ways = ("decides about", "decide") if config.only_decides else ("embeds or ranks", "embed or rerank")
            kind = "an encoder" if self._is_encoder else "made for decisions"
            raise RequestError(
                f"this model is {kind} ({config.architecture}): it {does} texts and generates none; use {ways}, or "
                "load a model that generates"
            )

    def plan(self, sampling: SamplingParams, mask: TokenMask | None = None) -> SamplingPlan:
        """Check sampling parameters against the vocabulary and draw the seed; mask: what a grammar allows."""
        return SamplingPlan(sampling, self.vocab_size, mask)

    def check_prompt(
        self,
        prompt_ids: Sequence[int] | NDArray[np.integer],
        *,
        media: Sequence[MediaRun] = (),
        names_media: bool = False,
        shifts_context: bool = False,
        needs_tokens: bool = False,
        room: int = 0,
    ) -> NDArray[np.int32]:
        """Return a copy of a prompt, int32[T], proven to be token ids that fit the context, unless it may be shifted.

        media: its pictures and sounds in order, whose ids are among the prompt's. names_media: there may be such ids
        without them, of a text that is looked up and not computed. room: tokens that are to follow it in the context.
        Raises: TokenIdError naming the first wrong id, or if there has to be one; ContextLengthError with both lengths.
        """
        token_ids = self._check_ids(prompt_ids, lowest=-(1 << 31) if media or names_media else 0)
        size = token_ids.size + room
        if size > self.context_length and not shifts_context:
            raise ContextLengthError(
                f"the prompt has {size} tokens, but the context holds {self.context_length}; shorten it, "
                "load the model with a larger context_length, or allow context_shift",
                num_tokens=size,
                context_length=self.context_length,
            )
        if needs_tokens and not token_ids.size:
            raise TokenIdError("the prompt has no tokens; give at least one, such as the beginning-of-text token")
        return token_ids

    def place_media(
        self, token_ids: NDArray[np.int32], media: Sequence[MediaRun], salt: bytes = NO_SALT
    ) -> PlacedMedia | None:
        """Place the pictures and sounds of a checked prompt, given in order; None if there are none. salt: of the text.

        Raises: RequestError for a model that was loaded for words only, for a run that is not in the prompt, and for
        one whose rows see each other and are more than a batch holds.
        """
        if not media:
            return None
        if not self._model.config.takes_media:
            raise RequestError("this model was loaded to read words only, and the prompt has pictures or sounds")
        placed, most = PlacedMedia.locate(token_ids, media, self.embeddings, salt), self.program.max_batch_rows
        if placed is not None and placed.largest_batch() > most:
            raise RequestError(
                f"a picture, or a prompt all of which sees itself, takes {placed.largest_batch()} rows that are "
                f"computed at once, and a batch has {most}; make it smaller (image_max_tokens), or shorten the prompt"
            )
        return placed

    def row_type(self, token_ids: NDArray[np.int32]) -> int:
        """The token type of a whole prompt's rows: 1 where it has pictures or sounds and an adapter changes such."""
        return int(bool((token_ids < 0).any()) and self._model.adapts_media)

    def typed(self, hints: CacheHints, token_ids: NDArray[np.int32]) -> CacheHints:
        """The hints of a whole prompt with its rows' type, which texts of others share nothing with."""
        row_type = self.row_type(token_ids)
        return replace(hints, salt=salt_of_type(hints.salt, row_type), row_type=row_type) if row_type else hints

    def text_salt(self, token_ids: NDArray[np.int32], salt: bytes) -> bytes:
        """The salt under which a whole prompt is cached, whose caller gave this one."""
        return salt_of_type(salt, self.row_type(token_ids))

    def generate(
        self,
        prompt_ids: Sequence[int] | NDArray[np.integer],
        sampling: SamplingParams | SamplingPlan,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        context_shift: bool = False,
        cache_hints: CacheHints = _NO_HINTS,
        prediction: Sequence[int] | NDArray[np.integer] = (),
        owner: Hashable = None,
        completion_tokens: int = 0,
        priority: int = 0,
        ttft_objective: float | None = None,
        media: Sequence[MediaRun] = (),
    ) -> Generation:
        """Continue a prompt; yield each token as it is sampled. Closing the generation cancels it.

        Nothing is computed before the first token is asked for. Generations that are read at the same time, by several
        threads or alternately by one, share their steps; each gets the tokens that it would get alone. What of the
        prompt is in the cache is not computed again; what is computed stays there.

        max_tokens: None continues to a stop token or the end of the context, 0 yields nothing.
        stop_token_ids: end the generation; the stop token is yielded, as the last one. ignore_eos: they do not.
        context_shift: where prompt or completion outgrow the context, continue with the system tokens and the recent
            half of the rest, recomputed; then only a stop token or max_tokens ends it.
        cache_hints: how the cache should keep the prompt.
        prediction: ids that the completion is likely to have; right or wrong, they change its speed only.
        owner: such as a connection: prompts of several owners are computed in fair round-robin, chunk by chunk; None
            is an owner of its own. An `Owner` may have a limit of what runs at once.
        completion_tokens: number of ids at the prompt's end that are the completion's first, so that the context is
            shifted where it would have been; max_tokens does not count them.
        priority: the lower, the earlier it is admitted and its prompt computed, and the later it loses its memory
            where that ends. It changes when tokens come, and none of them.
        ttft_objective: seconds in which the first token is wanted: where it is predicted for later, because of what
            runs and waits, the request is refused; None never.
        media: pictures and sounds in order, whose ids the prompt has (`media.join_pieces`).
        Raises: at once RequestError, ContextLengthError, ClosedError, OutOfMemoryError for a prompt that can never
            fit, OverloadedError if as many wait as may, or for ttft_objective; while iterating ModelFileError for
            logits that are not finite, ClosedError, and OutOfMemoryError before the first token. Where memory ends
            later, one last event of reason "length" says so, and the record why. The engine stays usable after each
            but ClosedError.
        """
        self.check_usable()
        self.check_generates()
        limit = check_max_tokens(max_tokens)
        token_ids = self.check_prompt(prompt_ids, media=media, shifts_context=context_shift, needs_tokens=True)
        hints = self.typed(cache_hints, token_ids)
        placed = self.place_media(token_ids, media, hints.salt)
        plan = self.plan(sampling) if isinstance(sampling, SamplingParams) else sampling
        stops = frozenset() if ignore_eos else frozenset(stop_token_ids)
        limit = min(limit, (sys.maxsize if context_shift else self.context_length) - token_ids.size)
        prompt_length = token_ids.size - completion_tokens
        head, placed = shifted(token_ids, placed, prompt_length, hints, self.context_length)
        self._cache.check_fits(head.size)
        history = np.empty(token_ids.size + min(limit, HISTORY_ROOM), np.int32)
        history[: token_ids.size] = token_ids
        expected = self._check_ids(prediction, "prediction")
        request = Request(
            plan=plan,
            hints=hints,
            head=head,
            history=history,
            base=token_ids.size,
            prompt_length=prompt_length,
            last=token_ids.size + limit - 1,
            stops=stops,
            record=GenerationRecord(dropped_tokens=token_ids.size - head.size),
            owner=object() if owner is None else owner,
            media=placed,
            priority=check_priority(priority),
            is_over=limit == 0,
        )
        if self._speculation is not None:
            request.speculative = self._speculation.begin(plan, expected, cache_hints.salt)
            request.record.speculation = request.speculative.record
        objective = check_number("ttft_objective", ttft_objective, 0, kind=float, none="for none")
        if not request.is_over:
            self.scheduler.add(request, objective)
        return Generation(self.scheduler, request)

    def logits(
        self, token_ids: Sequence[int] | NDArray[np.integer], media: Sequence[MediaRun] = (), *, first: int = 0
    ) -> NDArray[np.float32]:
        """Return float32[T - first, vocab_size]: for each position from `first` on, the logits of the next token.

        media: as of `generate`.
        Raises: as `generate`; OutOfMemoryError if the machine cannot hold the result.
        """
        self.check_usable()
        self.check_generates()
        tokens = self.check_prompt(token_ids, media=media)
        placed, count = self.place_media(tokens, media), tokens.size - check_number("first", first, 0, tokens.size)
        try:
            out = np.empty((count, self.vocab_size), np.float32)
        except MemoryError:
            raise OutOfMemoryError(
                f"the logits of {count} positions take {count * self.vocab_size * 4:,} bytes, which this "
                "machine does not have; pass fewer positions"
            ) from None
        for _ in self.outputs(self.program, tokens, out, placed, first):
            pass
        return out

    def outputs(
        self,
        program: Program,
        tokens: NDArray[np.int32],
        out: FloatArray | None = None,
        media: PlacedMedia | None = None,
        first: int = 0,
    ) -> Iterator[tuple[int, FloatArray]]:
        """Compute a program's results for positions of checked tokens, some at a time, in steps between others'.

        out: float32[T - first, width] to write them to. media: pictures and sounds among the tokens. first: position of
        the first result. Yields: the first position and float32[n, width]. Nothing of it stays in the cache.
        Raises: OutOfMemoryError, ClosedError, ModelFileError for what is not finite.
        """
        self._cache.check_fits(tokens.size)
        sequence = self._cache.open()
        sequence.media, sequence.row_type = media, self.row_type(tokens)
        try:
            done = 0
            while done < tokens.size:
                begin = sequence.length
                has_results = done >= first
                most = program.max_output_rows if has_results else first - done
                stop = end = min(done + most, begin + program.max_batch_rows, tokens.size)
                if media is not None and (parted := media.whole_run_at(stop)) is not None:
                    # Of rows that see each other, those whose results do not fit are computed again: to the same bits.
                    stop, end = (parted[0], parted[0]) if parted[0] > done else (stop, parted[1])
                rows = np.arange((done if has_results else stop) - begin, stop - begin, dtype=np.int32)
                with self.exclusive_cache():
                    found = forward(program.run, (sequence,), (tokens[begin:end],), rows)
                    if out is None or not has_results:
                        found = found.copy()
                    else:
                        out[done - first : stop - first] = found
                        found = out[done - first : stop - first]
                    if end > stop:
                        sequence.truncate(stop)
                if not np.isfinite(found).all():
                    raise not_finite_error(done + 1 + int(np.argmin(np.isfinite(found).all(axis=1))))
                if has_results:
                    yield done, found
                done = stop
        finally:
            with self.scheduler.exclusive():
                sequence.close()

    def close(self) -> None:
        """Wait for the step in progress, then release model and pages; may be called again. A forked child does
        nothing."""
        is_usable, self.scheduler.is_closed = self.scheduler.is_usable, True
        if not is_usable:
            return
        with self.scheduler.step_lock.exclusive():
            self._runner.close()
            self._cache.close()
            self.embeddings.clear()
            if self._speculation is not None:
                self._speculation.close()
            self._model.close()

    def _check_ids(
        self, values: Sequence[int] | NDArray[np.integer], name: str = "the token ids", lowest: int = 0
    ) -> NDArray[np.int32]:
        """A copy of ids as int32[T], proven; of a caller's own array a later change would make other pages of them.

        lowest: the least id, below 0 where pictures are among the words.
        """
        try:
            array = np.array(values, order="C")
        except Exception:
            # A caller's object may raise anything in its `__array__`.
            array = np.zeros((0, 0))
        is_list = not isinstance(values, str | bytes) and array.ndim == 1
        if is_list and (array.dtype.kind in "iu" or array.size == 0):
            wrong = np.flatnonzero((array < lowest) | (array >= self.vocab_size))
            if not wrong.size:
                return array.astype(np.int32, copy=False)
            index, of = int(wrong[0]), f" of {name}" if name == "prediction" else ""
            raise TokenIdError(
                f"token id {array[index]} at index {index}{of} is not in the vocabulary, which has ids 0 to "
                f"{self.vocab_size - 1}; encode the text with this model's tokenizer",
                field="prediction" if name == "prediction" else None,
            )
        is_one = name == "prediction"
        raise RequestError(
            f"{name} {'is' if is_one else 'are'} {shown(values)}; give a flat list or one-dimensional array of "
            "whole numbers",
            field=name if is_one else None,
        )


def check_max_tokens(max_tokens: object) -> int:
    """Return the limit of a completion; None sets none. Raises: RequestError."""
    limit = check_number("max_tokens", max_tokens, 0, none="for no limit")
    return sys.maxsize if limit is None else int(limit)
