"""Persistent threads that run a tape: every thread walks the same ops, with a barrier after each.

Python is left once per run. The calling thread is thread 0; the others spin for about a millisecond after a run, since
the next token usually comes within it, and then sleep on a lock, so an idle process uses no CPU.

The control block is int64 words, one cache line apart where threads contend.
"""

import os
import threading
import weakref
from typing import Any

import numpy as np

from localinfer.errors import ClosedError
from localinfer.kernels.address_space import shortage
from localinfer.kernels.cpu.kernel_abi import (
    BATCH,
    GENERATION,
    MAX_THREADS,
    NUM_OPS,
    NUM_THREADS,
    OPS,
    RELEASED,
    SLEEPING,
    STOPPING,
)
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.jit.object_cache import Function

_START_RUN = Function("pool.start_run", "q", "qq")
_FINISH_RUN = Function("pool.finish_run", "q", "q")
_WORK = Function("pool.work", "q", "qqq")
KERNELS = (_START_RUN, _FINISH_RUN, _WORK)
"""What a pool calls."""

_STACK_BYTES = 8 << 20
"""What most systems map for a thread."""


def _serve(control: int, thread: int, wake: threading.Semaphore, keep: Any) -> None:
    """Body of a worker thread; `keep` holds the control block alive."""
    seen = 0
    while True:
        result = int(_WORK(control, thread, seen))
        if result == -1:
            return
        if result < -1:
            seen = -2 - result
            continue
        seen = result
        wake.acquire()


class ThreadPool:
    """`num_threads` threads (the caller among them) that run tapes, one at a time.

    Raises: OutOfMemoryError if the system does not start as many.
    """

    def __init__(self, num_threads: int) -> None:
        assert 1 <= num_threads < MAX_THREADS, "the loader checks the thread count"
        self.num_threads = num_threads
        self._process = os.getpid()
        self._closed = False
        self._control = aligned_zeros(SLEEPING + 64 * (num_threads + 1)).view(np.int64)
        self.control_address = address(self._control)
        self._wake = [threading.Semaphore(0) for _ in range(num_threads)]
        _compile()
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self.control_address, thread, self._wake[thread], self._control),
                name=f"localinfer-{thread}",
                daemon=True,
            )
            for thread in range(1, num_threads)
        ]
        for count, worker in enumerate(self._threads):
            try:
                worker.start()
            except RuntimeError:
                _stop(self._control, self._wake, self._threads[:count], self._process)
                raise shortage(_STACK_BYTES * (num_threads - 1), f"starting {num_threads} threads") from None
        self._finalizer = weakref.finalize(self, _stop, self._control, self._wake, self._threads, self._process)

    def run(self, ops_address: int, num_ops: int, batch_address: int, num_threads: int = 0) -> None:
        """Run ops (pairs of function and parameter address) over a batch header; blocks without the GIL.

        num_threads: how many of the threads take part; 0 for all.
        """
        control = self._control
        if self._closed or control[STOPPING // 8]:
            raise ClosedError("the model was closed; load it again to go on")
        if os.getpid() != self._process:
            raise ClosedError("the model was loaded in the parent process; load it again in this one")
        control[OPS // 8] = ops_address
        control[NUM_OPS // 8] = num_ops
        control[BATCH // 8] = batch_address
        num_threads = num_threads or self.num_threads
        control[NUM_THREADS // 8] = num_threads
        if num_threads == 1:
            _FINISH_RUN.call(self.control_address)
            return
        generation, released = int(control[GENERATION // 8]), int(control[RELEASED // 8])
        try:
            to_wake = _START_RUN(self.control_address, num_threads)
            for worker in range(1, num_threads):
                if to_wake >> worker & 1:
                    self._wake[worker].release()
            _FINISH_RUN(self.control_address)
        except BaseException:
            # Ctrl-C came between two of these steps. If the workers were started but this thread has not run its
            # share, they would wait at the first barrier for ever.
            if control[GENERATION // 8] != generation and control[RELEASED // 8] == released:
                for semaphore in self._wake[1:num_threads]:
                    semaphore.release()
                _FINISH_RUN(self.control_address)
            raise

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._closed = True
        self._finalizer()


def _stop(control: Any, wake: list[threading.Semaphore], threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process or not threads:
        return
    control[STOPPING // 8] = 1
    _START_RUN(address(control), 0)
    for semaphore in wake[1:]:
        semaphore.release()
    for thread in threads:
        thread.join()


def _compile() -> None:
    """Compile or load the loops before the threads start, so that no worker compiles while others spin."""
    for kernel in KERNELS:
        assert kernel.address, "compiled or loaded"
