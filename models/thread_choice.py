"""How many threads decode fastest: measured on the model itself, once per machine and model size, and remembered.

No rule of thumb survives hybrid cores, shared caches and one or two memory channels, but one token tells.
"""

import os
import statistics
import time

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.arrays import address, aligned_zeros
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.cpu.protocol import MAX_THREADS
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Batch, Segment
from localinfer.models.measurement_memory import recall, remember

_REPETITIONS = 5
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
    key = _memory_key(program.num_threads, weight_bytes)
    remembered = _recall(key)
    if remembered is not None and 1 <= remembered <= program.num_threads:
        program.decode_threads = remembered
        return
    seconds: dict[int, float] = {}
    for count in _candidates(program.num_threads):
        program.decode_threads = count
        seconds[count] = _token_seconds(program, kv_layout)
    best = min(seconds.values())
    program.decode_threads = min(count for count, value in seconds.items() if value * _LEAST_GAIN <= best)
    remember("threads", key, decode_threads=program.decode_threads)


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
    memory = aligned_zeros(kv_layout.page_bytes + kv_layout.windowed_bytes)
    page = np.array([address(memory)], np.int64)
    segment = Segment(0, 1, page, windowed_addresses=page + kv_layout.page_bytes)
    batch = Batch(np.zeros(1, np.int32), [segment], np.zeros(1, np.int32))
    program.run(batch)
    samples = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        program.run(batch)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _memory_key(num_threads: int, weight_bytes: int) -> str:
    """The same for models of about this size."""
    return f"{num_threads} {round(2 * float(np.log2(max(weight_bytes, 1))))}"


def _recall(key: str) -> int | None:
    try:
        return int((recall("threads", key) or {})["decode_threads"])
    except (KeyError, ValueError, TypeError, ArithmeticError):
        return None
