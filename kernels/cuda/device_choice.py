"""The launches after a row's logits: its likeliest token, or one drawn from it, so that four bytes go to the host."""

from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import Device, Launch
from localinfer.kernels.cuda.sampling import CAPACITY, DRAW_WORDS, STATE_WORDS, Draw, draw_words

_THREADS = 128
_MOST_SLICES = 64
"""Blocks that share a row; a small vocabulary needs fewer."""


class Chosen(Enum):
    """What is chosen of each row: nothing, its likeliest token, or one that is drawn."""

    NOTHING = "nothing"
    LIKELIEST = "likeliest"
    DRAWN = "drawn"


class TokenChoice:
    """Chooses a token of each of up to `max_rows` rows of logits, which lie at an address, `stride` bytes apart."""

    def __init__(self, device: Device, logits: int, stride: int, vocab_size: int, max_rows: int) -> None:
        self._device = device
        self._logits, self._stride, self._vocab_size = logits, stride, vocab_size
        self._slices = 1
        while self._slices < _MOST_SLICES and self._slices * _THREADS < vocab_size:
            self._slices *= 2
        self._bests = device.allocate(16 * 4 * self._slices * max_rows)
        self._chosen = device.allocate(4 * max_rows)
        self._draws = device.allocate(8 * DRAW_WORDS * max_rows)
        self._states = device.allocate(8 * STATE_WORDS * max_rows)
        self._lists = device.allocate(16 * CAPACITY * max_rows)
        self._parts = device.allocate(16 * self._slices * max_rows)
        self._here = np.empty(max_rows, np.int32)

    def steps(self, chosen: Chosen, rows: int) -> Iterator[Launch]:
        """The launches for some rows."""
        if chosen is Chosen.NOTHING or not rows:
            return
        constants, all_slices, one = (self._slices,), (self._slices, rows, 1), (1, rows, 1)
        row = (self._logits, self._stride, self._vocab_size)
        yield Launch("sampling.best_of_warps", constants, all_slices, _THREADS, (*row, self._bests))
        if chosen is Chosen.LIKELIEST:
            yield Launch("sampling.best_of_row", constants, one, 32, (self._bests, self._chosen))
            return
        how = (self._draws, self._states)
        heads = (self._bests, self._logits, self._stride, *how)
        yield Launch("draws.find_heads", constants, one, 4 * self._slices, heads)
        lists = (*how, self._lists, self._parts)
        yield Launch("draws.gather", constants, all_slices, _THREADS, (*row, *lists))
        yield Launch("draws.choose", constants, one, _THREADS, (*row[:2], *lists, self._chosen))

    def write(self, draws: Sequence[Draw]) -> None:
        """Say how each row is drawn, for the next run."""
        if draws:
            self._device.write(self._draws, draw_words(draws, self._vocab_size))

    def read(self, rows: int) -> NDArray[np.int32]:
        """Wait for every step so far and return the rows' tokens, int32[rows], valid until the next call."""
        if rows:
            self._device.read(self._chosen, self._here[:rows])
        return self._here[:rows]
