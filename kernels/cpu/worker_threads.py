"""The threads of a pool besides the caller's: their start, their priority, their end.

Of priority "background" they ask the system for little: a nice value of their own on Linux, a quality-of-service class
on macOS and a thread priority on Windows (these two are untested). A thread sets its own, and only that: the threads of
the host program stay as they are. Unprivileged threads cannot take it back, so a change of priority is a change of
threads. In the background the caller's thread computes nothing either: a leader, one more thread of the pool, stands in
for it, and the caller sleeps until the run is over.
"""

import contextlib
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from numpy.typing import NDArray

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.cpu.memory import address
from localinfer.kernels.jit.object_cache import Function

Priority = Literal["normal", "background"]
PRIORITIES: tuple[Priority, ...] = ("normal", "background")

START_RUN = Function("pool.start_run", "q", "qq")
FINISH_RUN = Function("pool.finish_run", "q", "q")
_WORK = Function("pool.work", "q", "qq")
_STOP_WORK = Function("pool.stop_work", "q", "qq")
POOL_KERNELS = (START_RUN, FINISH_RUN, _WORK, _STOP_WORK)

_NICE = 10
"""Beside a busy thread of nice value 0 one of 10 gets about a tenth of a processor."""
_QOS_CLASS_UTILITY = 0x11
_THREAD_PRIORITY_LOWEST = -2

_IDLE_SPINS = {"normal": 20_000, "background": 100}
"""Looks for another run before a thread sleeps; about a millisecond is what lies between two tokens."""
_BARRIER_SPINS = {"normal": 1500, "background": 20}
"""Looks for the other threads at the end of an op before a thread sleeps."""


class Run:
    """A run that a leader is to make; the first thread to claim it decides whether it is made.

    computing_seconds: processor time that the leader had for it.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.is_done = threading.Event()
        self.computing_seconds = 0.0
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Return True for the first caller, which decides."""
        return self._claim.acquire(blocking=False)


