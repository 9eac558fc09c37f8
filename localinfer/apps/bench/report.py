"""Measurements as tables."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from localinfer.apps.bench.figures import PERCENTS, Record
from localinfer.apps.bench.processes import OURS
from localinfer.system.machine_limits import core_text
from localinfer.terminal import neutralise_controls

_PEAKS = {
    "bytes_per_second": "read_bytes_per_second",
    "multiply_adds_per_second": "multiply_adds_per_second",
}
"""Rates of an op, and the machine's ceiling of each."""
_SPREADS = {
    "first byte": "first_byte_seconds",
    "first token": "time_to_first_token_seconds",
    "between tokens": "itl_seconds",
    "/health": "health_seconds",
}


def render_json(record: Record) -> str:
    """One JSON object with every figure and every sample."""
    return json.dumps(record, indent=2, ensure_ascii=False)


def render_bench(record: Record) -> str:
    """The record of `run_bench` as a table; ratios are above 1 where localinfer is better than the peer."""
    ours = record["engines"][OURS]
    token_bytes = ours["weight_bytes_per_token"] + ours["kv_bytes_per_token"]
    compiled = ours["compile_seconds"]
    return _join(
        [
            *_heading(record),
            "",
            *_engine_table(record),
            "",
            f"decode reads {_size(token_bytes)} per token ({_size(ours['weight_bytes_per_token'])} weights, "
            f"{_size(ours['kv_bytes_per_token'])} keys and values): "
            f"{ours['decode_read_bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{ours['decode_read_share']:.2f} of what the machine reads",
            f"prefill multiplies {ours['prefill_multiply_adds_per_second'] / 1e9:,.0f} G times per second, "
            f"{ours['prefill_multiply_share']:.2f} of what the machine multiplies",
            *_wall_lines(record["walls"]),
            *(f"{name}: {engine['error']}" for name, engine in record["engines"].items() if "error" in engine),
            "kernels were compiled before"
            if compiled is None
            else f"kernels were compiled, once on this machine, in {compiled:.1f} s",
        ]
    )


def _wall_lines(walls: Record) -> Iterator[str]:
    """Two lines for each phase: the ceiling that bounds it, and what would move it."""
    for phase, found in walls.items():
        amount = (
            f"{found['read_bytes_per_second'] / 1e9:.1f} GB/s read"
            if found["wall"] == "memory"
            else f"{found['multiply_adds_per_second'] / 1e9:,.0f} G multiplications per second"
        )
        other, share = ("multiplications", "multiply_share") if found["wall"] == "memory" else ("reads", "read_share")
        where = "at" if found["is_near"] else "below"
        yield (
            f"{phase} is {where} the wall of {found['wall']}: {found['reached']:.2f} of {amount} "
            f"(of {other} {found[share]:.2f})"
        )
        yield f"  what would move it: {'; '.join(found['moves'])}"


def render_stream(record: Record) -> str:
    """The record of `run_stream_bench` as a table."""
    return _join([*_heading(record), "", *_engine_table(record)])


def render_gpu(record: Record) -> str:
    """The record of `run_gpu_bench` as a table."""
    machine, figures = record["machine"], record["figures"]
    major, minor = machine["capability"]
    lines = [
        *_heading({key: value for key, value in record.items() if key != "machine"}),
        f"gpu      {machine['gpu']}, sm_{major}{minor}, {machine['gpu_layers']} of {machine['num_layers']} layers; "
        f"reads {machine['read_bytes_per_second'] / 1e9:,.1f} GB/s",
        "",
        *_figure_lines(record["settings"], {OURS: figures}, {}),
    ]
    if "decode_read_share" in figures:
        token_bytes = figures["weight_bytes_per_token"] + figures["kv_bytes_per_token"]
        lines += [
            "",
            f"decode reads {_size(token_bytes)} per token: {figures['decode_read_bytes_per_second'] / 1e9:,.1f} GB/s, "
            f"{figures['decode_read_share']:.2f} of what the GPU reads",
        ]
    return _join(lines)


def render_speculation(record: Record) -> str:
    """The record of `run_speculation_bench`: times of passes, then each kind of text with and without drafts."""
    costs = "  ".join(f"{rows}: {cost:.2f}" for rows, cost in enumerate(record["costs"], 1))
    lines = [*_heading(record), "", f"one token takes {_time(record['plain_step_seconds'])}; a pass over", f"  {costs}"]
    lines += ["", f"drafts by: {', '.join(record['drafters'])}"]
    for name, text in record["texts"].items():
        speedup = text["speedup"]
        ratio = f"{speedup['median']:.2f} ({min(speedup['values']):.2f} to {max(speedup['values']):.2f})"
        counts = zip(text["accepted_by_position"], text["drafted_by_position"], strict=True)
        shares = "  ".join(f"{100 * accepted / drafted:.0f} %" for accepted, drafted in counts if drafted)
        lines += [
            "",
            f"{name}: {record['settings']['decode']} tokens",
            _line("  plain", [_rate(text["plain_tokens_per_second"]["median"])]),
            _line("  with drafts", [_rate(text["tokens_per_second"]["median"])]),
            _line("  ratio (spread)", [ratio]),
            _line("  tokens per pass", [f"{text['tokens_per_pass']:.2f}"]),
            f"  accepted by position in the draft: {shares or 'nothing was drafted'}",
        ]
    return _join(lines)


