"""The order of requests over all replicas: limits of tokens, a queue in turns, and the replica of each request.

The promises of `localinfer serve` for one process hold here for the whole application, by the same classes: limits per
minute (`RateLimiter`), texts at one time (`check_generations`, `check_queue`), owners and how many texts each may run
(`Owner`). Nothing of Ray is known here: it is as many method calls on one thread, and one object of it is all that
several ingresses share.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

from localinfer.apps.fleet.placement import Placement
from localinfer.apps.server.replies.clients import RateLimiter, check_generations, check_queue
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.arguments import MAX_PRIORITY
from localinfer.engine.admission import Owner, may_run

AGING_SECONDS = 30.0
"""As in the engine: after so long the longest waiting request goes first, whatever its priority."""


@dataclass(frozen=True)
class Asked:
    """The facts of a request that decide its turn."""

    token: str
    """Name of its token, "" for none."""
    owner: Hashable
    """Identity among which turns are taken."""
    num_texts: int = 1
    """Texts that it generates."""
    priority: int = 0
    """Priority; the least number is the most urgent."""
    prefixes: tuple[int, ...] = ()
    """Prefixes of its prompt, see `PromptFacts`."""


@dataclass(eq=False)
class Place:
    """A request that waits, or is with a replica.

    Its fields are those of a reply that `check_queue` reads.
    """

    asked: Asked
    give: Callable[["Place"], None] = field(repr=False)
    began: float = 0.0
    """Time of arrival, on the dispatcher's clock."""
    num_texts: int = 1
    urgency: int = 0
    """Its priority, or that of the most urgent once it has waited too long."""
    replica: str = ""
    """Name of its replica, "" while it waits, or where Serve chooses."""
    is_running: bool = False
    is_cancelled: bool = False

    @property
    def token(self) -> str:
        """Name of the client's token."""
        return self.asked.token


