"""The model runner: one step is a forward pass over rows of any requests, and the choice of the tokens that follow.

A step changes each request only after the pass, and a row that was computed and not sampled, because an error or
Ctrl-C came between, is computed again by the next step: to the same bits. An error of one request ends that one only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import forward
from localinfer.engine.request import NO_TOKEN, Request, TokenEvent
from localinfer.engine.sampling.mask import GuidingMask
from localinfer.engine.sampling.sampler import OnDeviceSampling, OutputSpec, Results, Sampler
from localinfer.engine.speculation.costs import MAX_DRAFT_TOKENS
from localinfer.engine.speculation.floor import ALONE, Round, StepKind
from localinfer.engine.speculation.verify import Others, Speculation, choose_verified
from localinfer.engine.step_costs import StepCosts
from localinfer.errors import OutOfMemoryError, without_frames
from localinfer.kernels.program import AbortableProgram, Batch, HiddenProgram, Program
from localinfer.types import FinishReason

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
        speculation: Speculation | None,
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
            speculation.floor.observe_plain(ALONE, speculation.clock() - began)

    def may_draft(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """True if a step that only decodes is to be drafted for; called once before each."""
        speculation = self._speculation
        if speculation is None or len(scheduled) > speculation.costs.max_draft_tokens:
            return False
        floor = speculation.floor
        return not floor.in_backoff() and not floor.is_plain(_kind(scheduled))

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
                others = Others(rows - 1, len(scheduled) - 1) if len(scheduled) > 1 else None
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
        speculation: Speculation,
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
            # Learning from a round takes time, too, which small models notice.
            learning = speculation.learning_seconds.value or 0.0
            done = Round(
                _kind(scheduled),
                rows,
                sum(part.num_chosen for part in scheduled),
                ended - began + learning,
                drafted - began + learning,
                sum(text.expected_seconds for text in texts) + learning,
                sum(text.reading_seconds for text in texts),
            )
            speculation.floor.observe_round(done)
            speculation.learning_seconds.add(speculation.clock() - ended)
        elif speculation.floor.is_timed and rows == len(scheduled):
            speculation.floor.observe_plain(_kind(scheduled), ended - began)

    def _draft(self, part: ScheduledSequence, most: int, others: Others | None) -> None:
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

    def _drafted(self, part: ScheduledSequence, most: int, others: Others | None) -> Sequence[int] | NDArray[np.int32]:
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
            request.restart(shortened(context, request.hints, self._context_length))
            request.record.dropped_tokens += context.size - request.head.size


def shortened(token_ids: NDArray[np.int32], hints: CacheHints, context_length: int) -> NDArray[np.int32]:
    """The system tokens, at most half a context of them, and as many recent ids as half of the rest holds."""
    system = min(hints.system_tokens, context_length // 2)
    recent = max(1, (context_length - system) // 2)
    return np.concatenate((token_ids[:system], token_ids[token_ids.size - recent :]))


def shifted(
    token_ids: NDArray[np.int32], prompt_length: int, hints: CacheHints, context_length: int
) -> NDArray[np.int32]:
    """The ids that a context holds after a prompt and the start of its completion, shifted wherever it was full."""
    head, base = token_ids[:prompt_length], prompt_length
    if prompt_length > context_length:
        head = shortened(head, hints, context_length)
    while head.size + token_ids.size - base > context_length:
        end = base + context_length - head.size + 1
        head, base = shortened(np.concatenate((head, token_ids[base:end])), hints, context_length), end
    return np.concatenate((head, token_ids[base:]))


def _kind(scheduled: Sequence[ScheduledSequence]) -> StepKind:
    return StepKind(len(scheduled), any(part.request.matcher is not None for part in scheduled))


def _mean_depth(scheduled: Sequence[ScheduledSequence], chunk_rows: int) -> float:
    """Mean number of positions before a row of the prompts."""
    chunks = [part for part in scheduled if part.is_chunk and part.request.sequence is not None]
    depths = sum(part.num_rows * (part.request.cache.length + part.num_rows / 2) for part in chunks)
    return depths / chunk_rows if chunk_rows else 0.0
