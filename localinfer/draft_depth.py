"""How many tokens to draft: the depth of most expected tokens per second, from what was measured, and 0 is a choice.

A round of depth k computes k + 1 rows and yields 1 + a1 + a1 a2 + ... tokens, a_i the chance that the i-th drafted
token is accepted after those before it. What rows cost on this machine is measured (`VerificationCosts`); the chances
are running estimates per kind of draft (`Acceptance`), kept across generations.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence

MAX_DEPTH = 15
"""Most tokens drafted at once: 16 rows are verified."""

_PRIOR_WEIGHT = 3.0
"""Tokens' worth of belief in a chance before anything was counted."""
_MEMORY = 0.985
"""Share of every count that is left after another draft of its kind: about the last 67 count."""
_FIRST_PROBE, _LAST_PROBE = 4, 512
"""Rounds without a draft before the next probe: doubled after each that yields nothing."""
_LEAST_GAIN = 1.01
"""Expected speed over plain decoding that a draft must promise, for estimates are noisy."""
_COST_STEP = 0.025
"""Share of a surprise by which the cost of all numbers of rows follows it; that of this number moves further."""
_LARGEST_COST_STEP = 0.25
_PLAIN_EVERY = 64
_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
_REPETITIONS = 5
_PATIENCE_SECONDS = 0.06
"""Slow models are timed fewer times per size, so that a first load of theirs stays short."""


class Acceptance:
    """Running chance, per place in a draft of one kind, that its token is accepted after those before it."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._accepted = [0.0] * MAX_DEPTH
        self._tried = [0.0] * MAX_DEPTH
        self._rounds_to_probe = 0
        self._next_probe = _FIRST_PROBE

    def chances(self) -> list[float]:
        """The estimates; a place that was hardly tried leans on the one before it.

        Once a token was right the draft is likelier to be on the way: in prose and code the second chance was close to
        the square root of the first, whatever that was, and later ones to the second.
        """
        chances = []
        belief = self._prior
        for index, (accepted, tried) in enumerate(zip(self._accepted, self._tried, strict=True)):
            expected = math.sqrt(belief) if index == 1 else belief
            belief = (accepted + _PRIOR_WEIGHT * expected) / (tried + _PRIOR_WEIGHT)
            chances.append(belief)
        return chances

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified draft: the tokens accepted, and the first that was not."""
        for index in range(MAX_DEPTH):
            is_tried = index < num_drafted and index <= num_accepted
            self._accepted[index] = self._accepted[index] * _MEMORY + (is_tried and index < num_accepted)
            self._tried[index] = self._tried[index] * _MEMORY + is_tried

    def stop_probing(self) -> None:
        """Note that this kind promises a gain, so that the next time it does not, probes begin anew."""
        self._next_probe = _FIRST_PROBE
        self._rounds_to_probe = 0

    def is_probe_due(self) -> bool:
        """Ask once for each round that drafts nothing: whether to try one all the same. Waits double up to 512."""
        if self._rounds_to_probe > 0:
            self._rounds_to_probe -= 1
            return False
        self._rounds_to_probe = self._next_probe
        self._next_probe = min(2 * self._next_probe, _LAST_PROBE)
        return True


class VerificationCosts:
    """Seconds of one forward pass by number of rows: measured once, then followed as passes are timed."""

    def __init__(self, seconds: Sequence[float]) -> None:
        """seconds[n - 1]: of n rows, from 1 to the most that are verified at once, at most MAX_DEPTH + 1."""
        assert 1 <= len(seconds) <= MAX_DEPTH + 1, "one time per number of rows"
        self._shares = list(seconds)
        self._scale = 1.0
        self._num_observed = 0
        self._last_observed = [0] * len(self._shares)

    @property
    def max_depth(self) -> int:
        """Most tokens that can be verified after the one that is certain."""
        return len(self._shares) - 1

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a pass; infinite beyond what is verified at once."""
        return self._scale * self._shares[num_rows - 1] if num_rows <= len(self._shares) else math.inf

    def observe(self, num_rows: int, seconds: float) -> None:
        """Follow what a pass took: contexts grow, and machines get warm and busy.

        What holds for one number of rows holds for all in part. A number that was not seen for long moves further.
        """
        # A pass that was interrupted says nothing about the next.
        change = min(max(seconds / self.seconds(num_rows), 0.5), 2.0) - 1.0
        self._num_observed += 1
        unseen = self._num_observed - self._last_observed[num_rows - 1]
        self._last_observed[num_rows - 1] = self._num_observed
        self._scale *= 1.0 + change * _COST_STEP
        self._shares[num_rows - 1] *= 1.0 + change * min(_COST_STEP * unseen, _LARGEST_COST_STEP)

    @property
    def is_plain_due(self) -> bool:
        """Whether a pass without a draft should be made, since none was for so long that its cost is a guess."""
        return self._num_observed - self._last_observed[0] >= _PLAIN_EVERY


def best_depth(
    chances: Sequence[float],
    costs: VerificationCosts,
    most: int,
    *,
    seconds_per_token: float = 0.0,
    seconds_per_draft: float = 0.0,
    other_rows: int = 0,
    other_tokens: int = 0,
) -> tuple[int, float]:
    """Return the depth of most expected tokens per second, up to `most`, and how many times plain speed that is.

    seconds_per_token, seconds_per_draft: what drafting itself costs. other_rows: rows of other sequences in the same
    pass, and other_tokens what they yield; the pass takes longer for those too, so depth shrinks as a batch grows.
    """
    plain = costs.seconds(other_rows + 1)
    best, best_rate = 0, _LEAST_GAIN
    tokens = chance = 1.0
    for depth in range(1, min(most, costs.max_depth - other_rows) + 1):
        chance *= chances[depth - 1]
        tokens += chance
        seconds = costs.seconds(other_rows + depth + 1) + seconds_per_draft + depth * seconds_per_token
        rate = (other_tokens + tokens) / (other_tokens + 1) * plain / seconds
        if rate > best_rate:
            best, best_rate = depth, rate
    return best, best_rate if best else 1.0


def measure_costs(run: Callable[[int], object], most_rows: int) -> list[float]:
    """Time `run(num_rows)`, one forward pass, for 1 to at most MAX_DEPTH + 1 rows; some sizes are interpolated."""
    most_rows = min(most_rows, MAX_DEPTH + 1)
    run(1)
    measured: dict[int, float] = {}
    for num_rows in sorted({size for size in _MEASURED_ROWS if size < most_rows} | {1, most_rows}):
        samples = [_timed(run, num_rows)]
        while len(samples) < _REPETITIONS and sum(samples) < _PATIENCE_SECONDS:
            samples.append(_timed(run, num_rows))
        measured[num_rows] = min(samples)
    seconds = [_interpolated(measured, num_rows) for num_rows in range(1, most_rows + 1)]
    # More rows never take less, whatever the clock says.
    return list(itertools.accumulate(seconds, max))


def _timed(run: Callable[[int], object], num_rows: int) -> float:
    began = time.perf_counter()
    run(num_rows)
    return time.perf_counter() - began


def _interpolated(measured: dict[int, float], num_rows: int) -> float:
    below = max(size for size in measured if size <= num_rows)
    above = min(size for size in measured if size >= num_rows)
    if below == above:
        return measured[below]
    share = (num_rows - below) / (above - below)
    return measured[below] * (1 - share) + measured[above] * share
