"""The number of threads that decodes fastest: measured on the model, and cached per machine and model size.

It depends on hybrid cores, shared caches and memory channels, so it is measured by decoding one token. A measurement on
a busy machine holds for the load that made it, and is not cached; a cached one is used once two loads agree.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.kernel_abi import MAX_THREADS
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.cpu.worker_threads import PRIORITIES, Priority, steps_of
from localinfer.kernels.jit.object_cache import cache_folder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch, Program, Segment, StateStep
from localinfer.system.files import read_bounded, write_all, write_atomically
from localinfer.system.machine_limits import processor_limits
from localinfer.types import ProgressCallback, Record, UnitsCallback

_OFTEN_SECONDS = 0.02
_QUICK_PASS_SECONDS = 0.05
"""A pass that takes no longer is run in one go, since looking up in between would be measured too."""


class Stage:
    """Reports one stage's progress, and what was reported last again. Does nothing without a callback."""

    def __init__(self, progress: ProgressCallback | None, name: str) -> None:
        self._progress = progress
        self._name = name
        self._last = (0, 1)
        self._told_at = float("-inf")

    def __call__(self, done: int, total: int) -> None:
        """Report units done and their total."""
        self._last, self._told_at = (done, total), time.monotonic()
        if self._progress is not None:
            self._progress(self._name, done, total)

    def again(self) -> None:
        """Report the same again, unless that was done a moment ago."""
        if time.monotonic() - self._told_at >= _OFTEN_SECONDS:
            self(*self._last)


def checked_run(program: Program, stage: Stage) -> Callable[[Batch], Any]:
    """Return a function that runs batches of a program; `stage` reports within long ones and may raise to end them."""
    if not isinstance(program, CpuProgram):
        return program.run
    seconds: dict[int, float] = {}

    def go_on(done: float) -> bool:
        stage.again()
        return False

    def run(batch: Batch) -> Any:
        rows = len(batch.token_ids)
        if seconds.get(rows, 1.0) <= _QUICK_PASS_SECONDS:
            return program.run(batch)
        began = time.perf_counter()
        result = program.run_abortable(batch, go_on, least_rows=1)
        seconds[rows] = time.perf_counter() - began
        return result

    return run


_REPETITIONS = 7
_LEAST_REPETITIONS = 3
_PATIENCE_SECONDS = 0.6
"""Time limit after which slow computations are repeated fewer times."""
_QUICK_SECONDS = 0.01
_CALM_SPREAD = 1.15
"""Largest ratio of the median to the least time on an idle machine."""
_CALM_SHARE = 0.75
"""Share of all times that lie less than twice as far above it there: medians miss work in a third of the time."""
_CALM_LOAD = 0.1
"""Largest load by other programs there, see `OtherLoad`: a program that is always busy slows all repetitions alike."""
_LEAST_TICKS_SECONDS = 0.1
"""Shorter intervals say little where the system counts in ticks."""
_KEPT_SECONDS = 30 * 24 * 3600
_MAX_BYTES = 1 << 16
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 600.0, 24 * 3600.0
"""Until a measurement that found the machine busy is tried again: twice as long after each further time."""

Key = TypeVar("Key")


class Timings(Record, Generic[Key]):
    """Times of several computations."""

    seconds: dict[Key, float]
    """The least time of each."""
    is_calm: bool
    """Repetitions agree, and other programs do so little, that they may be cached."""
    load: float | None = None
    """By other programs, see `OtherLoad`; None if unknown."""


