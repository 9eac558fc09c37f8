"""Draw a roofline as a PNG."""

import os
from typing import TYPE_CHECKING, Any

from localinfer.errors import BackendUnavailableError, RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s")
_LABELLED_SHARE = 0.04
"""Ops that take less of a phase than this are drawn without their name."""


def require_matplotlib() -> None:
    """Raise BackendUnavailableError if charts cannot be drawn, before time is spent on measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendUnavailableError(
            "matplotlib is not installed, so the chart cannot be drawn; install it with `pip install "
            "'localinfer[bench]'`, or ask for --json, which draws none"
        ) from None


def draw_roofline(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the chart of a `measure_roofline` record; areas of the marks are shares of their phase's time.

    Raises: BackendUnavailableError without matplotlib; RequestError if the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), dpi=120, layout="constrained")
    _draw(figure, record)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RequestError(
            f"{os.fspath(path)} cannot be written ({error.strerror}); choose another file with --output"
        ) from None


def _draw(figure: "Figure", record: dict[str, Any]) -> None:
    machine, phases = record["machine"], record.get("phases", [])
    read, multiply = machine["read_bytes_per_second"], machine["multiply_adds_per_second"]
    axes = figure.subplots()
    points = [(_intensity(entry), phase, entry) for phase in phases for entry in phase["operations"]]
    points = [point for point in points if point[0] > 0]
    ridge = multiply / read
    low = min([0.25, *(intensity / 2 for intensity, _, _ in points)])
    high = max([8 * ridge, *(intensity * 2 for intensity, _, _ in points)])
    axes.plot([low, ridge, high], [low * read, multiply, multiply], color="black", linewidth=1.5)
    for index, phase in enumerate(phases):
        mine = [(intensity, entry) for intensity, owner, entry in points if owner is phase]
        sizes = [30 + 900 * entry["seconds"] / phase["operation_seconds"] for _, entry in mine]
        axes.scatter(
            [intensity for intensity, _ in mine],
            [entry["multiply_adds_per_second"] for _, entry in mine],
            s=sizes,
            marker=_MARKERS[index % len(_MARKERS)],
            alpha=0.5,
            label=phase["name"],
        )
        for intensity, entry in mine:
            if entry["seconds"] >= _LABELLED_SHARE * phase["operation_seconds"]:
                place = (intensity, entry["multiply_adds_per_second"])
                axes.annotate(entry["name"], place, xytext=(6, -10), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("multiplications per byte read from memory")
    axes.set_ylabel("multiplications per second")
    axes.set_title(
        f"{machine['cpu']}, {machine['threads']} threads: {read / 1e9:.1f} GB/s, {multiply / 1e9:,.0f} G "
        "multiplications of bytes per second",
        fontsize=10,
    )
    axes.grid(True, which="both", linewidth=0.3)
    if phases:
        axes.legend(loc="lower right")


def _intensity(entry: dict[str, Any]) -> float:
    """Multiplications per byte; 0 for ops that read no memory worth counting."""
    num_bytes = entry["weight_bytes"] + entry["kv_bytes"]
    return entry["multiply_adds"] / num_bytes if num_bytes else 0.0
