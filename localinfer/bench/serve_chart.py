"""Draw what a server does under load as a PNG."""

import os
from typing import TYPE_CHECKING, Any

from localinfer.bench.roofline_chart import require_matplotlib, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PERCENTS = ("p50", "p95", "p99")


def draw_serve(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the chart of a `run_serve_bench` record: throughput and latency with the knee, then each by streams.

    Raises: BackendUnavailableError without matplotlib; RequestError if the file cannot be written.
    """
    save_figure(serve_figure(record), path)


def serve_figure(record: dict[str, Any]) -> "Figure":
    """The chart of a `run_serve_bench` record. Raises: BackendUnavailableError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    settings = record["settings"]
    levels = [level for level in record["levels"] if level["seconds_per_token"] is not None]
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    (curve, goodput), (first, interval) = figure.subplots(2, 2)
    _draw_curve(curve, levels, record["knee"])
    _draw_goodput(goodput, levels)
    for axes, key, name, limit in (
        (first, "time_to_first_token_seconds", "first token", settings["slo_first_token_seconds"]),
        (interval, "itl_seconds", "between tokens", settings["slo_itl_seconds"]),
    ):
        _draw_spread(axes, levels, key, name, limit)
    model = os.path.basename(record["model"]["path"])
    figure.suptitle(
        f"{model}: messages of {settings['prompt']} tokens, replies of {settings['decode']} in the mean", fontsize=10
    )
    return figure


def _draw_curve(axes: "Axes", levels: list[dict[str, Any]], knee: int | None) -> None:
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


def _draw_goodput(axes: "Axes", levels: list[dict[str, Any]]) -> None:
    streams = [level["concurrency"] for level in levels]
    axes.plot(streams, [level["requests_per_second"] for level in levels], marker="o", label="requests")
    axes.plot(
        streams, [level["goodput_requests_per_second"] for level in levels], marker="s", label="within the objective"
    )
    axes.set_ylabel("requests per second")
    _start_at_zero(axes, [level["requests_per_second"] for level in levels])
    _finish(axes, streams)


def _draw_spread(axes: "Axes", levels: list[dict[str, Any]], key: str, name: str, limit: float) -> None:
    shown = [level for level in levels if level[key] is not None]
    streams = [level["concurrency"] for level in shown]
    for percent in _PERCENTS:
        axes.plot(streams, [1e3 * level[key][percent] for level in shown], marker="o", label=percent)
    axes.axhline(1e3 * limit, color="black", linewidth=0.8, linestyle="--", label="objective")
    axes.set_ylabel(f"{name}, ms")
    _start_at_zero(axes, [1e3 * level[key][percent] for level in shown for percent in _PERCENTS] + [1e3 * limit])
    _finish(axes, streams)


def _start_at_zero(axes: "Axes", values: list[float]) -> None:
    """Show all from zero, with room above the highest: for its mark, the knee's ring and the line of the objective."""
    axes.set_ylim(0, 1.15 * max(values, default=0) or 1)


def _finish(axes: "Axes", streams: list[int]) -> None:
    axes.set_xlabel("streams")
    axes.set_xticks(streams, [str(count) for count in streams])
    axes.grid(True, linewidth=0.3)
    axes.legend()
