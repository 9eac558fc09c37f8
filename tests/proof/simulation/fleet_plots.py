"""Draws what `fleet_study` found: `python -m tests.proof.simulation.fleet_plots STUDY.json docs`.

Writes fleet-policies.png, fleet-load.png and fleet-apart.png; wants `pip install 'localinfer[plot]'`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from localinfer.apps.bench.charts import require_matplotlib
from tests.proof.simulation.fleet_study import APART_FIRST_TOKEN, APART_REPLICAS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]

NAMES = {"random": "random", "two-choices": "less loaded of two", "prefix": "prefix-aware"}
COLOURS = {"random": "#c44e52", "two-choices": "#dd8452", "prefix": "#4c72b0"}
MARKS = {"random": "s", "two-choices": "^", "prefix": "o"}
LOAD_REPLICAS = 100
SHARE_IN_TIME = 0.9
"""Of requests, those whose first token has to come in time for a load to count as served."""
_DPI = 110


def best(records: list[Record], replicas: int, policy: str) -> list[Record]:
    """The load of most goodput with the first seed: its record, and those with other seeds."""
    mine = [one for one in records if one["replicas"] == replicas and one["policy"] == policy]
    load = max((one for one in mine if one["seed"] == 1), key=lambda one: one["good_tokens_per_second"])["load"]
    return [one for one in mine if one["load"] == load]


def mean(records: list[Record], name: str) -> float:
    """Of a figure, over seeds."""
    return fmean(one[name] for one in records)


def numbers_of(records: list[Record], policy: str) -> list[int]:
    """The numbers of replicas that a policy was run with."""
    return sorted({one["replicas"] for one in records if one["policy"] == policy})


def served(records: list[Record], people: str, split: int, interval: float) -> float:
    """The most reply tokens per second with a p99 interval within a limit and first tokens in time; 0 if none."""
    mine = [
        one["tokens_per_second"]
        for one in records
        if one["people"] == people
        and one["split"] == split
        and one["interval_p99"] <= interval
        and one["in_time"] >= SHARE_IN_TIME
    ]
    return max(mine, default=0.0)


def draw_policies(records: list[Record], file: Path) -> None:
    """Hit rate, goodput and cost by the number of replicas, each at its best load, means over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for policy, name in NAMES.items():
        numbers = numbers_of(records, policy)
        found = [best(records, number, policy) for number in numbers]
        style = {"color": COLOURS[policy], "marker": MARKS[policy], "label": name, "markersize": 5}
        panels[0].plot(numbers, [100 * mean(runs, "hit_rate") for runs in found], **style)
        panels[1].plot(numbers, [mean(runs, "good_tokens_per_second") / runs[0]["replicas"] for runs in found], **style)
        panels[2].plot(numbers, [mean(runs, "cost_per_million") for runs in found], **style)
    _finish(panels[0], "hit rate (% of shareable tokens)")
    _finish(panels[1], "goodput per replica (tokens/s)")
    _finish(panels[2], "cost of a million tokens ($)")
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
        axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    panels[0].legend(frameon=False)
    figure.savefig(file, dpi=_DPI)


