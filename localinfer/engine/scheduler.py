"""The scheduler: every step serves all requests that can proceed, however many threads read them.

A step decodes a token, or a draft, of every request whose reader keeps up, and computes a chunk of one or several
prompts beside them (chunked prefill): short enough that no stream stalls, the most urgent first, and in fair
round-robin by owner among those. A request joins with the next step after its reader first asks, and leaves at once. It
waits where as many run as may, or where memory has no room for it beside the others; where memory ends, the least
urgent is preempted, and recomputed to the same bits when others have ended. A lone request takes its steps on its
reader's own thread, and pays for none of this.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from localinfer.engine.admission import AdmissionControl, AdmissionPolicy, EngineLimits
from localinfer.engine.cache.block_hashes import common_length
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.media import PlacedMedia
from localinfer.engine.request import NO_TOKEN, Request, StepLock, TokenEvent
from localinfer.engine.runner import ModelRunner, ScheduledSequence, ShouldAbort, StepCosts, StepFit
from localinfer.errors import ClosedError, OutOfMemoryError
from localinfer.kernels.program import Program

_WAIT_SECONDS = 0.1
"""Time that a new request waits for the end of a prompt's chunk before it is aborted, to be computed again."""
_CLOSED = "the model was closed; load it again"

PolicyFactory = Callable[[PrefixCache, StepFit, Callable[[int, int], int], AdmissionControl], AdmissionPolicy]
"""Makes an engine's policy of its cache, the costs of its steps, the rows of prompts that a step has beside streams,
and its admission."""