class OtherLoad:
    """Load that other programs and threads put on the processors, measured from its construction on.

    On Linux the part of their time that this process's threads waited for a processor. Elsewhere the part of all
    processors' time that others used, which is known of longer intervals only (untested).
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._waits = _waiting_seconds()
        self._used = _used_seconds() if self._waits is None else None

    def measure(self) -> float | None:
        """The load so far, from 0 to 1; None if unknown."""
        if self._waits is not None:
            run, waited = (after - before for after, before in zip(_waiting_seconds() or (), self._waits, strict=False))
            return min(1.0, max(0.0, waited) / max(run + waited, 1e-9))
        seconds = time.perf_counter() - self._began
        if self._used is None or seconds < _LEAST_TICKS_SECONDS:
            return None
        used = (_used_seconds() or 0.0) - self._used
        return min(1.0, max(0.0, used) / (seconds * (os.cpu_count() or 1)))


def _waiting_seconds() -> tuple[float, float] | None:
    """Seconds that this process's threads have run, and waited for a processor, by the Linux scheduler's statistics."""
    if not sys.platform.startswith("linux"):
        return None
    run = waited = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()
                run, waited = run + int(words[0]), waited + int(words[1])
    except (OSError, ValueError, IndexError):
        return None
    return (run / 1e9, waited / 1e9) if run else None


def _used_seconds() -> float | None:
    """Processor seconds of all other processes."""
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, RuntimeError):
        return None
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0)) - time.process_time()


def time_in_turns(
    runs: Mapping[Key, Callable[[], object]], *, repetitions: int = _REPETITIONS, told: UnitsCallback | None = None
) -> Timings[Key]:
    """Time computations in a round robin, so that a busy moment affects all alike.

    Other programs only add to a time, so the least counts; if the medians are well above it, or a quarter of all times
    far above it, the machine was busy. A fast computation is run once more before it is timed, because sleeping threads
    take a millisecond to wake up, and in use none sleeps between two runs.

    told: called before every run that is timed, with the runs done and those planned.
    """
    # Most starts find what another one has measured.
    import statistics

    now, others = time.perf_counter, OtherLoad()
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    began = now()
    for repetition in range(repetitions):
        if repetition >= _LEAST_REPETITIONS and now() - began > _PATIENCE_SECONDS:
            break
        for key, run in runs.items():
            if told is not None:
                told(sum(map(len, samples.values())), repetitions * len(samples))
            if samples[key] and samples[key][-1] < _QUICK_SECONDS:
                run()
            start = now()
            run()
            samples[key].append(now() - start)
    least = {key: max(min(values), 1e-9) for key, values in samples.items()}
    spreads = [statistics.median(values) / least[key] for key, values in samples.items()]
    every = sorted(value / least[key] for key, values in samples.items() for value in values)
    is_calm = (
        statistics.median(spreads) <= _CALM_SPREAD
        and max(spreads) <= 2 * _CALM_SPREAD
        and every[int(_CALM_SHARE * len(every))] <= 2 * _CALM_SPREAD
    )
    load = others.measure()
    return Timings(least, is_calm and (load is None or load <= _CALM_LOAD), load)


def get_measurement(kind: str, key: str) -> dict[str, Any] | None:
    """The values of `put_measurement` under this kind and key, for a month; None if missing or invalid.

    So is one that does not say what load by others it was made under: it may be that of a busy machine.
    """
    path = _path(kind, key)
    if path is None:
        return None
    try:
        record = json.loads(read_bounded(path, _MAX_BYTES))
        is_calm = record["load"] is None or 0 <= float(record["load"]) <= _CALM_LOAD
        return record if is_calm and 0 <= time.time() - float(record["measured_at"]) < _KEPT_SECONDS else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def put_measurement(kind: str, key: str, *, load: float | None, **values: Any) -> None:
    """Cache JSON-serializable values beside the compiled kernels; errors of the disk are ignored.

    load: by others while they were measured; what a busy machine measures is for the load that measured it only.
    """
    path = _path(kind, key)
    if path is None:
        return
    record = json.dumps({**values, "load": load, "measured_at": time.time()}).encode()
    with contextlib.suppress(OSError):
        write_atomically(path, lambda file: write_all(file, record))


def postpone(kind: str, key: str) -> None:
    """Remember that the machine was too busy to measure, so that not every start beside a busy program tries again."""
    put_measurement(f"busy-{kind}", key, load=None, times=min(_times_busy(kind, key)[0] + 1, 64))


def is_postponed(kind: str, key: str) -> bool:
    """True if the machine was too busy for a measurement lately: within ten minutes at first, within a day at most."""
    times, seconds = _times_busy(kind, key)
    return times > 0 and seconds < min(_FIRST_PAUSE_SECONDS * 2.0 ** (times - 1), _LONGEST_PAUSE_SECONDS)


def _times_busy(kind: str, key: str) -> tuple[int, float]:
    """Number of times in a row that it was too busy, and seconds since the last of them."""
    record = get_measurement(f"busy-{kind}", key) or {}
    times = record.get("times")
    if not isinstance(times, int) or not 1 <= times <= 64:
        return 0, 0.0
    return times, time.time() - float(record["measured_at"])


def settle(kind: str, key: str) -> None:
    """Forget that the machine was too busy: it was measured."""
    path = _path(f"busy-{kind}", key)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _path(kind: str, key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


STAGE = "measuring how many threads decode fastest"

_ENOUGH_LOADS = 2
"""Loads that must agree before a cached count is used without measuring."""
_LEAST_GAIN = 0.97
"""More threads must take at most this share of the time of fewer."""


def available_threads() -> int:
    """Physical cores available to this process, by affinity and by its control group's share of time."""
    return min(processor_limits().usable_threads, MAX_THREADS)


