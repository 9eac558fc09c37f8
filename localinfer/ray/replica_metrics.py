"""The metrics of several replicas as one text of Prometheus, each sample with the replica that it is of."""

from collections.abc import Mapping


def merged_metrics(texts: Mapping[str, str]) -> str:
    """One exposition of all; texts: by replica. A family is described once, and samples get the label `replica`."""
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                lines = described.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, replica))
    lines = [line for family, heads in described.items() for line in (*heads, *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in [*samples.get("", ()), *lines])


def _labelled(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
