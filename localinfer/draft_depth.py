"""How many tokens to draft: the depth of most expected tokens per second, from what was measured, and 0 is a choice.

A round of depth k computes k + 1 rows and yields 1 + a1 + a1 a2 + ... tokens, a_i the chance that the i-th drafted
token is accepted after those before it. What rows cost on this machine is measured (`VerificationCosts`); the chances
are running estimates per kind of draft (`Acceptance`), kept across generations.
"""

import statistics
import time
from collections.abc import Callable, Sequence

MAX_DEPTH = 15
"""Most tokens drafted at once: 16 rows are verified."""

_PRIOR_WEIGHT = 1.0
"""Tokens' worth of belief in a chance before anything was counted."""
_MEMORY = 0.98
"""Share of every count that is left after another draft of its kind: about the last 50 count."""
_FIRST_PROBE, _LAST_PROBE = 4, 512
"""Rounds without a draft before the next probe: doubled after each that yields nothing."""
_LEAST_GAIN = 1.01
"""Expected speed over plain decoding that a draft must promise, for estimates are noisy."""
_COST_MEMORY = 0.95
_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
_REPETITIONS = 3


class Acceptance:
    """Running chance, per place in a draft of one kind, that its token is accepted after those before it."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._accepted = [0.0] * MAX_DEPTH
        self._tried = [0.0] * MAX_DEPTH
        self.rounds_to_probe = 0
        self._next_probe = _FIRST_PROBE

    def chances(self) -> list[float]:
        """The estimates; a place that was hardly tried leans on the one before it."""
        chances = []
        belief = self._prior
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            belief = (accepted + _PRIOR_WEIGHT * belief) / (tried + _PRIOR_WEIGHT)
            chances.append(belief)
        return chances

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified draft: the tokens accepted, and the first that was not."""
        for index in range(MAX_DEPTH):
            is_tried = index < num_drafted and index <= num_accepted
            self._accepted[index] = self._accepted[index] * _MEMORY + (is_tried and index < num_accepted)
            self._tried[index] = self._tried[index] * _MEMORY + is_tried
        if num_accepted:
            self._next_probe = _FIRST_PROBE
            self.rounds_to_probe = 0

    def is_probe_due(self) -> bool:
        """Ask once for each round that drafts nothing: whether to try one all the same. Waits double up to 512."""
        if self.rounds_to_probe > 0:
            self.rounds_to_probe -= 1
            return False
        self.rounds_to_probe = self._next_probe
        self._next_probe = min(2 * self._next_probe, _LAST_PROBE)
        return True


class VerificationCosts:
    """Seconds of one forward pass by number of rows: measured once, then followed as passes are timed."""

    def __init__(self, seconds: Sequence[float]) -> None:
        """seconds[n - 1]: of n rows, for 1 to MAX_DEPTH + 1."""
        assert len(seconds) == MAX_DEPTH + 1, "one time per number of rows"
        self._seconds = list(seconds)

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a pass; at most MAX_DEPTH + 1 rows are told apart."""
        return self._seconds[min(num_rows, MAX_DEPTH + 1) - 1]

    def observe(self, num_rows: int, seconds: float) -> None:
        """Follow what a pass took: contexts grow, and machines get warm and busy.

        What holds for one number of rows holds for all in part, so that plain passes and drafts stay comparable.
        """
        if not 1 <= num_rows <= MAX_DEPTH + 1:
            return
        # A pass that was interrupted says nothing about the next.
        ratio = min(max(seconds / self._seconds[num_rows - 1], 0.5), 2.0)
        shared = 1.0 + (ratio - 1.0) * (1.0 - _COST_MEMORY) / 2
        for index in range(MAX_DEPTH + 1):
            self._seconds[index] *= shared
        self._seconds[num_rows - 1] *= 1.0 + (ratio - 1.0) * (1.0 - _COST_MEMORY) / 2


def best_depth(
    chances: Sequence[float],
    costs: VerificationCosts,
    most: int,
    *,
    seconds_per_token: float = 0.0,
    seconds_per_draft: float = 0.0,
    other_rows: int = 0,
) -> tuple[int, float]:
    """Return the depth of most expected tokens per second, up to `most`, and how many times plain speed that is.

    seconds_per_token, seconds_per_draft: what drafting itself costs. other_rows: rows of other sequences in the same
    pass, which make every further row dearer, so that depth shrinks as a batch grows.
    """
    plain = costs.seconds(other_rows + 1)
    best, best_rate = 0, _LEAST_GAIN
    tokens = chance = 1.0
    for depth in range(1, min(most, MAX_DEPTH) + 1):
        chance *= chances[depth - 1]
        tokens += chance
        seconds = costs.seconds(other_rows + depth + 1) + seconds_per_draft + depth * seconds_per_token
        rate = tokens * plain / seconds
        if rate > best_rate:
            best, best_rate = depth, rate
    return best, best_rate if best else 1.0


def measure_costs(run: Callable[[int], None]) -> list[float]:
    """Time `run(num_rows)`, one forward pass, for 1 to MAX_DEPTH + 1 rows; some sizes are interpolated."""
    measured: dict[int, float] = {}
    for num_rows in _MEASURED_ROWS:
        run(num_rows)
        samples = []
        for _ in range(_REPETITIONS):
            began = time.perf_counter()
            run(num_rows)
            samples.append(time.perf_counter() - began)
        measured[num_rows] = statistics.median(samples)
    return [_interpolated(measured, num_rows) for num_rows in range(1, MAX_DEPTH + 2)]


def _interpolated(measured: dict[int, float], num_rows: int) -> float:
    below = max(size for size in measured if size <= num_rows)
    above = min(size for size in measured if size >= num_rows)
    if below == above:
        return measured[below]
    share = (num_rows - below) / (above - below)
    return measured[below] * (1 - share) + measured[above] * share