def checked_threads(threads: int) -> int:
    """Check a requested number of threads. Raises: RequestError."""
    processors = os.cpu_count() or 1
    limit = min(processors, MAX_THREADS)
    if not 1 <= threads <= limit:
        why = f", the most of any model, though it has {processors} processors" if limit < processors else ""
        raise RequestError(f"threads is {threads}; this machine runs 1 to {limit}{why}, and None chooses")
    return threads


def checked_priority(priority: object) -> Priority:
    """Check a priority of threads. Raises: RequestError."""
    for known in PRIORITIES:
        if isinstance(priority, str) and priority == known:
            return known
    raise RequestError(f"priority is {priority!a:.60}; give {' or '.join(map(repr, PRIORITIES))}")


def choose_decode_threads(
    program: CpuProgram,
    kv_layout: KVLayout,
    weight_bytes: int,
    progress: ProgressCallback | None = None,
    *,
    measure_again: bool = False,
    may_measure: bool = True,
) -> None:
    """Set the program's `decode_threads` to the fewest that decode within 3 % of the fastest.

    Where other programs are busy and nothing is known, that is a first guess, and the program measures on.

    measure_again: whatever earlier loads have found. may_measure: else what one of them has found, or all.
    """
    if program.num_threads == 1:
        return
    # Shared by models of about the same size.
    key = f"{program.num_threads} {round(2 * float(np.log2(max(weight_bytes, 1))))}"
    cached, loads = (None, 0) if measure_again else cached_count(key, program.num_threads)
    if cached is not None and (loads >= _ENOUGH_LOADS or not may_measure):
        program.decode_threads = cached
    if cached is not None and loads >= _ENOUGH_LOADS or not may_measure:
        return
    stage = Stage(progress, STAGE)
    program.adapts = False
    try:
        timed = time_in_turns(_token_runs(program, kv_layout, stage), told=stage)
    finally:
        program.adapts = True
    best = min(timed.seconds.values())
    found = min(count for count, value in timed.seconds.items() if value * _LEAST_GAIN <= best)
    if timed.is_calm:
        agreeing = loads + 1 if found == cached else 1
        put_measurement("threads", key, load=timed.load, decode_threads=found, loads=agreeing)
    elif cached is not None:
        found = cached
    program.decode_threads, program.is_measured = found, timed.is_calm or cached is not None


def _token_runs(program: CpuProgram, kv_layout: KVLayout, stage: Stage) -> dict[int, Callable[[], object]]:
    """For each number of threads a function that decodes one token at the start of a sequence; each was run once."""
    page_bytes = kv_layout.page_bytes + kv_layout.windowed_bytes
    memory = aligned_zeros(page_bytes + 2 * kv_layout.state_bytes)
    page = np.array([address(memory)], np.int64)
    state = None
    if kv_layout.states:
        # The token after another one, so that states are read as well as written.
        source = address(memory) + page_bytes
        state = StateStep(source, [(1, source + kv_layout.state_bytes)])
    segment = Segment(0, 1, page, windowed_addresses=page + kv_layout.page_bytes, state=state)
    batch = Batch(np.zeros(1, np.int32), [segment], np.zeros(1, np.int32))

    def run(count: int) -> None:
        # Referenced here, so that the page is alive during the runs.
        assert memory.size >= kv_layout.page_bytes
        program.decode_threads = count
        run_of[count](batch)

    counts = steps_of(program.num_threads, program.performance_cores)
    run_of = {count: checked_run(program, stage) for count in counts}
    for count in counts:
        stage(0, 1)
        run(count)
    return {count: lambda count=count: run(count) for count in counts}  # type: ignore[misc]


def cached_count(key: str, most: int) -> tuple[int | None, int]:
    """The cached count, or None, and how many loads in a row agreed on it."""
    record = get_measurement("threads", key) or {}
    try:
        count, loads = int(record["decode_threads"]), int(record["loads"])
    except (KeyError, ValueError, TypeError, ArithmeticError):
        return None, 0
    return (count, max(0, loads)) if 1 <= count <= most else (None, 0)
