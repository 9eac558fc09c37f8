"""On-device sampling: the launches that find the likeliest token of a row of logits, or sample one.

Four bytes per row are copied to the host instead of its logits.
"""

import math
from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import CudaDevice, Launch
from localinfer.kernels.program import UNDECIDED as UNDECIDED, Draw as Draw

CAPACITY = 512
"""Maximum candidates of a row if tokens are filtered."""

DRAW = np.dtype(
    [(name, np.float64) for name in ("inverse_temperature", "top_p")]
    + [(name, np.int64) for name in ("top_k", "least_weight", "seed", "position")]
)
"""A draw in the kernels' layout; an inverse temperature of 0 selects the best token."""

DRAW_BYTES = DRAW.itemsize
STATE_BYTES = 40
"""Bytes of a row's state between kernels."""

_ONE = float(2**43)
_THREADS = 128
_MAX_SLICES = 64
"""Blocks per row; a small vocabulary needs fewer."""


def _packed(draws: Sequence[Draw], vocab_size: int) -> NDArray[np.void]:
    """Draws in the kernels' layout."""
    packed = np.zeros(len(draws), DRAW)
    for index, draw in enumerate(draws):
        if draw.temperature == 0.0 or draw.top_k == 1 or draw.top_p == 0.0:
            continue
        top_k = draw.top_k if draw.top_k < vocab_size else 0
        seed = draw.seed & (2**64 - 1)
        seed -= seed >> 63 << 64
        inverse_temperature = min(1.0 / draw.temperature, 1e300)
        packed[index] = (inverse_temperature, draw.top_p, top_k, math.ceil(draw.min_p * _ONE), seed, draw.position)
    return packed


class SampleMode(Enum):
    """The result of each row: logits only, its likeliest token, or a sampled one."""

    NOTHING = "nothing"
    LIKELIEST = "likeliest"
    DRAWN = "drawn"


class TokenChoice:
    """Samples a token of each of up to `max_rows` rows of logits at an address, `stride` bytes apart."""

    def __init__(self, device: CudaDevice, logits: int, stride: int, vocab_size: int, max_rows: int) -> None:
        self._device = device
        self._logits, self._stride, self._vocab_size = logits, stride, vocab_size
        self._slices = 1
        while self._slices < _MAX_SLICES and self._slices * _THREADS < vocab_size:
            self._slices *= 2
        self._bests = device.allocate(16 * 4 * self._slices * max_rows)
        self._chosen = device.allocate(4 * max_rows)
        self._draws = device.allocate(DRAW_BYTES * max_rows)
        self._states = device.allocate(STATE_BYTES * max_rows)
        self._lists = device.allocate(16 * CAPACITY * max_rows)
        self._parts = device.allocate(16 * self._slices * max_rows)
        self._here = np.empty(max_rows, np.int32)

    def steps(self, chosen: SampleMode, rows: int) -> Iterator[Launch]:
        """The launches for this many rows."""
        if chosen is SampleMode.NOTHING or not rows:
            return
        constants, all_slices, one = (self._slices,), (self._slices, rows, 1), (1, rows, 1)
        row = (self._logits, self._stride, self._vocab_size)
        yield Launch("sampling.best_of_warps", constants, all_slices, _THREADS, (*row, self._bests))
        if chosen is SampleMode.LIKELIEST:
            yield Launch("sampling.best_of_row", constants, one, 32, (self._bests, self._chosen))
            return
        how = (self._draws, self._states)
        heads = (self._bests, self._logits, self._stride, *how)
        yield Launch("sampling.find_heads", constants, one, 4 * self._slices, heads)
        lists = (*how, self._lists, self._parts)
        yield Launch("sampling.gather", constants, all_slices, _THREADS, (*row, *lists))
        yield Launch("sampling.choose", constants, one, _THREADS, (*row[:2], *lists, self._chosen))

    def write(self, draws: Sequence[Draw]) -> None:
        """Set the draws of the next run."""
        if draws:
            self._device.write(self._draws, _packed(draws, self._vocab_size))

    def read(self, rows: int) -> NDArray[np.int32]:
        """Wait for every step so far and return the rows' tokens, int32[rows], valid until the next call."""
        if rows:
            self._device.read(self._chosen, self._here[:rows])
        return self._here[:rows]
