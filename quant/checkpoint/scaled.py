"""Weights with one byte per element, FP8 or int8, and scales per tensor, row, group of columns or block.

A weight is element * scale (less a zero point before it is scaled, of asymmetric integers). Scales are stored as
plain numbers or, of MXFP8, as powers of two (E8M0).
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import grouped_matrix
from localinfer.quant.checkpoint.module_tensors import (
    AGAIN,
    FP8_DTYPES,
    bytes_of,
    exponent_values,
    floats_of,
    fp8_values,
    span_of,
    wrong_shape,
    wrong_type,
)
from localinfer.quant.checkpoint.stored_matrix import DecodedMatrix, StoredMatrix
from localinfer.types import FloatArray

EXPONENT_DTYPES = ("U8", "F8_E8M0")
USUAL_BLOCK = (128, 128)

_NAMES = {"F8_E4M3": "FP8 (E4M3)", "F8_E5M2": "FP8 (E5M2)"}


@dataclass(frozen=True)
class ScaleGrid:
    """Scales of a matrix: that of [r, k] is values[row_of[r], column_of[k]].

    Shapes: values float32[a, b]; row_of int32[rows] below a; column_of int32[columns] below b. description: what shares
    a scale.
    """

    values: FloatArray
    row_of: NDArray[np.int32]
    column_of: NDArray[np.int32]
    description: str

    def of_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns] of n row numbers, or [n, 1] where a row has one scale."""
        scales = self.values[self.row_of[rows]]
        return scales if scales.shape[1] == 1 else scales[:, self.column_of]


def block_of(sides: object) -> tuple[int, int]:
    """Return the rows and columns of a block by the settings. Raises: CorruptFileError if they are no sizes."""
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and 0 < side < 1 << 31 for side in sides):
        return sides[0], sides[1]
    raise CorruptFileError(
        f"quantization_config: a block is {sides!r:.60}; wanted its rows and columns, such as [128, 128]. {AGAIN}"
    )


def is_scaled(folder: CheckpointFolder, module: str) -> bool:
    """Whether a module's weight is stored in one byte per element."""
    tensor = folder.tensors.get(f"{module}.weight")
    return tensor is not None and tensor.dtype in (*FP8_DTYPES, "I8")


def scaled_matrix(
    folder: CheckpointFolder,
    module: str,
    scale_leaf: str,
    *,
    integer_bits: int = 8,
    group_sizes: Collection[int] = (),
    block: tuple[int, int] = USUAL_BLOCK,
) -> StoredMatrix:
    """Return a module's weight from `weight`, its scales and perhaps `weight_zero_point`.

    integer_bits: what the settings say of integers. group_sizes: of the settings; any where there are none. block: rows
    and columns that share a scale, if the scales' shape is that of blocks.
    Raises: CorruptFileError if a tensor is missing, of another type, or does not fit the others.
    """
    dtype = folder.tensor(f"{module}.weight").dtype
    data = bytes_of(folder, f"{module}.weight", (*FP8_DTYPES, "I8"))
    grid = scale_grid(folder, f"{module}.{scale_leaf}", (data.shape[0], data.shape[1]), group_sizes, block)
    if dtype == "I8":
        return _integers(folder, module, data, grid, integer_bits)
    table = fp8_values(dtype)
    largest = float(np.nanmax(np.where(np.isinf(table), np.nan, table)))
    return DecodedMatrix(
        module,
        f"{_NAMES[dtype]}, {grid.description}",
        (data.shape[0], data.shape[1]),
        lambda rows: table[data[span_of(rows)]] * grid.of_rows(rows),
        largest * float(np.abs(grid.values).max()),
    )


def scale_grid(
    folder: CheckpointFolder, name: str, shape: tuple[int, int], group_sizes: Collection[int], block: tuple[int, int]
) -> ScaleGrid:
    """Return the scales of a matrix of this shape, shared as the shape of their tensor says.

    Raises: CorruptFileError if the tensor is missing or of another type, has another shape, or an infinite scale.
    """
    num_rows, num_columns = shape
    values = _scales(folder, name)
    found = values.shape
    values = values.reshape([size for size in found if size != 1] or [1])
    every_row, every_column = np.arange(num_rows), np.arange(num_columns)
    no_row, no_column = np.zeros_like(every_row), np.zeros_like(every_column)
    by_block = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    if values.size == 1:
        values, rows, columns, shared = values.reshape(1, 1), no_row, no_column, "a scale per tensor"
    elif values.size == num_rows and found[0] == num_rows:
        values, rows, columns, shared = values.reshape(-1, 1), every_row, no_column, "a scale per row"
    elif values.size == by_block[0] * by_block[1] and found[0] == by_block[0]:
        values, rows, columns = values.reshape(by_block), every_row // block[0], every_column // block[1]
        shared = f"a scale per block of {block[0]} x {block[1]}"
    else:
        num_groups = values.size // num_rows
        size = num_columns // num_groups if num_groups else 0
        is_whole = values.size == num_rows * num_groups and found[0] == num_rows and size * num_groups == num_columns
        if not size or not is_whole or (group_sizes and size not in group_sizes):
            raise wrong_shape(
                name, found, (num_rows, 1), f" for rows, {by_block} for blocks of {block[0]} x {block[1]}, or groups"
            )
        values, rows, columns = values.reshape(num_rows, num_groups), every_row, every_column // size
        shared = f"groups of {size}"
    return ScaleGrid(values, rows.astype(np.int32), columns.astype(np.int32), shared)


def _scales(folder: CheckpointFolder, name: str) -> FloatArray:
    tensor = folder.tensor(name)
    if tensor.dtype in EXPONENT_DTYPES and 0 not in tensor.shape:
        return exponent_values(folder.tensor_bytes(name), name).reshape(tensor.shape)
    values = floats_of(folder, name)
    if not np.isfinite(values).all():
        raise CorruptFileError(f"{name}: a scale is infinite or NaN. {AGAIN}")
    return values


def _integers(
    folder: CheckpointFolder, module: str, data: NDArray[np.uint8], grid: ScaleGrid, bits: int
) -> StoredMatrix:
    middle = 1 << (bits - 1)

    def codes(rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        found = data[span_of(rows)].view(np.int8) + np.int16(middle)
        if not 0 <= int(found.min()) <= int(found.max()) < 2 * middle:
            raise CorruptFileError(
                f"{module}.weight holds {found.min() - middle} to {found.max() - middle}; wanted -{middle} to "
                f"{middle - 1}, as num_bits is {bits}. {AGAIN}"
            )
        return found.astype(np.uint8)

    scales = grid.values[grid.row_of]
    return grouped_matrix(module, bits, scales, _zeros(folder, module, grid) + middle, grid.column_of, codes)


def _zeros(folder: CheckpointFolder, module: str, grid: ScaleGrid) -> NDArray[np.int16]:
    """Zero points of each row's groups: stored like the scales, or all zero."""
    name = f"{module}.weight_zero_point"
    if name not in folder.tensors:
        return np.zeros((len(grid.row_of), grid.values.shape[1]), np.int16)
    tensor = folder.tensor(name)
    if tensor.dtype != "I8":
        raise wrong_type(folder, name, "I8")
    stored = folder.array(name)
    if stored.size != grid.values.size:
        raise wrong_shape(name, tensor.shape, grid.values.shape)
    zeros: NDArray[np.int16] = stored.reshape(grid.values.shape)[grid.row_of].astype(np.int16)
    return zeros