def render_roofline(record: Record) -> str:
    """The record of `measure_roofline`: the ceilings, then every kind of op with its shares of time and ceilings."""
    machine = record["machine"]
    lines = _machine_lines(machine)
    for phase in record.get("phases", []):
        lines += [
            "",
            f"{phase['name']}: {_time(phase['seconds'])}",
            f"  {'op':<44}{'ops':>5}{'time':>11}{'share':>8}{'GB/s':>9}{'of peak':>9}{'Gmul/s':>9}{'of peak':>9}",
        ]
        for entry in phase["operations"]:
            rates = [(entry[name], machine[peak]) for name, peak in _PEAKS.items()]
            cells = [f"{rate / 1e9:>9.1f}{rate / peak:>9.2f}" if rate else " " * 18 for rate, peak in rates]
            share = entry["seconds"] / phase["operation_seconds"]
            name = entry["name"] if len(entry["name"]) <= 42 else f"{entry['name'][:39]}..."
            seconds = f"{_time(entry['seconds']):>11}{100 * share:>7.1f}%"
            lines.append(f"  {name:<44}{entry['count']:>5}{seconds}{''.join(cells)}")
    return _join(lines)


def render_ablation(record: Record) -> str:
    """The record of `run_ablation`: each optimisation switched on in turn, then each off from the whole."""
    settings = record["settings"]
    lines = [*_heading(record), "", f"{'':<26}" + "".join(f"{label:>14}" for label, _ in _ABLATED.values())]
    for row in record["rows"]:
        cells = [written(row["figures"][key]) for key, (_, written) in _ABLATED.items()]
        lines.append(f"{row['name']:<26}" + "".join(f"{cell:>14}" for cell in cells))
    return _join(
        [
            *lines,
            "",
            f"first token: of {settings['prompt']} tokens; next turn: of the second message; restart: of it after one",
            f"decode: of one stream, throughput: of {settings['streams']} at once, in tokens/s",
            "stall: the longest time between two tokens of a stream while another prompt is computed",
            "KLD: mean KL divergence from the first row, in thousandths of a nat",
        ]
    )


def render_serve(record: Record) -> str:
    """The record of `run_serve_bench` as a table, one column per number of streams; times in milliseconds."""
    settings, levels, same = record["settings"], record["levels"], record["same_text"]
    first, interval = settings["slo_first_token_seconds"], settings["slo_itl_seconds"]

    def row(label: str, cell: Callable[[Record], str]) -> str:
        return f"{label:<24}" + "".join(f"{cell(level):>11}" for level in levels)

    def ratio(level: Record) -> str:
        return "" if level["ratio_to_one"] is None else f"{level['ratio_to_one']:.2f}"

    lines = [
        *_heading(record),
        f"load     messages of about {settings['prompt']} tokens, replies of {settings['decode']} on average, "
        f"{settings['requests']} per stream",
        "",
        row("streams", lambda level: str(level["concurrency"])),
        row("requests", lambda level: str(level["requests"])),
        row("tokens/s, all streams", lambda level: f"{level['tokens_per_second']:,.1f}"),
        row("  over one stream", ratio),
        row("requests/s", lambda level: f"{level['requests_per_second']:.2f}"),
        row("goodput, requests/s", lambda level: f"{level['goodput_requests_per_second']:.2f}"),
        row("  share of requests", lambda level: f"{100 * level['goodput_share']:.0f} %"),
    ]
    for label, key in _SPREADS.items():
        for percent in PERCENTS:
            prefix = f"{label}, " if percent == PERCENTS[0] else " " * (len(label) + 2)
            lines.append(row(f"{prefix}p{percent}, ms", partial(_milliseconds, key, f"p{percent}")))
    lines += [
        row("failed or lost", lambda level: str(len(level["failures"]) + level["health_failures"])),
        "",
        f"goodput counts replies with a first token within {1e3 * first:g} ms, and intervals of at most "
        f"{1e3 * interval:g} ms on average",
        "knee: none in this range of streams"
        if record["knee"] is None
        else f"knee: {record['knee']} streams; with more, latency grows faster than throughput",
    ]
    lines += [
        f"client disconnects during a {name}: work ends after {1e3 * seconds['median']:.0f} ms (median), at most "
        f"{1e3 * seconds['max']:.0f} ms ({len(seconds['values'])} times)"
        for name, seconds in record["leaving"].items()
    ]
    if same["different"]:
        lines.append(
            f"DIFFERENT text under load, or after a disconnect, than alone: {len(same['different'])} of "
            f"{same['compared']} texts"
        )
    else:
        lines.append(f"same text under load, after a disconnect and alone: all {same['compared']} texts")
    reasons = dict.fromkeys(reason for part in (*levels, same) for reason in part["failures"])
    return _join([*lines, *(f"failed: {reason}" for reason in reasons)])


