"""Tables of measurements for people."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from localinfer.bench.client import OURS
from localinfer.terminal import neutralise_controls

Record = dict[str, Any]
Cell = Callable[[Any], str]


def render_json(record: Record) -> str:
    """One JSON object with every figure and every sample."""
    return json.dumps(record, indent=2, ensure_ascii=False)


def render_bench(record: Record) -> str:
    """The record of `run_bench` as a table; ratios are above 1 where localinfer is better than the peer."""
    settings, ours = record["settings"], record["engines"][OURS]
    engines: dict[str, Record] = record["engines"]
    lines = [*heading(record), "", _columns(record)]
    rows: list[tuple[str, str, Cell]] = [
        (f"prefill of {settings['prompt']} tokens", "prefill_tokens_per_second", _rate),
        (f"decode of {settings['decode']} after {settings['context']}", "decode_tokens_per_second", _rate),
        (f"first token after {settings['prompt']}", "time_to_first_token_seconds", _time),
        ("between tokens, p50", "itl_p50_seconds", _time),
        ("between tokens, p99", "itl_p99_seconds", _time),
        ("process start to first token", "process_to_first_token_seconds", _time),
        ("load", "load_seconds", _time),
        ("peak memory", "peak_memory_bytes", _size),
    ]
    lines += [_row(record, label, key, cell) for label, key, cell in rows]
    for size in ours["verification_cost"]:
        costs = [f"{engine['verification_cost'][size]:.2f} x" for engine in engines.values()]
        lines.append(_line(f"verifying {size} tokens over 1", costs))
    lines += ["", *_shares(ours)]
    return join_lines(lines)


def render_stream(record: Record) -> str:
    """The record of `run_stream_bench` as a table."""
    tokens = record["engines"][OURS]["tokens"]
    rows: list[tuple[str, str, Cell]] = [
        (f"streamed completion, {tokens} tokens", "stream_tokens_per_second", _rate),
        ("first token", "time_to_first_token_seconds", _time),
        ("peak memory", "peak_memory_bytes", _size),
    ]
    lines = [*heading(record), "", _columns(record)]
    return join_lines([*lines, *(_row(record, label, key, cell) for label, key, cell in rows)])


def render_gpu(record: Record) -> str:
    """The record of `run_gpu_bench` as a table."""
    settings, machine, figures = record["settings"], record["machine"], record["figures"]
    lines = heading({key: value for key, value in record.items() if key != "machine"})
    major, minor = machine["capability"]
    lines.append(
        f"gpu      {machine['gpu']}, sm_{major}{minor}, {machine['gpu_layers']} of {machine['num_layers']} layers; "
        f"reads {machine['read_bytes_per_second'] / 1e9:,.1f} GB/s"
    )
    rows: list[tuple[str, str, Cell]] = [
        (f"prefill of {settings['prompt']} tokens", "prefill_tokens_per_second", _rate),
        (f"decode of {settings['decode']} after {settings['context']}", "decode_tokens_per_second", _rate),
        ("the same, drawn (top-k, top-p)", "drawn_tokens_per_second", _rate),
        ("between tokens, p50", "itl_p50_seconds", _time),
        ("between tokens, p99", "itl_p99_seconds", _time),
        ("of it the host's part", "host_seconds_per_token", _time),
        ("load", "load_seconds", _time),
        ("memory of the GPU", "device_memory_bytes", _size),
    ]
    lines.append("")
    for label, key, cell in rows:
        value = figures[key]
        lines.append(_line(label, [cell(value["median"] if isinstance(value, dict) else value)]))
    for size, cost in figures["verification_cost"].items():
        lines.append(_line(f"verifying {size} tokens over 1", [f"{cost:.2f} x"]))
    if "decode_read_share" in figures:
        token_bytes = figures["weight_bytes_per_token"] + figures["kv_bytes_per_token"]
        lines += [
            "",
            f"decode reads {_size(token_bytes)} per token: {figures['decode_read_bytes_per_second'] / 1e9:,.1f} GB/s, "
            f"{figures['decode_read_share']:.2f} of what the GPU reads",
        ]
    return join_lines(lines)


def render_speculation(record: Record) -> str:
    """The record of `run_speculation_bench`: what rows cost, then each kind of text with and without drafts."""
    costs = "  ".join(f"{rows}: {cost:.2f}" for rows, cost in enumerate(record["costs"], 1))
    lines = [*heading(record), "", f"one token takes {_time(record['plain_step_seconds'])}; a pass over", f"  {costs}"]
    for name, text in record["texts"].items():
        speedup = text["speedup"]
        lines += [
            "",
            f"{name}: {record['settings']['decode']} tokens",
            _line("  plain", [_rate(text["plain_tokens_per_second"]["median"])]),
            _line("  with drafts", [_rate(text["tokens_per_second"]["median"])]),
            _line(
                "  ratio (spread)",
                [f"{speedup['median']:.2f} ({min(speedup['values']):.2f} to {max(speedup['values']):.2f})"],
            ),
            _line("  tokens per pass", [f"{text['tokens_per_pass']:.2f}"]),
        ]
        places = zip(text["accepted_by_position"], text["drafted_by_position"], strict=True)
        shares = "  ".join(f"{100 * accepted / drafted:.0f} %" for accepted, drafted in places if drafted)
        lines.append(f"  accepted by place in the draft: {shares or 'nothing was drafted'}")
    return join_lines(lines)


def render_roofline(record: Record) -> str:
    """The record of `measure_roofline`: the ceilings, then every kind of op with its share of time and of them."""
    machine = record["machine"]
    lines = _machine_lines(machine)
    for phase in record.get("phases", []):
        whole = phase["seconds"]
        lines += ["", f"{phase['name']}: {_time(whole)}"]
        lines.append(
            f"  {'op':<44}{'ops':>5}{'time':>11}{'share':>8}{'GB/s':>9}{'of peak':>9}{'Gmul/s':>9}{'of peak':>9}"
        )
        for entry in phase["operations"]:
            read, multiplied = entry["bytes_per_second"], entry["multiply_adds_per_second"]
            cells = [
                f"{read / 1e9:.1f}" if read else "",
                f"{read / machine['read_bytes_per_second']:.2f}" if read else "",
                f"{multiplied / 1e9:.1f}" if multiplied else "",
                f"{multiplied / machine['multiply_adds_per_second']:.2f}" if multiplied else "",
            ]
            share = entry["seconds"] / phase["operation_seconds"]
            name = entry["name"] if len(entry["name"]) <= 42 else f"{entry['name'][:39]}..."
            lines.append(
                f"  {name:<44}{entry['count']:>5}{_time(entry['seconds']):>11}{100 * share:>7.1f}%"
                + "".join(f"{cell:>9}" for cell in cells)
            )
    return join_lines(lines)


def heading(record: Record) -> list[str]:
    """The lines that say what was measured, and on which machine where the record says that."""
    model = record["model"]
    types = ", ".join(model["types"])
    lines = [
        f"model    {Path(model['path']).name}, {model['architecture']}, {model['num_parameters'] / 1e6:,.1f} M "
        f"weights, {_size(model['num_bytes'])} ({types})"
    ]
    if "machine" in record:
        lines += _machine_lines(record["machine"])
    elif "threads" in record["settings"]:
        lines.append(f"threads  {record['settings']['threads']}")
    return lines


def _machine_lines(machine: Record) -> list[str]:
    return [
        f"machine  {machine['cpu']}, {machine['instruction_set']}, threads: {machine['threads']}",
        f"ceilings {machine['read_bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{machine['multiply_adds_per_second'] / 1e9:,.0f} G multiplications of bytes per second",
    ]


def _shares(ours: Record) -> Iterable[str]:
    token_bytes = ours["weight_bytes_per_token"] + ours["kv_bytes_per_token"]
    yield (
        f"decode reads {_size(token_bytes)} per token ({_size(ours['weight_bytes_per_token'])} weights, "
        f"{_size(ours['kv_bytes_per_token'])} keys and values): {ours['decode_read_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{ours['decode_read_share']:.2f} of what the machine reads"
    )
    yield (
        f"prefill multiplies {ours['prefill_multiply_adds_per_second'] / 1e9:,.0f} G times per second, "
        f"{ours['prefill_multiply_share']:.2f} of what the machine multiplies"
    )
    compiled = ours["compile_seconds"]
    if compiled is None:
        yield "kernels were compiled before"
    else:
        yield f"kernels were compiled, once on this machine, in {compiled:.1f} s"


def _columns(record: Record) -> str:
    names = [f"{name} {engine['version']}" for name, engine in record["engines"].items()]
    return _line("", [*names, "ratio (spread)"] if "ratios" in record else names)


def _row(record: Record, label: str, key: str, cell: Cell) -> str:
    cells = []
    for engine in record["engines"].values():
        value = engine[key]
        cells.append("unknown" if value is None else cell(value["median"] if isinstance(value, dict) else value))
    ratio = record.get("ratios", {}).get(key)
    if ratio is not None:
        spread = f" ({ratio['lowest']:.2f} to {ratio['highest']:.2f})" if "lowest" in ratio else ""
        cells.append(f"{ratio['ratio']:.2f}{spread}")
    return _line(label, cells)


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<32}" + "".join(f"{cell:>26}" for cell in cells)


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


def join_lines(lines: Iterable[str]) -> str:
    """A table as one text, harmless for a terminal."""
    return neutralise_controls("\n".join(line.rstrip() for line in lines))
