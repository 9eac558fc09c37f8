"""Draw a roofline as a PNG."""

import io
import math
import os
from typing import TYPE_CHECKING, Any

from localinfer.errors import BackendUnavailableError
from localinfer.files import OutputFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s")
_DRAWN_SHARE = 0.002
"""Ops that take less of a phase than this are left out: their times are those of the clock."""


def require_matplotlib() -> None:
    """Raise BackendUnavailableError if charts cannot be drawn, before time is spent on measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendUnavailableError(
            "matplotlib is not installed, so the chart cannot be drawn; install it with `pip install "
            "'localinfer[plot]'`, or ask for --json without --output, which draws none"
        ) from None


def draw_roofline(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the chart of a `measure_roofline` record; areas of the marks are shares of their phase's time.

    Raises: BackendUnavailableError without matplotlib; RequestError if the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), dpi=120, layout="constrained")
    _draw(figure, record)
    save_figure(figure, path)


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure as a PNG. Raises: RequestError if the file cannot be written."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with OutputFile(path) as file:
        file.write(picture.getbuffer())


def _draw(figure: "Figure", record: dict[str, Any]) -> None:
    machine, phases = record["machine"], record.get("phases", [])
    read, multiply = machine["read_bytes_per_second"], machine["multiply_adds_per_second"]
    axes = figure.subplots()
    points = [(_intensity(entry), phase, entry) for phase in phases for entry in phase["operations"]]
    points = [point for point in points if point[0] > 0 and _share(point[2], point[1]) >= _DRAWN_SHARE]
    ridge = multiply / read
    low = min([0.25, *(intensity / 2 for intensity, _, _ in points)])
    high = max([8 * ridge, *(intensity * 2 for intensity, _, _ in points)])
    axes.plot([low, ridge, high], [low * read, multiply, multiply], color="black", linewidth=1.5)
    names: list[str] = []
    for index, phase in enumerate(phases):
        mine = [(intensity, entry) for intensity, owner, entry in points if owner is phase]
        axes.scatter(
            [intensity for intensity, _ in mine],
            [entry["multiply_adds_per_second"] for _, entry in mine],
            s=[30 + 900 * _share(entry, phase) for _, entry in mine],
            marker=_MARKERS[index % len(_MARKERS)],
            alpha=0.5,
            label=phase["name"],
        )
        names += ["", f"{phase['name']}:"]
        labels: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
        for number, (intensity, entry) in enumerate(mine, 1):
            rate = entry["multiply_adds_per_second"]
            names.append(f"{number}  {entry['name']}, {100 * _share(entry, phase):.0f} %")
            # Marks that would cover each other's numbers share one label.
            place = (round(8 * math.log10(intensity)), round(8 * math.log10(rate or 1.0)))
            labels.setdefault(place, []).append((intensity, rate, str(number)))
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


def _share(entry: dict[str, Any], phase: dict[str, Any]) -> float:
    """Part of its phase's time that an op takes."""
    return float(entry["seconds"] / phase["operation_seconds"])


def _intensity(entry: dict[str, Any]) -> float:
    """Multiplications per byte; 0 for ops that read no memory worth counting."""
    num_bytes = entry["weight_bytes"] + entry["kv_bytes"]
    return entry["multiply_adds"] / num_bytes if num_bytes else 0.0
