"""Persistent threads that run a tape: every thread walks the same ops and meets the others at a barrier after each.

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
from localinfer.kernels.cpu.arrays import address, aligned_zeros
from localinfer.kernels.cpu.memory import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_op,
    load_i64,
    spin_hint,
    store_i64,
    yield_processor,
)
from localinfer.kernels.jit import inline, jit

GENERATION = 0 * 64
ARRIVED = 1 * 64
RELEASED = 2 * 64
NEXT_UNIT = 3 * 64
OPS = 4 * 64
NUM_OPS = OPS + 8
BATCH = OPS + 16
NUM_THREADS = OPS + 24
STOPPING = OPS + 32
SLEEPING = 5 * 64
"""One line per thread follows: 1 while that thread sleeps."""

_SPINS_BEFORE_YIELD = 500
_SPINS_BEFORE_SLEEP = 20000


@inline
def take_units(control: int, count: int) -> int:
    """Claim the next `count` units of the current op; returns the first, which may lie past the end."""
    return atomic_add(control + NEXT_UNIT, count)


@inline
def _meet(control: int, num_threads: int) -> None:
    """Wait until every thread has finished the op; the last one resets the unit counter."""
    if num_threads == 1:
        store_i64(control + NEXT_UNIT, 0)
        return
    released = atomic_load(control + RELEASED)
    if atomic_add(control + ARRIVED, 1) == num_threads - 1:
        store_i64(control + ARRIVED, 0)
        store_i64(control + NEXT_UNIT, 0)
        atomic_store(control + RELEASED, released + 1)
        return
    spins = 0
    while atomic_load(control + RELEASED) == released:
        spins += 1
        if spins % _SPINS_BEFORE_YIELD == 0:
            yield_processor()
        spin_hint()


@inline
def _walk(control: int, thread: int) -> None:
    ops = load_i64(control + OPS)
    batch = load_i64(control + BATCH)
    num_threads = load_i64(control + NUM_THREADS)
    for index in range(load_i64(control + NUM_OPS)):
        call_op(load_i64(ops + 16 * index), load_i64(ops + 16 * index + 8), batch, thread, num_threads)
        _meet(control, num_threads)


@jit
def _start_run(control: int, num_workers: int) -> int:
    """Publish a run; returns a bit per sleeping worker that must be woken."""
    atomic_add(control + GENERATION, 1)
    to_wake = 0
    for worker in range(1, num_workers + 1):
        if atomic_exchange(control + SLEEPING + 64 * worker, 0) == 1:
            to_wake |= 1 << worker
    return to_wake


@jit
def _finish_run(control: int) -> None:
    """Do thread 0's share; returns when every thread has passed the last op."""
    _walk(control, 0)


@jit
def _work(control: int, thread: int, seen: int) -> int:
    """Do runs until idle for a while; returns the last generation seen, or -1 to end the thread."""
    spins = 0
    while spins < _SPINS_BEFORE_SLEEP:
        generation = atomic_load(control + GENERATION)
        if generation == seen:
            spins += 1
            spin_hint()
            continue
        seen = generation
        spins = 0
        if load_i64(control + STOPPING) != 0:
            return -1
        _walk(control, thread)
    atomic_exchange(control + SLEEPING + 64 * thread, 1)
    # A run published just before the flag was up did not see it: take the flag back and go on. If it is down already,
    # the publisher has seen it and releases the lock, so the caller must consume that.
    if atomic_load(control + GENERATION) != seen and atomic_exchange(control + SLEEPING + 64 * thread, 0) == 1:
        return -2 - seen
    return seen


def _serve(control: int, thread: int, wake: threading.Semaphore, keep: Any) -> None:
    """Body of a worker thread; `keep` holds the control block alive."""
    seen = 0
    while True:
        result = int(_work(control, thread, seen))
        if result == -1:
            return
        if result < -1:
            seen = -2 - result
            continue
        seen = result
        wake.acquire()


class ThreadPool:
    """`num_threads` threads (the caller among them) that run tapes, one at a time."""

    def __init__(self, num_threads: int) -> None:
        assert 1 <= num_threads <= 62, "the loader checks the thread count"
        self.num_threads = num_threads
        self._process = os.getpid()
        self._control = aligned_zeros(SLEEPING + 64 * (num_threads + 1)).view(np.int64)
        self.control_address = address(self._control)
        self._control[NUM_THREADS // 8] = num_threads
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
        for worker in self._threads:
            worker.start()
        self._finalizer = weakref.finalize(self, _stop, self._control, self._wake, self._threads, self._process)

    def run(self, ops_address: int, num_ops: int, batch_address: int) -> None:
        """Run ops (pairs of function and parameter address) over a batch header; blocks without the GIL."""
        if not self._finalizer.alive:
            raise ClosedError("the model was closed; load it again to go on")
        if os.getpid() != self._process:
            raise ClosedError("the model was loaded in the parent process; load it again in this one")
        control = self._control
        control[OPS // 8] = ops_address
        control[NUM_OPS // 8] = num_ops
        control[BATCH // 8] = batch_address
        if self._threads:
            to_wake = _start_run(self.control_address, len(self._threads))
            if to_wake:
                for worker in range(1, self.num_threads):
                    if to_wake >> worker & 1:
                        self._wake[worker].release()
        _finish_run(self.control_address)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._finalizer()


def _stop(control: Any, wake: list[threading.Semaphore], threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process or not threads:
        return
    control[STOPPING // 8] = 1
    _start_run(address(control), 0)
    for semaphore in wake[1:]:
        semaphore.release()
    for thread in threads:
        thread.join()


def _compile() -> None:
    """Compile or load the loops before the threads start, so that no worker compiles while others spin."""
    control = aligned_zeros(SLEEPING + 128).view(np.int64)
    control[NUM_THREADS // 8] = 1
    _finish_run(address(control))
    control[STOPPING // 8] = 1
    _start_run(address(control), 0)
    _work(address(control), 0, 0)
