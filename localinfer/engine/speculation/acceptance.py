"""How likely drafted tokens are accepted, and how many to draft: 0 is a choice.

A round with k drafted tokens computes k + 1 rows and yields 1 + a1 + a1 a2 + ... tokens, a_i the probability that the
i-th drafted token is accepted after those before it. Those probabilities are running estimates per kind of draft, kept
across generations. The length of most expected tokens per second is taken.
"""

import math
from collections.abc import Sequence

from localinfer.engine.speculation.costs import MAX_DRAFT_TOKENS, VerificationCosts

_PRIOR_WEIGHT = 3.0
"""Tokens that the prior counts as, where nothing else is said."""
_MEMORY = 0.985
"""Share of every count that is left after another draft of its kind: about the last 67 count."""
_FIRST_PROBE, _LAST_PROBE = 4, 512
"""Rounds without a draft before the next probe: doubled after each that yields nothing."""
_LEAST_GAIN = 1.01
"""Expected speed over plain decoding that a draft must promise, for estimates are noisy."""


class Acceptance:
    """Running probability, per place in a draft of one kind, that its token is accepted after those before it.

    prior, weight: before anything was seen, and tokens that it counts as. reach: how long drafts may be by what was
    accepted so far, for a drafter of which nothing is known: twice the longest, and one.
    """

    def __init__(self, prior: float, weight: float = _PRIOR_WEIGHT) -> None:
        self.reach = 1
        self._prior = prior
        self._weight = weight
        self._accepted = [0.0] * MAX_DRAFT_TOKENS
        self._tried = [0.0] * MAX_DRAFT_TOKENS
        self._probabilities: list[float] | None = None
        self._rounds_to_probe = 0
        self._next_probe = _FIRST_PROBE

    def probabilities(self) -> Sequence[float]:
        """The estimates; a place that was hardly tried leans on the one before it.

        Once a token was right the draft is likelier to be on the way: in prose and code the second probability was
        close to the square root of the first, whatever that was, and later ones to the second.
        """
        if self._probabilities is None:
            estimate = self._prior
            found: list[float] = []
            for accepted, tried in zip(self._accepted, self._tried, strict=True):
                prior = math.sqrt(estimate) if len(found) == 1 else estimate
                estimate = (accepted + self._weight * prior) / (tried + self._weight)
                found.append(estimate)
            self._probabilities = found
        return self._probabilities

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified draft: the tokens accepted, and the first that was not."""
        for counts, most in ((self._accepted, num_accepted), (self._tried, num_accepted + 1)):
            counts[:] = [value * _MEMORY for value in counts]
            for index in range(min(num_drafted, most)):
                counts[index] += 1.0
        self.reach = max(self.reach, 2 * num_accepted + 1)
        self._probabilities = None

    def stop_probing(self) -> None:
        """Note that this kind promises a gain, so that the next time it does not, probes start over."""
        self._next_probe = _FIRST_PROBE
        self._rounds_to_probe = 0

    def is_probe_due(self) -> bool:
        """Whether to draft all the same in a round that would not; called once for each. Waits double up to 512."""
        if self._rounds_to_probe > 0:
            self._rounds_to_probe -= 1
            return False
        self._rounds_to_probe = self._next_probe
        self._next_probe = min(2 * self._next_probe, _LAST_PROBE)
        return True


def best_draft_length(
    probabilities: Sequence[float],
    costs: VerificationCosts,
    most: int,
    other_rows: int = 0,
    other_tokens: int = 0,
    *,
    seconds_per_token: float = 0.0,
    seconds_per_draft: float = 0.0,
) -> tuple[int, float]:
    """Return the draft length of most expected tokens per second, up to `most`, and that speed over plain decoding.

    seconds_per_token, seconds_per_draft: what drafting itself costs. other_rows: rows of other sequences in the same
    pass, and other_tokens what they yield; the pass takes longer for those too, so drafts shrink as a batch grows.
    """
    ratios, plain = costs.ratios(), costs.seconds(1)
    drafting, per_token = seconds_per_draft / plain, seconds_per_token / plain
    scale = ratios[other_rows] / (other_tokens + 1) if other_rows < len(ratios) else 0.0
    best, best_rate = 0, _LEAST_GAIN
    tokens = probability = 1.0
    for length in range(1, min(most, costs.max_draft_tokens - other_rows) + 1):
        probability *= probabilities[length - 1]
        tokens += probability
        rate = scale * (other_tokens + tokens) / (ratios[other_rows + length] + drafting + length * per_token)
        if rate > best_rate:
            best, best_rate = length, rate
    return best, best_rate if best else 1.0


# Credit in plain steps: earned per token, at the start, at most, and beyond the cheapest draft when a backoff ends.