class WorkerThreads:
    """Threads 1, 2, ... of a pool, and in the background its thread 0. One call at a time.

    No thread refers to it, so that an unused pool can end them.
    """

    def __init__(self, control: NDArray[Any], priority: Priority) -> None:
        """control: the pool's control block, int64; it has a line for each thread that may be started."""
        self.priority = priority
        self._process = os.getpid()
        self._control = control
        self._address = address(control)
        self._wake: list[threading.Semaphore] = []
        self._threads: list[threading.Thread] = []
        self._leader: threading.Thread | None = None
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        # Compiled or loaded before the threads start, so that no thread compiles while others spin.
        for kernel in POOL_KERNELS:
            assert kernel.address, "compiled or loaded"

    @property
    def num_threads(self) -> int:
        """Threads that can take part in a run, the caller's among them."""
        return 1 + len(self._threads)

    def start(self, num_threads: int) -> bool:
        """Start the missing ones of so many threads; return False where the system does not start them."""
        is_background = self.priority == "background"
        self._control[kernel_abi.STOPPING // 8] = 0
        self._control[kernel_abi.IDLE_SPINS // 8] = _IDLE_SPINS[self.priority]
        self._control[kernel_abi.BARRIER_SPINS // 8] = _BARRIER_SPINS[self.priority]
        try:
            if is_background and self._leader is None:
                leader = self._made(_lead, (self._address, self._runs, self._wake, self._control), 0)
                leader.start()
                self._leader = leader
            while self.num_threads < num_threads:
                index, wake = self.num_threads, threading.Semaphore(0)
                self._control[(kernel_abi.SLEEPING + 64 * index) // 8] = 0
                self._wake.append(wake)
                self._threads.append(self._made(_serve, (self._address, index, wake, self._control), index))
                # An interrupt comes while the thread is waited for, which runs by then.
                try:
                    self._threads[-1].start()
                except RuntimeError:
                    self._threads.pop()
                    self._wake.pop()
                    raise
        except RuntimeError:
            return False
        return True

    def wake(self, sleeping: int) -> None:
        """Wake the sleeping threads of a run that was started, a bit each."""
        _wake(self._wake, sleeping)

    def wake_all(self, num_threads: int) -> None:
        """Wake every thread of a run, asleep or not; an extra wake does no harm."""
        for semaphore in self._wake[: num_threads - 1]:
            semaphore.release()

    @property
    def has_leader(self) -> bool:
        """True if a leader is to make runs, instead of the caller."""
        return self._leader is not None

    def run(self, num_threads: int) -> float:
        """Let the leader execute the run in the control block; returns its processor time when it is over.

        An interrupt is raised once no thread runs any more.
        """
        run = Run(num_threads)
        try:
            self._runs.put(run)
            run.is_done.wait()
            return run.computing_seconds
        except BaseException:
            if not run.claim():
                while not run.is_done.is_set():
                    # The next interrupt must not leave threads at work behind either.
                    with contextlib.suppress(BaseException):
                        run.is_done.wait()
            raise

    def stop(self) -> None:
        """End the threads, between two runs; others can be started after that. A forked child has none to end."""
        if os.getpid() != self._process:
            return
        if self._leader is not None:
            self._runs.put(None)
            self._leader.join()
            self._leader = None
        if not self._threads:
            return
        _STOP_WORK(self._address, self.num_threads)
        self.wake_all(self.num_threads)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._wake.clear()

    def _made(self, body: Callable[..., None], arguments: tuple[Any, ...], index: int) -> threading.Thread:
        def serve() -> None:
            if is_background:
                lower_own_priority()
            body(*arguments)

        is_background = self.priority == "background"
        return threading.Thread(target=serve, name=f"localinfer-{index}", daemon=True)


def lower_own_priority() -> None:
    """Give the calling thread the priority of background work; where the system refuses, it keeps its own."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform.startswith("linux"):
            # Linux keeps a nice value per thread; a thread's id is a process's to setpriority.
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(os.getpriority(os.PRIO_PROCESS, own), _NICE))
        elif sys.platform == "darwin":
            ctypes.CDLL(None).pthread_set_qos_class_self_np(ctypes.c_uint(_QOS_CLASS_UTILITY), ctypes.c_int(0))
        elif sys.platform == "win32":
            kernel32 = ctypes.windll.kernel32
            kernel32.GetCurrentThread.restype = ctypes.c_void_p
            kernel32.SetThreadPriority(ctypes.c_void_p(kernel32.GetCurrentThread()), _THREAD_PRIORITY_LOWEST)


def _serve(control: int, thread: int, wake: threading.Semaphore, keep: Any) -> None:
    """Body of a worker thread; `keep` holds the control block alive."""
    note_thread(keep, thread)
    while int(_WORK(control, thread)) != -1:
        wake.acquire()


def note_thread(control: NDArray[Any], thread: int) -> None:
    """Write into a control block that the calling thread is this one of its pool."""
    control[(kernel_abi.SLEEPING + 64 * thread + kernel_abi.THREAD_ID) // 8] = threading.get_ident()


def _lead(
    control: int, runs: "queue.SimpleQueue[Run | None]", wake: list[threading.Semaphore], keep: NDArray[Any]
) -> None:
    """Body of a leader; `keep` holds the control block alive."""
    note_thread(keep, 0)
    while (run := runs.get()) is not None:
        if not run.claim():
            continue
        began = time.thread_time()
        if run.num_threads > 1:
            _wake(wake, int(START_RUN(control, run.num_threads)))
        FINISH_RUN(control)
        run.computing_seconds = time.thread_time() - began
        run.is_done.set()


def _wake(semaphores: list[threading.Semaphore], sleeping: int) -> None:
    for index, semaphore in enumerate(semaphores, 1):
        if sleeping >> index & 1:
            semaphore.release()
