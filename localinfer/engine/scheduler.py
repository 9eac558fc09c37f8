"""The scheduler: every step serves all generations that can go on, however many threads read them.

A step decodes a token, or a draft, of every generation whose reader keeps up, and computes a chunk of one or several
prompts beside them: short enough that nobody's stream stalls, and owner after owner. A generation joins with the next
step after its reader first asks, and leaves at once. It waits where as many run as may, or where memory has no room
for it beside the others; where memory ends, one is set aside, and computed again to the same bits when others have
ended. A lone generation takes its steps on its reader's own thread, and pays for none of this.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from localinfer.arguments import check_number
from localinfer.cache.prefix_cache import PrefixCache
from localinfer.cache.prefix_tree import common_length
from localinfer.engine.request import NO_TOKEN, Request, TokenEvent
from localinfer.engine.runner import ModelRunner, ScheduledSequence, ShouldAbort
from localinfer.engine.step_lock import StepLock
from localinfer.errors import OutOfMemoryError, OverloadedError
from localinfer.kernels.program import Program

_READ_AHEAD = 4
"""Tokens a generation may be ahead of its reader; with more, it waits until they are read."""
_WAIT_SECONDS = 0.1
"""What whoever comes waits for the end of a prompt's chunk, rather than have it computed again."""
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0
_DURATION_MEMORY = 0.8


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How many generations are taken on at once.

    max_running: most that share a step. max_queued: most that may wait for that, beyond which `generate` raises
    OverloadedError; None sets no limit.
    Raises: RequestError naming the value.
    """

    max_running: int = 16
    max_queued: int | None = None

    def __post_init__(self) -> None:
        check_number("max_running", self.max_running, 1)
        check_number("max_queued", self.max_queued, 0, none="for no limit")


class Scheduler:
    """The generations of one engine; `generation.GenerationSource`.

    check_usable: raises ClosedError once the engine is closed, or in a forked child; is_usable: the same, as an answer.
    """

    def __init__(
        self,
        program: Program,
        cache: PrefixCache,
        stepper: ModelRunner,
        limits: EngineLimits,
        *,
        check_usable: Callable[[], None],
        is_usable: Callable[[], bool],
    ) -> None:
        self.turns = StepLock()
        self._cache = cache
        self._stepper = stepper
        self._limits = limits
        self._check_usable = check_usable
        self._is_usable = is_usable
        self._max_rows = program.max_batch_rows
        self._max_outputs = program.max_output_rows
        self._open: set[Request] = set()
        """Every generation that was asked for and has not ended; `_runs` those whose readers have begun, in order."""
        self._runs: list[Request] = []
        self._departed: deque[Request] = deque()
        self._steps = 0
        self._is_stepping = False
        """Whether a step is in progress; at the start of one, whether the step before it was interrupted."""
        self._chunk_of_owner: dict[Hashable, int] = {}
        self._mean_duration = _LEAST_RETRY_SECONDS

    def enter(self, run: Request) -> None:
        """Take on a generation. Raises: OverloadedError."""
        limits = self._limits
        if limits.max_queued is not None and len(self._open) >= limits.max_running + limits.max_queued:
            rounds = 1 + limits.max_queued / limits.max_running
            seconds = min(max(rounds * self._mean_duration, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
            raise OverloadedError(
                f"{limits.max_running} requests are running and {limits.max_queued} are waiting, as many as may; try "
                f"again in {seconds:.0f} seconds",
                seconds,
            )
        run.began = time.monotonic()
        self._open.add(run)

    def next_event(self, run: Request) -> TokenEvent | None:
        """Take the next event of a run, by the steps of all runs if nobody else takes them; None after the last."""
        has_turn = False
        try:
            while True:
                # In this order: the last event is there before its run is over.
                is_over = run.is_over
                if run.is_cancelled:
                    return self._cancelled(run)
                if run.events:
                    return run.events.popleft()
                if is_over:
                    if run.error is None:
                        return None
                    error, run.error = run.error, None
                    raise error
                self._check_usable()
                if not run.is_started:
                    run.is_started = True
                    self._runs.append(run)
                if not has_turn:
                    has_turn = self.turns.try_take()
                    if not has_turn:
                        has_turn = self.turns.take_or_wait(run)
                        continue
                elif not self.turns.pause():
                    has_turn = False
                    continue
                if not run.events and not run.is_over and not run.is_cancelled:
                    self._step()
        except BaseException:
            # Whoever interrupts a reader means this generation, not the others that it takes steps for.
            self._depart(run)
            raise
        finally:
            if has_turn:
                self.turns.end()
            if self._departed:
                self._settle()

    def cancel(self, run: Request) -> None:
        """See `GenerationSource.cancel`."""
        if not run.is_over:
            run.is_cancelled = True
            self._departed.append(run)
            self._wake(run)

    def leave(self, run: Request) -> None:
        """See `GenerationSource.leave`."""
        if not run.is_over or run in self._open:
            self._depart(run)
            self._wake(run)

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Have model and cache to oneself for a block, between two steps."""
        with self.turns.take():
            self._close_departed()
            yield
        self._settle()

    def make_room(self, run: Request, error: OutOfMemoryError) -> bool:
        """Find memory for a run: set it aside while others go on, or others aside that do not; else it has failed.

        Returns whether it is to try again at once.
        """
        others = [other for other in self._runs if other is not run and other.sequence is not None]
        if any(_can_go_on(other) or other.is_over or other.is_cancelled for other in others):
            self._set_aside(run)
            return False
        if others:
            self._set_aside(others[-1])
            return True
        self._stepper.fail(run, error)
        return False

    def _set_aside(self, run: Request) -> None:
        token_ids = run.token_ids()
        self._stepper.set_aside(run)
        run.begin_anew(token_ids)

    def _cancelled(self, run: Request) -> TokenEvent:
        run.is_over, run.is_cancelled = True, False
        position = run.events[0].position if run.events else run.position
        run.events.clear()
        return TokenEvent(NO_TOKEN, position, "cancelled")

    def _depart(self, run: Request) -> None:
        run.is_over = True
        self._departed.append(run)

    def _wake(self, run: Request) -> None:
        waiter = run.waiter
        if waiter is not None and waiter.claim():
            waiter.wake()
        self._settle()

    def _settle(self) -> None:
        """Close what has ended, unless somebody is at work, who will do it. Never waits."""
        while self._departed and self._is_usable() and self.turns.try_take():
            try:
                self._close_departed()
            finally:
                self.turns.end()

    def _close_departed(self) -> None:
        while self._departed:
            run = self._departed.popleft()
            if self._is_usable():
                self._stepper.finish(run)
            self._forget(run)

    def _forget(self, run: Request) -> None:
        if run in self._runs:
            self._runs.remove(run)
        if run in self._open:
            self._open.discard(run)
            seconds = time.monotonic() - run.began
            self._mean_duration += (1.0 - _DURATION_MEMORY) * (seconds - self._mean_duration)

    def _step(self) -> None:
        """Take one step of everybody who can go on. The caller has the turn."""
        if self._departed:
            self._close_departed()
        runs = self._runs
        if self._is_stepping:
            for run in runs:
                _mend(run)
        self._is_stepping = True
        if len(runs) == 1 and (run := runs[0]).sequence is not None and run.position > run.base:
            if run.guide is None and (run.speculative is None or run.speculative.rests()):
                self._stepper.decode_alone(run)
            else:
                self._step_alone(run)
            if run.is_over:
                self._forget(run)
        else:
            self._step_together(runs)
        self._is_stepping = False

    def _step_alone(self, run: Request) -> None:
        """Decode the only generation there is, with drafts if they are to be asked for."""
        if run.guide is not None:
            part = ScheduledSequence(run)
            part.may_draft = self._stepper.may_draft([part])
            self._stepper.compute([part])
        elif run.speculative is not None and run.speculative.takes_plain_step():
            self._stepper.decode_observed(run)
        else:
            self._stepper.compute([ScheduledSequence(run, may_draft=True)])

    def _step_together(self, runs: list[Request]) -> None:
        self._steps += 1
        num_known = len(runs)
        ready = [run for run in runs if _can_go_on(run)]
        self._admit(ready)
        decoding = [run for run in ready if run.sequence is not None and run.position > run.base]
        prompts = [run for run in ready if run.sequence is not None and run.position == run.base]
        parts = self._choose(decoding, prompts)
        for part in parts:
            part.run.served = self._steps
        self._stepper.compute(parts, self._reason_to_stop(parts, num_known))
        for run in ready:
            if run.is_over:
                self._forget(run)

    def _admit(self, ready: list[Request]) -> None:
        """Let those begin that wait, as long as there are places and memory; first those that were set aside."""
        waiting = [run for run in ready if run.sequence is None]
        active = [run for run in ready if run.sequence is not None]
        while waiting:
            if len(active) >= self._limits.max_running:
                return
            owners = Counter(run.owner for run in active)
            run = min(waiting, key=lambda run: (run.is_prompt, owners[run.owner]))
            held = [other.sequence for other in self._runs if other.sequence is not None]
            if active and not self._cache.has_room(run.head, held):
                return
            waiting.remove(run)
            try:
                admission = self._cache.admit(run.head, run.use, is_prompt=run.is_prompt)
            except Exception as error:
                self._stepper.fail(run, error)
                continue
            run.sequence = admission.sequence
            if run.is_prompt:
                run.record.cached_tokens, run.record.miss = admission.cached_tokens, admission.miss
                run.record.waited_seconds = time.monotonic() - run.began
                if run.speculative is not None:
                    run.speculative.admit()
            active.append(run)

    def _reason_to_stop(self, parts: Sequence[ScheduledSequence], num_known: int) -> ShouldAbort | None:
        """What ends a step before it is done: nobody wants it any more, or its only chunk is long and somebody comes.

        num_known: how many runs there were when the step was begun; meanwhile others are added, and none is removed.
        """
        if not all(part.is_chunk for part in parts):
            return None
        gives_way = len(parts) == 1 and self._limits.max_running > 1
        began = time.perf_counter()

        def should_abort(done: float) -> bool:
            if not self._is_usable() or all(part.run.is_over or part.run.is_cancelled for part in parts):
                return True
            if not gives_way or len(self._runs) == num_known:
                return False
            return (time.perf_counter() - began) * (1.0 - done) > _WAIT_SECONDS * done

        return should_abort

    def _choose(self, decoding: list[Request], prompts: list[Request]) -> list[ScheduledSequence]:
        """What the next step computes: a row of each who decodes, and a chunk, or drafts where there is none."""
        most = min(self._max_rows, self._max_outputs)
        if prompts and decoding and most == 1:
            # No room for both: whoever was served last waits.
            is_prompts_turn = min(run.served for run in prompts) < min(run.served for run in decoding)
            decoding, prompts = ([], prompts) if is_prompts_turn else (decoding, [])
        most -= bool(prompts) and most > 1
        if len(decoding) > most:
            decoding = sorted(decoding, key=lambda run: run.served)[:most]
        parts = [ScheduledSequence(run) for run in decoding]
        chunks = self._chunks(prompts, len(parts)) if prompts else []
        if parts and not chunks:
            may_draft = self._stepper.may_draft(parts)
            for part in parts:
                part.may_draft = may_draft
        return parts + chunks

    def _chunks(self, prompts: list[Request], num_decoding: int) -> list[ScheduledSequence]:
        """Share a chunk's rows among prompts: first those of the owner whose last chunk is longest ago."""
        rows = self._stepper.costs.chunk_rows(
            num_streams=num_decoding, num_prompts=len(prompts), most=self._max_rows - num_decoding
        )
        outputs = self._max_outputs - num_decoding
        for run in prompts:
            assert run.sequence is not None, "it was admitted"
            saved = self._cache.extend(run.sequence, run.head)
            if run.is_prompt:
                run.record.cached_tokens += saved
        parts: list[ScheduledSequence] = []
        for run in sorted(prompts, key=lambda run: self._chunk_of_owner.get(run.owner, 0)):
            if not rows:
                break
            if self._is_computed_by_another(run, prompts):
                continue
            assert run.sequence is not None, "it was admitted"
            wanted = run.head.size - run.sequence.length
            samples = wanted <= rows and outputs > 0
            count = wanted if samples else min(rows, wanted - 1)
            if count:
                parts.append(ScheduledSequence(run, count, is_chunk=True, samples=samples))
                rows -= count
                outputs -= samples
                self._note_chunk(run.owner)
        return parts

    def _is_computed_by_another(self, run: Request, prompts: list[Request]) -> bool:
        """Whether somebody who is further, or came first, computes whole pages that this prompt wants next."""
        is_before = True
        assert run.sequence is not None, "it was admitted"
        length = run.sequence.length
        for other in prompts:
            if other is run:
                is_before = False
                continue
            assert other.sequence is not None, "it was admitted"
            if other.sequence.length > length or (is_before and other.sequence.length == length):
                shared = common_length(other.head, run.head[:-1])
                whole = shared - shared % self._cache.pool.page_tokens
                # Whoever has passed what is shared leaves nothing more of it.
                if whole > length and whole > other.sequence.length:
                    return True
        return False

    def _note_chunk(self, owner: Hashable) -> None:
        if len(self._chunk_of_owner) > 4 * len(self._runs) + 64:
            present = {run.owner for run in self._runs}
            self._chunk_of_owner = {key: step for key, step in self._chunk_of_owner.items() if key in present}
        self._chunk_of_owner[owner] = self._steps


def _can_go_on(run: Request) -> bool:
    """Whether a step may work for it: its reader keeps up, and nobody has ended it."""
    return len(run.events) < _READ_AHEAD and not run.is_over and not run.is_cancelled


def _mend(run: Request) -> None:
    """Forget what was computed and not sampled, because a step was interrupted between the two."""
    if run.sequence is not None and run.sequence.length >= run.length:
        run.sequence.truncate(run.length - 1)
