"""Who goes before whom: requests of a lower priority number first, and in the end everyone.

Strict priorities alone could let a request wait for ever. So of those that were given no token for too long one at a
time becomes the elder: it is as urgent as the most urgent, goes first among those, and stays so until it ends, if its
reader reads (aging, bounded to one place so that the urgent lose little).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localinfer.engine.request import Request


class Precedence:
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
        """What requests are sorted by: their urgency, and the elder first among equals."""
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
        """Those of the others that give way to the only text of an owner though they are as urgent: of owners with
        several texts, who keep one, first the newest of the one that has most. None where its owner has others itself.

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
