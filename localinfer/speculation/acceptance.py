"""Which drafted tokens stay: two rules that both leave the distribution of the text as it is without drafts.

Coupled noise is what the engine uses. The sampler takes the largest of logit / temperature + Gumbel noise, and the
noise is a function of (seed, position, token), so a position has one answer whatever was drafted: a drafted token stays
if it is that answer, and the text is, token for token, the text without drafts. A draft model that draws with the same
noise mostly draws the same token: two distributions p and q agree with probability at least (1 - d) / (1 + d), d their
total variation distance (Daliri, Musco and Suresh, Coupling without Communication, arXiv 2408.07978).

Rejection sampling accepts with probability 1 - d, the most that any rule can, but the text then depends on the drafts.
For a draft that is certain (n-gram, prediction: q is 1 at one token) both accept with probability p(token).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def accept_coupled(drafted: Sequence[int], chosen: int, index: int) -> bool:
    """Whether the token chosen for a position is what was drafted there, so that the next row of the pass is valid."""
    return index < len(drafted) and drafted[index] == chosen


def accept_by_rejection(
    p: NDArray[np.float64], q: NDArray[np.float64], drafted: int, generator: np.random.Generator
) -> tuple[int, bool]:
    """Accept a token drawn from q with probability min(1, p / q), or draw from the normalised positive part of p - q.

    Shapes: p and q float64[V], the target's and the draft's probabilities, each of sum 1.
    Returns: the token, distributed as p, and whether it is the drafted one, accepted.
    Source: Leviathan, Kalman and Matias, arXiv 2211.17192, section 2.3; Chen et al., arXiv 2302.01318, algorithm 2.
    """
    if generator.random() * q[drafted] < p[drafted]:
        return drafted, True
    rest = np.maximum(p - q, 0.0)
    return int(np.searchsorted(np.cumsum(rest), generator.random() * rest.sum(), side="right")), False