class Scheduler:
    """The requests of one engine; not usable in a forked child, whose threads did not survive the fork."""

    def __init__(
        self,
        program: Program,
        cache: PrefixCache,
        runner: ModelRunner,
        limits: EngineLimits,
        make_policy: PolicyFactory | None = None,
    ) -> None:
        self.step_lock = StepLock()
        self.is_closed = False
        self._process = os.getpid()
        self._cache = cache
        self._runner = runner
        self.admission = AdmissionControl(cache, runner, limits)
        self._max_rows = program.max_batch_rows
        self._max_outputs = program.max_output_rows
        self._unfinished: set[Request] = set()
        """Every request that has not ended; `running`: those whose readers have begun, in order of arrival."""
        self.running: list[Request] = []
        self._departed: deque[Request] = deque()
        self._steps = 0
        self._is_stepping = False
        """True if a step is in progress; at the start of one, whether the step before it was interrupted."""
        self._chunk_of_owner: dict[Hashable, int] = {}
        self._adding = threading.Lock()
        # It keeps no scheduler: a cycle would hold all memory of a model until the next full garbage collection.
        self.chunk_rows: Callable[..., int] = partial(_chunk_rows, runner.costs, program.max_batch_rows)
        """Rows of prompts in a step beside streams; another function measures what chunks are worth."""
        self.policy: AdmissionPolicy | None = None
        """Made for the first request with an objective."""
        self._make_policy = make_policy

    @property
    def is_usable(self) -> bool:
        """True if the engine is open, and of this process."""
        return not self.is_closed and os.getpid() == self._process

    def check_usable(self) -> None:
        """Raise ClosedError if the engine was closed, or belongs to the process that forked this one."""
        if self.is_closed:
            raise ClosedError(_CLOSED)
        self.check_process()

    @property
    def is_of_parent(self) -> bool:
        """True if this process was forked from the one that made it."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise ClosedError in a forked child, where locks may be held by threads that stayed behind."""
        if os.getpid() != self._process:
            raise ClosedError(
                "the model was loaded before this process was forked, and its threads stayed behind; load it here, or "
                "start processes with the 'spawn' method"
            )

    def requests(self) -> list[Request]:
        """Every request that has not ended, in no order. Any thread may ask, during a step too."""
        return list(self._unfinished)

    def add(self, request: Request, ttft_objective: float | None = None) -> None:
        """Take on a request, unless the policy refuses it. ttft_objective: seconds in which its first token is wanted.

        Raises: OverloadedError.
        """
        with self._adding:
            self.admission.check(len(self._unfinished))
            request.began = request.token_seconds = time.monotonic()
            if ttft_objective is not None and self._make_policy is not None:
                if self.policy is None:
                    self.policy = self._make_policy(
                        self._cache, self._runner.costs.fit, self.chunk_rows, self.admission
                    )
                request.predicted_seconds = self.policy.check(
                    request, ttft_objective, self.requests(), self._chunk_of_owner.copy()
                )
            self._unfinished.add(request)

    def next_event(self, request: Request) -> TokenEvent | None:
        """Take the next event of a request, by the steps of all if no other thread takes them; None after the last."""
        self.check_process()
        has_lock = False
        try:
            while True:
                # In this order: the last event is there before its request is over.
                is_over = request.is_over
                if request.is_cancelled:
                    return self._cancelled(request)
                if request.events:
                    return request.events.popleft()
                if is_over:
                    if request.error is None:
                        return None
                    error, request.error = request.error, None
                    raise error
                if self.is_closed:
                    raise ClosedError(_CLOSED)
                if not request.is_started:
                    if request.media is not None:
                        self._hold_embeddings(request, request.media)
                    request.is_started = True
                    self.running.append(request)
                if not has_lock:
                    has_lock = self.step_lock.try_acquire()
                    if not has_lock:
                        has_lock = self.step_lock.acquire_or_wait(request)
                        continue
                elif not self.step_lock.hand_to_exclusive():
                    has_lock = False
                    continue
                if not request.events and not request.is_over and not request.is_cancelled:
                    self._step()
        except BaseException:
            # An interrupt of a reader is meant for its request, not for the others that it takes steps for.
            self._depart(request)
            raise
        finally:
            if has_lock:
                self.step_lock.release()
            if self._departed:
                self._settle()

    def _hold_embeddings(self, request: Request, media: PlacedMedia) -> None:
        """Compute the embeddings that a new request needs, on its reader's thread and beside the steps of others."""
        with self.exclusive():
            cached = self._cache.find(request.head, request.hints.salt, media)
        media.hold(cached, lambda: request.is_cancelled or request.is_over or self.is_closed)

    def cancel(self, request: Request) -> None:
        """End a request, whose reader gets one last event. Any thread, at any time."""
        if not request.is_over:
            request.is_cancelled = True
            self._departed.append(request)
            self._wake(request)

    def leave(self, request: Request) -> None:
        """End a request that is no longer read. Any thread, at any time, even the garbage collector; never waits."""
        if not request.is_over or request in self._unfinished:
            self._depart(request)
            self._wake(request)

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Use model and cache exclusively for a block, between two steps. Raises: ClosedError in a forked child."""
        self.check_process()
        with self.step_lock.exclusive():
            self._close_departed()
            yield
        self._settle()

    def _cancelled(self, request: Request) -> TokenEvent:
        request.is_over, request.is_cancelled = True, False
        position = request.events[0].position if request.events else request.position
        request.events.clear()
        return TokenEvent(NO_TOKEN, position, "cancelled")

    def _depart(self, request: Request) -> None:
        request.is_over = True
        self._departed.append(request)

    def _wake(self, request: Request) -> None:
        waiter = request.waiter
        if waiter is not None and waiter.claim():
            waiter.wake()
        self._settle()

    def _settle(self) -> None:
        """Close what has ended, unless another thread is in a step, which will do it. Never waits."""
        while self._departed and self.is_usable and self.step_lock.try_acquire():
            try:
                self._close_departed()
            finally:
                self.step_lock.release()

    def _close_departed(self) -> None:
        while self._departed:
            request = self._departed.popleft()
            if self.is_usable:
                self._runner.finish(request)
            self._remove(request)

    def _remove(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        if request in self._unfinished:
            self._unfinished.discard(request)
            self.admission.note_end(request)

    def _step(self) -> None:
        """Take one step of every request that can proceed, under the step lock."""
        if self._departed:
            self._close_departed()
        running = self.running
        if self._is_stepping:
            for request in running:
                _rollback(request)
        self._is_stepping = True
        if len(running) == 1 and (request := running[0]).sequence is not None and request.position > request.base:
            if request.matcher is None and (request.speculative is None or request.speculative.in_backoff()):
                self._runner.decode_alone(request)
            else:
                self._step_alone(request)
            if request.is_over:
                self._remove(request)
        else:
            self._step_together(running)
        self._is_stepping = False

    def _step_alone(self, request: Request) -> None:
        """Decode the only request there is, with drafts unless its step is to be plain."""
        if request.matcher is not None:
            part = ScheduledSequence(request)
            part.may_draft = self._runner.may_draft([part])
            self._compute([part])
        elif request.speculative is not None and request.speculative.takes_plain_step():
            self._runner.decode_observed(request)
        else:
            self._compute([ScheduledSequence(request, may_draft=True)])

    def _step_together(self, running: list[Request]) -> None:
        self._steps += 1
        num_known = len(running)
        now = time.monotonic()
        ready = self.admission.priority_order.begin_step(running, now)
        self.admission.admit(ready, running)
        decoding = [request for request in ready if request.sequence is not None and request.position > request.base]
        prompts = [request for request in ready if request.sequence is not None and request.position == request.base]
        scheduled = self._schedule(decoding, prompts)
        for part in scheduled:
            part.request.served = self._steps
            if part.samples:
                part.request.token_seconds = now
        self._compute(scheduled, self._abort_condition(scheduled, num_known))
        for request in ready:
            predicted = request.predicted_seconds
            if self.policy is not None and predicted is not None and request.position > request.prompt_length:
                self.policy.observe(predicted, time.monotonic() - request.began)
                request.predicted_seconds = None
            if request.is_over:
                self._remove(request)

    def _compute(self, scheduled: Sequence[ScheduledSequence], should_abort: ShouldAbort | None = None) -> None:
        """Reserve memory for the rows of a step, preempting where there is too little, and take it for the rest."""
        reserved = [part for part in scheduled if self._reserve(part)]
        # A later one may have taken it from a less urgent one before it.
        with_memory = [part for part in reserved if part.request.sequence is not None and self._prepare(part)]
        if with_memory:
            self._runner.compute(with_memory, should_abort)

    def _prepare(self, part: ScheduledSequence) -> bool:
        """Compute embeddings that a part's rows need and that were not held before; False if its request ended
        meanwhile, and the others go on without it."""
        request = part.request
        if request.media is None:
            return True
        try:
            return request.media.prepare(
                request.cache.length,
                part.num_rows,
                lambda: request.is_cancelled or request.is_over or not self.is_usable,
            )
        except Exception as error:
            self._runner.fail(request, error)
            return False

    def _reserve(self, part: ScheduledSequence) -> bool:
        """Reserve memory for a part's rows; return whether there is."""
        while part.request.sequence is not None:
            try:
                part.request.sequence.reserve(part.request.sequence.length + part.num_rows)
                return True
            except OutOfMemoryError as error:
                self.admission.preempt_for(part.request, self.running, error)
        return False

    def _abort_condition(self, scheduled: Sequence[ScheduledSequence], num_known: int) -> ShouldAbort | None:
        """Condition for aborting a step: nothing reads it, or its only chunk is long and a request arrives that is as
        urgent.

        num_known: requests when the step was begun; meanwhile others are added, and none is removed.
        """
        if not all(part.is_chunk for part in scheduled):
            return None
        yields_to_others = len(scheduled) == 1 and self.admission.limits.max_running > 1
        urgency = max(self.admission.priority_order.urgency(part.request) for part in scheduled)
        began = time.perf_counter()

        def should_abort(done: float) -> bool:
            if not self.is_usable or all(part.request.is_over or part.request.is_cancelled for part in scheduled):
                return True
            if not yields_to_others or all(other.priority > urgency for other in self.running[num_known:]):
                return False
            return (time.perf_counter() - began) * (1.0 - done) > _WAIT_SECONDS * done

        return should_abort

    def _schedule(self, decoding: list[Request], prompts: list[Request]) -> list[ScheduledSequence]:
        """Rows of the next step: one of each that decodes, and chunks, or drafts where there are none."""
        most = min(self._max_rows, self._max_outputs)
        if prompts and decoding and most == 1:
            # No room for both: what was served last waits.
            prompts_first = min(request.served for request in prompts) < min(request.served for request in decoding)
            decoding, prompts = ([], prompts) if prompts_first else (decoding, [])
        most -= bool(prompts) and most > 1
        if len(decoding) > most:
            decoding = sorted(decoding, key=lambda request: request.served)[:most]
        scheduled = [ScheduledSequence(request) for request in decoding]
        if scheduled and prompts and self._runner.costs.wants_plain_step:
            return scheduled
        chunks = self._chunks(prompts, len(scheduled)) if prompts else []
        if scheduled and not chunks and any(request.media is not None for request in prompts):
            # A picture that is computed at once may have no room beside the streams, which then wait for a step.
            last = min(request.served for request in prompts)
            if last < min(request.served for request in decoding):
                chunks = self._chunks(prompts, 0)
                scheduled = [] if chunks else scheduled
        if scheduled and not chunks:
            may_draft = self._runner.may_draft(scheduled)
            for part in scheduled:
                part.may_draft = may_draft
        return scheduled + chunks

    def _chunks(self, prompts: list[Request], num_decoding: int) -> list[ScheduledSequence]:
        """Share a step's rows among prompts: first the most urgent, of those first the owner's whose last chunk is
        longest ago."""
        urgency, last_chunk = self.admission.priority_order.urgency, self._chunk_of_owner
        prompts = sorted(prompts, key=urgency)
        # What draft layers lack of a cached prefix takes a row more.
        repeated = sum(request.cache.lacks_carried for request in prompts)
        outputs = self._max_outputs - num_decoding
        for request in prompts:
            saved = self._cache.extend(request.cache, request.head, request.hints.salt)
            if request.is_prompt:
                request.record.cached_tokens += saved
        depth = max(request.cache.length for request in prompts)
        rows = self.chunk_rows(num_decoding, len(prompts), repeated, depth)
        room = self._max_rows - num_decoding - repeated
        chunks: list[ScheduledSequence] = []
        for request in sorted(prompts, key=lambda request: (urgency(request), last_chunk.get(request.owner, 0))):
            if not rows:
                break
            if self._is_computed_by_another(request, prompts):
                continue
            wanted = request.head.size - request.cache.length
            samples = wanted <= rows and outputs > 0
            count = wanted if samples else min(rows, wanted - 1)
            if request.media is not None:
                count = _whole_runs(request.media, request.cache.length, count, room, wanted - (outputs <= 0))
                samples = count == wanted
                if not count and wanted > 1:
                    # None that is less urgent takes the room that it waits for.
                    break
            if count:
                chunks.append(ScheduledSequence(request, count, is_chunk=True, samples=samples))
                rows, room = max(0, rows - count), room - count
                outputs -= samples
                self._note_chunk(request.owner)
        return chunks

    def _is_computed_by_another(self, request: Request, prompts: list[Request]) -> bool:
        """True if a prompt that is further, or came first, computes whole pages that this one wants next.

        prompts: the most urgent first. One that is less urgent may not be computed for long, and is not waited for.
        """
        is_before = True
        length = request.cache.length
        urgency = self.admission.priority_order.urgency
        for other in prompts:
            if other is request:
                is_before = False
                continue
            if urgency(other) > urgency(request):
                return False
            if other.hints.salt != request.hints.salt:
                continue
            other_length = other.cache.length
            if other_length > length or (is_before and other_length == length):
                shared = common_length(other.head, request.head[:-1])
                if request.media is not None:
                    shared = request.media.reusable(shared)
                whole = shared - shared % self._cache.pool.page_tokens
                # A prompt that has passed what is shared computes no more of it.
                if whole > length and whole > other_length:
                    other.cache.want_snapshots(whole)
                    return True
        return False

    def _note_chunk(self, owner: Hashable) -> None:
        if len(self._chunk_of_owner) > 4 * len(self.running) + 64:
            present = {request.owner for request in self.running}
            self._chunk_of_owner = {key: step for key, step in self._chunk_of_owner.items() if key in present}
        self._chunk_of_owner[owner] = self._steps


