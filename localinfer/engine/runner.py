"""One step: a run of the program over rows of any generations, and the choice of the tokens that follow.

A step changes each generation only after the program has run, and a row that was computed and not sampled, because an
error or Ctrl-C came between, is computed again by the next step: to the same bits. What goes wrong for one generation
ends that one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.cache.sequence import SequenceCache
from localinfer.engine.mask_worker import MaskWorker
from localinfer.engine.request import NO_TOKEN, FinishReason, Request, TokenEvent
from localinfer.engine.step_costs import StepCosts
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.program import AbortableProgram, Batch, Program, Segment
from localinfer.sampling.device_draws import Results, RowResults, WantedRows
from localinfer.sampling.sampler import Sampler
from localinfer.speculation.floor import ALONE, Round, StepKind
from localinfer.speculation.verification_costs import MAX_DEPTH
from localinfer.speculation.verify import Others, Speculation, choose_verified

logger = logging.getLogger(__name__)

_FIRST_ROW = np.zeros(1, np.int32)

ShouldAbort = Callable[[float], bool]
"""Whether a step need not go on; it is told which share of it is done."""


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """What a step computes of one generation: so many ids that wait, and drafts after them.

    is_chunk: of a prompt, or of what is computed like one. samples: the last of those ids is the last of the text, so
    that its logits are wanted. may_draft: it decodes, and its drafters may be asked; what a grammar forces is drafted
    in any case. is_forced: it was. num_chosen: tokens that the step gave it.
    """

    run: Request
    num_rows: int = 1
    is_chunk: bool = False
    samples: bool = True
    may_draft: bool = False
    num_drafted: int = 0
    is_forced: bool = False
    num_chosen: int = 0


def shortened(token_ids: NDArray[np.int32], use: CacheHints, context_length: int) -> NDArray[np.int32]:
    """The system tokens, at most half a context of them, and as many recent ids as half of the rest holds."""
    system = min(use.system_tokens, context_length // 2)
    recent = max(1, (context_length - system) // 2)
    return np.concatenate((token_ids[:system], token_ids[token_ids.size - recent :]))


class ModelRunner:
    """Computes steps; whoever has the turn may call.

    make_room: called for a generation whose next positions do not fit into memory; it tries again, or has no part in
        the step.
    """

    def __init__(
        self,
        program: Program,
        cache: PrefixCache,
        speculation: Speculation | None,
        *,
        vocab_size: int,
        context_length: int,
        make_room: Callable[[Request, OutOfMemoryError], bool],
    ) -> None:
        self.sampler = Sampler(vocab_size)
        self.costs = StepCosts()
        self._program = program
        self._results = RowResults(program)
        self._abortable_program = program if isinstance(program, AbortableProgram) else None
        self._cache = cache
        self._masks = MaskWorker()
        self._speculation = speculation
        self._context_length = context_length
        self._make_room = make_room

    def forward(
        self,
        sequence: SequenceCache,
        token_ids: NDArray[np.int32],
        output_rows: NDArray[np.int32],
        wanted: WantedRows = (),
    ) -> Results:
        """Compute the next positions of one sequence; the results of its output rows are valid until the next step.

        See `RowResults.run`: they are float32[rows, vocab_size] where nothing is `wanted` of them.
        """
        stop = sequence.length + token_ids.size
        sequence.reserve(stop)
        batch = Batch(token_ids, (sequence.segment(token_ids.size),), output_rows)
        results = self._results.run(batch, wanted)
        sequence.commit(stop)
        return results

    def _results_unless(self, batch: Batch, wanted: WantedRows, should_abort: ShouldAbort | None) -> Results | None:
        if should_abort is None or self._abortable_program is None:
            return self._results.run(batch, wanted)
        return self._abortable_program.run_abortable(batch, should_abort)

    def decode_alone(self, run: Request) -> None:
        """Decode one token of the only generation there is, without a draft."""
        sequence, position, history = run.sequence, run.position, run.history
        assert sequence is not None, "it was admitted"
        if position == history.size:
            run.make_room(position + 1)
            history = run.history
        try:
            results = self.forward(sequence, history[position - 1 : position], _FIRST_ROW, ((run.plan, position),))
            history[position] = token_id = self.sampler.choose(results[0], run.plan, position, history)
        except Exception as error:
            self.fail(run, error)
            return
        self._extend(run, (token_id,))

    def decode_observed(self, run: Request) -> None:
        """As `decode_alone`, and tell what it took where that is wanted."""
        speculation = self._speculation
        assert speculation is not None, "else nobody wants to know"
        began = speculation.clock()
        self.decode_alone(run)
        if speculation.floor.is_timed and not run.is_over:
            speculation.floor.observe_plain(ALONE, speculation.clock() - began)

    def may_draft(self, parts: Sequence[ScheduledSequence]) -> bool:
        """Ask once before a step that only decodes: whether drafters are to be asked for it."""
        speculation = self._speculation
        if speculation is None or len(parts) > speculation.costs.max_depth:
            return False
        floor = speculation.floor
        return not floor.rests() and not floor.is_plain(_kind(parts))

    def compute(self, parts: Sequence[ScheduledSequence], should_abort: ShouldAbort | None = None) -> None:
        """Take one step of some generations, each of which is admitted.

        is_unwanted: asked now and then, where the device can leave a step undone, with the share that is done; after a
            yes no generation has changed.
        """
        clock = time.perf_counter if self._speculation is None else self._speculation.clock
        began = clock()
        decode_rows = rows = sum(part.num_rows for part in parts if not part.is_chunk)
        chunk_rows = sum(part.num_rows for part in parts if part.is_chunk)
        room = min(self._program.max_batch_rows - rows - chunk_rows, self._program.max_output_rows - len(parts))
        for part in parts:
            if part.may_draft or (part.run.guide is not None and not part.is_chunk):
                self._draft(part, min(room, MAX_DEPTH), Others(rows - 1, len(parts) - 1) if len(parts) > 1 else None)
                rows += part.num_drafted
                room -= part.num_drafted
        drafted = clock()
        if not self._compute([part for part in parts if self._reserve(part)], drafted, should_abort):
            return
        ended = clock()
        self.costs.observe(decode_rows, chunk_rows, ended - began)
        if self._speculation is not None:
            self._observe_drafts(self._speculation, parts, began, drafted, ended)

    def _observe_drafts(
        self, speculation: Speculation, parts: Sequence[ScheduledSequence], began: float, drafted: float, ended: float
    ) -> None:
        """Tell what a step took to whom it teaches whether drafting pays."""
        for part in parts:
            if not part.is_chunk and not part.may_draft and part.run.speculative is not None:
                part.run.speculative.observe_plain(ended - began)
        rows = sum(1 + part.num_drafted for part in parts)
        if any(part.is_chunk or part.is_forced or not part.num_chosen for part in parts):
            return
        texts = [text for part in parts if part.may_draft and (text := part.run.speculative) is not None]
        if texts:
            # What is learned from a round takes time, too, which small models notice.
            learning = speculation.learning_seconds.value or 0.0
            done = Round(
                _kind(parts),
                rows,
                sum(part.num_chosen for part in parts),
                ended - began + learning,
                drafted - began + learning,
                sum(text.expected_seconds for text in texts) + learning,
                sum(text.reading_seconds for text in texts),
            )
            speculation.floor.observe_round(done)
            speculation.learning_seconds.add(speculation.clock() - ended)
        elif speculation.floor.is_timed and rows == len(parts):
            speculation.floor.observe_plain(_kind(parts), ended - began)

    def fail(self, run: Request, error: Exception) -> None:
        """End a generation with an error, which its reader gets after the tokens before it.

        Where memory ended and there are tokens before it, they are the completion, and its record says why it is short.
        """
        if isinstance(error, OutOfMemoryError) and run.position > run.prompt_length:
            notice = f"the completion ends after {run.position - run.prompt_length} tokens for lack of memory: {error}"
            run.record.notices.append(notice)
            logger.warning(notice)
            run.events.append(TokenEvent(NO_TOKEN, run.position, "length"))
        else:
            run.error = error
        self.finish(run)

    def finish(self, run: Request) -> None:
        """Leave what a generation has computed to the cache; it goes no further."""
        run.is_over = True
        self.set_aside(run)
        if run.speculative is not None:
            run.speculative.close()

    def set_aside(self, run: Request) -> None:
        """Leave what a generation has computed to the cache."""
        if run.sequence is not None:
            sequence, token_ids = run.sequence, run.context_ids()
            run.sequence = None
            self._cache.retire(sequence, token_ids, run.use)

    def close(self) -> None:
        """End the thread that prepares masks."""
        self._masks.close()

    def _draft(self, part: ScheduledSequence, most: int, others: Others | None) -> None:
        """Write what may follow into the history: what has to, or else what promises a gain."""
        run, position = part.run, part.run.position
        assert run.sequence is not None, "it was admitted"
        most = min(most, run.last - position, self._context_length - run.sequence.length - 1)
        try:
            drafted = self._drafted(part, most, others)
        except Exception as error:
            self.fail(run, error)
            return
        part.num_drafted = len(drafted)
        run.make_room(position + part.num_drafted)
        run.history[position : position + part.num_drafted] = drafted

    def _drafted(self, part: ScheduledSequence, most: int, others: Others | None) -> Sequence[int] | NDArray[np.int32]:
        run = part.run
        history, guide = run.history[: run.position], run.guide
        speculative = run.speculative if part.may_draft else None
        forced = [] if guide is None or most <= 0 else guide.forced(history, most)
        if forced:
            part.is_forced = True
            if speculative is not None:
                speculative.expect_forced(others)
            return forced
        if speculative is None:
            return forced
        drafted = speculative.draft(history, most, others)
        if guide is None or not drafted.size:
            return drafted
        return drafted[: guide.count_allowed(history, drafted.tolist())]

    def _reserve(self, part: ScheduledSequence) -> bool:
        """Make room for what is to be computed, if need be without the draft; return whether there is."""
        run, sequence = part.run, part.run.sequence
        if sequence is None:
            return False
        run.make_room(run.position + part.num_drafted + 1)
        while True:
            try:
                sequence.reserve(sequence.length + part.num_rows + part.num_drafted)
                return True
            except OutOfMemoryError as error:
                if part.num_drafted:
                    part.num_drafted = 0
                elif not self._make_room(run, error):
                    return False

    def _compute(self, parts: Sequence[ScheduledSequence], began: float, should_abort: ShouldAbort | None) -> bool:
        """Run the program over parts that memory is reserved for; after a failure over each alone, to know whose.

        Returns whether it was done.
        """
        if not parts:
            return True
        try:
            results = self._run(parts, should_abort)
        except Exception as error:
            if len(parts) == 1 and parts[0].num_drafted:
                # What the text would be without a draft comes first, whatever the rows of the draft have met.
                parts[0].num_drafted = 0
                self._compute(parts, began, None)
            elif len(parts) == 1:
                self.fail(parts[0].run, error)
            else:
                for part in parts:
                    self._compute([part], began, None)
            return True
        if results is None:
            return False
        for part in parts:
            sequence = part.run.sequence
            assert sequence is not None, "whoever leaves meanwhile keeps it until the turn ends"
            sequence.commit(sequence.length + part.num_rows + part.num_drafted)
        first = 0
        for part in parts:
            end = first + part.samples + part.num_drafted
            try:
                self._take(part, results[first:end], began)
            except Exception as error:
                self.fail(part.run, error)
            first = end
        return True

    def _run(self, parts: Sequence[ScheduledSequence], should_abort: ShouldAbort | None) -> Results | None:
        """Compute the rows' results, see `forward`, and the masks of grammars at the same time."""
        guided = [
            (run.guide, run.history[: run.position + part.num_drafted], run.position)
            for part in parts
            if (run := part.run).guide is not None and part.samples
        ]
        if not guided:
            wanted = [
                (part.run.plan, part.run.position + index)
                for part in parts
                if part.samples
                for index in range(1 + part.num_drafted)
            ]
            return self._results_unless(_batch(parts), wanted, should_abort)
        try:
            self._masks.begin(guided)
            return self._results_unless(_batch(parts), (), should_abort)
        finally:
            self._masks.finish()

    def _take(self, part: ScheduledSequence, results: Results, began: float) -> None:
        """Sample what a step has computed of one generation. results: those of 1 + num_drafted rows, or none."""
        run, sequence, position = part.run, part.run.sequence, part.run.position
        assert sequence is not None, "it was computed"
        if part.is_chunk:
            self._cache.publish(sequence, run.head, run.use)
        if not part.samples or run.is_over or run.is_cancelled:
            return
        guesses = run.history[position : position + part.num_drafted].tolist()
        chosen = choose_verified(self.sampler.choose, results, run.plan, position, run.history, guesses, run.stops)
        if len(chosen) <= part.num_drafted:
            sequence.truncate(sequence.length - (part.num_drafted + 1 - len(chosen)))
        if part.may_draft and run.speculative is not None:
            run.speculative.observe(part.num_drafted, len(chosen) - 1, run.speculative.clock() - began)
        part.num_chosen = len(chosen)
        self._extend(run, chosen)

    def _extend(self, run: Request, token_ids: Sequence[int]) -> None:
        """Tell a generation's reader its next tokens, which are in its history already."""
        append, stops, last, position = run.events.append, run.stops, run.last, run.position
        for token_id in token_ids:
            reason: FinishReason | None = "stop" if token_id in stops else "length" if position == last else None
            event = TokenEvent(token_id, position, reason)
            # Signals are looked at after calls: none can come between these two lines, which must go together.
            run.position = position = position + 1
            append(event)
            if reason is not None:
                self.finish(run)
                return
        if run.sequence is not None and run.sequence.length == self._context_length:
            self._shift(run)

    def _shift(self, run: Request) -> None:
        """Begin anew with the system tokens and the recent half of the context, at a full one."""
        context = run.token_ids()
        self.set_aside(run)
        run.begin_anew(shortened(context, run.use, self._context_length))
        run.record.dropped_tokens += context.size - run.head.size


def _kind(parts: Sequence[ScheduledSequence]) -> StepKind:
    return StepKind(len(parts), any(part.run.guide is not None for part in parts))


def _batch(parts: Sequence[ScheduledSequence]) -> Batch:
    token_ids: list[NDArray[np.int32]] = []
    segments: list[Segment] = []
    outputs: list[int] = []
    row = 0
    for part in parts:
        run, sequence = part.run, part.run.sequence
        assert sequence is not None, "it was admitted"
        start, count = sequence.length, part.num_rows + part.num_drafted
        if part.is_chunk:
            token_ids.append(run.head[start : start + count])
        else:
            token_ids.append(run.history[run.position - 1 : run.position - 1 + count])
        segments.append(sequence.segment(count))
        row += count
        if part.samples:
            outputs.extend(range(row - 1 - part.num_drafted, row))
    joined = token_ids[0] if len(token_ids) == 1 else np.concatenate(token_ids)
    return Batch(joined, segments, np.array(outputs, np.int32))
