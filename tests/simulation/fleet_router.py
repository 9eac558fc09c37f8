"""Routing policies: which replica gets a request. The same code routes simulated and real requests."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.simulation.fleet_memory import Request

STREAM_TOKENS = 64
"""A request that runs or waits weighs as much as so many prompt tokens that wait."""
_ALL = 16
"""Up to so many replicas are compared one by one; of more, two at random beside those that hold the text."""
_SAMPLED_HOLDERS = 4


class View(Protocol):
    """What a router knows of a replica. outstanding: requests that have not ended. pending_tokens: of prompts, which
    are not cached and not computed."""

    outstanding: int
    pending_tokens: int

    def match(self, request: Request) -> int:
        """Tokens of a prompt that are cached there."""
        ...


class Router:
    """One of POLICIES over replicas; its own random numbers."""

    def __init__(self, policy: str, replicas: Sequence[View], seed: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"there is no policy {policy!r}; choose one of {', '.join(POLICIES)}")
        self.replicas = replicas
        self.random_numbers = random.Random(f"route {seed}")
        self._policy = POLICIES[policy]
        self.texts: dict[int, set[int]] = defaultdict(set)
        self.systems: dict[int, list[int]] = defaultdict(list)
        self.conversations = [0] * len(replicas)

    def choose(self, request: Request) -> int:
        """The number of the replica for a request; it is remembered to have its text."""
        number = self._policy(self, request)
        if number not in self.texts[request.conversation]:
            self.texts[request.conversation].add(number)
            self.conversations[number] += 1
        if number not in self.systems[request.system]:
            self.systems[request.system].append(number)
        return number

    def forget(self, conversation: int) -> None:
        """A conversation has ended."""
        for number in self.texts.pop(conversation, ()):
            self.conversations[number] -= 1

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
    """The least work ahead of the reply: prompt tokens that are not cached, of this request and those that wait.

    Requests there weigh STREAM_TOKENS each; of equals the replica with the fewest conversations. So a cached prompt
    leads to its replica unless the queue there costs more than computing it elsewhere.
    """
    candidates: Sequence[int] = router.sample(_ALL if len(router.replicas) <= _ALL else 2)
    if len(router.replicas) > _ALL:
        held = router.systems[request.system]
        if len(held) > _SAMPLED_HOLDERS:
            held = router.random_numbers.sample(held, _SAMPLED_HOLDERS)
        candidates = sorted({*candidates, *held, *router.texts[request.conversation]})

    def cost(number: int) -> tuple[int, int, float]:
        view = router.replicas[number]
        work = request.prompt - view.match(request) + view.pending_tokens + STREAM_TOKENS * view.outstanding
        return work, router.conversations[number], router.random_numbers.random()

    return min(candidates, key=cost)


POLICIES: dict[str, Callable[[Router, Request], int]] = {
    "random": _random,
    "least-loaded": _least_loaded,
    "two-choices": _two_choices,
    "prefix": _prefix,
}
