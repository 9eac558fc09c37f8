"""Log probabilities of tokens, as the model gave them: before bias, penalties, masks and temperature."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """Natural logarithms of a token's probability and of the likeliest ones' at its position.

    top: (token id, log probability) of as many as were asked for, likeliest first, the lowest id on ties. -inf stands
    for a token that the model rules out.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


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
