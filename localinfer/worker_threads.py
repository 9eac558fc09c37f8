"""Work that leaves the interpreter's lock to others, such as reading, writing and checksums, spread over threads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


def num_io_threads() -> int:
    """Threads that keep storage busy: one per core, and one for those that wait."""
    return min(8, (os.cpu_count() or 1) + 1)


class WorkerThreads:
    """Up to `threads` threads for as long as a `with` block lasts; one is the caller's own, and starts none."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "localinfer-io") if threads > 1 else None

    def begin(self, job: Callable[[], T]) -> Future[T]:
        """Have a job done, at the latest when the block ends; with one thread it is done already."""
        if self._executor is not None:
            try:
                return self._executor.submit(job)
            except RuntimeError:
                # The interpreter is shutting down and begins no more threads.
                pass
        future: Future[T] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown()


def run_all(jobs: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Run jobs and return their results in order; raises the exception of the first that failed."""
    with WorkerThreads(min(threads, len(jobs))) as workers:
        futures = [workers.begin(job) for job in jobs]
    return [future.result() for future in futures]
