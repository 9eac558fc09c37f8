"""Each op of a model relative to the machine's two ceilings.

Source: the roofline model of Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

import re
import statistics
import time
from typing import Any

from localinfer.apps.bench.decode import check_context
from localinfer.apps.bench.figures import Record
from localinfer.apps.bench.machine import measure_machine
from localinfer.apps.bench.measured_model import MeasuredModel, OperationTime
from localinfer.apps.show.describe import describe_file
from localinfer.models.load.threads import available_threads
from localinfer.types import ProgressCallback

PREFILL_ROWS = 512
_DECODE_RUNS = 15
_PREFILL_RUNS = 3


def measure_roofline(
    model: str | None, *, threads: int | None, prompt: int, context: int, progress: ProgressCallback
) -> Record:
    """Measure the ceilings and, given a model, every op in its tape: of one decoded token, and of a prefill.

    prompt: tokens of the prefill, at most one batch. context: tokens before the decoded one.
    Returns machine, and phases with their operations summed by kind over all layers.
    Raises: LocalinferError.
    """
    if model is None:
        return {"machine": measure_machine(threads or available_threads(), progress)}
    rows = min(prompt, PREFILL_ROWS)
    needed = max(rows, context + 1)
    check_context(describe_file(model), needed)
    with MeasuredModel(model, threads=threads, context_length=needed, progress=progress) as measured:
        machine = measure_machine(measured.num_threads, progress)
        token_ids = [index % measured.vocab_size for index in range(needed)]
        progress("timing the ops of decode", 0, 2)
        measured.compute(0, token_ids[:context])
        decode = _phase(f"decode after {context}", measured, context, token_ids[:1], _DECODE_RUNS)
        progress("timing the ops of prefill", 1, 2)
        prefill = _phase(f"prefill of {rows}", measured, 0, token_ids[:rows], _PREFILL_RUNS)
    return {"machine": machine, "model": model, "phases": [decode, prefill]}


def _phase(name: str, measured: MeasuredModel, start: int, token_ids: list[int], runs: int) -> Record:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        measured.compute(start, token_ids)
        seconds.append(time.perf_counter() - began)
    entries = _by_kind(measured.time_operations(start, token_ids, runs))
    return {
        "name": name,
        "num_rows": len(token_ids),
        "seconds": statistics.median(seconds),
        "operation_seconds": sum(entry["seconds"] for entry in entries),
        "operations": entries,
    }


def _by_kind(times: list[OperationTime]) -> list[Record]:
    """One entry per kernel and tensor role, summed over layers; the longest first."""
    kinds: dict[str, dict[str, Any]] = {}
    for operation, work, seconds in times:
        weights = "+".join(re.sub(r"^blk\.\d+\.|\.weight$", "", name) for name in operation.weights)
        name = f"{operation.kernel.rpartition('.')[2]} {weights}".strip()
        entry = kinds.setdefault(
            name, {"name": name, "count": 0, "seconds": 0.0, "weight_bytes": 0, "kv_bytes": 0, "multiply_adds": 0}
        )
        entry["count"] += 1
        entry["seconds"] += seconds
        entry["weight_bytes"] += work.weight_bytes
        entry["kv_bytes"] += work.kv_bytes
        entry["multiply_adds"] += work.multiply_adds + work.kv_multiply_adds
    for entry in kinds.values():
        entry["bytes_per_second"] = (entry["weight_bytes"] + entry["kv_bytes"]) / entry["seconds"]
        entry["multiply_adds_per_second"] = entry["multiply_adds"] / entry["seconds"]
    return sorted(kinds.values(), key=lambda entry: -entry["seconds"])