def _chunk_rows(
    costs: StepCosts, max_rows: int, num_decoding: int, num_prompts: int, repeated: int = 0, depth: int = 0
) -> int:
    """Rows of prompts that a step has beside streams. repeated: of them, those that are computed once more. depth:
    positions before them."""
    most = max(1, max_rows - num_decoding - repeated)
    return costs.chunk_rows(num_streams=num_decoding, num_prompts=num_prompts, most=most, depth=depth)


def _whole_runs(media: PlacedMedia, start: int, count: int, room: int, most: int) -> int:
    """Number of rows, about `count`, of a chunk from `start` on that parts no run of rows that see each other; 0 where
    one has to wait for a step with more room.

    room: rows that the step can have at most. most: rows that may be computed.
    """
    parted = media.whole_run_at(start + count)
    if parted is None:
        return count
    first, end = parted
    if first > start:
        return first - start
    return end - start if end - start <= min(room, most) else 0


class Generation(Iterator[TokenEvent]):
    """The tokens of one request as they are sampled, and what they cost; one reader at a time.

    `cancel` and `close` may be called by any thread at any time. What was computed stays in the cache.
    """

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.record = request.record
        self._scheduler = scheduler
        self.request = request

    @property
    def computed_tokens(self) -> int:
        """Number of ids that were read, computed or from the cache, at the end too; 0 while it is not admitted."""
        sequence = self.request.sequence
        return self.request.final_length if sequence is None else sequence.length

    def __next__(self) -> TokenEvent:
        event = self._scheduler.next_event(self.request)
        if event is None:
            raise StopIteration
        return event

    def cancel(self) -> None:
        """End the generation within the step in progress: its reader gets one last event, of reason "cancelled".

        Tokens that were not read yet are dropped. Nothing happens if it has ended by itself. May be called again.
        """
        self._scheduler.cancel(self.request)

    def close(self) -> None:
        """End the generation without an event. May be called again."""
        self._scheduler.leave(self.request)

    def __del__(self) -> None:
        self._scheduler.leave(self.request)


def _rollback(request: Request) -> None:
    """Forget what was computed and not sampled, because a step was interrupted between the two."""
    sequence = request.sequence
    if sequence is None and request.position > request.base:
        # It was being preempted.
        request.restart(request.token_ids(), request.media)
    if sequence is None or sequence.length < request.length:
        return
    if sequence.truncate(request.length - 1) < request.length - 1 and request.position > request.base:
        # What came before the last step is held; should it not be, what is missing is computed like a prompt.
        request.restart(request.token_ids(), request.media)
        request.sequence = sequence
