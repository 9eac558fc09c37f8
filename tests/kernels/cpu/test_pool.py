"""The worker pool: any number of threads, asleep when idle, closed once, unusable after a fork."""

import ctypes
import gc
import os
import re
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from localinfer.errors import ClosedError
from localinfer.kernels.cpu import worker_threads
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.worker_threads import FINISH_RUN, PRIORITIES, START_RUN, set_own_priority
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import random_rows, run_rows
from tests.kernels.subprocesses import run
from tests.support.limits import seconds
from tests.support.threads import leave_out_present, own_threads

LONGER_THAN_SPINNING_SECONDS = 0.1


def idle(seconds: float = LONGER_THAN_SPINNING_SECONDS) -> float:
    """Leave the threads without work for so long; the CPU time that it took."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def doubled(pool: ThreadPool, x: FloatArray) -> FloatArray:
    """Twice x, by many small ops, so that threads meet often."""

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        for _ in range(40):
            tape.scale(inputs[0], 2.0)
            tape.scale(inputs[0], 0.5)
        tape.add(inputs[0], inputs[0], inputs[0])
        return inputs[0]

    return run_rows(pool, [x], write, [1] * len(x))


@pytest.fixture(autouse=True, scope="module")
def threads_of_others() -> None:
    leave_out_present()


def workers() -> list[threading.Thread]:
    return own_threads(re.compile(r"localinfer-\d+").fullmatch)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_a_pool_of_any_size_does_every_row(num_threads: int) -> None:
    pool, x = ThreadPool(num_threads), random_rows(20, 2000, 1)
    try:
        np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


def test_idle_threads_sleep_and_wake_again() -> None:
    pool, x = ThreadPool(3), random_rows(3, 100, 2)
    try:
        for _ in range(5):
            np.testing.assert_array_equal(doubled(pool, x), 2 * x)
            idle()
        assert idle(0.3) < 0.15
        np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


@pytest.mark.parametrize("when", ["before the start", "while waking", "before the walk", "after the walk"])
def test_an_interrupt_between_the_steps_of_a_run_leaves_the_pool_usable(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, x = ThreadPool(3), random_rows(3, 100, 6)
    start, finish = START_RUN.call, FINISH_RUN.call

    def interrupted_start(control: int, num_threads: int) -> int:
        if when == "while waking":
            start(control, num_threads)
        raise KeyboardInterrupt

    def interrupted_finish(control: int) -> int:
        # Only once: the pool must be able to finish what it started.
        monkeypatch.setattr(FINISH_RUN, "call", finish)
        if when == "after the walk":
            finish(control)
        raise KeyboardInterrupt

    try:
        for pause in (0, LONGER_THAN_SPINNING_SECONDS):
            doubled(pool, x)
            idle(pause)
            if "walk" in when:
                monkeypatch.setattr(FINISH_RUN, "call", interrupted_finish)
            else:
                monkeypatch.setattr(START_RUN, "call", interrupted_start)
            with pytest.raises(KeyboardInterrupt):
                doubled(pool, x)
            monkeypatch.undo()
            np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


def test_close_ends_the_threads_and_may_be_called_twice() -> None:
    before = set(workers())
    pool = ThreadPool(3)
    assert len(set(workers()) - before) == 2
    doubled(pool, random_rows(2, 50, 3))
    pool.close()
    pool.close()
    assert not set(workers()) - before
    with pytest.raises(ClosedError, match="load it again"):
        pool.run(0, 0, 0)


def test_close_ends_threads_that_sleep() -> None:
    before = set(workers())
    pool = ThreadPool(2)
    idle()
    pool.close()
    assert not set(workers()) - before


def test_a_pool_nobody_holds_ends_its_threads() -> None:
    before = set(workers())
    pool = ThreadPool(2)
    del pool
    gc.collect()
    assert not set(workers()) - before


def test_two_pools_run_at_the_same_time() -> None:
    pools, x = [ThreadPool(2), ThreadPool(2)], random_rows(30, 500, 4)
    results: dict[int, FloatArray] = {}
    threads = [
        threading.Thread(target=lambda index=index: results.update({index: doubled(pools[index], x)}))
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pool in pools:
        pool.close()
    for index in range(2):
        np.testing.assert_array_equal(results[index], 2 * x)


def test_a_process_ends_although_its_pool_was_left_open() -> None:
    code = (
        "from localinfer.kernels.cpu.program import ThreadPool; pool = ThreadPool(3); pool.run(0, 0, 0); print('done')"
    )
    assert run(code) == ("done", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_gets_a_typed_error_and_can_make_its_own_pool() -> None:
    code = """
