"""DRY, "don't repeat yourself": the penalty on the token that would make a repetition longer (P. E. Weidmann,
text-generation-webui, 2024).
"""

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

LONGEST_REPETITION = 512
"""Tokens at the end of a text that are compared; longer repetitions count as this long."""

_LARGEST_PENALTY = 1e30


def repetition_lengths(tokens: TokenIds, breakers: Collection[int]) -> dict[int, int]:
    """For each token that followed an earlier occurrence of the text's end: how many tokens of the end occurred there.

    tokens: int32[T]. breakers: tokens that an occurrence does not go across.
    """
    lengths: dict[int, int] = {}
    # An occurrence before `places[i]` that is `length` tokens long is looked at once more for each length.
    places = np.arange(1, tokens.size)
    for length in range(1, min(LONGEST_REPETITION, tokens.size - 1) + 1):
        last = int(tokens[tokens.size - length])
        if last in breakers:
            break
        places = places[np.searchsorted(places, length) :]
        places = places[tokens[places - length] == last]
        if not places.size:
            break
        lengths.update(dict.fromkeys(tokens[places].tolist(), length))
    return lengths


def penalise_repetitions(
    logits: NDArray[np.float32],
    tokens: TokenIds,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Collection[int],
) -> None:
    """Subtract multiplier * base ^ (n - allowed_length) from each token that would prolong a repetition of n tokens.

    logits: float32[V], changed in place. tokens: int32[T], where repetitions are looked for, up to the text's end.
    Repetitions shorter than `allowed_length` are free; no penalty exceeds 1e30.
    """
    largest = math.log(_LARGEST_PENALTY / multiplier)
    for token_id, length in repetition_lengths(tokens, breakers).items():
        if length >= allowed_length:
            exponent = min(largest, (length - allowed_length) * math.log(base))
            logits[token_id] = np.float32(float(logits[token_id]) - multiplier * math.exp(exponent))
