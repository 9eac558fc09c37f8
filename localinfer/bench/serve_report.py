"""The measurement of a server as a table for people."""

from collections.abc import Callable, Sequence
from typing import Any

from localinfer.bench.report import heading, join_lines
from localinfer.terminal import neutralise_controls

Record = dict[str, Any]

_SPREADS = (
    ("first byte", "first_byte_seconds"),
    ("first token", "time_to_first_token_seconds"),
    ("between tokens", "itl_seconds"),
    ("/health", "health_seconds"),
)


def render_serve(record: Record) -> str:
    """The record of `run_serve_bench` as a table, a column per number of streams; times in milliseconds."""
    settings, levels = record["settings"], record["levels"]
    first, interval = settings["slo_first_token_seconds"], settings["slo_itl_seconds"]

    def row(label: str, cell: Callable[[Record], str]) -> str:
        return _line(label, [cell(level) for level in levels])

    lines = [
        *heading(record),
        f"load     messages of about {settings['prompt']} tokens, replies of {settings['decode']} in the mean, "
        f"{settings['requests']} from each stream",
        "",
        row("streams", lambda level: str(level["concurrency"])),
        row("requests", lambda level: str(level["requests"])),
        row("tokens/s, all streams", lambda level: f"{level['tokens_per_second']:,.1f}"),
        row("  over one stream", lambda level: _ratio(level["ratio_to_one"])),
        row("requests/s", lambda level: f"{level['requests_per_second']:.2f}"),
        row("goodput, requests/s", lambda level: f"{level['goodput_requests_per_second']:.2f}"),
        row("  share of requests", lambda level: f"{100 * level['goodput_share']:.0f} %"),
    ]
    for label, key in _SPREADS:
        for percent in ("p50", "p95", "p99"):
            name = f"{label}, {percent}" if percent == "p50" else f"{'':<{len(label)}}  {percent}"
            lines.append(_line(f"{name}, ms", [_figure(level[key], percent) for level in levels]))
    lines += [
        row("failed or lost", lambda level: str(len(level["failures"]) + level["health_failures"])),
        "",
        f"goodput counts replies with a first token within {1e3 * first:g} ms, and intervals of at most "
        f"{1e3 * interval:g} ms in the mean",
        _knee(record),
        *_leaving(record["leaving"]),
        _same_text(record["same_text"]),
        *_failures([*levels, record["same_text"]]),
    ]
    return join_lines(lines)


def _knee(record: Record) -> str:
    if record["knee"] is None:
        return "knee: none within these numbers of streams"
    return f"knee: {record['knee']} streams; with more, latency grows faster than throughput"


def _leaving(leaving: Record) -> list[str]:
    return [
        f"client leaves in the midst of a {name}: work stops after {1e3 * seconds['median']:.0f} ms in the median, "
        f"{1e3 * seconds['max']:.0f} ms at most ({len(seconds['values'])} times)"
        for name, seconds in leaving.items()
    ]


def _same_text(same: Record) -> str:
    compared, different = same["compared"], len(same["different"])
    if not different:
        return f"same text under load, after leaving and alone: all {compared} texts"
    return f"DIFFERENT text under load, or after leaving, than alone: {different} of {compared} texts"


def _failures(parts: Sequence[Record]) -> list[str]:
    """Each reason once."""
    reasons = dict.fromkeys(reason for part in parts for reason in part["failures"])
    return [f"failed: {neutralise_controls(reason)}" for reason in reasons]


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<24}" + "".join(f"{cell:>11}" for cell in cells)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _figure(figures: Record | None, percent: str) -> str:
    return "" if figures is None else f"{1e3 * figures[percent]:,.1f}"
