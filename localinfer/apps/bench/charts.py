"""Charts as PNG: a roofline, a server's throughput and latency under load, or what each optimisation is worth."""

import io
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localinfer.apps.bench.figures import PERCENTS, Record
from localinfer.errors import BackendUnavailableError
from localinfer.system.files import OutputFile, check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s")
_DRAWN_SHARE = 0.002
"""Ops below this share of a phase are left out: their times are below timer resolution."""


def check_chart(path: str, *, inputs: Sequence[str]) -> None:
    """Check before measuring that a chart can be written. inputs: files it must not replace.

    Raises: BackendUnavailableError without matplotlib; RequestError if the file cannot be written.
    """
    check_output(path, inputs=inputs)
    require_matplotlib()


def require_matplotlib() -> None:
    """Raise BackendUnavailableError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendUnavailableError(
            "matplotlib is not installed, so the chart cannot be drawn; install it with `pip install "
            "'localinfer[plot]'`, or use --json without --output, which draws none"
        ) from None


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure as a PNG. Raises: RequestError if the file cannot be written."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with OutputFile(path) as file:
        file.write(picture.getbuffer())


def roofline_figure(record: Record) -> "Figure":
    """The chart of a `measure_roofline` record; the area of a marker is the op's share of its phase's time.

    Raises: BackendUnavailableError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), dpi=120, layout="constrained")
    machine, phases = record["machine"], record.get("phases", [])
    read, multiply = machine["read_bytes_per_second"], machine["multiply_adds_per_second"]
    axes = figure.subplots()
    drawn = [[entry for entry in phase["operations"] if _is_drawn(entry, phase)] for phase in phases]
    intensities = [_intensity(entry) for entries in drawn for entry in entries]
    ridge = multiply / read
    low = min([0.25, *(intensity / 2 for intensity in intensities)])
    high = max([8 * ridge, *(intensity * 2 for intensity in intensities)])
    axes.plot([low, ridge, high], [low * read, multiply, multiply], color="black", linewidth=1.5)
    names: list[str] = []
    for index, (phase, entries) in enumerate(zip(phases, drawn, strict=True)):
        axes.scatter(
            [_intensity(entry) for entry in entries],
            [entry["multiply_adds_per_second"] for entry in entries],
            s=[30 + 900 * _share(entry, phase) for entry in entries],
            marker=_MARKERS[index % len(_MARKERS)],
            alpha=0.5,
            label=phase["name"],
        )
        names += ["", f"{phase['name']}:"]
        labels: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
        for number, entry in enumerate(entries, 1):
            intensity, rate = _intensity(entry), entry["multiply_adds_per_second"]
            names.append(f"{number}  {entry['name']}, {100 * _share(entry, phase):.0f} %")
            # Overlapping markers share one label.
            cell = (round(8 * math.log10(intensity)), round(8 * math.log10(rate or 1.0)))
            labels.setdefault(cell, []).append((intensity, rate, str(number)))
        for marks in labels.values():
            text = ", ".join(number for _, _, number in marks)
            offset = (9, 7 if index else -11)
            axes.annotate(text, marks[0][:2], xytext=offset, textcoords="offset points", fontsize=8)
    if names:
        axes.text(1.02, 1, "\n".join(names[1:]), transform=axes.transAxes, va="top", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("multiplications per byte read from memory")
    axes.set_ylabel("multiplications per second")
    axes.set_title(
        f"{machine['cpu']}, threads: {machine['threads']}, {read / 1e9:.1f} GB/s, {multiply / 1e9:,.0f} G "
        "multiplications of bytes per second",
        fontsize=10,
    )
    axes.grid(True, which="both", linewidth=0.3)
    if phases:
        axes.legend(loc="lower right", markerscale=0.4)
    return figure


def _share(entry: Record, phase: Record) -> float:
    """An op's share of its phase's time."""
    return float(entry["seconds"] / phase["operation_seconds"])


def _intensity(entry: Record) -> float:
    """Multiplications per byte; 0 for ops that read almost no memory."""
    num_bytes = entry["weight_bytes"] + entry["kv_bytes"]
    return float(entry["multiply_adds"] / num_bytes) if num_bytes else 0.0


def _is_drawn(entry: Record, phase: Record) -> bool:
    return _intensity(entry) > 0 and _share(entry, phase) >= _DRAWN_SHARE


def serve_figure(record: Record) -> "Figure":
    """The chart of a `run_serve_bench` record: latency over throughput with the knee, then each over streams.

    Raises: BackendUnavailableError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    settings = record["settings"]
    levels = [level for level in record["levels"] if level["seconds_per_token"] is not None]
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    (curve, goodput), (first, interval) = figure.subplots(2, 2)
    _draw_curve(curve, levels, record["knee"])
    requests = [level["requests_per_second"] for level in levels]
    good = [level["goodput_requests_per_second"] for level in levels]
    streams = [level["concurrency"] for level in levels]
    goodput.plot(streams, requests, marker="o", label="requests")
    goodput.plot(streams, good, marker="s", label="within the objective")
    _finish(goodput, "requests per second", streams, requests)
    for axes, key, name, limit in (
        (first, "time_to_first_token_seconds", "first token", settings["slo_first_token_seconds"]),
        (interval, "itl_seconds", "between tokens", settings["slo_itl_seconds"]),
    ):
        shown = [level for level in levels if level[key] is not None]
        streams = [level["concurrency"] for level in shown]
        heights = [1e3 * limit]
        for percent in PERCENTS:
            values = [1e3 * level[key][f"p{percent}"] for level in shown]
            axes.plot(streams, values, marker="o", label=f"p{percent}")
            heights += values
        axes.axhline(1e3 * limit, color="black", linewidth=0.8, linestyle="--", label="objective")
        _finish(axes, f"{name}, ms", streams, heights)
    model = os.path.basename(record["model"]["path"])
    figure.suptitle(
        f"{model}: messages of {settings['prompt']} tokens, replies of {settings['decode']} on average", fontsize=10
    )
    return figure


def ablation_figure(record: Record) -> "Figure":
    """The chart of a `run_ablation` record: a panel for each figure, a bar for each configuration.

    Raises: BackendUnavailableError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = record["rows"]
    figure = Figure(figsize=(15, 9), dpi=110, layout="constrained")
    names = [row["name"] for row in rows]
    colours = ["tab:orange" if name.startswith("all but") else "tab:blue" for name in names]
    for axes, (key, (title, scale)) in zip(figure.subplots(2, 4).flat, _ABLATED.items(), strict=True):
        axes.barh(names, [row["figures"][key] * scale for row in rows], color=colours)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=7)
        axes.grid(True, axis="x", linewidth=0.3)
        if axes.get_subplotspec().colspan.start:
            axes.set_yticklabels([])
    settings = record["settings"]
    figure.suptitle(
        f"{os.path.basename(record['model']['path'])}: prompts of {settings['prompt']} tokens, replies of "
        f"{settings['decode']}; blue: switched on in turn, orange: the whole without one",
        fontsize=10,
    )
    return figure


