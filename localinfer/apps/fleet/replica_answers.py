"""What several replicas answer, of which some may say nothing: those that do are not kept waiting by the others."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Answers(Generic[Answer]):
    """What replicas returned, as they came; num_missing: how many failed, or said nothing in time."""

    found: list[Answer] = field(default_factory=list)
    num_missing: int = 0


async def answers_within(
    asked: Iterable[Awaitable[Answer]], seconds: float, is_enough: Callable[[Answer], bool] = lambda answer: False
) -> Answers[Answer]:
    """Await all at one time, for so many seconds at most, or until an answer is enough; the others are cancelled."""
    waiting = {asyncio.ensure_future(one) for one in asked}
    count, found = len(waiting), list[Answer]()
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        while waiting and not any(map(is_enough, found)):
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            found += [one.result() for one in done if not one.cancelled() and one.exception() is None]
    finally:
        for one in waiting:
            one.cancel()
    return Answers(found, count - len(found))


class AnsweredReplicas:
    """Which replicas answered, for their metrics; remembers the names of those that did before."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def exposition(self, names: Iterable[str], num_missing: int, seconds: float) -> str:
        """Gauges of who has answered, as Prometheus reads them.

        names: of those that have. num_missing: how many others were asked. seconds: that they were given.
        Others are named where no more replicas are known than are missing: a known one may have been removed.
        """
        answered = set(names)
        absent = self._known - answered
        silent = absent if len(absent) <= num_missing else set()
        # One that is not asked any more is forgotten once nobody is missing.
        self._known = answered | (absent if num_missing else set())
        within = f"within {seconds:g} s, when these metrics were read"
        values = {name: int(name in answered) for name in sorted(answered | silent)}
        lines = [
            f"# HELP localinfer_missing_replicas Replicas that did not answer {within}",
            "# TYPE localinfer_missing_replicas gauge",
            f"localinfer_missing_replicas {num_missing}",
            f"# HELP localinfer_replica_answered Whether a replica answered {within}",
            "# TYPE localinfer_replica_answered gauge",
            *(f'localinfer_replica_answered{{replica="{name}"}} {value}' for name, value in values.items()),
        ]
        return "".join(f"{line}\n" for line in lines)