import os, warnings
from localinfer.errors import ClosedError
from localinfer.kernels.cpu.program import ThreadPool
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of any fork beside threads
pool = ThreadPool(2)
pool.run(0, 0, 0)
child = os.fork()
if child == 0:
    try:
        pool.run(0, 0, 0)
    except ClosedError as error:
        assert "parent process" in str(error), error
        pool.close()
        own = ThreadPool(2)
        own.run(0, 0, 0)
        own.close()
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
pool.run(0, 0, 0)
pool.close()
"""
    assert run(code) == ("7", "")


def test_a_pool_runs_beside_a_host_program_that_uses_numba() -> None:
    code = """
import threading
import numpy as np
from localinfer.kernels.cpu.program import ThreadPool
from tests.kernels.cpu.tape_runs import random_rows
from tests.kernels.cpu.test_pool import doubled
from tests.kernels.numba_host import total

values = np.ones(10_000)
sums = [total(values)]
host = threading.Thread(target=lambda: sums.extend(total(values) for _ in range(300)))
pool, x = ThreadPool(2), random_rows(20, 500, 1)
host.start()
equal = all((doubled(pool, x) == 2 * x).all() for _ in range(5))
host.join()
pool.close()
print(equal, set(sums) == {10_000.0})
"""
    assert run(code, NUMBA_THREADING_LAYER="workqueue")[0] == "True True"


def nice_values() -> dict[str, int]:
    """Of this thread and a pool's, by name."""
    return {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id)
        for thread in [*workers(), threading.current_thread()]
        if thread.native_id is not None
    }


def test_a_pool_takes_another_number_of_threads_between_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    pool, x = ThreadPool(2), random_rows(20, 500, 1)
    try:
        for count in (1, 5, 3, 6, None, 2, 1, 6):
            pool.ask_threads(count)
            before = pool.num_threads
            pool.settle()
            assert (pool.num_threads, pool.has_own_count) == (count or 2, count is not None), before
            np.testing.assert_array_equal(doubled(pool, x), 2 * x)
        # Threads that are not needed sleep, and none was started twice.
        assert len(workers()) == 5
    finally:
        pool.close()
    assert not workers()


def test_macos_is_asked_for_the_class_of_what_a_user_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(
        pthread_set_qos_class_self_np=lambda which, relative: asked.append((which.value, relative.value))
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for priority in PRIORITIES:
        set_own_priority(priority)
    assert asked == [(0x19, 0), (0x11, 0)]
    # Older systems have no classes.
    del library.pthread_set_qos_class_self_np
    set_own_priority("normal")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_of_the_background_are_others_than_the_hosts(num_threads: int) -> None:
    pool, x = ThreadPool(num_threads), random_rows(20, 500, 1)
    caller = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
    try:
        for priority in ("background", "normal", "background"):
            pool.ask_priority(priority)
            pool.settle()
            for _ in range(3):
                np.testing.assert_array_equal(doubled(pool, x), 2 * x)
            names = {thread.name for thread in workers()}
            first = 0 if priority == "background" else 1
            assert names == {f"localinfer-{index}" for index in range(first, num_threads)}
            if sys.platform.startswith("linux"):
                wanted = caller if priority == "normal" else max(caller, 10)
                found = nice_values()
                assert {found[name] for name in names} <= {wanted}
                assert found[threading.current_thread().name] == caller
    finally:
        pool.close()
    assert not workers()


def test_threads_of_the_background_sleep_when_there_is_nothing_to_do() -> None:
    pool, x = ThreadPool(3, priority="background"), random_rows(3, 100, 2)
    try:
        doubled(pool, x)
        assert idle(0.3) < 0.15
        np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_of_who_waits_for_the_background_leaves_no_run_behind(
    is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, x = ThreadPool(2, priority="background"), random_rows(20, 500, 1)
    runs = pool._workers._runs

    class Interrupted:
        def put(self, run: worker_threads.Run) -> None:
            if is_begun:
                runs.put(run)
                run.is_done.wait(seconds(10))
            raise KeyboardInterrupt

    try:
        doubled(pool, x)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(pool._workers, "_runs", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                doubled(pool, x)
        np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


def test_threads_that_cannot_be_started_later_leave_those_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    pool, x = ThreadPool(2), random_rows(20, 500, 1)
    try:
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refuse)
            pool.ask_threads(4)
            pool.settle()
        assert pool.num_threads == 2 and "starts 2 threads, not 4" in caplog.text
        np.testing.assert_array_equal(doubled(pool, x), 2 * x)
    finally:
        pool.close()


def test_a_closed_pool_starts_no_threads() -> None:
    pool = ThreadPool(2)
    pool.close()
    pool.ask_priority("background")
    pool.settle()
    assert not workers()
