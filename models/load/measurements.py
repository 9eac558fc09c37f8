"""Measurements on a machine that may be busy: times taken in turns, and a cache of what was measured before."""

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from localinfer.files import read_bounded, write_all, write_atomically
from localinfer.kernels.jit.object_cache import CACHE_FOLDER

_REPETITIONS = 7
_LEAST_REPETITIONS = 3
_PATIENCE_SECONDS = 0.6
"""Slow computations are repeated fewer times once all of them have taken this long."""
_QUICK_SECONDS = 0.01
_CALM_SPREAD = 1.15
"""How far the median may lie above the least time where nothing else runs."""
_CALM_SHARE = 0.75
"""Share of all times that lie less than twice as far above it there: medians miss work in a third of the time."""
_KEPT_SECONDS = 30 * 24 * 3600
_MAX_BYTES = 1 << 16

Key = TypeVar("Key")


@dataclass(frozen=True)
class Timings(Generic[Key]):
    """seconds: the least time of each. is_calm: whether repetitions agree well enough to be kept for another day."""

    seconds: dict[Key, float]
    is_calm: bool


def time_in_turns(runs: Mapping[Key, Callable[[], object]], *, repetitions: int = _REPETITIONS) -> Timings[Key]:
    """Run all once, then all again, so that a moment in which the machine is busy slows every one of them.

    Another program's work only ever adds to a time, so the least counts; where the medians lie well above it, or a
    quarter of all times far above it, the machine was busy. What is quick is run once more before it is timed: threads
    that slept through the runs before it take a millisecond to wake up, and in use none sleeps between two runs of a
    kind.
    """
    now = time.perf_counter
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    began = now()
    for repetition in range(repetitions):
        if repetition >= _LEAST_REPETITIONS and now() - began > _PATIENCE_SECONDS:
            break
        for key, run in runs.items():
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
    return Timings(least, is_calm)


def get_measurement(kind: str, key: str) -> dict[str, Any] | None:
    """What `put_measurement` was given under this kind and key, for a month; None for nothing sound."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        record = json.loads(read_bounded(path, _MAX_BYTES))
        return record if 0 <= time.time() - float(record["measured_at"]) < _KEPT_SECONDS else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def put_measurement(kind: str, key: str, **values: Any) -> None:
    """Cache values that JSON can hold beside the kernels they were measured with.

    A disk that is full only costs measuring again.
    """
    path = _path(kind, key)
    if path is None:
        return
    record = json.dumps({**values, "measured_at": time.time()}).encode()
    with contextlib.suppress(OSError):
        write_atomically(path, lambda file: write_all(file, record))


def _path(kind: str, key: str) -> Path | None:
    if CACHE_FOLDER is None:
        return None
    return CACHE_FOLDER / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
