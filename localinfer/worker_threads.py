"""Work that leaves the interpreter's lock to others, such as reading, writing and checksums, spread over threads."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def num_io_threads() -> int:
    """Threads that keep storage busy: it is faster than the checksums of one."""
    return min(8, os.cpu_count() or 1)


def run_all(jobs: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Run jobs and return their results in order; the first exception is raised when those begun have ended."""
    if min(len(jobs), threads) < 2:
        return [job() for job in jobs]
    futures: list[Future[T]] = []
    # An interpreter that is shutting down begins no more threads.
    with ThreadPoolExecutor(min(threads, len(jobs)), "localinfer-io") as executor, contextlib.suppress(RuntimeError):
        for job in jobs:
            futures.append(executor.submit(job))
    return [future.result() for future in futures] + [job() for job in jobs[len(futures) :]]
