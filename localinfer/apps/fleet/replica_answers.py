"""Answers of several replicas, of which some may be missing, and their metrics as one text of Prometheus."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Answers(Generic[Answer]):
    """Results of replicas in their order of arrival. num_missing: replicas that failed, or were late."""

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
    """Metrics of the replicas that answered; remembers the names of those that did before."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def exposition(self, names: Iterable[str], num_missing: int, seconds: float) -> str:
        """Gauges of the replicas that answered, as Prometheus reads them.

        names: of replicas that answered. num_missing: others that were asked. seconds: their time limit.
        Others are named where no more replicas are known than are missing: a known one may have been removed.
        """
        answered = set(names)
        absent = self._known - answered
        silent = absent if len(absent) <= num_missing else set()
        # One that is not asked any more is forgotten once none is missing.
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


_MEANS = ("_perc", "_per_decode", "_seconds")
"""Ends of names of gauges that are shares or speeds."""


class _Families:
    """Families in the order in which they came: their descriptions, each once, and their samples."""

    def __init__(self) -> None:
        self.described: dict[str, list[str]] = {}
        self.samples: dict[str, list[str]] = {}

    def read(self, text: str, marked: Callable[[str], str] = lambda sample: sample) -> None:
        """Take the lines of one exposition. marked: gives a sample as it is kept."""
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                lines = self.described.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif line and not line.startswith("#"):
                self.samples.setdefault(family, []).append(marked(line))

    def text(self) -> str:
        """One exposition."""
        lines = [line for family, heads in self.described.items() for line in (*heads, *self.samples.get(family, ()))]
        return "".join(f"{line}\n" for line in [*self.samples.get("", ()), *lines])


def merged_metrics(texts: Mapping[str, str]) -> str:
    """One exposition of all; texts: by replica. A family is described once, and samples get the label `replica`."""
    families = _Families()
    for replica, text in texts.items():
        families.read(text, lambda sample, replica=replica: _labelled(sample, replica))  # type: ignore[misc]
    return families.text()


def summed_metrics(texts: Iterable[str]) -> str:
    """One exposition that does not tell replicas apart, as if they were one server.

    Counters, histograms and amounts are added up; shares and speeds are means, times of creation and largest values one
    of them, and quantiles, which cannot be put together, are left out.
    """
    families = _Families()
    for text in texts:
        families.read(text)
    for family, samples in families.samples.items():
        values: dict[str, list[float]] = {}
        for sample in samples:
            name, _, value = sample.rpartition(" ")
            if "quantile=" not in name:
                values.setdefault(name, []).append(float(value))
        joined = _combination(family, families.described.get(family, ()))
        families.samples[family] = [f"{name} {joined(found)!r}" for name, found in values.items()]
    return families.text()


def _combination(family: str, described: Iterable[str]) -> Callable[[list[float]], float]:
    """The function that combines values of several replicas."""
    if family.endswith("_created"):
        return min
    if family.endswith("_max"):
        return max
    is_gauge = any(line == f"# TYPE {family} gauge" for line in described)
    return fmean if is_gauge and family.endswith(_MEANS) else sum


def _labelled(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
