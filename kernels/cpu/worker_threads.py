"""The threads of a pool besides the caller's: their start, priority and end, and how many take part in the next step.

Of priority "background" they ask the system for little: a nice value of their own on Linux, a quality-of-service class
on macOS and a thread priority on Windows (these two are untested). Of priority "normal" they ask macOS for the class of
what a user waits for: the slow cores are for lower ones. A thread sets its own, and only that: the threads of the host
program stay as they are. Unprivileged threads cannot take it back, so a change of priority is a change of
threads. In the background the caller's thread computes nothing either: a leader, one more thread of the pool, stands in
for it, and the caller sleeps until the run is over.

A thread that computes is given a processor's whole time. If it gets less, because it was put off its processor or slept
until another that was came back, then processors are scarce, and fewer threads may do more: an op waits for every
thread that has begun a part of it. How many are best depends on the load, so `ThreadChoice` tries it: steps with
another number in turns with steps as before, rarely where that changes nothing. Once the processors are free, the usual
number holds again.
"""

import contextlib
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
_QOS_CLASSES = {"normal": 0x19, "background": 0x11}
"""USER_INITIATED and UTILITY."""
_THREAD_PRIORITY_LOWEST = -2

_IDLE_SPINS = {"normal": 20_000, "background": 100}
"""Looks for another run before a thread sleeps; about a millisecond is what lies between two tokens."""
_BARRIER_SPINS = {"normal": 1500, "background": 20}
"""Looks for the other threads at the end of an op before a thread sleeps."""
_IDLE_NANOSECONDS = {"normal": 1_000_000, "background": 5_000}
_BARRIER_NANOSECONDS = {"normal": 50_000, "background": 1_000}
"""Times that so many looks take on x86-64, whose pause is 20 to 50 ns; on arm64 they count in place of looks."""


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
        self.leader: threading.Thread | None = None
        """The thread that makes runs instead of the caller, in the background."""
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
        self._control[kernel_abi.IDLE_NANOSECONDS // 8] = _IDLE_NANOSECONDS[self.priority]
        self._control[kernel_abi.BARRIER_NANOSECONDS // 8] = _BARRIER_NANOSECONDS[self.priority]
        try:
            if is_background and self.leader is None:
                leader = self._made(_lead, (self._address, self._runs, self._wake, self._control), 0)
                leader.start()
                self.leader = leader
            while self.num_threads < num_threads:
                index, wake = self.num_threads, threading.Semaphore(0)
                line = kernel_abi.SLEEPING + kernel_abi.LINE_BYTES * index
                self._control[line // 8] = self._control[(line + kernel_abi.MUST_WAKE) // 8] = 0
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

    def wake(self, marked: int) -> None:
        """Wake the threads that were marked when a run was started, so many."""
        _wake(self._wake, self._control, marked)

    def wake_all(self, num_threads: int) -> None:
        """Wake every thread of a run, asleep or not; an extra wake does no harm."""
        for semaphore in self._wake[: num_threads - 1]:
            semaphore.release()

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
        if self.leader is not None:
            self._runs.put(None)
            self.leader.join()
            self.leader = None
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
            set_own_priority(priority)
            body(*arguments)

        priority = self.priority
        return threading.Thread(target=serve, name=f"localinfer-{index}", daemon=True)


def set_own_priority(priority: Priority) -> None:
    """Give the calling thread a priority; where the system refuses, it keeps its own."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform == "darwin":
            ctypes.CDLL(None).pthread_set_qos_class_self_np(ctypes.c_uint(_QOS_CLASSES[priority]), ctypes.c_int(0))
        elif priority == "normal":
            return
        elif sys.platform.startswith("linux"):
            # Linux keeps a nice value per thread; a thread's id is a process's to setpriority.
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(os.getpriority(os.PRIO_PROCESS, own), _NICE))
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
    line = kernel_abi.SLEEPING + kernel_abi.LINE_BYTES * thread
    control[(line + kernel_abi.THREAD_ID) // 8] = threading.get_ident()


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
            _wake(wake, keep, int(START_RUN(control, run.num_threads)))
        FINISH_RUN(control)
        run.computing_seconds = time.thread_time() - began
        run.is_done.set()


def _wake(semaphores: list[threading.Semaphore], control: NDArray[Any], marked: int) -> None:
    if not marked:
        return
    for index, semaphore in enumerate(semaphores, 1):
        mark = (kernel_abi.SLEEPING + kernel_abi.LINE_BYTES * index + kernel_abi.MUST_WAKE) // 8
        if control[mark]:
            control[mark] = 0
            semaphore.release()


_SAMPLE_SECONDS = 0.02
"""Steps are looked at together for so long: some systems count processor time in ticks of a 64th of a second."""
_MEMORY_SECONDS = 0.2
"""Time constant of the share of time that was lost."""
_BUSY_SHARE = 0.08
_CALM_SHARE = 0.03
"""Lost shares above which processors are scarce, and below which they are free."""
_CALM_SECONDS = 0.3, 8.0
"""Time that the share must be that low: at first, and at most, if scarcity keeps coming back."""
_CALM_GROWTH = 4
"""So many times longer each time that it came back soon."""
_SOON_SECONDS = 1.0
"""If it comes back within so long, they had not been free: the usual number hid it or caused it."""
_TRIAL_SECONDS = 0.5, 4.0
"""Between two trials: at first, and at most, if none changes anything. The load may be another one by then."""
_LOAD_SECONDS = 1.0
"""Time constant of the lost share by which loads are distinguished."""
_OTHER_LOAD = 0.15
"""If that share is by so much another one than after the last trial, the load is: what was rejected is tried again."""
_TURN_SECONDS = 0.2
_SETTLING_SECONDS = 0.06
"""Of a turn in a trial, and the time before it that does not count: a scheduler moves threads to other processors, and
gives back what they did not use, after tens of milliseconds. In turns of 50 ms one thread seemed to do 1240 tokens of a
prompt a second, and did 700 when it was left alone."""
_PAIRS = 3
_GAIN = 0.9, 0.95
"""Largest ratio of times with fewer threads, and with more, to the time before. More are given more time beside
other programs, so that fewer are seldom much better, and may be much worse."""
_CLEAR = ((1, 0.6, 1.2), (2, 0.8, 1.1))
"""After so many pairs of turns a trial is over already if the ratio is outside of these. Above is nearer than below: a
number that was rejected by mistake is tried again, and what a trial costs are the turns of what is slower."""
_HOPELESS = 2.0
"""So is one whose first turn takes so many times the usual time."""
_LONGEST_RATIO = 4.0
"""A number that took several times as long is tried again that many times later, at most."""


def steps_of(most: int, performance_cores: int = 0) -> list[int]:
    """Numbers of threads that are tried: 1, 2, 3, 4, 6, 8, 12, 16 ... and `most`, and one for each performance core."""
    counts, count = {1, most, min(3, most), min(performance_cores or 1, most)}, 2
    while count < most:
        counts |= {count, min(count * 3 // 2, most)}
        count *= 2
    return sorted(counts)


@dataclass
class _Trial:
    """Steps with another number of threads, in turns with steps as before. gain: as in _GAIN."""

    candidate: int
    gain: float
    expected: float
    """Seconds per unit of work, as before."""
    ratio: float = 1.0
    """Of the candidate's seconds to those as before."""
    pairs: int = 0
    is_candidates_turn: bool = True
    settling: float = 0.0
    settling_work: float = 0.0
    turn: float = 0.0
    """Seconds of the turn that do not count, the work done in them, and seconds that do."""
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of all turns: as before, and with the candidate; and the work done in them."""
    work: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def observe(self, seconds: float, work: float) -> bool | None:
        """Take in a step; return whether the candidate is better once that is known."""
        if self.settling < _SETTLING_SECONDS:
            self.settling += seconds
            self.settling_work += work
            if self.is_candidates_turn and not self.pairs and self.settling > _TURN_SECONDS:
                # One long step.
                self.ratio = self.settling / self.settling_work / self.expected
                return False if self.ratio > _HOPELESS else None
            return None
        self.seconds[self.is_candidates_turn] += seconds
        self.work[self.is_candidates_turn] += work
        self.turn += seconds
        if self.turn < _TURN_SECONDS:
            return None
        self.settling = self.settling_work = self.turn = 0.0
        self.is_candidates_turn = not self.is_candidates_turn
        if not self.is_candidates_turn:
            return None
        self.pairs += 1
        before, candidate = (seconds / work for seconds, work in zip(self.seconds, self.work, strict=True))
        self.ratio = candidate / before
        if self.pairs == _PAIRS:
            return self.ratio < self.gain
        for pairs, low, high in _CLEAR:
            if self.pairs >= pairs and not low <= self.ratio <= high:
                return self.ratio < low
        return None


class ThreadChoice:
    """Chooses for steps of one kind; not thread-safe. It has no clock: time passes with the steps that are reported.

    usual: how many are best on a free machine, at most `most`. is_sure: that was measured on one; if not, it is found
    out as soon as processors are free. given: these three as they were at first. performance_cores: see `ThreadPool`.
    """

    def __init__(self, usual: int, most: int, *, is_sure: bool = True, performance_cores: int = 0) -> None:
        self.given = usual, most, is_sure
        self.usual, self.most, self.is_sure = usual, most, is_sure
        self._steps = steps_of(most, performance_cores)
        self._leaps = {most: performance_cores, performance_cores: most} if 0 < performance_cores < most else {}
        """Numbers that are tried from another though others lie between: some slow cores may be worse than none."""
        self._count = usual
        self._is_busy = not is_sure
        self._seconds = self._computing = 0.0
        self._lost = 0.0
        self._load = self._load_at_choice = 0.0
        """The lost share over a longer time, and its value soon after the number was chosen."""
        self._since_choice = 0.0
        self._calm_seconds = 0.0
        self._calm_needed = _CALM_SECONDS[0]
        self._since_calm = _SOON_SECONDS
        self._trial: _Trial | None = None
        self._recent = 0.0, 0.0
        """Seconds and work of late, outside of trials."""
        self._interval = self._until_trial = _TRIAL_SECONDS[0]
        self._rejected: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Processors are taken to be scarce."""
        return self._is_busy

    def next_count(self) -> int:
        """Number of threads of the next step."""
        if not self._is_busy:
            return self.usual
        if self._trial is not None and self._trial.is_candidates_turn:
            return self._trial.candidate
        return self._count

    def observe(self, seconds: float, computing: float, work: float) -> None:
        """Take in a step with `next_count` threads: its time, the part that its first thread computed, and its work.

        work: in any unit that the time of a step of this kind is proportional to; steps without work say how much time
        was lost, and nothing of how many threads are best.
        """
        if self.most == 1 or seconds <= 0:
            return
        self._seconds += seconds
        self._computing += computing
        if self._seconds >= _SAMPLE_SECONDS:
            share = 1 - self._computing / self._seconds
            self._lost += min(1.0, self._seconds / _MEMORY_SECONDS) * (share - self._lost)
            self._note_load(self._seconds)
            self._compare_load(self._seconds, share)
            self._seconds = self._computing = 0.0
        if not self._is_busy or work <= 0:
            return
        if self._trial is None:
            kept = max(0.0, 1 - seconds / _MEMORY_SECONDS)
            self._recent = kept * self._recent[0] + seconds, kept * self._recent[1] + work
            self._until_trial -= seconds
            if self._until_trial <= 0:
                self._trial = self._next_trial()
            return
        is_better = self._trial.observe(seconds, work)
        if is_better is not None:
            self._end_trial(self._trial, is_better)

    def _note_load(self, seconds: float) -> None:
        self._since_calm += seconds
        if not self._is_busy:
            if self._lost > _BUSY_SHARE:
                self._begin_busy()
            return
        if self._lost >= _CALM_SHARE:
            self._calm_seconds = 0.0
            return
        if not self._calm_seconds and not self.is_sure:
            # The other programs have gone.
            self._try_again_soon()
        self._calm_seconds += seconds
        if self._calm_seconds >= self._calm_needed and self.is_sure:
            self._begin_calm()

    def _compare_load(self, seconds: float, share: float) -> None:
        """Try other numbers soon if the load is another one than when the present number was chosen."""
        if not self._is_busy or self._trial is not None:
            return
        self._load += min(1.0, seconds / _LOAD_SECONDS) * (share - self._load)
        self._since_choice += seconds
        if self._since_choice < 2 * _LOAD_SECONDS:
            self._load_at_choice = self._load
        elif abs(self._load - self._load_at_choice) > _OTHER_LOAD:
            self._try_again_soon()
            self._load_at_choice = self._load

    def _try_again_soon(self) -> None:
        """Forget which numbers were rejected: what was found says nothing any more."""
        self._rejected.clear()
        self._interval = _TRIAL_SECONDS[0]
        self._until_trial = min(self._until_trial, self._interval)

    def _begin_busy(self) -> None:
        is_soon = self._since_calm < _SOON_SECONDS
        longest = _CALM_SECONDS[1]
        self._calm_needed = min(_CALM_GROWTH * self._calm_needed, longest) if is_soon else _CALM_SECONDS[0]
        if not is_soon:
            self._count, self._interval = self.usual, _TRIAL_SECONDS[0]
            self._rejected.clear()
        self._until_trial = self._interval
        self._is_busy, self._calm_seconds = True, 0.0

    def _begin_calm(self) -> None:
        self._is_busy, self._trial, self._since_calm = False, None, 0.0

    def _neighbours(self) -> list[int]:
        place = self._steps.index(self._count) if self._count in self._steps else len(self._steps) - 1
        found = [self._steps[other] for other in (place - 1, place + 1) if 0 <= other < len(self._steps)]
        leap = self._leaps.get(self._count)
        return found if leap is None or leap in found else [leap, *found]

    def _next_trial(self) -> _Trial:
        neighbours = self._neighbours()
        fresh = [count for count in neighbours if count not in self._rejected]
        if not fresh:
            self._rejected.clear()
        candidate = (fresh or neighbours)[0]
        return _Trial(candidate, _GAIN[candidate > self._count], self._recent[0] / self._recent[1])

    def _end_trial(self, trial: _Trial, is_better: bool) -> None:
        self._trial, candidate = None, trial.candidate
        if is_better:
            self._since_choice = 0.0
            # The number before is known to be worse; the next beyond may be better still.
            self._rejected = {self._count}
            self._count, self._interval = candidate, _TRIAL_SECONDS[0]
        else:
            self._rejected.add(candidate)
            longest = _TRIAL_SECONDS[1] * min(max(1.0, trial.ratio), _LONGEST_RATIO)
            self._interval = min(2 * self._interval * max(1.0, trial.ratio), longest)
        self._until_trial = self._interval
        if self._calm_seconds and not self.is_sure and not set(self._neighbours()) - self._rejected:
            self.usual, self.is_sure = self._count, True
            self._begin_calm()
