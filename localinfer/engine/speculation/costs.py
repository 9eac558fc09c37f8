"""What a step of so many rows costs.

What was measured at load time is only the prior. A row count's estimate is the lower median of its last three times,
over the time of plain steps around them, so that neither an interruption nor a busy period lasts; one that was not
observed lately decays until it is worth another try.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localinfer.models.load.measurements import time_in_turns
from localinfer.types import Told

MAX_DRAFT_TOKENS = 15
"""Most tokens drafted at once: 16 rows are verified."""

_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
_FEW_MEASURED_ROWS = (1, 2, 4, 8, 16)
_SLOW_SECONDS = 0.03
"""A pass that takes longer is measured at few sizes, so that a first load of a large model stays short."""
_SAMPLES = 3
_LEAST_RATIO = 0.9
"""More rows never take less than one: a smaller ratio compares times of different load."""
_NOTICEABLE = 0.02
"""Plain steps by which an estimate has to change for the curve to be recomputed, which takes 10 us."""
_FRESH_STEPS = 64
_HALF_LIFE_STEPS = 512
"""Steps in which an unconfirmed estimate is halved: optimism costs one round, and corrects itself."""


class RecentMedian:
    """The lower median of the last values; None before there is any."""

    def __init__(self, most: int) -> None:
        self.values: deque[float] = deque(maxlen=most)
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.values.append(value)
        self.value = sorted(self.values)[(len(self.values) - 1) // 2]

    def restart(self, values: Sequence[float]) -> None:
        """Forget all but these, at least one."""
        self.values.clear()
        for value in values:
            self.add(value)


class VerificationCosts:
    """Seconds of one step by number of rows: a measured prior, updated by what steps take.

    num_steps: steps taken so far, plain ones included; counted by `DraftFloor`.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        """seconds[n - 1]: of n rows, from 1 to the most that are verified at once, at most MAX_DRAFT_TOKENS + 1."""
        assert 1 <= len(seconds) <= MAX_DRAFT_TOKENS + 1, "one time per number of rows"
        self.num_steps = 0
        first = max(seconds[0], 1e-9)
        self._plain_seconds = first
        self._priors = list(itertools.accumulate((max(1.0, value / first) for value in seconds), max))
        self._observed = [RecentMedian(_SAMPLES) for _ in seconds]
        # The prior is trusted as far as a step that was taken a while ago.
        self._last_steps = [-_FRESH_STEPS] * len(seconds)
        self._curve: list[float] = []
        self._bounds: list[float] = []
        self._next_update = 0

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that can be verified after the one that is certain."""
        return len(self._priors) - 1

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a step; infinite beyond what is verified at once."""
        return self._plain_seconds * self.ratios()[num_rows - 1] if num_rows <= len(self._priors) else math.inf

    def ratios(self) -> Sequence[float]:
        """Expected seconds of steps of 1, 2, 3 ... rows over those of a plain one."""
        if self.num_steps >= self._next_update:
            self._update()
        return self._curve

    def most_seconds(self, num_rows: int) -> float:
        """What a step may take at worst, by what was observed of late; infinite beyond what is verified at once."""
        self.ratios()
        return self._plain_seconds * self._bounds[num_rows - 1] if num_rows <= len(self._priors) else math.inf

    def is_known(self, num_rows: int) -> bool:
        """Whether steps of so many rows were observed often enough that one more says little."""
        return num_rows <= len(self._priors) and len(self._observed[num_rows - 1].values) > 1

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """Take what steps without drafts take at present; num_rows: of so many streams, one row each."""
        if num_rows <= len(self._priors):
            self._plain_seconds = seconds * self._plain_seconds / self.seconds(num_rows)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Follow what a step with drafts took, its drafting left out."""
        ratio = seconds / self._plain_seconds
        if not 1 < num_rows <= len(self._priors) or ratio < _LEAST_RATIO:
            return
        index = num_rows - 1
        observed = self._observed[index]
        if self.num_steps - self._last_steps[index] > _HALF_LIFE_STEPS and observed.value is not None:
            observed.restart([observed.value])
        observed.add(ratio)
        self._last_steps[index] = self.num_steps
        if abs((observed.value or 0.0) - self.ratios()[index]) > _NOTICEABLE:
            self._next_update = 0

    def _update(self) -> None:
        """Recompute the curve of ratios to a plain step: it never falls, and stale estimates decay."""
        curve, bounds, scale, now = [1.0], [1.0], 1.0, self.num_steps
        caps = self._caps()
        for index in range(1, len(caps)):
            prior, observed, age = self._priors[index], self._observed[index], now - self._last_steps[index]
            # One row more never costs more than the rows before it do on average.
            growth = (index + 1) / index
            ratio = prior * scale
            if observed.value is not None:
                if len(observed.values) > 1:
                    # Where rows cost more, or less, than the prior says, larger counts may, too.
                    ratio = observed.value
                    scale = ratio / prior
                else:
                    # A single observation may only lower it.
                    ratio = min(ratio, observed.value)
            cap = caps[index]
            if age >= _FRESH_STEPS:
                ratio = min(ratio * 0.5 ** ((age - _FRESH_STEPS) / _HALF_LIFE_STEPS), curve[-1] * growth)
            curve.append(max(min(ratio, cap), curve[-1]))
            bounds.append(max(min(bounds[-1] * growth, cap), bounds[-1]))
        self._curve, self._bounds = curve, bounds
        self._next_update = now + _FRESH_STEPS // 2

    def _caps(self) -> list[float]:
        """What so many rows cost at most, because as many, or more, were observed of late to cost that."""
        caps, cap, oldest = [], math.inf, self.num_steps - _HALF_LIFE_STEPS
        for observed, last_step in zip(reversed(self._observed), reversed(self._last_steps), strict=True):
            if observed.value is not None and observed.value < cap and last_step > oldest:
                cap = observed.value
            caps.append(cap)
        return caps[::-1]


class MeasuredCosts(NamedTuple):
    """seconds: of passes over 1, 2, ... rows. is_calm, load: of the machine meanwhile, see `Timings`."""

    seconds: list[float]
    is_calm: bool
    load: float | None


def measure_costs(run: Callable[[int], object], most_rows: int, told: Told | None = None) -> MeasuredCosts:
    """Time `run(num_rows)`, one forward pass, for 1 to at most MAX_DRAFT_TOKENS + 1 rows; some sizes are interpolated.

    told: as in `time_in_turns`. Whether repetitions agree tells a machine that does nothing else.
    """
    most_rows = min(most_rows, MAX_DRAFT_TOKENS + 1)
    if told is not None:
        told(0, 1)
    run(1)
    first = time_in_turns({1: lambda: run(1)}, repetitions=2).seconds[1]
    chosen = _MEASURED_ROWS if first < _SLOW_SECONDS else _FEW_MEASURED_ROWS
    sizes = sorted({size for size in chosen if size < most_rows} | {1, most_rows})
    timed = time_in_turns({size: lambda size=size: run(size) for size in sizes}, told=told)  # type: ignore[misc]
    seconds = [_interpolated(timed.seconds, num_rows) for num_rows in range(1, most_rows + 1)]
    # More rows never take less, whatever the clock says.
    return MeasuredCosts(list(itertools.accumulate(seconds, max)), timed.is_calm, timed.load)


def _interpolated(measured: dict[int, float], num_rows: int) -> float:
    below = max(size for size in measured if size <= num_rows)
    above = min(size for size in measured if size >= num_rows)
    if below == above:
        return measured[below]
    share = (num_rows - below) / (above - below)
    return measured[below] * (1 - share) + measured[above] * share
