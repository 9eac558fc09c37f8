"""The machine's two measured ceilings, of memory bandwidth and of multiplications, and each op of a model under them.

Source: the roofline model of Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

import re
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.apps.bench.figures import Record, check_context
from localinfer.apps.bench.measured_model import MeasuredModel, OperationTime
from localinfer.apps.show.describe import describe_file
from localinfer.kernels.cpu.kernel_abi import MULTIPLICATIONS_PER_ROUND
from localinfer.kernels.cpu.memory import Arena, address, aligned_zeros
from localinfer.kernels.cpu.parameters import BATCH, MULTIPLY, READ_MEMORY
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.host import cpu_name
from localinfer.kernels.jit.object_cache import Kernel, cache_folder
from localinfer.models.load.threads import available_threads
from localinfer.system.machine_limits import memory_limits, processor_limits
from localinfer.types import ProgressCallback

_READ_MEMORY = Kernel("roofline.read_memory")
_MULTIPLY_BYTES = Kernel("roofline.multiply_bytes")

BUFFER_BYTES = 512 << 20
"""Bytes read per measurement: far more than any cache, on the same kind of pages as weights."""
_UNIT_BYTES = 1 << 20
_ROUND_SECONDS = 0.03
_ATTEMPTS = 9


def measure_read_bandwidth(num_threads: int) -> float:
    """Bytes per second that this many threads read from memory: the best of several attempts."""
    num_bytes = min(BUFFER_BYTES, memory_limits().available_bytes // 4) // _UNIT_BYTES * _UNIT_BYTES
    memory = Arena(0).take(num_bytes)
    # Pages that were never written are all mapped to one page of zeros.
    memory[:] = 1
    sink = aligned_zeros(64 * num_threads)
    units = num_bytes // _UNIT_BYTES
    words = READ_MEMORY.pack(start=address(memory), unit_bytes=_UNIT_BYTES, units=units, sink=address(sink))
    with closing(ThreadPool(num_threads)) as pool:
        return num_bytes / min(_seconds(pool, _READ_MEMORY, words) for _ in range(_ATTEMPTS))


def measure_multiply_peak(num_threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Multiply-adds of bytes per second on this many threads, all in registers. clock: of seconds."""
    sink = aligned_zeros(64 * num_threads)
    words = MULTIPLY.pack(rounds=10_000, sink=address(sink))
    with closing(ThreadPool(num_threads)) as pool:
        _seconds(pool, _MULTIPLY_BYTES, words, clock)
        words[0] = max(1, int(words[0] * _ROUND_SECONDS / _seconds(pool, _MULTIPLY_BYTES, words, clock)))
        best = min(_seconds(pool, _MULTIPLY_BYTES, words, clock) for _ in range(_ATTEMPTS))
    return int(words[0]) * MULTIPLICATIONS_PER_ROUND * num_threads / best


def measure_machine(num_threads: int, progress: ProgressCallback) -> Record:
    """The machine, and its ceilings with this many threads."""
    progress("measuring the machine's ceilings", 0, 2)
    read = measure_read_bandwidth(num_threads)
    progress("measuring the machine's ceilings", 1, 2)
    limits = processor_limits()
    return {
        "cpu": cpu_name(),
        "instruction_set": instruction_set(),
        "threads": num_threads,
        "performance_cores": limits.performance_cores,
        "efficiency_cores": limits.efficiency_cores,
        "read_bytes_per_second": read,
        "multiply_adds_per_second": measure_multiply_peak(num_threads),
    }


def instruction_set() -> str:
    """The instruction set that the kernels use."""
    return isa.SELECTED.value


def num_compiled_kernels() -> int:
    """Compiled kernels in the cache."""
    folder = cache_folder()
    return 0 if folder is None else sum(1 for _ in folder.glob("*.o"))


def _seconds(
    pool: ThreadPool, kernel: Kernel, words: NDArray[np.int64], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one run of an op."""
    header = BATCH.pack(**{**dict.fromkeys(BATCH.fields, 0), "control": pool.control_address})
    ops = np.array([[kernel.address, address(words)]], np.int64)
    began = clock()
    pool.run(address(ops), 1, address(header))
    return clock() - began


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
