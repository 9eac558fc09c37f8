"""The model runner: one step is a forward pass over rows of any requests, and the choice of the tokens that follow.

A step changes each request only after the pass, and a row that was computed and not sampled, because an error or
Ctrl-C came between, is computed again by the next step: to the same bits. An error of one request ends that one only.

It observes what steps cost, which decides how many rows of prompts a step has beside running streams (chunked prefill).
Times are fitted as a line over the latest steps (`StepFit`): a constant, and rows of streams and of prompts.

The time that a chunk adds to a step is that of its rows: it grows with the position in the prompt, for each row looks
back at all before it, and with whatever else is busy on the machine. So it is measured with each step, and the next
chunk follows: at once where rows take longer, and bit by bit where they take less, so that one step that was
interrupted costs some small chunks and an error is made on the side of the streams. A row deeper in a prompt than any
before is expected to take longer in proportion to its depth, the most that it can, and on a machine whose plain steps
have become slower, in proportion to those.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import forward
from localinfer.engine.media import PlacedMedia
from localinfer.engine.request import NO_TOKEN, Request, TokenEvent
from localinfer.engine.sampling.mask import GuidingMask
from localinfer.engine.sampling.sampler import (
    MAX_DRAFT_TOKENS,
    OnDeviceSampling,
    OutputSpec,
    Results,
    Sampler,
    choose_verified,
)
from localinfer.errors import ContextLengthError, OutOfMemoryError, without_frames
from localinfer.kernels.program import AbortableProgram, Batch, HiddenProgram, Program
from localinfer.types import FinishReason

if TYPE_CHECKING:
    from localinfer.engine.speculation.verify import Speculation

logger = logging.getLogger(__name__)

_FIRST_ROW = np.zeros(1, np.int32)

ShouldAbort = Callable[[float], bool]
"""Test whether a step should be aborted, given the share of it that is done."""


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """Rows that a step computes of one request: so many ids that wait, and drafts after them."""

    request: Request
    num_rows: int = 1
    is_chunk: bool = False
    """The rows are of a prompt, or of a text that is computed like one."""
    samples: bool = True
    """The last of the rows is the last of the text, so that its logits are wanted."""
    may_draft: bool = False
    """It decodes, and its drafters may draft; what a grammar forces is drafted in any case."""
    num_drafted: int = 0
    is_forced: bool = False
    """A grammar forced the drafted tokens."""
    num_chosen: int = 0
    """Tokens that the step sampled for it."""


class ModelRunner:
    """Computes steps, under the step lock."""

    def __init__(
        self,
        program: Program,
        cache: PrefixCache,
        speculation: "Speculation | None",
        *,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self.sampler = Sampler(vocab_size)
        self.costs = StepCosts()
        self._program = program
        self._device_sampling = OnDeviceSampling(program)
        shows_states = isinstance(program, HiddenProgram) and program.hidden is not None
        self._hidden_program = cast(HiddenProgram, program) if shows_states else None
        self._abortable_program = program if isinstance(program, AbortableProgram) else None
        self._cache = cache
        self._speculation = speculation
        self._context_length = context_length
        self._mask_thread: ThreadPoolExecutor | None = None
        self._masks: list[Future[None]] = []

    def decode_alone(self, request: Request) -> None:
        """Decode one token of the only running request, without a draft."""
        position, history = request.position, request.history
        assert request.sequence is not None, "it was admitted"
        if position == history.size:
            request.grow_history(position + 1)
            history = request.history
        try:
            run = self._device_sampling.run_for(((request.plan, position),))
            results = forward(run, (request.sequence,), (history[position - 1 : position],), _FIRST_ROW)
            history[position] = token_id = self.sampler.choose(results[0], request.plan, position, history)
            if self._hidden_program is not None and self._hidden_program.hidden is not None:
                request.sequence.carry(self._hidden_program.hidden[0])
        except Exception as error:
            self.fail(request, error)
            return
        self._extend(request, (token_id,))

    def decode_observed(self, request: Request) -> None:
        """Do as `decode_alone`, and let the draft floor observe its time if it is to be timed."""
        speculation = self._speculation
        assert speculation is not None, "else nothing observes it"
        began = speculation.clock()
        self.decode_alone(request)
        if speculation.floor.is_timed and not request.is_over:
            speculation.observe_plain(1, speculation.clock() - began)

    def may_draft(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """True if a step that only decodes is to be drafted for; called once before each."""
        speculation = self._speculation
        return speculation is not None and speculation.may_draft(
            len(scheduled), is_constrained=_is_constrained(scheduled)
        )

    def compute(self, scheduled: Sequence[ScheduledSequence], should_abort: ShouldAbort | None = None) -> None:
        """Take one step of some requests, for whose rows but drafts memory is reserved.

        should_abort: polled between ops, where the device can abort a step; after True no request has changed.
        """
        clock = time.perf_counter if self._speculation is None else self._speculation.clock
        began = clock()
        decode_rows = rows = sum(part.num_rows for part in scheduled if not part.is_chunk)
        chunk_rows = sum(part.num_rows for part in scheduled if part.is_chunk)
        room = min(self._program.max_batch_rows - rows - chunk_rows, self._program.max_output_rows - len(scheduled))
        for part in scheduled:
            if part.may_draft or (part.request.matcher is not None and not part.is_chunk):
                others = (rows - 1, len(scheduled) - 1) if len(scheduled) > 1 else None
                self._draft(part, min(room, MAX_DRAFT_TOKENS), others)
                rows += part.num_drafted
                room -= part.num_drafted
        drafted = clock()
        depth = _mean_depth(scheduled, chunk_rows)
        if not self._compute([part for part in scheduled if part.request.sequence is not None], drafted, should_abort):
            return
        ended = clock()
        self.costs.observe(decode_rows, chunk_rows, ended - began, depth)
        if self._speculation is not None:
            self._observe_drafts(self._speculation, scheduled, began, drafted, ended)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, which its reader gets after the tokens before it.

        Where memory ended and there are tokens before it, they are the completion, and its record says why it is short.
        """
        num_tokens = request.position - request.prompt_length
        if isinstance(error, OutOfMemoryError) and num_tokens > 0:
            notice = f"the completion ends after {num_tokens} tokens for lack of memory: {error}"
            request.record.notices.append(notice)
            logger.warning(notice)
            request.events.append(TokenEvent(NO_TOKEN, request.position, "length"))
        else:
            request.error = without_frames(error)
        self.finish(request)

    def finish(self, request: Request) -> None:
        """End a request, and leave what it has computed to the cache."""
        request.is_over = True
        if request.sequence is not None:
            request.final_length = request.sequence.length
        if request.media is not None:
            request.media.release(sys.maxsize)
        self.retire(request)
        request.record.state_snapshots = self._cache.tree.num_snapshots
        if request.speculative is not None:
            request.speculative.close()

    def retire(self, request: Request) -> None:
        """Leave what a request has computed to the cache."""
        if request.sequence is not None:
            # Where Ctrl-C came before a draft was rolled back, the history has the tokens that were chosen instead.
            if request.sequence.length > request.length:
                request.sequence.truncate(request.length)
            sequence, token_ids = request.sequence, request.context_ids()
            request.sequence = None
            self._cache.retire(sequence, token_ids, request.hints)

    def close(self) -> None:
        """End the thread that prepares masks."""
        if self._mask_thread is not None:
            self._mask_thread.shutdown()

    def _observe_drafts(
        self,
        speculation: "Speculation",
        scheduled: Sequence[ScheduledSequence],
        began: float,
        drafted: float,
        ended: float,
    ) -> None:
        """Let texts and the draft floor observe what a step took."""
        for part in scheduled:
            if not part.is_chunk and not part.may_draft and part.request.speculative is not None:
                part.request.speculative.observe_plain(ended - began)
        if any(part.is_chunk or part.is_forced or not part.num_chosen for part in scheduled):
            return
        rows = sum(1 + part.num_drafted for part in scheduled)
        texts = [text for part in scheduled if part.may_draft and (text := part.request.speculative) is not None]
        if texts:
            speculation.observe_round(
                texts,
                len(scheduled),
                rows,
                sum(part.num_chosen for part in scheduled),
                is_constrained=_is_constrained(scheduled),
                began=began,
                drafted=drafted,
                ended=ended,
            )
        elif speculation.floor.is_timed and rows == len(scheduled):
            speculation.observe_plain(len(scheduled), ended - began, is_constrained=_is_constrained(scheduled))

    def _draft(self, part: ScheduledSequence, most: int, others: tuple[int, int] | None) -> None:
        """Write what may follow into the history, and reserve memory for it: what a grammar forces, or else a draft."""
        request, position, sequence = part.request, part.request.position, part.request.cache
        most = min(most, request.last - position, self._context_length - sequence.length - 1)
        try:
            drafted = self._drafted(part, most, others)
        except Exception as error:
            self.fail(request, error)
            return
        request.grow_history(position + len(drafted) + 1)
        request.history[position : position + len(drafted)] = drafted
        # Without memory there is no draft; the row before it has its memory.
        with suppress(OutOfMemoryError):
            sequence.reserve(sequence.length + part.num_rows + len(drafted), len(drafted))
            part.num_drafted = len(drafted)

    def _drafted(
        self, part: ScheduledSequence, most: int, others: tuple[int, int] | None
    ) -> Sequence[int] | NDArray[np.int32]:
        request = part.request
        history, matcher = request.history[: request.position], request.matcher
        speculative = request.speculative if part.may_draft else None
        forced = matcher.forced(history, most) if matcher is not None and most > 0 else []
        if forced:
            part.is_forced = True
            if speculative is not None:
                speculative.expect_forced(others)
            return forced
        if speculative is None:
            return forced
        drafted = speculative.draft(history, most, others, request.cache)
        if matcher is None or not drafted.size:
            return drafted
        return drafted[: matcher.count_allowed(history, drafted.tolist())]

    def _compute(self, scheduled: Sequence[ScheduledSequence], began: float, should_abort: ShouldAbort | None) -> bool:
        """Run the program over parts that memory is reserved for; after a failure over each alone, to know whose it is.

        Returns whether it was done.
        """
        if not scheduled:
            return True
        try:
            results = self._run(scheduled, should_abort)
        except Exception as error:
            if len(scheduled) == 1 and scheduled[0].num_drafted:
                # What the text would be without a draft comes first, whatever the rows of the draft have met.
                scheduled[0].num_drafted = 0
                self._compute(scheduled, began, None)
            elif len(scheduled) == 1:
                self.fail(scheduled[0].request, error)
            else:
                for part in scheduled:
                    self._compute([part], began, None)
            return True
        if results is None:
            return False
        first = 0
        for part in scheduled:
            end = first + part.samples + part.num_drafted
            try:
                hidden = None if self._hidden_program is None else self._hidden_program.hidden
                self._take(part, results[first:end], None if hidden is None else hidden[first:end], began)
            except Exception as error:
                self.fail(part.request, error)
            first = end
        return True

    def _run(self, scheduled: Sequence[ScheduledSequence], should_abort: ShouldAbort | None) -> Results | None:
        """Compute the rows' results, see `OnDeviceSampling`, and masks of grammars on a thread at the same time."""
        token_ids: list[NDArray[np.int32]] = []
        rows: list[int] = []
        outputs: list[OutputSpec] = []
        num_rows = 0
        for part in scheduled:
            request, count = part.request, part.num_rows + part.num_drafted
            if part.is_chunk:
                token_ids.append(request.head[request.cache.length : request.cache.length + count])
            else:
                token_ids.append(request.history[request.position - 1 : request.position - 1 + count])
            num_rows += count
            if part.samples:
                rows += range(num_rows - 1 - part.num_drafted, num_rows)
                outputs += [(request.plan, request.position + index) for index in range(1 + part.num_drafted)]
        run: Callable[[Batch], Results | None] = self._device_sampling.run_for(outputs)
        program = self._abortable_program
        if should_abort is not None and program is not None:

            def run(batch: Batch) -> Results | None:
                return program.run_abortable(batch, should_abort)

        try:
            for part in scheduled:
                request = part.request
                if request.matcher is not None and part.samples:
                    history = request.history[: request.position + part.num_drafted]
                    self._prepare_mask(request.matcher, history, request.position)
            sequences = [part.request.cache for part in scheduled]
            drafted = [part.num_drafted for part in scheduled]
            before = self._tokens_before(scheduled, num_rows)
            return forward(run, sequences, token_ids, np.array(rows, np.int32), drafted, before)
        finally:
            # All of them, those of an interrupted step too; a mask raises its own error when it is called.
            while self._masks:
                self._masks[-1].exception()
                self._masks.pop()

    def _tokens_before(self, scheduled: Sequence[ScheduledSequence], num_rows: int) -> Sequence[int | None] | None:
        """The last computed tokens of prompts whose hidden states draft layers lack, if there is room for them."""
        wanted = [part.is_chunk and part.request.cache.lacks_carried for part in scheduled]
        if not any(wanted) or num_rows + sum(wanted) > self._program.max_batch_rows:
            return None
        return [
            int(part.request.head[part.request.cache.length - 1]) if is_wanted else None
            for part, is_wanted in zip(scheduled, wanted, strict=True)
        ]

    def _prepare_mask(self, matcher: GuidingMask, history: NDArray[np.int32], position: int) -> None:
        if self._mask_thread is None:
            self._mask_thread = ThreadPoolExecutor(1, "localinfer-mask")
        self._masks.append(self._mask_thread.submit(matcher.prepare, history, position))

    def _take(
        self, part: ScheduledSequence, results: Results, hidden: NDArray[np.float32] | None, began: float
    ) -> None:
        """Sample what a step has computed of one request.

        results: those of 1 + num_drafted rows, or none. hidden: states of those rows, where a draft begins with them.
        """
        request, sequence, position = part.request, part.request.cache, part.request.position
        if part.is_chunk:
            self._cache.publish(sequence, request.head, request.hints)
            if request.media is not None:
                request.media.release(sequence.length)
        if not part.samples or request.is_over or request.is_cancelled:
            return
        request.grow_history(position + part.num_drafted + 1)
        guesses = request.history[position : position + part.num_drafted].tolist()
        chosen = choose_verified(
            self.sampler.choose, results, request.plan, position, request.history, guesses, request.stops
        )
        if len(chosen) <= part.num_drafted:
            sequence.truncate(sequence.length - (part.num_drafted + 1 - len(chosen)))
        if hidden is not None:
            sequence.carry(hidden[len(chosen) - 1])
        if part.may_draft and request.speculative is not None:
            seconds = request.speculative.clock() - began
            request.speculative.observe(part.num_drafted, len(chosen) - 1, seconds, chosen[-1])
        part.num_chosen = len(chosen)
        self._extend(request, chosen)

    def _extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Give a request's reader its next tokens, which are in its history already."""
        append, stops, last, position = request.events.append, request.stops, request.last, request.position
        for token_id in token_ids:
            reason: FinishReason | None = "stop" if token_id in stops else "length" if position == last else None
            event = TokenEvent(token_id, position, reason)
            # Signals are handled after calls: none can come between these two lines, which must go together.
            request.position = position = position + 1
            append(event)
            if reason is not None:
                self.finish(request)
                return
        if request.sequence is not None and request.sequence.length == self._context_length:
            # Context shift: continue with the system tokens and the recent half of the rest.
            context = request.token_ids()
            self.retire(request)
            request.restart(*shortened(context, request.media, request.hints, self._context_length))
            request.record.dropped_tokens += context.size - request.head.size