def draw_load(records: list[Record], file: Path) -> None:
    """Goodput, first tokens and hit rate of a hundred replicas by load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for policy, name in NAMES.items():
        mine = [one for one in records if one["replicas"] == LOAD_REPLICAS and one["policy"] == policy]
        mine = [one for one in mine if one["seed"] == 1]
        loads = [one["load"] for one in mine]
        style = {"color": COLOURS[policy], "marker": MARKS[policy], "label": name, "markersize": 5}
        panels[0].plot(loads, [one["good_tokens_per_second"] / one["replicas"] for one in mine], **style)
        panels[1].plot(loads, [one["ttft_p50"] for one in mine], **style)
        panels[2].plot(loads, [100 * one["hit_rate"] for one in mine], **style)
    _finish(panels[0], "goodput per replica (tokens/s)")
    _finish(panels[1], "median time to first token (s)")
    _finish(panels[2], "hit rate (% of shareable tokens)")
    panels[1].set_ylim(0, 20)
    for axes in panels:
        axes.set_xlabel("open conversations per replica")
    panels[0].legend(frameon=False)
    figure.savefig(file, dpi=_DPI)


def draw_apart(records: list[Record], file: Path) -> None:
    """What is served within limits of the interval, by how many replicas compute prompts alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=False)
    splits = sorted({one["split"] for one in records})
    colours = ["#222222", "#8172b3", "#4c72b0", "#55a868", "#dd8452", "#c44e52"]
    limits = [number / 1000 for number in range(20, 125, 2)]
    for axes, people in zip(panels, ("chat", "documents"), strict=True):
        for split, colour in zip(splits, colours, strict=False):
            rates = [served(records, people, split, limit) for limit in limits]
            name = f"{split} of {APART_REPLICAS} for prompts" if split else "all do both"
            style = {"color": colour, "label": name, "linewidth": 1.4 if split else 2.2}
            axes.step([1000 * limit for limit in limits], rates, where="post", **style)
        _finish(axes, "reply tokens/s, all replicas")
        axes.set_title({"chat": "chat", "documents": "long first messages"}[people], fontsize=10)
        axes.set_xlabel("limit of the p99 time between tokens (ms)")
    panels[0].legend(frameon=False, fontsize=8, title=f"first token within {APART_FIRST_TOKEN:g} s", title_fontsize=8)
    figure.savefig(file, dpi=_DPI)


def _finish(axes: "Axes", label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def tables(study: Record) -> str:
    """The figures of the pictures, as Markdown."""
    return "\n\n".join(_TABLES[part](study[part]) for part in _TABLES if part in study)


def _table_of_policies(records: list[Record]) -> str:
    lines = [
        "| replicas | policy | load | hit rate | tokens/s per replica | in objective | TTFT p50, p99 | $ per million |"
    ]
    lines.append("|---:|---|---:|---:|---:|---:|---:|---:|")
    for number in sorted({one["replicas"] for one in records}):
        for policy, name in NAMES.items():
            if number not in numbers_of(records, policy):
                continue
            runs = best(records, number, policy)
            goods = [one["good_tokens_per_second"] / number for one in runs]
            costs = [one["cost_per_million"] for one in runs]
            lines.append(
                f"| {number:,} | {name} | {runs[0]['load']:g} | {100 * mean(runs, 'hit_rate'):.0f} % | "
                f"{fmean(goods):.1f} ({min(goods):.1f} to {max(goods):.1f}) | "
                f"{100 * mean(runs, 'good_share'):.0f} % | "
                f"{mean(runs, 'ttft_p50'):.2f}, {mean(runs, 'ttft_p99'):.1f} s | "
                f"{fmean(costs):.2f} ({min(costs):.2f} to {max(costs):.2f}) |"
            )
    return "\n".join(lines)


def _table_apart(records: list[Record]) -> str:
    lines = ["| users | prompts apart | " + " | ".join(f"{limit} ms" for limit in (30, 40, 60, 80, 120)) + " |"]
    lines.append("|---|---:|" + "---:|" * 5)
    for people in ("chat", "documents"):
        for split in sorted({one["split"] for one in records}):
            rates = [served(records, people, split, limit / 1000) for limit in (30, 40, 60, 80, 120)]
            lines.append(
                f"| {people} | {split} | " + " | ".join(f"{rate:.0f}" if rate else "-" for rate in rates) + " |"
            )
    return "\n".join(lines)


_TABLES: dict[str, Callable[[list[Record]], str]] = {"policies": _table_of_policies, "apart": _table_apart}


def main() -> None:
    """Draw the pictures of the parts that there are, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("folder")
    words = parser.parse_args()
    require_matplotlib()
    study, folder = json.loads(Path(words.study).read_text()), Path(words.folder)
    if "policies" in study:
        draw_policies(study["policies"], folder / "fleet-policies.png")
        draw_load(study["policies"], folder / "fleet-load.png")
    if "apart" in study:
        draw_apart(study["apart"], folder / "fleet-apart.png")
    print(tables(study))


if __name__ == "__main__":
    main()
