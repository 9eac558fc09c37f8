"""Which requests take part in steps: places, room in memory, and who gives them back.

The most urgent is admitted first. It takes place and memory of less urgent ones where that is enough for it: they are
preempted, and recomputed to the same bits. Whoever is preempted so is less urgent than who takes its place, so no two
take it from each other in turn. Among equals an owner of whom nothing runs takes them from one with several texts,
whose newest gives way: that one keeps a text, so these take nothing back either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from localinfer.arguments import check_number
from localinfer.engine.owner import may_run
from localinfer.engine.precedence import Precedence
from localinfer.errors import OutOfMemoryError, OverloadedError

if TYPE_CHECKING:
    from localinfer.engine.cache.prefix_cache import PrefixCache
    from localinfer.engine.request import Request
    from localinfer.engine.runner import ModelRunner

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0
_DURATION_MEMORY = 0.8


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How many requests are taken on at once.

    max_running: most that share a step. max_queued: most that may wait for that, beyond which `generate` raises
    OverloadedError; None sets no limit. aging_seconds: how long a reader waits for a token while more urgent requests
    are served; of those that have waited so long one at a time is then as urgent as any, until it ends; None for ever.
    Raises: RequestError naming the value.
    """

    max_running: int = 16
    max_queued: int | None = None
    aging_seconds: float | None = 30.0

    def __post_init__(self) -> None:
        check_number("max_running", self.max_running, 1)
        check_number("max_queued", self.max_queued, 0, none="for no limit")
        check_number("aging_seconds", self.aging_seconds, 0, kind=float, none="for ever")


class AdmissionControl:
    """Admits and preempts the requests of one engine; used under the step lock, but for `check`.

    precedence: who goes before whom. preemptions: how often one lost its memory to others.
    """

    def __init__(self, cache: PrefixCache, runner: ModelRunner, limits: EngineLimits) -> None:
        self.limits = limits
        self.precedence = Precedence(limits.aging_seconds)
        self.preemptions = 0
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
        """Remember how long a request took that has ended."""
        seconds = time.monotonic() - request.began
        self._mean_duration += (1.0 - _DURATION_MEMORY) * (seconds - self._mean_duration)

    def admit(self, ready: list[Request], running: list[Request]) -> None:
        """Admit requests that wait, as long as there are places and memory; of equally urgent ones first those whose
        owners have none that runs, then those that were preempted.

        ready: of those that are running, the ones that can proceed.
        """
        waiting = [request for request in ready if request.sequence is None]
        active = [request for request in ready if request.sequence is not None]
        while waiting:
            owners = Counter(request.owner for request in active)
            rank = self.precedence.rank
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
                admission = self._cache.admit(request.head, request.hints, is_prompt=request.is_prompt)
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
            self._preempt(max(reversed(others), key=self.precedence.urgency))
        else:
            self._runner.fail(request, error)

    def _make_way(self, request: Request, active: list[Request], running: list[Request]) -> bool:
        """Whether there are a place and memory for a request; preempts as many less urgent ones as that takes."""
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
            # It comes back as soon as there is room beside who took it.
            victim.gave_way_to = frozenset()
        return True

    def _givers(self, request: Request, others: Sequence[Request]) -> list[Request]:
        """Who gives way to a request, one after the other: less urgent ones, then what others have too many of."""
        less_urgent = self.precedence.less_urgent(request, others)
        held = [other for other in others if other.sequence is not None and other not in less_urgent]
        return less_urgent + self.precedence.surplus(request, held)

    def _preempt(self, request: Request) -> None:
        """Free the memory of a request, which is admitted again and recomputed when there is room.

        Out of memory in a step, it waits until what it gave way to has ended.
        """
        self.preemptions += 1
        token_ids = request.token_ids()
        self._runner.retire(request)
        request.restart(token_ids)
        request.gave_way_to = frozenset(self._cache.pool.sequences)

    def _has_room(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether a request may begin or go on beside others, were some of them not there."""
        sequences = [other.cache for other in without]
        return self._cache.has_room(request.head, request.hints.salt, without=sequences)


def _turn(
    rank: Callable[[Request], tuple[int, bool]], owners: Mapping[Hashable, int], request: Request
) -> tuple[tuple[int, bool], bool, bool, int]:
    """What requests that wait are sorted by. owners: how many texts of each run."""
    count = owners[request.owner]
    return rank(request), count > 0, request.is_prompt, count
