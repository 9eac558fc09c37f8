"""Which tokens a device draws: the records that say how, and what devices and kernels agree on about their memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Batch, FloatArray, GreedyProgram

UNDECIDED = -3
"""Instead of a token id: the device leaves this row to the host."""

CAPACITY = 512
"""Tokens of a row that are looked at one by one, where some are filtered out."""

INVERSE_TEMPERATURE, TOP_K, TOP_P, LEAST_WEIGHT, SEED, POSITION = range(6)
DRAW_WORDS = 8
"""Words of 64 bits of a draw: 0 as inverse temperature takes the best token."""

MODE, BEST_TOKEN, BEST, BOUND, COUNT = range(5)
STATE_WORDS = 8
"""Words that the kernels hand on about a row."""

_ONE = float(2**43)


@dataclass(frozen=True)
class Draw:
    """How one row's token is drawn: see `kernels.cpu.sampling.RowSampler.choose`, which draws the same one.

    seed: all 64 bits of it, as a whole number of any sign.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


@runtime_checkable
class DrawingProgram(GreedyProgram, Protocol):
    """A program that draws tokens where the logits are."""

    def run_drawn(self, batch: Batch, draws: Sequence[Draw]) -> NDArray[np.int32]:
        """Return the token of every output row, each drawn in its own way, valid until the next call; or UNDECIDED,
        or a code as `run_greedy`."""
        ...

    def logits_of(self, row: int) -> FloatArray:
        """The logits float32[vocab_size] of one output row of the last batch."""
        ...


def draw_words(draws: Sequence[Draw], vocab_size: int) -> NDArray[np.int64]:
    """Draws as kernels read them, int64[len(draws), DRAW_WORDS]."""
    words = np.zeros((len(draws), DRAW_WORDS), np.int64)
    floats = words.view(np.float64)
    for index, draw in enumerate(draws):
        if draw.temperature == 0.0 or draw.top_k == 1 or draw.top_p == 0.0:
            continue
        floats[index, INVERSE_TEMPERATURE] = min(1.0 / draw.temperature, 1e300)
        floats[index, TOP_P] = draw.top_p
        seed = draw.seed & (2**64 - 1)
        words[index, TOP_K] = draw.top_k if draw.top_k < vocab_size else 0
        words[index, LEAST_WEIGHT] = math.ceil(draw.min_p * _ONE)
        words[index, SEED] = seed - (seed >> 63 << 64)
        words[index, POSITION] = draw.position
    return words
