"""The machine's two measured ceilings: memory read bandwidth, and multiplications of bytes per second."""

import platform
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.apps.bench.figures import Record
from localinfer.kernels.cpu.kernel_abi import MULTIPLICATIONS_PER_ROUND
from localinfer.kernels.cpu.memory import Arena, address, aligned_zeros
from localinfer.kernels.cpu.parameters import BATCH, MULTIPLY, READ_MEMORY
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.object_cache import Kernel, cache_folder
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
    import psutil

    num_bytes = min(BUFFER_BYTES, int(psutil.virtual_memory().available) // 4) // _UNIT_BYTES * _UNIT_BYTES
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
    return {
        "cpu": cpu_name(),
        "instruction_set": instruction_set(),
        "threads": num_threads,
        "read_bytes_per_second": read,
        "multiply_adds_per_second": measure_multiply_peak(num_threads),
    }


def cpu_name() -> str:
    """The processor's name, or its architecture if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