_ABLATED = {
    "first_token_seconds": ("first token, ms", 1e3),
    "next_turn_seconds": ("first token of the next turn, ms", 1e3),
    "restart_seconds": ("the same after a restart, ms", 1e3),
    "stall_seconds": ("longest stall of a stream, ms", 1e3),
    "decode_tokens_per_second": ("decode, tokens/s", 1),
    "throughput_tokens_per_second": ("several streams, tokens/s", 1),
    "peak_memory_bytes": ("peak memory, MB", 1e-6),
    "divergence": ("KL divergence, nats / 1,000", 1e3),
}
"""Figures of an ablation, with the title and the factor of their panels."""


def _draw_curve(axes: "Axes", levels: list[Record], knee: int | None) -> None:
    points = [(level["tokens_per_second"], 1e3 * level["seconds_per_token"]["p50"]) for level in levels]
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o")
    for level, point in zip(levels, points, strict=True):
        axes.annotate(str(level["concurrency"]), point, xytext=(6, -10), textcoords="offset points", fontsize=8)
        if level["concurrency"] == knee:
            label = f"knee: {knee} streams"
            axes.scatter(*point, s=200, facecolors="none", edgecolors="black", label=label)
            axes.legend(loc="upper left")
    axes.set_xlabel("tokens per second, all streams")
    axes.set_ylabel("ms of a request per token, p50")
    axes.margins(x=0.1)
    _start_at_zero(axes, [y for _, y in points])
    axes.grid(True, linewidth=0.3)


def _finish(axes: "Axes", label: str, streams: list[int], heights: list[float]) -> None:
    axes.set_ylabel(label)
    _start_at_zero(axes, heights)
    axes.set_xlabel("streams")
    axes.set_xticks(streams, [str(count) for count in streams])
    axes.grid(True, linewidth=0.3)
    axes.legend()


def _start_at_zero(axes: "Axes", values: list[float]) -> None:
    """Scale the axis from zero, with room above the highest value for markers and the line of the objective."""
    axes.set_ylim(0, 1.15 * max(values, default=0) or 1)
