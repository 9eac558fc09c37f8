"""Timings on a machine that may be busy, and a cache of measurements."""

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
"""Time limit after which slow computations are repeated fewer times."""
_QUICK_SECONDS = 0.01
_CALM_SPREAD = 1.15
"""Largest ratio of the median to the least time on an idle machine."""
_CALM_SHARE = 0.75
"""Share of all times that lie less than twice as far above it there: medians miss work in a third of the time."""
_KEPT_SECONDS = 30 * 24 * 3600
_MAX_BYTES = 1 << 16

Key = TypeVar("Key")

Told = Callable[[int, int], None]
"""Called before every run that is timed, with the runs done and those planned; what it raises ends the measurement."""


@dataclass(frozen=True)
class Timings(Generic[Key]):
    """seconds: the least time of each. is_calm: whether repetitions agree well enough to be cached."""

    seconds: dict[Key, float]
    is_calm: bool


def time_in_turns(
    runs: Mapping[Key, Callable[[], object]], *, repetitions: int = _REPETITIONS, told: Told | None = None
) -> Timings[Key]:
    """Time computations in a round robin, so that a busy moment affects all alike.

    Other programs only add to a time, so the least counts; if the medians are well above it, or a quarter of all times
    far above it, the machine was busy. A fast computation is run once more before it is timed, because sleeping threads
    take a millisecond to wake up, and in use none sleeps between two runs.
    """
    now = time.perf_counter
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
    return Timings(least, is_calm)


def get_measurement(kind: str, key: str) -> dict[str, Any] | None:
    """The values of `put_measurement` under this kind and key, for a month; None if missing or invalid."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        record = json.loads(read_bounded(path, _MAX_BYTES))
        return record if 0 <= time.time() - float(record["measured_at"]) < _KEPT_SECONDS else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def put_measurement(kind: str, key: str, **values: Any) -> None:
    """Cache JSON-serializable values beside the compiled kernels; errors of the disk are ignored."""
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
