"""How many threads decode fastest: measured on the model itself, once per machine and model size, and remembered.

No rule of thumb survives hybrid cores, shared caches and one or two memory channels, but one token tells.
"""

import hashlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.arrays import address, aligned_zeros
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.cpu.protocol import MAX_THREADS
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.object_cache import CACHE_FOLDER
from localinfer.kernels.ops import Batch, Segment

_REPETITIONS = 5
_REMEMBERED_SECONDS = 30 * 24 * 3600
_LEAST_GAIN = 0.97
"""More threads must take at most this share of the time of fewer, for they cost heat and leave less for others."""


def available_threads() -> int:
    """Physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed, MAX_THREADS - 1))


def checked_threads(threads: int) -> int:
    """A count the caller asked for; raises RequestError for one that is not a number of threads."""
    limit = min(os.cpu_count() or 1, MAX_THREADS - 1)
    if not 1 <= threads <= limit:
        raise RequestError(f"threads is {threads}; this machine runs 1 to {limit}, and None chooses for you")
    return threads


def choose_decode_threads(program: CpuProgram, kv_layout: KVLayout, weight_bytes: int) -> None:
    """Set the program's `decode_threads` to the fewest that decode within 3 % of the fastest."""
    if program.num_threads == 1:
        return
    path = _memory_path(program.num_threads, weight_bytes)
    remembered = _recall(path)
    if remembered is not None and 1 <= remembered <= program.num_threads:
        program.decode_threads = remembered
        return
    seconds: dict[int, float] = {}
    for count in _candidates(program.num_threads):
        program.decode_threads = count
        seconds[count] = _token_seconds(program, kv_layout)
    best = min(seconds.values())
    program.decode_threads = min(count for count, value in seconds.items() if value * _LEAST_GAIN <= best)
    _remember(path, program.decode_threads)


def _candidates(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... and the most."""
    counts = {1, 3, most}
    count = 2
    while count < most:
        counts |= {count, count * 3 // 2}
        count *= 2
    return sorted(value for value in counts if value <= most)


def _token_seconds(program: CpuProgram, kv_layout: KVLayout) -> float:
    """Median time of one decoded token at the start of a sequence."""
    memory = aligned_zeros(kv_layout.page_bytes)
    segment = Segment(0, 1, np.array([address(memory)], np.int64))
    batch = Batch(np.zeros(1, np.int32), [segment], np.zeros(1, np.int32))
    program.run(batch)
    samples = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        program.run(batch)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _memory_path(num_threads: int, weight_bytes: int) -> Path | None:
    """Where the choice for models of about this size is kept, beside the kernels it was measured with."""
    if CACHE_FOLDER is None:
        return None
    size = round(2 * float(np.log2(max(weight_bytes, 1))))
    key = hashlib.sha256(f"{num_threads} {size}".encode()).hexdigest()[:12]
    return CACHE_FOLDER / f"threads-{key}.json"


def _recall(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        record = json.loads(path.read_text("utf-8"))
        is_fresh = 0 <= time.time() - float(record["measured_at"]) < _REMEMBERED_SECONDS
        return int(record["decode_threads"]) if is_fresh else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path | None, decode_threads: int) -> None:
    if path is None:
        return
    record = json.dumps({"decode_threads": decode_threads, "measured_at": time.time()})
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(record)
        os.replace(file.name, path)
    except OSError:
        return  # a full disk only costs measuring again
