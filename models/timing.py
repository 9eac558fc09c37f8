"""Times of several computations on a machine that may be busy: taken in turns, with a word on whether they agree."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_REPETITIONS = 7
_LEAST_REPETITIONS = 3
_PATIENCE_SECONDS = 0.6
"""Slow computations are repeated fewer times once all of them have taken this long."""
_QUICK_SECONDS = 0.01
_CALM_SPREAD = 1.15
"""How far the median may lie above the least time where nothing else runs."""

Key = TypeVar("Key")


@dataclass(frozen=True)
class Timings(Generic[Key]):
    """seconds: the least time of each. is_calm: whether repetitions agree well enough to be kept for another day."""

    seconds: dict[Key, float]
    is_calm: bool


def time_in_turns(
    runs: Mapping[Key, Callable[[], object]],
    *,
    repetitions: int = _REPETITIONS,
) -> Timings[Key]:
    """Run all once, then all again, so that a moment in which the machine is busy meets every one of them.

    Another program's work only ever adds to a time, so the least counts; where the medians lie well above it, somebody
    was at work, perhaps all the time. What is quick is run once more before it is timed: threads that slept through the
    runs before it take a millisecond to wake up, and in use none sleeps between two runs of a kind.
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
    least = {key: min(values) for key, values in samples.items()}
    spreads = [statistics.median(values) / max(least[key], 1e-9) for key, values in samples.items()]
    return Timings(least, statistics.median(spreads) <= _CALM_SPREAD and max(spreads) <= 2 * _CALM_SPREAD)