def shortened(
    token_ids: NDArray[np.int32], media: PlacedMedia | None, hints: CacheHints, context_length: int
) -> tuple[NDArray[np.int32], PlacedMedia | None]:
    """The system tokens, at most half a context of them, and as many recent ids as half of the rest holds, with the
    pictures and sounds that are whole in them.

    Raises: ContextLengthError for a text that ends in a picture which is too large.
    """
    system = min(hints.system_tokens, context_length // 2)
    recent = max(1, (context_length - system) // 2)
    first = token_ids.size - recent
    if media is None:
        return np.concatenate((token_ids[:system], token_ids[first:])), None
    if (parted := media.run_at(system)) is not None:
        system = parted[0]
    if (parted := media.run_at(first)) is not None:
        first = parted[1]
        if first == token_ids.size:
            first = parted[0]
        if system + token_ids.size - first > context_length:
            raise ContextLengthError(
                f"{media.name_at(first)}, which the text ends in, takes {token_ids.size - first} tokens, and the "
                f"context holds {context_length}; make it smaller, or load the model with a larger context_length",
                num_tokens=token_ids.size,
                context_length=context_length,
            )
    return np.concatenate((token_ids[:system], token_ids[first:])), media.shifted(system, first)


def shifted(
    token_ids: NDArray[np.int32],
    media: PlacedMedia | None,
    prompt_length: int,
    hints: CacheHints,
    context_length: int,
) -> tuple[NDArray[np.int32], PlacedMedia | None]:
    """The ids that a context holds after a prompt and the start of its completion, shifted wherever it was full, and
    their pictures and sounds. Raises: as `shortened`."""
    head, base = token_ids[:prompt_length], prompt_length
    if prompt_length > context_length:
        head, media = shortened(head, media, hints, context_length)
    while head.size + token_ids.size - base > context_length:
        end = base + context_length - head.size + 1
        joined = np.concatenate((head, token_ids[base:end]))
        (head, media), base = shortened(joined, media, hints, context_length), end
    return np.concatenate((head, token_ids[base:])), media


def _is_constrained(scheduled: Sequence[ScheduledSequence]) -> bool:
    """True if a grammar constrains any."""
    return any(part.request.matcher is not None for part in scheduled)


def _mean_depth(scheduled: Sequence[ScheduledSequence], chunk_rows: int) -> float:
    """Mean number of positions before a row of the prompts."""
    chunks = [part for part in scheduled if part.is_chunk and part.request.sequence is not None]
    depths = sum(part.num_rows * (part.request.cache.length + part.num_rows / 2) for part in chunks)
    return depths / chunk_rows if chunk_rows else 0.0


_FIT_MEMORY = 0.97
"""Weight of what was known after one more step: some thirty steps count."""
_SCALES = (1.0, 8.0, 64.0)
"""Usual sizes of a step, its rows of streams and its rows of prompts, so that none is lost in rounding."""
_RIDGE = 1e-3
_LARGEST_FIT_CHANGE = 4.0
_STEPS_PER_LINE = 16
"""Fitting anew takes as long as a small step; a prediction has the line of all steps so far."""


class StepFit:
    """Least squares over the latest steps, each weighed less as others come."""

    def __init__(self) -> None:
        self._moments = [0.0] * 6
        self._seconds = [0.0] * 3
        self._num_steps = self._solved_at = 0
        self._coefficients: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """True if any step was observed."""
        return self._moments[0] > 0.0

    def observe(self, decode_rows: int, chunk_rows: int, seconds: float) -> None:
        """Follow a step. Called for every step that is shared, so it is no NumPy."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LINE == 0:
            self._coefficients = self._solve()
        if self._coefficients is not None:
            # A step that was interrupted says little about the next.
            base, by_stream, by_row = self._coefficients
            known = base + by_stream * decode_rows + by_row * chunk_rows
            seconds = min(max(seconds, known / _LARGEST_FIT_CHANGE), known * _LARGEST_FIT_CHANGE)
        decode, chunk = decode_rows / _SCALES[1], chunk_rows / _SCALES[2]
        moments = (1.0, decode, chunk, decode * decode, decode * chunk, chunk * chunk)
        self._moments = [_FIT_MEMORY * old + new for old, new in zip(self._moments, moments, strict=True)]
        found = (seconds, decode * seconds, chunk * seconds)
        self._seconds = [_FIT_MEMORY * old + new for old, new in zip(self._seconds, found, strict=True)]

    def seconds(self, decode_rows: float, chunk_rows: float) -> float:
        """Seconds of a step of so many rows; 0 before any was observed."""
        if self._solved_at != self._num_steps:
            self._coefficients, self._solved_at = self._solve(), self._num_steps
        base, by_stream, by_row = self._coefficients or (0.0, 0.0, 0.0)
        return base + by_stream * decode_rows + by_row * chunk_rows

    def _solve(self) -> tuple[float, float, float]:
        """The line, none of whose parts is negative: what would be is left out, and the others fitted again."""
        one, decode, chunk, decode_2, both, chunk_2 = self._moments
        matrix = np.array([[one, decode, chunk], [decode, decode_2, both], [chunk, both, chunk_2]])
        target = np.array(self._seconds)
        kept = [index for index in range(3) if matrix[index, index] > 0.0]
        found = np.zeros(3)
        while kept:
            part = matrix[np.ix_(kept, kept)] + _RIDGE * one * np.eye(len(kept))
            solved = np.linalg.solve(part, target[kept])
            if (solved >= 0.0).all():
                found[kept] = solved
                break
            kept = [index for index, value in zip(kept, solved, strict=True) if value >= 0.0]
        scaled = found / _SCALES
        return float(scaled[0]), float(scaled[1]), float(scaled[2])


_INTERVALS = 2.0
"""Intervals between two tokens of a running stream that a prompt's chunk beside it may take, when nothing else is busy
on the machine."""
_LEAST_SECONDS = 0.03
"""Seconds of such a chunk where intervals are short: it is not noticed, and small chunks waste work."""
_FIRST_ROWS = 8
"""Rows of a chunk beside streams before anything is known."""
_SEVERAL_SECONDS = 0.15
"""Seconds of the chunks of several prompts while nothing decodes: as long a new request waits to join."""
_LEAST_ROWS_OF_SEVERAL = 64
_ALONE_SECONDS = 1.0
_LEAST_ROWS_ALONE = 256
"""A lone prompt wastes nothing: 512 rows at once make 614 tokens per second of the 0.5B shape in Q4_0, 256 make 608
and 64 make 565. Such a chunk is aborted when it is cancelled, or another request arrives."""
_TILE = 16
"""Rows that kernels compute side by side; a longer chunk is a multiple of it."""
_SHALLOW = 512
"""Positions before a row up to which they hardly matter for what it takes."""
_STEPS_BESIDE = 16
"""Steps with a chunk after which one without shows what streams take by themselves now."""

_MEMORY = 0.7
_LARGEST_CHANGE = 2.0
_LARGEST_LOSS, _LARGEST_GAIN = 4.0, 1.5
"""Largest factors by which one step makes rows appear longer, and shorter."""
_CALM_MEMORY_SECONDS = 60.0
"""Seconds of longer plain steps after which the interval of a calm machine counts as twice as long."""


class StepCosts:
    """Times of rows of prompts and of plain steps: they decide how long a prompt's chunk is.

    fit: the same as a line, by which times are predicted.
    """

    def __init__(self) -> None:
        self.fit = StepFit()
        self._decode_seconds: float | None = None
        self._calm_seconds = 0.0
        self._row_seconds: float | None = None
        self._row_depth = float(_SHALLOW)
        self._row_decode_seconds: float | None = None
        self._num_beside = 0

    @property
    def wants_plain_step(self) -> bool:
        """True if it is time for a step without a chunk, where streams run."""
        return self._num_beside >= _STEPS_BESIDE

    @property
    def bound_seconds(self) -> float:
        """Seconds that a chunk may add to a step beside streams."""
        return max(_LEAST_SECONDS, _INTERVALS * self._calm_seconds)

    def observe(self, decode_rows: int, chunk_rows: int, seconds: float, depth: float = 0.0) -> None:
        """Follow a step that computed rows of running streams, and of prompts, or of one of these kinds.

        depth: positions before a row of the prompts, in the mean.
        """
        if seconds <= 0.0:
            return
        self.fit.observe(decode_rows, chunk_rows, seconds)
        if not chunk_rows:
            self._observe_plain(seconds)
            return
        if decode_rows:
            # A plain step that took longer than one with a chunk was taken on a machine that was busier.
            is_outdated = seconds < (self._decode_seconds or 0.0)
            self._num_beside = _STEPS_BESIDE if is_outdated else self._num_beside + 1
            seconds = max(seconds - (self._decode_seconds or 0.0), seconds / 4)
        depth = max(depth, _SHALLOW)
        known = self._seconds_at(depth)
        # The few rows that end a prompt say more of the step than of themselves.
        if chunk_rows >= _FIRST_ROWS or (known is not None and (chunk_rows + 1) * known > self.bound_seconds):
            self._observe_rows(seconds / chunk_rows, known, depth)

    def chunk_rows(self, *, num_streams: int, num_prompts: int, most: int, depth: float = 0.0) -> int:
        """Number of rows of prompts that the next step computes beside running streams, at most `most`.

        depth: positions before the first of them, of the deepest prompt.
        """
        if num_streams:
            least, seconds = 1, self.bound_seconds
        elif num_prompts > 1:
            least, seconds = _LEAST_ROWS_OF_SEVERAL, _SEVERAL_SECONDS
        else:
            least, seconds = _LEAST_ROWS_ALONE, _ALONE_SECONDS
        known = self._seconds_at(max(depth, _SHALLOW))
        rows = max(least, _FIRST_ROWS) if known is None else int(seconds / known)
        return min(most, max(least, rows - rows % _TILE if rows > _TILE else rows))

    def _observe_plain(self, seconds: float) -> None:
        self._num_beside = 0
        risen = self._calm_seconds * (1.0 + seconds / _CALM_MEMORY_SECONDS)
        self._calm_seconds = min(seconds, risen or seconds)
        known = self._decode_seconds
        if known is not None and seconds > known:
            # A step that was interrupted says little about the next.
            seconds = _MEMORY * known + (1.0 - _MEMORY) * min(seconds, known * _LARGEST_CHANGE)
        self._decode_seconds = seconds

    def _observe_rows(self, seconds: float, known: float | None, depth: float) -> None:
        if known is not None and seconds > known:
            seconds = min(seconds, _LARGEST_LOSS * known)
        elif known is not None:
            seconds = max(_MEMORY * known + (1.0 - _MEMORY) * seconds, known / _LARGEST_GAIN)
        self._row_seconds, self._row_depth, self._row_decode_seconds = seconds, depth, self._decode_seconds

    def _seconds_at(self, depth: float) -> float | None:
        """Expected seconds of a row after so many positions; None before any was computed."""
        if self._row_seconds is None:
            return None
        slower = (self._decode_seconds or 0.0) / (self._row_decode_seconds or self._decode_seconds or 1.0)
        return self._row_seconds * max(1.0, depth / self._row_depth) * max(1.0, slower)
