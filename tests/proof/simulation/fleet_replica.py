"""A simulated replica: continuous batching with chunked prefill, as in `localinfer.engine`, in steps of measured cost.

Steps that only decode are taken together until the first reply ends, or something arrives, so that a fleet of a
thousand replicas is simulated in minutes.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor, log, sqrt
from typing import Protocol

from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_memory import PrefixMemory, Request

INTERVALS, LEAST_SECONDS, LEAST_ROWS = 2.0, 0.03, 8
SEVERAL_SECONDS, LEAST_ROWS_OF_SEVERAL = 0.15, 64
ALONE_SECONDS, LEAST_ROWS_ALONE = 1.0, 256
WAIT_SECONDS = 0.1
TILE = 16
"""As in `localinfer/engine/step_costs.py` and `scheduler.py`, on a machine with nothing else to do."""
INTERVAL_BINS_PER_E = 40
"""Intervals are counted in bins of 2.5 percent."""


class Clock(Protocol):
    """What a replica needs of a simulation."""

    now: float

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do something at a moment."""
        ...


@dataclass(frozen=True)
class ReplicaOptions:
    """kv_tokens: memory for keys and values. max_running: requests that share steps."""

    kv_tokens: int
    max_running: int = 16


@dataclass
class Intervals:
    """Times between two tokens of a reply, counted by their logarithm."""

    bins: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float, count: int) -> None:
        """Count some intervals."""
        if count:
            self.bins[floor(log(max(seconds, 1e-9)) * INTERVAL_BINS_PER_E)] += count


@dataclass(slots=True)
class _Step:
    """What is computed now: chunks, or `count` steps of streams alone. began, ends: of all."""

    began: float
    ends: float
    chunks: list[tuple[Request, int]]
    streams: list[Request]
    count: int
    first_seconds: float
    growth: float
    """Seconds that each further step takes more."""


