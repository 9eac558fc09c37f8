"""FP8 checkpoints of three writers, which differ in the names of their settings and scales only.

`fp8` (DeepSeek-V3, arXiv 2412.19437, section 3.3, and Qwen's): weight [R, K], weight_scale_inv per block of
weight_block_size, or weight_scale per tensor. `fbgemm_fp8`: weight_scale [R, 1]. Both kinds of scale multiply. NVIDIA's
`modelopt`: FP8 with weight_scale per tensor, row or block; NVFP4 with bytes of two codes in weight, weight_scale E4M3
[R, K / 16] and weight_scale_2, which multiplies; MXFP8 and MXFP4 with powers of two in weight_scale. With AWQ
(arXiv 2306.00978) pre_quant_scale [K] multiplies the input, which the weight's columns can do as well.
AutoRound's `auto_round:fp8_static` and `auto_round:llm_compressor` are among these, and compressed-tensors' tensors.

Weights with one byte per element, FP8 or int8, and scales per tensor, row, group of columns or block.

A weight is element * scale (less a zero point before it is scaled, of asymmetric integers). Scales are stored as
plain numbers or, of MXFP8, as powers of two (E8M0).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint import fp4
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import grouped_matrix
from localinfer.quant.checkpoint.module_reader import DecodedMatrix, ModuleReader, StoredMatrix
from localinfer.quant.checkpoint.module_tensors import (
    AGAIN,
    FP8_DTYPES,
    bytes_of,
    exponent_values,
    floats_of,
    fp8_values,
    scalar_of,
    span_of,
    wrong_shape,
    wrong_type,
)
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


_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"),
    *("NVFP4_AWQ", "MXFP8", "MXFP4", "W4A8_MXFP4_FP8", "MIXED_PRECISION"),
)


class Fp8Reader(ModuleReader):
    """Reads modules whose `weight` holds bytes of floating point, and has scales beside it.

    Raises: UnsupportedFormatError if the settings name an algorithm that is not read, CorruptFileError if the size of
    blocks has no meaning.
    """

    leaves = ("weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "pre_quant_scale")

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)
        algorithm = settings.get("quant_algo")
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            raise UnsupportedFormatError(
                f"quantization_config: quant_algo is {algorithm!r:.40}; of modelopt's algorithms this version reads "
                f"{', '.join(_ALGORITHMS)}. Choose another copy of the model."
            )
        block = settings.get("weight_block_size")
        self._block = USUAL_BLOCK if block is None else block_of(block)

    def codes_leaf(self, module: str) -> str | None:
        """Return `weight` for a quantized module, None for one of plain numbers."""
        tensor = self._folder.tensors.get(f"{module}.weight")
        is_quantized = tensor is not None and (tensor.dtype == "U8" or is_scaled(self._folder, module))
        return "weight" if is_quantized else None

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""
        return self._stored_matrix(module).shape

    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other."""
        matrix, name = self._stored_matrix(module), f"{module}.pre_quant_scale"
        if name not in self._folder.tensors:
            return matrix
        factors = floats_of(self._folder, name).reshape(-1)
        if factors.shape != matrix.shape[1:] or not np.isfinite(factors).all():
            raise wrong_shape(name, factors.shape, matrix.shape[1:], " finite numbers")
        found = matrix.dequantize_rows(np.arange(min(matrix.shape[0], 16))) * factors
        return DecodedMatrix(
            module,
            f"{matrix.description}, scaled columns",
            matrix.shape,
            lambda rows: matrix.dequantize_rows(rows) * factors,
            float(np.abs(found).max()),
        )

    def _stored_matrix(self, module: str) -> StoredMatrix:
        folder = self._folder
        if folder.tensor(f"{module}.weight").dtype != "U8":
            scale = "weight_scale_inv" if f"{module}.weight_scale_inv" in folder.tensors else "weight_scale"
            return scaled_matrix(folder, module, scale, block=self._block)
        data = bytes_of(folder, f"{module}.weight", ("U8",))
        scales = bytes_of(folder, f"{module}.weight_scale", (*EXPONENT_DTYPES, "F8_E4M3"))
        if folder.tensor(f"{module}.weight_scale").dtype != "F8_E4M3":
            return fp4.mx_matrix(module, data, scales)
        return fp4.nvfp4_matrix(module, data, scales, scalar_of(folder, f"{module}.weight_scale_2"))
