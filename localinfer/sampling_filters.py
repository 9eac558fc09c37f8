"""The samplers that few ask for, in NumPy: which tokens stay, and at which temperature one of them is drawn.

Every step is a function of one row, so it gives the same tokens whatever was drafted. Rows are float64[N] in the order
of ids; a step answers with a mask of those it keeps, never an empty one.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.sampling_params import SamplingParams

Row = NDArray[np.float64]
Kept = NDArray[np.bool_]

_LARGEST_SCALE = 1e300
_LEAST_EXPONENT = -700.0


def keep_candidates(logits: Row, params: SamplingParams, temperature: float, xtc_draw: float) -> NDArray[np.int64]:
    """Apply top-n-sigma, top-k, typical-p, top-p, min-p and XTC, in this order; return the indices that are left.

    Each step judges by the probabilities among what the one before it left. With mirostat only the first is applied.
    logits: float64[N], the largest finite, -inf for what is forbidden. xtc_draw: in (0, 1); XTC acts if it is below its
    probability.
    """
    ids = np.flatnonzero(logits > -np.inf)
    z = logits[ids]
    if params.top_n_sigma > 0.0:
        mask = z >= z.max() - float(params.top_n_sigma) * z.std()
        ids, z = ids[mask], z[mask]
    if params.mirostat:
        return ids
    if 0 < params.top_k < ids.size:
        mask = top_k(z, int(params.top_k))
        ids, z = ids[mask], z[mask]
    x = scaled(z, temperature)
    for applies, step, value in (
        (params.typical_p < 1.0, typical, params.typical_p),
        (params.top_p < 1.0, nucleus, params.top_p),
        (params.min_p > 0.0, likely, params.min_p),
        (xtc_draw < params.xtc_probability, exclude_top, params.xtc_threshold),
    ):
        if applies:
            mask = step(x, float(value))
            ids, x = ids[mask], x[mask]
    return ids


def scaled(logits: Row, temperature: float) -> Row:
    """(logits - largest) / temperature, at least -700: what `exp` makes weights of."""
    with np.errstate(over="ignore"):
        x: Row = np.maximum((logits - logits.max()) * min(1.0 / temperature, _LARGEST_SCALE), _LEAST_EXPONENT)
    return x


def top_k(logits: Row, k: int) -> Kept:
    """The k largest logits; of equal ones at the end, those of the lowest ids."""
    kth = np.partition(logits, logits.size - k)[logits.size - k]
    mask: Kept = logits > kth
    ties = np.flatnonzero(logits == kth)
    mask[ties[: k - int(np.count_nonzero(mask))]] = True
    return mask


def nucleus(x: Row, p: float) -> Kept:
    """The fewest largest whose probabilities reach p (arXiv 1904.09751); of equal ones, the lowest ids."""
    weights = np.exp(x)
    # All lighter ones together weigh less than 1 - p, so that the sum is reached without them.
    ids = np.flatnonzero(weights * x.size >= (1.0 - p) * weights.sum())
    order = ids[np.argsort(-weights[ids], kind="stable")]
    return _head(weights, order, p)


def likely(x: Row, share: float) -> Kept:
    """Those of at least this share of the likeliest one's probability (arXiv 2407.01082)."""
    mask: Kept = np.exp(x - x.max()) >= share
    return mask


def typical(x: Row, p: float) -> Kept:
    """The fewest whose surprise is nearest to the entropy and whose probabilities reach p (arXiv 2202.00666)."""
    weights = np.exp(x)
    surprise = math.log(weights.sum()) - x
    order = np.argsort(np.abs(surprise - entropy(x)), kind="stable")
    return _head(weights, order, p)


def exclude_top(x: Row, threshold: float) -> Kept:
    """All but those of at least `threshold` probability, of which the least likely stays; of equal ones, the last."""
    weights = np.exp(x)
    mask: Kept = weights < threshold * weights.sum()
    choices = np.flatnonzero(~mask)
    if choices.size:
        mask[choices[choices.size - 1 - int(np.argmin(weights[choices][::-1]))]] = True
    return mask


def entropy(x: Row) -> float:
    """Entropy of softmax(x) in nats; x as `scaled` gives it."""
    weights = np.exp(x)
    total = float(weights.sum())
    return math.log(total) - float((weights * x).sum()) / total


def dynamic_temperature(logits: Row, temperature: float, reach: float, exponent: float) -> float:
    """The temperature between temperature - reach (or 0) and temperature + reach for the draw among these logits.

    It rises with (entropy / largest possible entropy) ^ exponent, that of the logits at temperature 1 (Kalomaze,
    KoboldCpp, 2024).
    """
    low = max(0.0, temperature - reach)
    if logits.size == 1:
        return low
    share = min(1.0, max(0.0, entropy(scaled(logits, 1.0)) / math.log(logits.size)))
    return float(low + (temperature + reach - low) * share**exponent)


class Mirostat:
    """The surprise that version 2 of mirostat (arXiv 2007.14966) lets pass, before each position of one text.

    It is kept by position, so that a position that is drawn again, after a failure, begins from the same surprise.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau, self._eta = tau, eta
        self._limits: dict[int, float] = {}

    def limit(self, position: int) -> float:
        """Bits of surprise that a token at this position may have; twice the target where the text begins."""
        return self._limits.get(position, 2.0 * self._tau)

    def keep(self, x: Row, position: int) -> Kept:
        """The tokens below the limit, and one of the likeliest at least."""
        mask: Kept = surprise_bits(x) <= self.limit(position)
        if not mask.any():
            mask[int(np.argmax(x))] = True
        return mask

    def advance(self, x: Row, index: int, position: int) -> None:
        """Take note that `index` of these was chosen for a position."""
        error = float(surprise_bits(x)[index]) - self._tau
        self._limits[position + 1] = self.limit(position) - self._eta * error


def surprise_bits(x: Row) -> Row:
    """-log2 of the probabilities softmax(x)."""
    bits: Row = (math.log(np.exp(x).sum()) - x) / math.log(2.0)
    return bits


def _head(weights: Row, order: NDArray[np.int64], p: float) -> Kept:
    """The shortest head of an order whose weights reach p of all; never none."""
    sums = np.cumsum(weights[order])
    size = int(np.searchsorted(sums, p * weights.sum())) + 1
    mask = np.zeros(weights.size, np.bool_)
    mask[order[:size]] = True
    return mask