class Replica:
    """One server. on_first, on_end: called with a request when its first token, or its end, is there."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        costs: StepCosts,
        options: ReplicaOptions,
        intervals: Intervals,
        on_end: Callable[[Request], None],
    ) -> None:
        self.number = number
        self.memory = PrefixMemory(options.kv_tokens // costs.page_tokens, costs.page_tokens)
        self.outstanding = 0
        self.pending_tokens = 0
        self.busy_seconds = 0.0
        self.max_queue = 0
        self._clock, self._costs, self._options = clock, costs, options
        self._intervals, self._on_end = intervals, on_end
        self._waiting: deque[Request] = deque()
        self._prompts: list[Request] = []
        self._streams: list[Request] = []
        self._step: _Step | None = None
        self._steps = 0

    def match(self, request: Request) -> int:
        """Tokens of a prompt that are cached here."""
        return self.memory.match(request)

    def expect(self, request: Request) -> None:
        """Count a request that is on its way."""
        request.estimate = request.prompt - self.match(request)
        self.outstanding += 1
        self.pending_tokens += request.estimate

    def arrive(self, request: Request) -> None:
        """Take on a request."""
        self._waiting.append(request)
        self.max_queue = max(self.max_queue, len(self._waiting))
        step, now = self._step, self._clock.now
        if step is None:
            self._begin()
        elif not step.chunks:
            done = self._steps_until(step, now)
            if done < step.count:
                step.count = done
                step.ends = step.began + _sum(step.first_seconds, step.growth, done)
                self._schedule(step)
        elif (
            len(step.chunks) == 1
            and not step.streams
            and self._options.max_running > 1
            and step.ends - now > WAIT_SECONDS
        ):
            # A long chunk of a lone prompt is aborted and computed again.
            self.busy_seconds += now - step.began
            self._step = None
            self._begin()

    def _begin(self) -> None:
        now = self._clock.now
        self._admit()
        streams = self._streams
        chunks = self._chunks() if self._prompts else []
        if not chunks and not streams:
            return
        self._steps += 1
        context = self._context()
        if chunks:
            rows = sum(count for _, count in chunks)
            before = sum(request.computed * count for request, count in chunks)
            seconds = self._costs.step_seconds(len(streams), context, rows, before)
            step = _Step(now, now + seconds, chunks, list(streams), 1, seconds, 0.0)
        else:
            count = min(request.reply - request.generated for request in streams)
            seconds = self._costs.decode_seconds(len(streams), context)
            growth = self._costs.decode_context * len(streams)
            step = _Step(now, now + _sum(seconds, growth, count), [], list(streams), count, seconds, growth)
        self._step = step
        self._schedule(step)

    def _schedule(self, step: _Step) -> None:
        ends = step.ends
        self._clock.at(ends, lambda: self._end(step, ends))

    def _end(self, step: _Step, ends: float) -> None:
        if step is not self._step or ends != step.ends:
            # It was cut short or aborted.
            return
        self._step = None
        self.busy_seconds += step.ends - step.began
        if step.streams:
            mean = (step.ends - step.began) / step.count
            self._intervals.add(mean, step.count * len(step.streams))
        over: list[Request] = []
        for request in step.streams:
            request.generated += step.count
            if request.generated >= request.reply:
                over.append(request)
        for request, count in step.chunks:
            request.computed += count
            request.served = self._steps
            self.memory.publish(request)
            if request.computed == request.prompt:
                self._prompts.remove(request)
                request.first_token = self._clock.now
                request.generated = 1
                self.pending_tokens -= request.estimate
                if request.hands_over or request.reply == 1:
                    over.append(request)
                else:
                    self._streams.append(request)
        for request in over:
            if request in self._streams:
                self._streams.remove(request)
            self.memory.finish(request)
            self.outstanding -= 1
            request.ended = self._clock.now
        self._begin()
        for request in over:
            self._on_end(request)

    def _admit(self) -> None:
        while self._waiting and len(self._prompts) + len(self._streams) < self._options.max_running:
            request = self._waiting[0]
            if (self._prompts or self._streams) and not self.memory.has_room(request):
                return
            self._waiting.popleft()
            request.replica = self.number
            request.cached = request.computed = self.memory.admit(request)
            self._prompts.append(request)

    def _chunks(self) -> list[tuple[Request, int]]:
        """Share a step's rows among prompts: first those whose last chunk is longest ago."""
        for request in self._prompts:
            found = self.match(request)
            if found > request.computed:
                request.cached += found - request.computed
                request.computed = found
        rows = self._most_rows()
        chunks: list[tuple[Request, int]] = []
        leaders: dict[int, int] = {}
        for request in self._prompts:
            leaders[request.system] = max(leaders.get(request.system, 0), request.computed)
        begun: set[int] = set()
        for request in sorted(self._prompts, key=lambda request: request.served):
            if rows <= 0:
                break
            if request.computed < request.system_tokens - request.system_tokens % self._costs.page_tokens:
                # Another prompt that is further, or came first, computes the same system prompt.
                if request.computed < leaders[request.system] < request.system_tokens or request.system in begun:
                    continue
                begun.add(request.system)
            count = min(rows, request.prompt - request.computed)
            chunks.append((request, count))
            rows -= count
        return chunks

    def _context(self) -> int:
        """Tokens before those that the streams get next; the last one of each is not held yet."""
        return sum(request.computed + request.generated - 1 for request in self._streams)

    def _most_rows(self) -> int:
        streams = self._streams
        if streams:
            decode = self._costs.decode_seconds(len(streams), self._context())
            least, seconds = LEAST_ROWS, max(LEAST_SECONDS, INTERVALS * decode)
        elif len(self._prompts) > 1:
            least, seconds = LEAST_ROWS_OF_SEVERAL, SEVERAL_SECONDS
        else:
            least, seconds = LEAST_ROWS_ALONE, ALONE_SECONDS
        rows = int(seconds / max(1e-9, self._costs.prompt_token_seconds))
        return min(self._costs.max_rows - len(streams), max(least, rows - rows % TILE if rows > TILE else rows))

    @staticmethod
    def _steps_until(step: _Step, now: float) -> int:
        """How many steps have ended once the one in progress at a moment has."""
        elapsed = now - step.began
        if step.growth > 1e-15:
            half = step.first_seconds - step.growth / 2
            steps = (sqrt(half * half + 2 * step.growth * max(0.0, elapsed)) - half) / step.growth
        else:
            steps = elapsed / max(step.first_seconds, 1e-12)
        return max(1, ceil(steps - 1e-9))


def _sum(first: float, growth: float, count: int) -> float:
    """Of an arithmetic series."""
    return count * first + growth * count * (count - 1) / 2
