"""The rarer sampling steps in NumPy: filters, dynamic temperature, mirostat, the DRY penalty; and log probabilities.

Every step is a function of one row, so it gives the same tokens whatever was drafted. Rows are float64[N] in the order
of ids; a filter returns a mask of those it keeps, never an empty one.
"""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.params import SamplingParams
from localinfer.types import TokenLogprobs

Row = NDArray[np.float64]
Kept = NDArray[np.bool_]

_LARGEST_SCALE = 1e300
_LEAST_EXPONENT = -700.0
_NUM_BINS = 4096
LONGEST_REPETITION = 512
"""Tokens at the end of a text that the DRY penalty compares; longer repetitions count as this long."""
_LARGEST_PENALTY = 1e30


def keep_candidates(
    logits: NDArray[np.floating[Any]], params: SamplingParams, temperature: float, xtc_draw: float
) -> NDArray[np.int64]:
    """Apply top-n-sigma, top-k, typical-p, top-p, min-p and XTC, in this order; return the indices that are left.

    Each step judges by the probabilities among what the one before it left. With mirostat only the first is applied.
    logits: [N], the largest finite, -inf for what is forbidden. xtc_draw: in (0, 1); XTC acts if it is below its
    probability.
    """
    ids = np.flatnonzero(logits > -np.inf)
    if params.top_n_sigma > 0.0:
        wide = logits[ids].astype(np.float64)
        ids = ids[wide >= wide.max() - float(params.top_n_sigma) * wide.std()]
    if params.mirostat:
        return ids
    if 0 < params.top_k < ids.size:
        ids = ids[top_k(logits[ids], int(params.top_k))]
    x = scaled(logits[ids], temperature)
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


def scaled(logits: NDArray[np.floating[Any]], temperature: float) -> Row:
    """(logits - largest) / temperature, at least -700: what `exp` makes weights of."""
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        x: Row = np.maximum((wide - wide.max()) * min(1.0 / temperature, _LARGEST_SCALE), _LEAST_EXPONENT)
    return x


def top_k(logits: NDArray[np.floating[Any]], k: int) -> Kept:
    """The k largest logits; of equal ones at the end, those of the lowest ids."""
    kth = np.partition(logits, logits.size - k)[logits.size - k]
    mask: Kept = logits > kth
    ties = np.flatnonzero(logits == kth)
    mask[ties[: k - int(np.count_nonzero(mask))]] = True
    return mask


def nucleus(x: Row, p: float) -> Kept:
    """The fewest largest whose probabilities reach p (arXiv 1904.09751); of equal ones, the lowest ids."""
    return _head(np.exp(x), -x, p)


def likely(x: Row, share: float) -> Kept:
    """Those of at least this share of the likeliest one's probability (arXiv 2407.01082)."""
    mask: Kept = np.exp(x - x.max()) >= share
    return mask


def typical(x: Row, p: float) -> Kept:
    """The fewest whose surprise is nearest to the entropy and whose probabilities reach p (arXiv 2202.00666)."""
    weights = np.exp(x)
    surprise = math.log(weights.sum()) - x
    return _head(weights, np.abs(surprise - entropy(x)), p)


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


def dynamic_temperature(logits: NDArray[np.floating[Any]], temperature: float, reach: float, exponent: float) -> float:
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

    def keep(self, bits: Row, position: int) -> Kept:
        """The tokens of at most the limit's surprise, and the least surprising one at least."""
        mask: Kept = bits <= self.limit(position)
        if not mask.any():
            mask[int(np.argmin(bits))] = True
        return mask

    def advance(self, bits: float, position: int) -> None:
        """Take note of the surprise of the token chosen for a position."""
        self._limits[position + 1] = self.limit(position) - self._eta * (bits - self._tau)


def surprise_bits(x: Row) -> Row:
    """-log2 of the probabilities softmax(x)."""
    bits: Row = (math.log(np.exp(x).sum()) - x) / math.log(2.0)
    return bits


def _head(weights: Row, keys: Row, p: float) -> Kept:
    """The fewest of the lowest keys, lowest index first on ties, whose weights reach p of all; never none.

    Only the bin of keys in which p is reached is sorted.
    """
    target = p * weights.sum()
    low, high = float(keys.min()), float(keys.max())
    scale = (_NUM_BINS - 1) / (high - low) if high - low > 1e-9 else 0.0
    bins = ((keys - low) * scale).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights, minlength=_NUM_BINS))
    reached = int(np.searchsorted(sums, target))
    mask: Kept = bins < reached
    ids = np.flatnonzero(bins == reached)
    order = ids[np.argsort(keys[ids], kind="stable")]
    before = float(sums[reached - 1]) if reached else 0.0
    size = int(np.searchsorted(before + np.cumsum(weights[order]), target)) + 1
    mask[order[:size]] = True
    return mask


def repetition_lengths(tokens: NDArray[np.int32], breakers: Collection[int]) -> dict[int, int]:
    """For each token that followed an earlier occurrence of the text's end: how many tokens of the end occurred there.

    tokens: int32[T]. breakers: tokens that an occurrence does not go across, nor across what is no token, below 0.
    """
    lengths: dict[int, int] = {}
    # An occurrence before `places[i]` that is `length` tokens long is looked at once more for each length.
    places = np.arange(1, tokens.size)
    for length in range(1, min(LONGEST_REPETITION, tokens.size - 1) + 1):
        last = int(tokens[tokens.size - length])
        if last < 0 or last in breakers:
            break
        places = places[np.searchsorted(places, length) :]
        places = places[tokens[places - length] == last]
        if not places.size:
            break
        lengths.update(dict.fromkeys(tokens[places].tolist(), length))
    return {token_id: length for token_id, length in lengths.items() if token_id >= 0}


def penalise_repetitions(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int32],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
) -> None:
    """DRY, "don't repeat yourself" (P. E. Weidmann, text-generation-webui, 2024): subtract multiplier * base ^ (n -
    allowed_length) from each token that would prolong a repetition of n tokens.

    logits: float32[V], changed in place. tokens: int32[T], where repetitions are looked for, up to the text's end.
    Repetitions shorter than `allowed_length` are free; no penalty exceeds 1e30.
    """
    largest = math.log(_LARGEST_PENALTY / multiplier)
    for token_id, length in repetition_lengths(tokens, breakers).items():
        if length >= allowed_length:
            exponent = min(largest, (length - allowed_length) * math.log(base))
            logits[token_id] = np.float32(float(logits[token_id]) - multiplier * math.exp(exponent))


def token_logprobs(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """The log probabilities of a token and of the `count` likeliest.

    logits: float32[V], the largest of them finite.
    """
    total = log_total(logits)
    top = likeliest(logits, count)
    return TokenLogprobs(
        float(logits[token_id]) - total, tuple((int(index), float(logits[index]) - total) for index in top)
    )


def log_total(logits: NDArray[np.float32]) -> float:
    """log(sum(exp(logits))) in float64, the same bits wherever the row lies."""
    best = float(logits.max())
    return best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the largest logits, int64[min(count, V)], largest first, the lowest id on ties."""
    count = min(count, logits.size)
    if count == 0:
        return np.empty(0, np.int64)
    least = np.partition(logits, logits.size - count)[logits.size - count]
    ids = np.flatnonzero(logits >= least)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]