class Dispatcher:
    """The accounts of an application. Used on one thread.

    settings: of the server; `max_generations` and `num_slots` are those of each replica, and what is refused is counted
    over as many as there are. placement: of the replicas. expected: replicas, where none has been reported yet.
    chooses: whether replicas are chosen here, and not by Serve. clock: seconds that never go back.
    """

    def __init__(
        self,
        settings: ServerSettings,
        placement: Placement,
        *,
        expected: int = 1,
        chooses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement = placement
        self.limiter = RateLimiter(lambda: settings, clock)
        self._own = self._settings = settings
        self._chooses = chooses
        self._clock = clock
        self._present: dict[str, set[Place]] = {}
        self._waiting: dict[tuple[int, Hashable], deque[Place]] = {}
        self._running: dict[Hashable, int] = {}
        self._owners: dict[str, Counter[Hashable]] = {}
        self._num_present = self._num_running = 0
        self._set_count(expected)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    def set_replicas(self, names: Iterable[str]) -> None:
        """Set the replicas; while there are none, the number of slots stays."""
        self.placement.set_replicas(names)
        if self.placement.num_replicas:
            self._set_count(self.placement.num_replicas)
        self._give_places()

    def suspect(self, name: str, is_suspect: bool) -> None:
        """See `Placement`."""
        self.placement.suspect(name, is_suspect)
        if not is_suspect:
            self._give_places()

    def ask(self, asked: Asked, give: Callable[[Place], None]) -> Place:
        """Queue a request. give: called when it has its slot, perhaps before this returns.

        Raises: ApiError, where it would be one too many.
        """
        present = self._present.setdefault(asked.token, set())
        try:
            most, is_first = self._settings.max_generations, bool(asked.token) and not present
            check_generations(self._num_present, asked.num_texts, most, is_first=is_first)
            check_queue(asked.token, asked.num_texts, present, self._settings)
        finally:
            if not present:
                del self._present[asked.token]
        place = Place(asked, give, self._clock(), asked.num_texts, asked.priority)
        self._present.setdefault(asked.token, set()).add(place)
        self._num_present += asked.num_texts
        self._waiting.setdefault((asked.priority, asked.owner), deque()).append(place)
        self._give_places()
        return place

    def resize(self, place: Place, num_texts: int) -> None:
        """Correct the number of texts of a request."""
        more = num_texts - place.num_texts
        if more and not place.is_cancelled:
            place.num_texts = num_texts
            self._num_present += more
            if place.is_running:
                self._count(place, more)
                self._change(place, more)

    def move(self, place: Place) -> None:
        """Move a request from its replica, which is gone or silent, to another one.

        It needs no free slot: an admitted request is not given up, and not put behind others.
        """
        if place.is_cancelled or not place.is_running:
            return
        former = place.replica
        self._change(place, -place.num_texts)
        self._send(place, self._choose(place.asked, without=former, waits=False) or "")

    def leave(self, place: Place) -> None:
        """Remove a request that has ended, or whose client has left; may be called again."""
        if place.is_cancelled:
            return
        place.is_cancelled = True
        asked = place.asked
        present = self._present[asked.token]
        present.discard(place)
        if not present:
            del self._present[asked.token]
        self._num_present -= place.num_texts
        if place.is_running:
            self._count(place, -place.num_texts)
            self._change(place, -place.num_texts)
        else:
            queue = self._waiting[asked.priority, asked.owner]
            queue.remove(place)
            if not queue:
                del self._waiting[asked.priority, asked.owner]
        self._give_places()

    def _set_count(self, replicas: int) -> None:
        self._num_places = replicas * self.placement.places
        # Until one is known, as much may wait as for one.
        count = max(1, replicas)
        self._settings = replace(
            self._own, num_slots=count * self.placement.places, max_generations=count * self._own.max_generations
        )

    def _give_places(self) -> None:
        """Assign free slots by urgency, then to the owner with the fewest running texts, then by arrival."""
        while self._waiting:
            heads = [queue[0] for queue in self._waiting.values()]
            first = min(heads, key=self._rank)
            if not self._gives(first) and not self._gives_any(heads):
                return

    def _rank(self, place: Place) -> tuple[float, int, float]:
        running = self._running.get(place.asked.owner, 0)
        return (-math.inf, 0, place.began) if self._is_aged(place) else (place.asked.priority, running, place.began)

    def _is_aged(self, place: Place) -> bool:
        return self._clock() - place.began >= AGING_SECONDS

    def _gives_any(self, heads: list[Place]) -> bool:
        """Assign a slot to one request, past owners at their limit; return True if one was assigned."""
        full_for = math.inf
        for place in sorted(heads, key=self._rank):
            if place.asked.priority >= full_for or not self._may_run(place):
                continue
            if self._gives(place):
                return True
            full_for = place.asked.priority
        return False

    def _gives(self, place: Place) -> bool:
        """Assign a slot to this request; return True if there was one."""
        asked = place.asked
        if not self._may_run(place):
            return False
        name = self._choose(asked)
        if name is None and not self._running.get(asked.owner):
            # Its engine takes a slot from an owner that has several, where another has nothing that runs.
            name = self.placement.crowded(self._has_surplus, place.num_texts)
        if name is None:
            return False
        queue = self._waiting[asked.priority, asked.owner]
        queue.popleft()
        if not queue:
            del self._waiting[asked.priority, asked.owner]
        self._count(place, place.num_texts)
        place.is_running = True
        if self._is_aged(place):
            # None that is more urgent is sent beyond it.
            place.urgency = -MAX_PRIORITY
        self._send(place, name)
        place.give(place)
        return True

    def _may_run(self, place: Place) -> bool:
        running = self._running.get(place.asked.owner, 0)
        return may_run(place.asked.owner, running)

    def _has_surplus(self, name: str) -> bool:
        """True if an owner has several texts at a replica."""
        owners = self._owners.get(name, ())
        return self.placement.running(name) > len(owners) > 0

    def _choose(self, asked: Asked, *, without: str = "", waits: bool = True) -> str | None:
        if not self._chooses or not self.placement.num_replicas:
            # Serve waits for the first replica.
            return "" if not waits or self._num_running < self._num_places else None
        return self.placement.choose(asked.prefixes, asked.priority, asked.num_texts, without=without, waits=waits)

    def _send(self, place: Place, name: str) -> None:
        place.replica = name
        if name:
            self.placement.begin(name, place.asked.prefixes, place.num_texts, place.urgency)
            self._owners.setdefault(name, Counter())[place.asked.owner] += place.num_texts

    def _change(self, place: Place, more: int) -> None:
        """Count more texts of a request at its replica."""
        name, owner = place.replica, place.asked.owner
        if not name:
            return
        self.placement.change(name, more, place.urgency)
        owners = self._owners[name]
        owners[owner] += more
        if owners[owner] <= 0:
            del owners[owner]
        if not owners:
            del self._owners[name]

    def _count(self, place: Place, more: int) -> None:
        owner = place.asked.owner
        self._num_running += more
        self._running[owner] = self._running.get(owner, 0) + more
        if self._running[owner] <= 0:
            del self._running[owner]


def owner_of(identity: str | None, max_running: int | None, other: str) -> Hashable:
    """The owner among which turns are taken: a token's identity with its limit, or the connection without a token."""
    return other if identity is None else Owner(identity, max_running)
