"""Threads that come late, or never, or stop in the midst of a part: every part is computed once, ops stay in order."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from localinfer.kernels.cpu import kernel_abi, worker_threads
from localinfer.kernels.cpu.memory import address
from localinfer.kernels.cpu.program import ThreadPool
from tests.kernels.cpu.tape_runs import random_rows
from tests.kernels.cpu.test_pool import doubled
from tests.support.limits import seconds

_OP = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Ops:
    """Ops in Python that claim units as kernels do, one at a time, and write down who did which when.

    delay: seconds that a thread stays in a unit, by (run, op, unit, thread).
    """

    def __init__(self, pool: ThreadPool, units: list[int], delay: Callable[[int, int, int, int], float]) -> None:
        self.done: list[tuple[str, int, int, int]] = []
        self._pool, self._delay, self._run = pool, delay, 0
        self._ops = [_OP(self._op(index, count)) for index, count in enumerate(units)]
        places = [[ctypes.cast(op, ctypes.c_void_p).value or 0, 0] for op in self._ops]
        self._tape = np.array(places, np.int64)

    def run(self, num_threads: int) -> list[tuple[str, int, int, int]]:
        """Run them; ("begin" or "end", op, unit, thread) in order."""
        self.done = []
        self._pool.run(address(self._tape), len(self._tape), 0, num_threads)
        self._run += 1
        return list(self.done)

    def _op(self, index: int, units: int) -> Callable[[int, int, int, int], None]:
        claimed = self._pool._control[kernel_abi.NEXT_UNIT // 8 :]

        def op(parameters: int, batch: int, thread: int, num_threads: int) -> None:
            # Threads of Python take turns, so reading and adding one is one step.
            while (unit := int(claimed[0])) < units:
                claimed[0] += 1
                self.done.append(("begin", index, unit, thread))
                if delay := self._delay(self._run, index, unit, thread):
                    time.sleep(delay)
                self.done.append(("end", index, unit, thread))

        return op


def check(done: list[tuple[str, int, int, int]], units: list[int]) -> None:
    """Every unit once, and no op begun before all of the one before it were over."""
    ends = [(op, unit) for what, op, unit, _ in done if what == "end"]
    assert sorted(ends) == [(op, unit) for op, count in enumerate(units) for unit in range(count)]
    ops = [op for _, op, _, _ in done]
    assert ops == sorted(ops)


@contextmanager
def absent_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Workers that the system gives no processor until the event is set."""
    come, serve = threading.Event(), worker_threads._serve

    def wait_and_serve(*arguments: object) -> None:
        come.wait(seconds(60))
        serve(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_threads, "_serve", wait_and_serve)
    yield come
    come.set()


UNITS = [3, 1, 5, 0, 2, 4]


def test_a_run_does_not_wait_for_threads_that_have_begun_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_rows(20, 500, 1)
    with absent_workers(monkeypatch) as come:
        pool = ThreadPool(3)
        try:
            ops = Ops(pool, UNITS, lambda *_: 0.0)
            check(done := ops.run(3), UNITS)
            assert {thread for *_, thread in done} == {0}
            np.testing.assert_array_equal(doubled(pool, x), 2 * x)
            come.set()
            for _ in range(20):
                check(ops.run(3), UNITS)
                np.testing.assert_array_equal(doubled(pool, x), 2 * x)
        finally:
            come.set()
            pool.close()


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_a_run_waits_for_who_stops_in_the_midst_of_a_unit(num_threads: int) -> None:
    random = np.random.default_rng(num_threads)
    pool = ThreadPool(num_threads)
    try:
        # Much longer than spinning lasts, so that the others sleep at the end of an op, and are woken.
        ops = Ops(pool, UNITS, lambda *_: float(random.choice([0, 0, 0.0002, 0.003])))
        for run in range(12):
            check(ops.run(1 + run % num_threads), UNITS)
    finally:
        pool.close()


def test_others_do_what_a_stopped_thread_has_not_begun() -> None:
    pool, is_stopped, go_on = ThreadPool(3), threading.Event(), threading.Event()
    stopped: dict[str, int] = {}

    def delay(run: int, op: int, unit: int, thread: int) -> float:
        if thread and stopped.setdefault("thread", thread) == thread and not is_stopped.is_set():
            is_stopped.set()
            go_on.wait(seconds(60))
        elif unit >= 10:
            is_stopped.wait(seconds(60))
        if unit == 39:
            go_on.set()
        return 0.0

    try:
        check(done := Ops(pool, [40], delay).run(3), [40])
        assert [thread for what, *_, thread in done if what == "end"].count(stopped["thread"]) == 1
    finally:
        go_on.set()
        pool.close()


def test_threads_change_in_number_from_run_to_run() -> None:
    pool, x = ThreadPool(5), random_rows(20, 500, 1)
    try:
        ops = Ops(pool, UNITS, lambda *_: 0.0)
        for num_threads in (5, 1, 3, 2, 4, 1, 5, 2):
            check(done := ops.run(num_threads), UNITS)
            assert {thread for *_, thread in done} <= set(range(num_threads))
            np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


@pytest.mark.parametrize("num_threads", [64, 65, kernel_abi.MAX_THREADS])
def test_of_more_threads_than_a_word_has_bits_each_takes_part(num_threads: int) -> None:
    pool, inside = ThreadPool(num_threads), threading.Barrier(num_threads)

    def delay(run: int, op: int, unit: int, thread: int) -> float:
        if op == 1:
            inside.wait(seconds(60))
        return 0.0

    try:
        done = Ops(pool, units := [3, num_threads, 2 * num_threads, 1], delay).run(num_threads)
        check(done, units)
        assert {thread for _, op, _, thread in done if op == 1} == set(range(num_threads))
    finally:
        pool.close()


def test_threads_that_were_marked_are_woken_once_each() -> None:
    control = np.zeros((kernel_abi.SLEEPING + kernel_abi.LINE_BYTES * 101) // 8, np.int64)
    semaphores = [threading.Semaphore(0) for _ in range(99)]
    lines = control[kernel_abi.SLEEPING // 8 :].reshape(-1, kernel_abi.LINE_BYTES // 8)
    lines[[1, 64, 99], kernel_abi.MUST_WAKE // 8] = 1
    for marked in (3, 0, 1):
        worker_threads._wake(semaphores, control, marked)
        woken = [thread for thread, semaphore in enumerate(semaphores, 1) if semaphore.acquire(blocking=False)]
        assert woken == ([1, 64, 99] if marked == 3 else [])


def test_a_run_without_ops_is_over_at_once() -> None:
    pool = ThreadPool(3)
    try:
        for _ in range(3):
            pool.run(0, 0, 0)
    finally:
        pool.close()
