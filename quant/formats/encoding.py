"""Encode weights for a file, by compiled kernels, and plain numbers and MXFP4 by NumPy; read and refill encoded grids.

The bytes are those of `dequantize.quantize`, on every machine and with any number of threads.

The grid of encoded blocks is the set of values that each weight may take once scales are fixed: scale * level +
minimum, in float32 and in this order, with one scale (and minimum) per group of 16 or 32 columns. Levels are the whole
numbers of a range, or IQ4's table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.encoding import ENCODERS, TABLE, NotFiniteError, TooLargeError, encode_rows
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.dequantize import LEVEL_OFFSETS, SUBTRACTS_MINIMUM, dequantize, group_scales
from localinfer.quant.formats.reference_encoders import check_mean_squares, nearest_iq4, quantize
from localinfer.quant.formats.types import TensorType, bfloat16_values, block_dtype, block_size, pack_codes, row_bytes
from localinfer.types import FloatArray

Source = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
"""Rows of weights; uint16 are the bits of bfloat16."""


def source_rows(data: NDArray[np.uint8], type: TensorType, columns: int) -> Source:
    """Give the rows of a tensor as numbers that `encode` takes: as they lie where it can, decoded where not.

    Shapes: data uint8, whole rows one after the other; result [rows, columns].
    """
    rows = data.size // row_bytes(type, columns)
    flat = np.ascontiguousarray(data).reshape(-1)
    if type is TensorType.F32:
        return flat.view(np.float32).reshape(rows, columns)
    if type is TensorType.F16:
        return flat.view(np.float16).reshape(rows, columns)
    if type is TensorType.BF16:
        return flat.view(np.uint16).reshape(rows, columns)
    return dequantize(flat, type, (rows, columns))


def as_float32(source: Source) -> NDArray[np.float32]:
    """The numbers of a source."""
    return bfloat16_values(source) if source.dtype == np.uint16 else source.astype(np.float32, copy=False)


def encode(
    pool: ThreadPool, source: Source, type: TensorType, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Encode a matrix, using every thread of the pool.

    importance: the weight of the square of an error in each column (the mean square of the column's inputs), finite and
    not negative. Plain numbers, Q8_0 and MXFP4 do not use it.

    Shapes: source [rows, columns]; importance float32[columns]; result uint8[rows, row bytes].
    Raises: as `dequantize.quantize`.
    """
    if source.ndim != 2 or source.dtype not in (np.float32, np.float16, np.uint16):
        raise ShapeError(
            f"got {source.dtype}{list(source.shape)} to encode; wanted a matrix of float32, float16 or bfloat16 bits"
        )
    if type.name not in ENCODERS:
        return quantize(as_float32(source), type, importance)
    rows, columns = source.shape
    num_bytes = row_bytes(type, columns)
    if importance is not None:
        if importance.dtype != np.float32 or importance.shape != (columns,):
            raise ShapeError(
                f"got importance {importance.dtype}{list(importance.shape)} for {columns} columns; "
                f"wanted float32[{columns}]"
            )
        check_mean_squares(importance)
    if not source.flags.c_contiguous:
        source = source.copy()
    target = np.empty((rows, num_bytes), np.uint8)
    try:
        encode_rows(pool, type.name, source, importance, target)
    except NotFiniteError:
        raise RequestError("got NaN or infinity to encode; wanted finite weights") from None
    except TooLargeError:
        raise RequestError(
            f"got weights up to {np.abs(as_float32(source)).max():g}, which float16 numbers of {type.name} cannot hold "
            "(they end at 65504); wanted smaller weights, or the type F32 or BF16"
        ) from None
    return target


def can_hold(type: TensorType, columns: int) -> bool:
    """True if rows of this many columns fill whole blocks of a type."""
    return columns > 0 and columns % block_size(type) == 0


LEVEL_RANGES = {
    TensorType.Q4_0: (-8, 7),
    TensorType.Q4_1: (0, 15),
    TensorType.Q5_0: (-16, 15),
    TensorType.Q5_1: (0, 31),
    TensorType.Q8_0: (-127, 127),
    TensorType.Q2_K: (0, 3),
    TensorType.Q3_K: (-4, 3),
    TensorType.Q4_K: (0, 15),
    TensorType.Q5_K: (0, 31),
    TensorType.Q6_K: (-32, 31),
    TensorType.IQ4_NL: TABLE,
    TensorType.IQ4_XS: TABLE,
}
"""Types whose codes can be chosen apart from their scales: the lowest and highest level, or `TABLE`."""


@dataclass(frozen=True)
class Grid:
    """Scales and minimums of encoded rows, by group of columns.

    Shapes: scale and minimum float32[groups, rows]; minimum is None where all are 0.
    """

    type: TensorType
    group_size: int
    scale: FloatArray
    minimum: FloatArray | None

    @property
    def level_range(self) -> tuple[int, int]:
        """The lowest and highest level, or `TABLE` of `kernels.cpu.encoding`."""
        return LEVEL_RANGES[self.type]


def read_grid(encoded: NDArray[np.uint8], type: TensorType) -> Grid:
    """Read the grid of encoded rows. Shapes: encoded uint8[rows, row bytes]."""
    rows = len(encoded)
    blocks = np.ascontiguousarray(encoded).reshape(-1).view(block_dtype(type))
    scale, minimum = group_scales(blocks, type)
    if minimum is not None and type in SUBTRACTS_MINIMUM:
        minimum = -minimum

    def by_group(values: NDArray[Any]) -> FloatArray:
        return np.ascontiguousarray(values.reshape(rows, -1).T, np.float32)

    group_size = block_size(type) // scale.shape[1]
    return Grid(type, group_size, by_group(scale), None if minimum is None else by_group(minimum))


def with_levels(encoded: NDArray[np.uint8], type: TensorType, levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Encoded rows with other levels on the same grid.

    Shapes: encoded uint8[rows, row bytes]; levels int8[rows, columns], of the type's range or values of IQ4's table.
    """
    result = np.array(encoded, np.uint8, order="C")
    blocks = result.reshape(-1).view(block_dtype(type))
    by_block = levels.reshape(len(blocks), -1)
    if LEVEL_RANGES[type] == TABLE:
        codes: NDArray[Any] = nearest_iq4(by_block.astype(np.float32))
    else:
        codes = by_block.astype(np.int16) + LEVEL_OFFSETS.get(type, 0)
    for name, values in pack_codes(codes, type).items():
        blocks[name] = values.reshape(blocks[name].shape)
    return result
