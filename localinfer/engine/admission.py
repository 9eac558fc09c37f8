"""Admission and preemption: which requests take part in steps, in priority order, within limits of memory and owners.

The most urgent request is admitted first. It takes the slot and memory of less urgent ones where that is enough for it:
these are preempted, and recomputed to the same bits. A preempted request is less urgent than the one that took its
slot, so no two preempt each other in turn. Among equals an owner with nothing running takes them from an owner with
several texts, whose newest gives way: it keeps at least one text, so this is not undone either.

Strict priorities alone could starve a request (aging): of those that got no token for too long, one at a time is
promoted to the most urgent level until it ends, if its reader reads. One at a time, so that the urgent lose little.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from localinfer.arguments import check_number
from localinfer.errors import OutOfMemoryError, OverloadedError
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.engine.cache.prefix_cache import PrefixCache
    from localinfer.engine.request import Request
    from localinfer.engine.runner import ModelRunner


class Owner(Record):
    """An owner with a limit; anything hashable is one without.

    key: what owners differ by. max_running: how many of its texts may share steps at once, None for as many as may.
    """

    key: Hashable
    max_running: int | None = field(default=None, compare=False)


def may_run(owner: Hashable, num_running: int) -> bool:
    """True if one more text of an owner may run beside so many of its own."""
    return not isinstance(owner, Owner) or owner.max_running is None or num_running < owner.max_running


class PriorityOrder:
    """The order of one engine's requests in a step; used under the step lock.

    aging_seconds: how long a reader waits for a token before its request may become the elder; None for ever.
    """

    def __init__(self, aging_seconds: float | None) -> None:
        self._aging_seconds = aging_seconds
        self._elder: Request | None = None
        self._elder_seconds = 0.0
        self._most_urgent = 0

    def begin_step(self, running: Iterable[Request], now: float) -> list[Request]:
        """The requests that can proceed, in order of arrival. now: seconds on the clock of `Request.began`."""
        ready = []
        for request in running:
            if request.can_proceed:
                ready.append(request)
            else:
                # It waits for its reader, not for others.
                request.token_seconds = now
        self._most_urgent = min((request.priority for request in ready), default=0)
        if self._aging_seconds is not None:
            self._choose_elder(ready, now, now - self._aging_seconds)
        return ready

    def _choose_elder(self, ready: list[Request], now: float, latest: float) -> None:
        """latest: when what has waited too long was given its last token."""
        elder = self._elder
        if elder in ready:
            self._elder_seconds = now
        elif elder is None or elder.is_over or self._elder_seconds <= latest:
            aged = [request for request in ready if request.token_seconds <= latest]
            self._elder = min(aged, key=lambda request: request.token_seconds, default=None)
            self._elder_seconds = now

    def urgency(self, request: Request) -> int:
        """Its priority, or that of the most urgent for the elder; the least is the most urgent."""
        return min(request.priority, self._most_urgent) if request is self._elder else request.priority

    def rank(self, request: Request) -> tuple[int, bool]:
        """Sort key of requests: their urgency, and the elder first among equals."""
        return self.urgency(request), request is not self._elder

    def less_urgent(self, request: Request, others: Iterable[Request]) -> list[Request]:
        """Those of the others that hold memory and are less urgent than a request, the least urgent first.

        Of two that are as urgent as each other the later one comes first: it has less to lose.
        """
        urgency = self.urgency(request)
        found = [
            other
            for other in others
            if other.sequence is not None and not other.is_over and self.urgency(other) > urgency
        ]
        found.reverse()
        return sorted(found, key=self.urgency, reverse=True)

    def surplus(self, request: Request, others: Sequence[Request]) -> list[Request]:
        """The others that give way to the only text of an owner though they are as urgent: of owners with several
        texts, which keep one, first the newest of the one that has most. None where its owner has others itself.

        others: that hold memory, in order of arrival. The elder runs to its end.
        """
        texts = [other for other in others if other is not request and not other.is_over]
        counts = Counter(other.owner for other in texts)
        if request.owner in counts:
            return []
        urgency, found = self.urgency(request), []
        may_give = [other for other in texts if other is not self._elder and self.urgency(other) >= urgency]
        may_give.reverse()
        while may_give:
            newest = max(may_give, key=lambda other: counts[other.owner])
            if counts[newest.owner] < 2:
                break
            counts[newest.owner] -= 1
            may_give.remove(newest)
            found.append(newest)
        return found


_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0
_DURATION_MEMORY, _LENGTH_MEMORY = 0.8, 0.9


class EngineLimits(Record, kw_only=True):
    """Limits of the requests that are taken on at once.

    Raises: RequestError naming the value.
    """

    max_running: int = 16
    """Most that share a step."""
    max_queued: int | None = None
    """Most that may wait for that, beyond which `generate` raises OverloadedError; None sets no limit."""
    aging_seconds: float | None = 30.0
    """Time that a reader waits for a token while more urgent requests are served; of those that have waited so long one
    at a time is then as urgent as any, until it ends; None for ever."""

    def __post_init__(self) -> None:
        check_number("max_running", self.max_running, 1)
        check_number("max_queued", self.max_queued, 0, none="for no limit")
        check_number("aging_seconds", self.aging_seconds, 0, kind=float, none="for ever")


class TtftStats(Record):
    """Accuracy of predicted times to the first token since loading."""

    num_predicted: int = 0
    """Number of predictions."""
    num_refused: int = 0
    """Number of requests that were refused for a prediction."""
    ratio_quantiles: Mapping[float, float] = field(default_factory=dict)
    """Ratios of the real time to the first token over the predicted one, by quantile, of the latest 512."""
    error_quantiles: Mapping[float, float] = field(default_factory=dict)
    """Differences of the two in seconds, by quantile; both are empty before the first."""


class AdmissionPolicy(Protocol):
    """Refuses requests whose first token would come later than is wanted."""

    @property
    def stats(self) -> TtftStats:
        """Accuracy of the predictions so far."""

    def check(
        self, new: Request, objective: float, present: Sequence[Request], last_chunks: Mapping[Hashable, int]
    ) -> float | None:
        """Return the predicted seconds to a request's first token, None if unknown, where it is taken on.

        objective: seconds that are wanted. present: the others that have not ended. last_chunks: the step of each
        owner's last chunk. Raises: OverloadedError.
        """

    def observe(self, predicted: float, seconds: float) -> None:
        """Compare a prediction with the time that the first token took."""


class AdmissionControl:
    """Admits and preempts the requests of one engine; used under the step lock, but for `check`.

    mean_tokens: mean length of texts that ended, recent ones above all; None before the first. preemptions: number of
    times that one lost its memory to others.
    """

    def __init__(self, cache: PrefixCache, runner: ModelRunner, limits: EngineLimits) -> None:
        self.limits = limits
        self.priority_order = PriorityOrder(limits.aging_seconds)
        self.preemptions = 0
        self.mean_tokens: float | None = None
        self._cache = cache
        self._runner = runner
        self._mean_duration = _LEAST_RETRY_SECONDS

    def check(self, num_unfinished: int) -> None:
        """Raise OverloadedError if one request more than these is too many."""
        limits = self.limits
        if limits.max_queued is not None and num_unfinished >= limits.max_running + limits.max_queued:
            rounds = 1 + limits.max_queued / limits.max_running
            seconds = min(max(rounds * self._mean_duration, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
            raise OverloadedError(
                f"{limits.max_running} requests are running and {limits.max_queued} are waiting, as many as may; try "
                f"again in {seconds:.0f} seconds",
                seconds,
            )

    def note_end(self, request: Request) -> None:
        """Remember the duration and length of a request that has ended."""
        seconds = time.monotonic() - request.began
        self._mean_duration += (1.0 - _DURATION_MEMORY) * (seconds - self._mean_duration)
        if num_tokens := request.position - request.prompt_length:
            known = float(num_tokens) if self.mean_tokens is None else self.mean_tokens
            self.mean_tokens = _LENGTH_MEMORY * known + (1.0 - _LENGTH_MEMORY) * num_tokens

    def admit(self, ready: list[Request], running: list[Request]) -> None:
        """Admit requests that wait, as long as there are slots and memory; of equally urgent ones first those whose
        owners have none that runs, then those that were preempted.

        ready: of those that are running, the ones that can proceed.
        """
        waiting = [request for request in ready if request.sequence is None]
        active = [request for request in ready if request.sequence is not None]
        while waiting:
            owners = Counter(request.owner for request in active)
            rank = self.priority_order.rank
            allowed = [request for request in waiting if may_run(request.owner, owners[request.owner])]
            if not allowed:
                return
            request = min(allowed, key=partial(_turn, rank, owners))
            if active and not self._make_way(request, active, running):
                return
            active = [other for other in active if other.sequence is not None]
            request.gave_way_to = frozenset()
            waiting.remove(request)
            try:
                admission = self._cache.admit(
                    request.head, request.hints, is_prompt=request.is_prompt, media=request.media
                )
            except Exception as error:
                self._runner.fail(request, error)
                continue
            request.sequence = admission.sequence
            if request.is_prompt:
                request.record.cached_tokens, request.record.miss = admission.cached_tokens, admission.miss
                request.record.waited_seconds = time.monotonic() - request.began
                if request.speculative is not None:
                    request.speculative.admit()
            active.append(request)

    def preempt_for(self, request: Request, running: list[Request], error: OutOfMemoryError) -> None:
        """Find memory for a request: the least urgent gives it, or an owner with several texts to one with this only.
        Else of equally urgent ones the request itself is preempted while others proceed, or one that cannot proceed.
        Without others the request fails."""
        less_urgent = self._givers(request, running)
        others = [other for other in running if other is not request and other.sequence is not None]
        if less_urgent:
            self._preempt(less_urgent[0])
        elif any(other.can_proceed or other.is_over or other.is_cancelled for other in others):
            self._preempt(request)
        elif others:
            self._preempt(max(reversed(others), key=self.priority_order.urgency))
        else:
            self._runner.fail(request, error)

    def _make_way(self, request: Request, active: list[Request], running: list[Request]) -> bool:
        """Preempt as many less urgent ones as a request takes; return False without a slot and memory for it."""
        if request.gave_way_to and request.gave_way_to <= self._cache.pool.sequences:
            # Where less memory can be had than is counted, two would otherwise preempt each other for ever.
            return False
        victims: list[Request] = []
        if len(active) >= self.limits.max_running:
            victims = self._givers(request, active)[:1]
            if not victims:
                return False
        if not self._has_room(request, victims):
            givers = self._givers(request, running)
            if not self._has_room(request, [*victims, *givers]):
                return False
            for other in givers:
                if other not in victims:
                    victims.append(other)
                    if self._has_room(request, victims):
                        break
        for victim in victims:
            self._preempt(victim)
            # It comes back as soon as there is room beside the request that took it.
            victim.gave_way_to = frozenset()
        return True

    def _givers(self, request: Request, others: Sequence[Request]) -> list[Request]:
        """Requests that give way to this one, in order: less urgent ones, then those that owners have too many of."""
        less_urgent = self.priority_order.less_urgent(request, others)
        held = [other for other in others if other.sequence is not None and other not in less_urgent]
        return less_urgent + self.priority_order.surplus(request, held)

    def _preempt(self, request: Request) -> None:
        """Free the memory of a request, which is admitted again and recomputed when there is room.

        Out of memory in a step, it waits until what it gave way to has ended.
        """
        self.preemptions += 1
        token_ids = request.token_ids()
        self._runner.retire(request)
        request.restart(token_ids, request.media)
        request.gave_way_to = frozenset(self._cache.pool.sequences)

    def _has_room(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """True if a request may begin or continue beside others, were some of them not there."""
        sequences = [other.cache for other in without]
        return self._cache.has_room(request.head, request.hints.salt, media=request.media, without=sequences)


def _turn(
    rank: Callable[[Request], tuple[int, bool]], owners: Mapping[Hashable, int], request: Request
) -> tuple[tuple[int, bool], bool, bool, int]:
    """Sort key of requests that wait. owners: number of running texts of each."""
    count = owners[request.owner]
    return rank(request), count > 0, request.is_prompt, count
