"""What checking drafts costs: seconds of a step by its number of rows, estimated from the steps that are really taken.

What was measured while the model was loaded is only where estimates begin. A row count's estimate is the lower median
of its last three times, over the time of plain steps around them, so that neither one interruption nor one busy hour
lasts; one that was not observed lately sinks until it is worth another try.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from localinfer.models.timing import time_in_turns

MAX_DEPTH = 15
"""Most tokens drafted at once: 16 rows are verified."""

_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
_FEW_MEASURED_ROWS = (1, 2, 4, 8, 16)
_SLOW_SECONDS = 0.03
"""A pass that takes longer is measured at few sizes, so that a first load of a large model stays short."""
_SAMPLES = 3
_LEAST_RATIO = 0.9
"""More rows never take less than one: what says so compares two times that are not alike."""
_FRESH_STEPS = 64
_HALF_LIFE_STEPS = 512
"""Steps in which an estimate that nothing confirms is halved: optimism costs one round, and finds out."""


class VerificationCosts:
    """Seconds of one step by number of rows; begins with what was measured, and follows what steps take.

    num_steps: steps taken so far, plain ones included; whoever takes them counts.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        """seconds[n - 1]: of n rows, from 1 to the most that are verified at once, at most MAX_DEPTH + 1."""
        assert 1 <= len(seconds) <= MAX_DEPTH + 1, "one time per number of rows"
        self.num_steps = 0
        first = max(seconds[0], 1e-9)
        self._plain_seconds = first
        ratios = itertools.accumulate((max(1.0, value / first) for value in seconds), max)
        self._rows = [_RowCosts(ratio) for ratio in ratios]
        self._curve: list[float] = []
        self._bounds: list[float] = []
        self._next_update = 0

    @property
    def max_depth(self) -> int:
        """Most tokens that can be verified after the one that is certain."""
        return len(self._rows) - 1

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a step; infinite beyond what is verified at once."""
        if self.num_steps >= self._next_update:
            self._update()
        return self._plain_seconds * self._curve[num_rows - 1] if num_rows <= len(self._rows) else math.inf

    def most_seconds(self, num_rows: int) -> float:
        """What a step may take at worst, by what was observed of late; infinite beyond what is verified at once."""
        if self.num_steps >= self._next_update:
            self._update()
        return self._plain_seconds * self._bounds[num_rows - 1] if num_rows <= len(self._rows) else math.inf

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """Take what steps without drafts take at present; num_rows: of so many streams, one row each."""
        if num_rows <= len(self._rows):
            self._plain_seconds = seconds * self._plain_seconds / self.seconds(num_rows)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Follow what a step with drafts took, its drafting left out."""
        ratio = seconds / self._plain_seconds
        if not 1 < num_rows <= len(self._rows) or ratio < _LEAST_RATIO:
            return
        self._rows[num_rows - 1].observe(ratio, self.num_steps)
        self._next_update = 0

    def _update(self) -> None:
        """Make the curve of ratios to a plain step anew: it never falls, and what is not fresh sinks."""
        curve, bounds, excess, extra = [1.0], [1.0], 1.0, 0.0
        caps = self._caps()
        for num_rows, costs in enumerate(self._rows[1:], 2):
            ratio, age = costs.ratio, self.num_steps - costs.last_step
            # A row more never costs more than the rows before it do on average.
            growth = num_rows / (num_rows - 1)
            if len(costs.samples) < 2:
                ratio = min([1.0 + (costs.prior - 1.0) * excess + extra, *costs.samples])
            else:
                # Where rows are dearer, or less dear, than was measured beforehand, those above them may well be, too.
                extra = max(0.0, ratio - costs.prior)
                excess = min(1.0, max(0.0, ratio - 1.0) / (costs.prior - 1.0)) if costs.prior > 1.0 else excess
            if age >= _FRESH_STEPS:
                ratio = ratio * 0.5 ** ((age - _FRESH_STEPS) / _HALF_LIFE_STEPS)
                ratio = min(ratio, curve[-1] * growth, caps[num_rows - 1])
            curve.append(max(ratio, curve[-1]))
            bounds.append(max(min(bounds[-1] * growth, caps[num_rows - 1]), bounds[-1]))
        self._curve, self._bounds = curve, bounds
        self._next_update = self.num_steps + _FRESH_STEPS // 2

    def _caps(self) -> list[float]:
        """What so many rows cost at most, because as many, or more, were observed of late to cost that."""
        caps, cap = [], math.inf
        for costs in reversed(self._rows):
            if costs.samples and self.num_steps - costs.last_step < _HALF_LIFE_STEPS:
                cap = min(cap, _lower_median(costs.samples))
            caps.append(cap)
        return caps[::-1]


class _RowCosts:
    """What steps of one number of rows take, over plain ones: what was measured beforehand, and what was observed."""

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.samples: deque[float] = deque(maxlen=_SAMPLES)
        # What was measured at another time is trusted as far as a step that was taken a while ago.
        self.last_step = -_FRESH_STEPS

    @property
    def ratio(self) -> float:
        """The estimate; a single observation may only lower it."""
        if not self.samples:
            return self.prior
        return min(self.samples[0], self.prior) if len(self.samples) == 1 else _lower_median(self.samples)

    def observe(self, ratio: float, step: int) -> None:
        if step - self.last_step > _HALF_LIFE_STEPS and self.samples:
            believed = self.ratio
            self.samples.clear()
            self.samples.append(believed)
        self.samples.append(ratio)
        self.last_step = step


def _lower_median(samples: Sequence[float]) -> float:
    return sorted(samples)[(len(samples) - 1) // 2]


def measure_costs(run: Callable[[int], object], most_rows: int) -> tuple[list[float], bool]:
    """Time `run(num_rows)`, one forward pass, for 1 to at most MAX_DEPTH + 1 rows; some sizes are interpolated.

    Returns: seconds by rows, and whether repetitions agree, as they do on a machine that does nothing else.
    """
    most_rows = min(most_rows, MAX_DEPTH + 1)
    run(1)
    first = time_in_turns({1: lambda: run(1)}, repetitions=2).seconds[1]
    chosen = _MEASURED_ROWS if first < _SLOW_SECONDS else _FEW_MEASURED_ROWS
    sizes = sorted({size for size in chosen if size < most_rows} | {1, most_rows})
    timed = time_in_turns({size: lambda size=size: run(size) for size in sizes})  # type: ignore[misc]
    seconds = [_interpolated(timed.seconds, num_rows) for num_rows in range(1, most_rows + 1)]
    # More rows never take less, whatever the clock says.
    return list(itertools.accumulate(seconds, max)), timed.is_calm


def _interpolated(measured: dict[int, float], num_rows: int) -> float:
    below = max(size for size in measured if size <= num_rows)
    above = min(size for size in measured if size >= num_rows)
    if below == above:
        return measured[below]
    share = (num_rows - below) / (above - below)
    return measured[below] * (1 - share) + measured[above] * share
