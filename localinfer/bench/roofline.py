"""Where each op of a model stands under the machine's two ceilings.

Source: the roofline model of Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

import re
import time
from typing import Any

from localinfer.bench.decode import ProgressCallback, Record, check_context, measure_machine
from localinfer.bench.measured_model import MeasuredModel, OperationTime
from localinfer.describe import describe_file
from localinfer.models.load.threads import available_threads

PREFILL_ROWS = 512
_DECODE_RUNS = 15
_PREFILL_RUNS = 3


def measure_roofline(
    model: str | None, *, threads: int | None, prompt: int, context: int, progress: ProgressCallback
) -> Record:
    """Measure the ceilings and, given a model, every op in its place: one decoded token, and a prompt.

    prompt: tokens of the prefill, at most what one run of the tape holds. context: tokens before the decoded one.
    Returns machine, and phases with their operations summed by kind: those of all layers are one entry.
    Raises: LocalinferError.
    """
    if model is None:
        return {"machine": measure_machine(threads or available_threads(), progress)}
    rows = min(prompt, PREFILL_ROWS)
    check_context(describe_file(model), max(rows, context + 1))
    with MeasuredModel(model, threads=threads, context_length=max(rows, context + 1), progress=progress) as measured:
        machine = measure_machine(measured.num_threads, progress)
        token_ids = [index % measured.vocab_size for index in range(max(rows, context + 1))]
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
    entries = _summed(measured.time_operations(start, token_ids, runs))
    return {
        "name": name,
        "num_rows": len(token_ids),
        "seconds": sorted(seconds)[runs // 2],
        "operation_seconds": sum(entry["seconds"] for entry in entries),
        "operations": entries,
    }


def _summed(times: list[OperationTime]) -> list[Record]:
    """One entry per kind of op, those that take longest first."""
    kinds: dict[str, dict[str, Any]] = {}
    for one in times:
        entry = kinds.setdefault(
            operation_name(one), {"count": 0, "seconds": 0.0, "weight_bytes": 0, "kv_bytes": 0, "multiply_adds": 0}
        )
        entry["count"] += 1
        entry["seconds"] += one.seconds
        entry["weight_bytes"] += one.work.weight_bytes
        entry["kv_bytes"] += one.work.kv_bytes
        entry["multiply_adds"] += one.work.multiply_adds + one.work.kv_multiply_adds
    for entry in kinds.values():
        entry["bytes_per_second"] = (entry["weight_bytes"] + entry["kv_bytes"]) / entry["seconds"]
        entry["multiply_adds_per_second"] = entry["multiply_adds"] / entry["seconds"]
    ordered = sorted(kinds.items(), key=lambda item: -item[1]["seconds"])
    return [{"name": name, **entry} for name, entry in ordered]


def operation_name(one: OperationTime) -> str:
    """The kernel's name, and the tensors it reads without their layer."""
    weights = [re.sub(r"^blk\.\d+\.|\.weight$", "", name) for name in one.operation.weights]
    kernel = one.operation.kernel.rpartition(".")[2]
    return " ".join([kernel, "+".join(weights)]).strip()
