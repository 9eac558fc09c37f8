"""Routing policies: which replica gets a request. The same code routes simulated and real requests.

"prefix" is the ingress's own choice (`localinfer.apps.fleet.placement`), with beginnings as it would make them of
texts.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from localinfer.apps.fleet.placement import Placement
from tests.proof.simulation.fleet_memory import Request

BLOCK_TOKENS = 15
"""In 64 bytes of English."""
_PLACES = 16


class View(Protocol):
    """What a router is told of a replica. outstanding: requests that have not ended."""

    outstanding: int


class Router:
    """One of POLICIES over replicas; its own random numbers."""

    def __init__(self, policy: str, replicas: Sequence[View], seed: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
        self.replicas = replicas
        self.random_numbers = random.Random(f"route {seed}")
        self._policy = POLICIES[policy]
        self.placement = Placement(_PLACES, seed=seed)
        self.placement.set_replicas(f"{number:06d}" for number in range(len(replicas)))
        self._placed: dict[int, str] = {}

    def choose(self, request: Request) -> int:
        """The number of the replica for a request; it is remembered to have its text."""
        number = self._policy(self, request)
        if self._policy is _prefix:
            name = self._placed[request.conversation] = f"{number:06d}"
            self.placement.begin(name, prefixes_of(request), 1, 0)
        return number

    def ended(self, request: Request) -> None:
        """A request that was chosen for has ended."""
        name = self._placed.pop(request.conversation, None)
        if name is not None:
            self.placement.change(name, -1, 0)

    def sample(self, count: int) -> Sequence[int]:
        """Some replicas, each once, or all."""
        if count >= len(self.replicas):
            return range(len(self.replicas))
        return self.random_numbers.sample(range(len(self.replicas)), count)


def _random(router: Router, request: Request) -> int:
    return router.random_numbers.randrange(len(router.replicas))


def _least(router: Router, candidates: Sequence[int]) -> int:
    return min(candidates, key=lambda number: (router.replicas[number].outstanding, router.random_numbers.random()))


def _least_loaded(router: Router, request: Request) -> int:
    """The fewest requests that have not ended, of all."""
    return _least(router, range(len(router.replicas)))


def _two_choices(router: Router, request: Request) -> int:
    """The fewest of two at random. Source: Mitzenmacher, 2001."""
    return _least(router, router.sample(2))


def _prefix(router: Router, request: Request) -> int:
    name = router.placement.choose(prefixes_of(request), waits=False)
    assert name is not None, "there are replicas"
    return int(name)


def prefixes_of(request: Request) -> tuple[int, ...]:
    """Prefixes of a prompt, as `prompt_prefixes` makes them of its text: whole blocks, each after all before it."""
    shared, count = request.system_tokens // BLOCK_TOKENS, request.prompt // BLOCK_TOKENS
    system, own = -1 - request.system, request.conversation
    return tuple((system if block < shared else own) << 20 | block for block in range(count))


POLICIES: dict[str, Callable[[Router, Request], int]] = {
    "random": _random,
    "least-loaded": _least_loaded,
    "two-choices": _two_choices,
    "prefix": _prefix,
}
