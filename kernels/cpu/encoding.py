"""Encode rows of weights as quantized blocks, with the bits of `quant.reference.quantize`; and GPTQ's inner loop.

Kernels take sixteen rows side by side, one to a lane, so the number of threads cannot change a bit.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.cpu.memory import address, aligned, aligned_zeros, placed
from localinfer.kernels.cpu.parameters import ENCODE, ROUND_COLUMNS
from localinfer.kernels.cpu.program import POOL_KERNELS, ThreadPool
from localinfer.kernels.jit.compile_ahead import compile_ahead
from localinfer.kernels.jit.object_cache import Function, Kernel
from localinfer.types import FloatArray, ProgressCallback

_TYPES = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS".split()
ENCODERS = {name: Kernel(f"encoders.{name.lower()}") for name in _TYPES}
"""Encoder kernels by the name of the type they write."""

_SOURCES = {
    np.dtype(np.float32): kernel_abi.SOURCE_F32,
    np.dtype(np.float16): kernel_abi.SOURCE_F16,
    np.dtype(np.uint16): kernel_abi.SOURCE_BF16,
}


class NotFiniteError(ArithmeticError):
    """A weight is infinite or NaN."""


class TooLargeError(ArithmeticError):
    """A scale is larger than float16 can hold."""


def prepare_encoders(
    names: Iterable[str], progress: ProgressCallback | None = None, *, with_feedback: bool = False
) -> None:
    """Compile the kernels of these types, and GPTQ's if wanted, where they are not cached yet, in child processes."""
    further = (_ROUND_BLOCK,) if with_feedback else ()
    compile_ahead([*POOL_KERNELS, *(ENCODERS[name] for name in names), *further], progress)


def encode_rows(
    pool: ThreadPool,
    name: str,
    source: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    importance: NDArray[np.float32] | None,
    target: NDArray[np.uint8],
) -> None:
    """Encode a matrix; the caller proves that shapes agree and that importance is finite and not negative.

    Shapes: source [rows, columns] in C order, uint16 being the bits of bfloat16; importance float32[columns];
        target uint8[rows, row bytes of the type] in C order.
    Raises: NotFiniteError, TooLargeError; the target then holds no meaning.
    """
    rows, columns = source.shape
    memory = aligned_zeros(pool.num_threads * kernel_abi.ENCODER_MEMORY_BYTES)
    # The checked copies must outlive the run.
    weights = None if importance is None else placed(np.ascontiguousarray(importance, np.float32))
    given, written = placed(source), placed(target)
    words = ENCODE.pack(
        control=pool.control_address, source=address(given), kind=_SOURCES[source.dtype],
        stride=columns * source.itemsize, target=address(written), target_stride=target.shape[1], rows=rows,
        columns=columns, importance=0 if weights is None else address(weights), memory=address(memory),
    )  # fmt: skip
    ops = np.array([[ENCODERS[name].address, address(words)]], np.int64)
    pool.run(address(ops), 1, 0)
    if written is not target:
        target[:] = written
    found = (
        memory.reshape(pool.num_threads, -1)[:, kernel_abi.ENCODER_STATUS : kernel_abi.ENCODER_STATUS + 8]
        .copy()
        .view(np.int64)
    )
    if (found == kernel_abi.STATUS_NOT_FINITE).any():
        raise NotFiniteError(name)
    if found.any():
        raise TooLargeError(name)


_LANES = 16
_ROUND_BLOCK = Function("encoders.round_block", "q", "q")

TABLE = (1, 0)
"""Instead of the lowest and highest level: those of IQ4's table."""


class FeedbackColumns:
    """Columns of a matrix in the order of rounding, and their results.

    wanted: the target of each column, to which the caller adds the weighed errors of earlier blocks; once rounded, the
    amount that rounding took. errors: the columns less their decoded values, as far as rounded. levels and decoded: at
    the columns' positions.

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
        level, or TABLE. groups: the group of each column. places: the positions of its results. weights: row i has
        the weights of the errors of earlier columns in column i.

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
        self._level_range, self._weights = level_range, placed(weights)
        self._groups, self._places = placed(groups), placed(places)

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
    """An array of the same shape, aligned for vectors."""
    return aligned(array.nbytes).view(np.float32).reshape(array.shape)


def _lanes(values: FloatArray) -> FloatArray:
    """A copy with zeros up to a whole number of vectors."""
    num_columns, num_rows = values.shape
    padded = -(-num_rows // _LANES) * _LANES
    result = aligned_zeros(4 * num_columns * padded).view(np.float32).reshape(num_columns, padded)
    result[:, :num_rows] = values
    return result
