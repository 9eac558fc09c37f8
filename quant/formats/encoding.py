"""Encode weights for a file: by compiled kernels, and by NumPy for plain numbers and MXFP4.

The bytes are those of `reference.quantize`, on every machine and with any number of threads.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.encoding import ENCODERS, NotFiniteError, TooLargeError, encode_rows
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.reference import dequantize, quantize
from localinfer.quant.formats.reference_encoders import check_mean_squares
from localinfer.quant.formats.types import TensorType, block_size, row_bytes

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
    if source.dtype == np.uint16:
        bits: NDArray[np.uint32] = source.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return source.astype(np.float32, copy=False)


def encode(
    pool: ThreadPool, source: Source, type: TensorType, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Encode a matrix, using every thread of the pool.

    importance: how much the square of an error in each column weighs (the mean square of what the column is multiplied
    with), finite and not negative. Plain numbers, Q8_0 and MXFP4 do not use it.

    Shapes: source [rows, columns]; importance float32[columns]; result uint8[rows, row bytes].
    Raises: as `reference.quantize`.
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
    """Whether rows of this many columns fill whole blocks of a type."""
    return columns > 0 and columns % block_size(type) == 0
