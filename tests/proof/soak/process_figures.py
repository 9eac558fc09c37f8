"""What a process holds of the system: memory, open files, threads; and whether memory grows."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_QUIET_DRIFT_BYTES = 8 << 20
"""What a process may grow by over a run without a trend that can be told from noise."""
_ERRORS = 3.0
_BLOCKS = 12
"""Parts of a run whose means a line is fitted to, each longer than models stay loaded."""


class Figures(NamedTuple):
    """Of one process at a time: bytes, and numbers of files and threads.

    anonymous: memory that is no file's, which no other process has a share in. tracked: what the server says it holds.
    """

    seconds: float
    rss: int
    pss: int
    anonymous: int
    files: int
    threads: int
    tracked: int = 0


def figures(process: int, tracked: int = 0) -> Figures:
    """What a process holds now; Linux only."""
    folder = Path(f"/proc/{process}")
    sizes = {}
    for line in (folder / "smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss", "Anonymous"):
            sizes[name] = int(rest.split()[0]) << 10
    files, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
    return Figures(time.monotonic(), sizes["Rss"], sizes["Pss"], sizes["Anonymous"], files, threads, tracked)


@dataclass(frozen=True)
class Trend:
    """A line through values over time: growth per hour with its standard error, and how much it is over the run.

    Values of neighbouring moments depend on each other, for as long as models stay loaded: the line is through means of
    _BLOCKS parts of the run, and the error counts what neighbouring means still have in common.
    """

    mean: float
    per_hour: float
    error_per_hour: float
    drift: float
    drift_error: float

    @property
    def is_noise(self) -> bool:
        """Whether the growth is small, or cannot be told from noise."""
        return self.drift <= max(_ERRORS * self.drift_error, _QUIET_DRIFT_BYTES)

    def __str__(self) -> str:
        mega = float(1 << 20)
        return (
            f"mean {self.mean / mega:.1f} MiB, {self.per_hour / mega:+.2f} +- {self.error_per_hour / mega:.2f} MiB "
            f"per hour ({self.drift / mega:+.2f} +- {self.drift_error / mega:.2f} MiB over the run)"
        )


def trend(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """Fit a line by least squares to means of neighbours; its error from the residuals, with their autocorrelation."""
    length = seconds[-1] - seconds[0]
    size = max(1, len(values) // _BLOCKS)
    starts = range(0, len(values) - size + 1, size)
    seconds, values = ([sum(row[start : start + size]) / size for start in starts] for row in (seconds, values))
    count = len(seconds)
    assert count >= 3, "a line and its error need three values"
    middle, mean = sum(seconds) / count, sum(values) / count
    spread = sum((one - middle) ** 2 for one in seconds)
    slope = sum((one - middle) * (value - mean) for one, value in zip(seconds, values, strict=True)) / spread
    left = [value - mean - slope * (one - middle) for one, value in zip(seconds, values, strict=True)]
    squares = sum(one * one for one in left)
    together = sum(one * other for one, other in zip(left, left[1:], strict=False))
    correlation = min(max(together / squares, 0.0), 0.98) if squares else 0.0
    effective = max(3.0, count * (1 - correlation) / (1 + correlation))
    error = math.sqrt(squares / (effective - 2) / spread * count / effective) if effective > 2 else math.inf
    return Trend(mean, 3600 * slope, 3600 * error, slope * length, error * length)