def _heading(record: Record) -> list[str]:
    """The model, and the machine if it is in the record."""
    model = record["model"]
    lines = [
        f"model    {Path(model['path']).name}, {model['architecture']}, {model['num_parameters'] / 1e6:,.1f} M "
        f"weights, {_size(model['num_bytes'])} ({', '.join(model['types'])})"
    ]
    if "machine" in record:
        lines += _machine_lines(record["machine"])
    elif "threads" in record["settings"]:
        lines.append(f"threads  {record['settings']['threads']}")
    return lines


def _machine_lines(machine: Record) -> list[str]:
    slow = machine["efficiency_cores"]
    kinds = f", cores: {core_text(machine['performance_cores'], slow)}" if slow else ""
    return [
        f"machine  {machine['cpu']}, {machine['instruction_set']}, threads: {machine['threads']}{kinds}",
        f"ceilings {machine['read_bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{machine['multiply_adds_per_second'] / 1e9:,.0f} G multiplications of bytes per second",
    ]


def _engine_table(record: Record) -> Iterator[str]:
    """One column per engine, and ratios beside a peer."""
    engines, ratios = record["engines"], record.get("ratios")
    names = [f"{name} {engine.get('version', 'failed')}" for name, engine in engines.items()]
    yield _line("", names if ratios is None else [*names, "ratio (spread)"])
    yield from _figure_lines(record["settings"], engines, ratios or {})


def _figure_lines(settings: Record, engines: dict[str, Record], ratios: Record) -> Iterator[str]:
    """One line per measured figure."""
    ours = engines[OURS]
    for key, (label, render) in _FIGURES.items():
        if key not in ours:
            continue
        cells = []
        for engine in engines.values():
            value = engine.get(key)
            value = value["median"] if isinstance(value, dict) else value
            cells.append("unknown" if value is None else render(value))
        if key in ratios:
            ratio = ratios[key]
            spread = f" ({ratio['lowest']:.2f} to {ratio['highest']:.2f})" if "lowest" in ratio else ""
            cells.append(f"{ratio['ratio']:.2f}{spread}")
        yield _line(label.format(**{**settings, **ours}), cells)
    for size in ours.get("verification_cost", ()):
        costs = [engine.get("verification_cost", {}).get(size) for engine in engines.values()]
        cells = ["unknown" if cost is None else f"{cost:.2f} x" for cost in costs]
        yield _line(f"verifying {size} tokens over 1", cells)


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<32}" + "".join(f"{cell:>26}" for cell in cells)


def _milliseconds(key: str, percent: str, level: Record) -> str:
    return "" if level[key] is None else f"{1e3 * level[key][percent]:,.1f}"


def _rate(value: float) -> str:
    return f"{value:,.1f} tokens/s"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def _size(num_bytes: float) -> str:
    for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _join(lines: Iterable[str]) -> str:
    """Lines as one text, without terminal controls."""
    return neutralise_controls("\n".join(line.rstrip() for line in lines))


_ABLATED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "first_token_seconds": ("first token", _time),
    "next_turn_seconds": ("next turn", _time),
    "restart_seconds": ("restart", _time),
    "decode_tokens_per_second": ("decode", "{:,.1f}".format),
    "throughput_tokens_per_second": ("throughput", "{:,.1f}".format),
    "stall_seconds": ("stall", _time),
    "peak_memory_bytes": ("peak memory", _size),
    "divergence": ("KLD", lambda nats: f"{1e3 * nats:.2f}"),
}
"""Labels of an ablation's figures, in the order of the columns, and how a value is written."""
_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "stream_tokens_per_second": ("streamed completion, {tokens} tokens", _rate),
    "prefill_tokens_per_second": ("prefill of {prompt} tokens", _rate),
    "decode_tokens_per_second": ("decode of {decode} after {context}", _rate),
    "drawn_tokens_per_second": ("the same, sampled (top-k, top-p)", _rate),
    "time_to_first_token_seconds": ("time to first token", _time),
    "itl_p50_seconds": ("inter-token latency, p50", _time),
    "itl_p99_seconds": ("inter-token latency, p99", _time),
    "host_seconds_per_token": ("host time per token", _time),
    "process_to_first_token_seconds": ("process start to first token", _time),
    "load_seconds": ("load", _time),
    "peak_memory_bytes": ("peak memory", _size),
    "device_memory_bytes": ("memory of the GPU", _size),
}
"""Labels of figures, in the order of the lines, and how a value is written."""
