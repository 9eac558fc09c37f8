"""The metrics of several replicas as one text of Prometheus: each sample with its replica, or all as one."""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

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
        joined = _way_of(family, families.described.get(family, ()))
        families.samples[family] = [f"{name} {joined(found)!r}" for name, found in values.items()]
    return families.text()


def _way_of(family: str, described: Iterable[str]) -> Callable[[list[float]], float]:
    """How the values of several replicas become one."""
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
