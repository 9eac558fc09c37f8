"""Rounding columns of a matrix one after the other, as GPTQ does; the loop is in `compiled/encode/feedback.py`."""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address, aligned, aligned_zeros
from localinfer.kernels.cpu.parameters import ROUND_COLUMNS
from localinfer.kernels.jit.object_cache import Function

FloatArray = NDArray[np.float32]

_LANES = 16
_ROUND_BLOCK = Function("feedback.round_block", "q", "q")
KERNELS = (_ROUND_BLOCK,)
"""What rounding calls, so that it can be compiled ahead."""

TABLE = (1, 0)
"""Instead of the lowest and highest level: those of IQ4's table."""


class FeedbackColumns:
    """Columns of a matrix in the order they are rounded in, and what has become of them.

    wanted: what each column should become, to which the caller adds what the errors of earlier blocks weigh in it; once
    rounded, what rounding took. errors: the columns less what they decode to, as far as rounded. levels and decoded: in
    the columns' places.

    Shapes: all four float32[columns, rows], with as many rows as whole vectors hold, the last of which mean nothing.
    """

    def __init__(
        self,
        columns: FloatArray,
        scales: FloatArray,
        minimums: FloatArray | None,
        *,
        level_range: tuple[int, int],
        groups: NDArray[np.int64],
        places: NDArray[np.int64],
        weights: FloatArray,
    ) -> None:
        """scales and minimums: of each group of columns; None where minimums are 0. level_range: the lowest and highest
        level, or TABLE. groups: whose scale a column has. places: where its results go. weights: row i says what the
        errors of earlier columns weigh in column i.

        Shapes: columns float32[columns, rows]; scales and minimums float32[groups, rows]; groups and places
            int64[columns]; weights float32[columns, columns] in C order.
        """
        size, num_rows = columns.shape
        assert scales.shape[1] == num_rows and (minimums is None or minimums.shape == scales.shape), "one for every row"
        assert weights.shape == (size, size) and weights.dtype == np.float32, "a weight for every pair of columns"
        for indices, limit in ((groups, len(scales)), (places, size)):
            assert indices.shape == (size,) and indices.dtype == np.int64, "one for every column"
            assert indices.min() >= 0 and indices.max() < limit, "indices stay inside"
        self._columns, self.wanted = _lanes(columns), _lanes(columns)
        self._scales = _lanes(scales)
        self._minimums = _lanes(np.zeros_like(scales) if minimums is None else minimums)
        self.errors, self.levels, self.decoded = (_aligned_like(self.wanted) for _ in range(3))
        self._level_range, self._groups, self._places, self._weights = level_range, groups, places, weights

    def round_block(self, first: int, end: int) -> None:
        """Round columns `first` to `end` - 1; the GIL is free meanwhile."""
        assert 0 <= first < end <= len(self.wanted), "columns that are there"
        lowest, highest = self._level_range
        words = ROUND_COLUMNS.pack(
            first=first, end=end, vectors=self.wanted.shape[1] // _LANES, stride=self.wanted.strides[0],
            wanted=address(self.wanted), given=address(self._columns), errors=address(self.errors),
            levels=address(self.levels), decoded=address(self.decoded), weights=address(self._weights),
            weights_stride=self._weights.strides[0], groups=address(self._groups), places=address(self._places),
            scales=address(self._scales), minimums=address(self._minimums), lowest=lowest, highest=highest,
        )  # fmt: skip
        _ROUND_BLOCK(address(words))


def _aligned_like(array: FloatArray) -> FloatArray:
    """An array of the same shape, where kernels can load vectors of them."""
    return aligned(array.nbytes).view(np.float32).reshape(array.shape)


def _lanes(values: FloatArray) -> FloatArray:
    """A copy with zeros up to a whole number of vectors."""
    num_columns, num_rows = values.shape
    padded = -(-num_rows // _LANES) * _LANES
    result = aligned_zeros(4 * num_columns * padded).view(np.float32).reshape(num_columns, padded)
    result[:, :num_rows] = values
    return result
