"""Memory bandwidth as NumPy reads it, without compiled kernels; and what other programs take of the processors."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.memory import Arena

BUFFER_BYTES = 256 << 20
"""Far more than any cache, on the same kind of pages as weights."""
_ATTEMPTS = 6
_BUSY_SECONDS = 0.4
_LEAST_SHARE = 0.15
"""Of a core; processes that take less are not named."""


def measure_bandwidth(num_threads: int, available_bytes: int) -> dict[str, Any]:
    """Bytes per second that one thread and `num_threads` threads read from memory: the best of several attempts."""
    num_bytes = min(BUFFER_BYTES, available_bytes // 4) // (8 * num_threads) * 8 * num_threads
    memory = Arena(0).take(num_bytes).view(np.int64)
    # Pages that were never written are all mapped to one page of zeros.
    memory[:] = 1
    alone = max(_read_speed(memory, 1) for _ in range(_ATTEMPTS))
    together = max(_read_speed(memory, num_threads) for _ in range(_ATTEMPTS))
    # Where one thread takes all that there is, the other figure is the same but for noise.
    together = max(alone, together)
    return {
        "num_threads": num_threads,
        "bytes_per_second": together,
        "bytes_per_second_of_one_thread": alone,
        "tokens_per_second_per_gb": together / 1e9,
    }


def _read_speed(memory: NDArray[np.int64], num_threads: int) -> float:
    parts = np.split(memory, num_threads)
    # A bitwise reduction leaves the interpreter free and is as fast as memory.
    threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts[1:]]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    np.bitwise_or.reduce(parts[0])
    for thread in threads:
        thread.join()
    return memory.nbytes / (time.perf_counter() - began)


def other_load(sleep: Callable[[float], object] = time.sleep) -> dict[str, Any]:
    """Count cores that other programs keep busy, name these, and give the share of time that a hypervisor takes."""
    import psutil

    watched = {}
    for process in psutil.process_iter(["name"]):
        if process.pid not in (0, os.getpid()):
            seconds = _cpu_seconds(process)
            if seconds is not None:
                watched[process] = seconds
    before, began, own = psutil.cpu_times(), time.monotonic(), time.process_time()
    sleep(_BUSY_SECONDS)
    after, elapsed, own = psutil.cpu_times(), time.monotonic() - began, time.process_time() - own
    found = []
    for process, seconds in watched.items():
        now = _cpu_seconds(process)
        if now is not None and (cores := (now - seconds) / elapsed) >= _LEAST_SHARE:
            found.append({"pid": process.pid, "name": process.info["name"] or "", "cores": round(cores, 2)})
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    busy = sum(getattr(after, name) - getattr(before, name) for name in after._fields if name not in idle)
    stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    return {
        "cores": round(max(0.0, (busy - own) / elapsed), 2),
        "stolen_share": round(max(0.0, stolen / elapsed / (os.cpu_count() or 1)), 3),
        "processes": sorted(found, key=lambda process: -float(process["cores"]))[:3],
    }


def _cpu_seconds(process: Any) -> float | None:
    import psutil

    try:
        times = process.cpu_times()
    except (psutil.Error, OSError):
        return None
    return float(times.user + times.system)
