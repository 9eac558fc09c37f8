"""Weights in floating point of four, six and eight bits, or int8, with scales; the folders of their writers.

A byte of FP4 (E2M1) holds two neighbouring columns, the first in its lower half. MXFP4: a power of two (E8M0) per 32
columns. NVFP4: an E4M3 number per 16 columns, times one number of the whole tensor. MXFP6: E2M3 codes, four in three
bytes. FP8 and int8 have one byte per element, and scales per tensor, row, group of columns or block, as plain numbers
or, of MXFP8, as powers of two: a weight is element * scale (less a zero point before it is scaled, of asymmetric
integers).
Sources: OCP Microscaling Formats 1.0, section 5; the model cards of NVIDIA's NVFP4 checkpoints.

gpt-oss (model card: arXiv 2508.10925, section 2.1) keeps the matrices of all experts of a layer in two tensors:
NAME_blocks uint8[experts, rows, columns / 32, 16] and NAME_scales uint8[experts, rows, columns / 32]. Expert e of the
module NAME is NAME#e here.

Three writers of FP8 differ in the names of their settings and scales only. `fp8` (DeepSeek-V3, arXiv 2412.19437,
section 3.3, and Qwen's): weight [R, K], weight_scale_inv per block of weight_block_size, or weight_scale per tensor.
`fbgemm_fp8`: weight_scale [R, 1]. Both kinds of scale multiply. NVIDIA's `modelopt`: FP8 with weight_scale per tensor,
row or block; NVFP4 with bytes of two codes in weight, weight_scale E4M3 [R, K / 16] and weight_scale_2, which
multiplies; MXFP8 and MXFP4 with powers of two in weight_scale. With AWQ (arXiv 2306.00978) pre_quant_scale [K]
multiplies the input, which the weight's columns can do as well.
AutoRound's `auto_round:fp8_static` and `auto_round:llm_compressor` are among these, and compressed-tensors' tensors.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import GroupedMatrix, grouped_matrix
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    FP8_DTYPES,
    CodeReader,
    DecodedMatrix,
    ModuleReader,
    StoredMatrix,
    bytes_of,
    exponent_values,
    floats_of,
    fp8_values,
    scalar_of,
    span_of,
    unpack_words,
    wrong_shape,
    wrong_type,
)
from localinfer.quant.formats.dequantize import E2M1_VALUES
from localinfer.quant.formats.types import TensorType, pack_codes
from localinfer.types import FloatArray

DOUBLED = E2M1_VALUES.astype(np.int8)
"""Twice the number of each E2M1 code."""

_SUPER_BLOCK, _SUB_BLOCK, _MX_BLOCK = 256, 16, 32
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
_SMALLEST_REACH, _LARGEST_REACH = 2.0**-9, 2.0**15


def nibbles_of(data: NDArray[np.uint8]) -> CodeReader:
    """Return the reader of codes uint8[n, columns] of bytes [rows, columns / 2]."""
    return lambda rows: unpack_words(data[span_of(rows)], 4)


@dataclass(frozen=True)
class MxMatrix(StoredMatrix):
    """MXFP4, which GGUF has too. exponents: uint8[rows, columns / 32], of E8M0."""

    exponents: NDArray[np.uint8]
    read: CodeReader
    by_row = ("exponents",)
    description = "MXFP4, groups of 32"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.exponents), self.exponents.shape[1] * _MX_BLOCK

    def decode(self, rows: NDArray[np.intp]) -> FloatArray:
        scales = exponent_values(self.exponents[rows], self.name) * np.float32(0.5)
        return DOUBLED[self.read(rows)].astype(np.float32) * np.repeat(scales, _MX_BLOCK, axis=1)

    def gguf_type(self) -> TensorType:
        return TensorType.MXFP4

    def fields(self, rows: NDArray[np.intp], type: TensorType) -> Mapping[str, NDArray[Any]]:
        """Return the fields of blocks of some rows, MXFP4's with the codes unchanged."""
        if type is not TensorType.MXFP4:
            return super().fields(rows, type)
        exponent_values(self.exponents[rows], self.name)
        return {"e": self.exponents[rows], **pack_codes(self.read(rows).reshape(-1, _MX_BLOCK), type)}


@dataclass(frozen=True)
class NvMatrix(StoredMatrix):
    """NVFP4: scales uint8[rows, columns / 16] of E4M3, and `factor`, which multiplies all of them.

    It becomes Q6_K, whose groups are of 16 columns too: a super-block's scales are whole multiples of a power of two
    up to 240, odd ones up to 127 (larger ones double the group's codes instead), and the factor goes into its float16.
    """

    factor: float
    scales: NDArray[np.uint8]
    read: CodeReader
    by_row = ("scales",)
    description = "NVFP4, groups of 16"
    own_change = "scales are rounded to float16 times 8 bits"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), self.scales.shape[1] * _SUB_BLOCK

    def decode(self, rows: NDArray[np.intp]) -> FloatArray:
        factors = fp8_values("F8_E4M3")[self._checked(rows)] * np.float32(self.factor * 0.5)
        return DOUBLED[self.read(rows)].astype(np.float32) * np.repeat(factors, _SUB_BLOCK, axis=1)

    def gguf_type(self) -> TensorType:
        """Return Q6_K, or Q8_0 where 256 does not divide the columns, or BF16 where float16 scales are too coarse."""
        reach = abs(self.factor) * _LARGEST_E4M3 * _LARGEST_E2M1
        if not _SMALLEST_REACH <= reach <= _LARGEST_REACH or self.shape[1] % 32:
            return TensorType.BF16
        return TensorType.Q8_0 if self.shape[1] % _SUPER_BLOCK else TensorType.Q6_K

    def fields(self, rows: NDArray[np.intp], type: TensorType) -> Mapping[str, NDArray[Any]]:
        if type is not TensorType.Q6_K:
            return super().fields(rows, type)
        unit, scales, is_doubled = _whole_scales(self._checked(rows).reshape(-1, _SUPER_BLOCK // _SUB_BLOCK))
        levels = DOUBLED[self.read(rows)].reshape(*scales.shape, _SUB_BLOCK) << is_doubled[:, :, None]
        codes = pack_codes(levels.reshape(-1, _SUPER_BLOCK) + 32, type)
        return {"d": unit * (self.factor * 2.0**-10), "scales": scales, **codes}

    def _checked(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        scales = self.scales[rows]
        if (scales & 127 == 127).any():
            raise CorruptFileError(f"{self.name}: a scale is NaN. {AGAIN}")
        return scales


def _whole_scales(codes: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int8]]:
    """Scales of super-blocks as whole numbers, for E4M3 codes uint8[super-blocks, 16].

    Returns: the unit of each super-block in 2^-9, a power of two; scales int8[..., 16] in units; and 1 where a group's
    scale is half of what it should be, so that its codes are to be doubled.
    """
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.int64)
    sizes = np.where(exponent == 0, mantissa, (8 + mantissa) << np.maximum(exponent, 1).astype(np.int64) - 1)
    lowest = np.where(sizes == 0, np.int64(1 << 40), sizes & -sizes).min(axis=1)
    largest = sizes.max(axis=1)
    # Of sizes further apart than 240 units the smallest are rounded: they matter least.
    smallest_unit = np.where(largest == 0, 1, 2.0 ** np.ceil(np.log2(np.maximum(largest, 1) / 240.0)))
    unit = np.maximum(np.minimum(lowest, np.maximum(largest, 1)), smallest_unit).astype(np.int64)
    scales = np.rint(sizes / unit[:, None]).astype(np.int64)
    is_doubled = (scales > 127).astype(np.int8)
    signed = np.where(codes >= 128, -1, 1) * (scales >> is_doubled)
    return unit, signed.astype(np.int8), is_doubled


def nvfp4_matrix(name: str, data: NDArray[np.uint8], scales: NDArray[np.uint8], factor: float) -> NvMatrix:
    """Return NVFP4 from its bytes. Raises: CorruptFileError if they are not those of one matrix.

    Shapes: data uint8[rows, columns / 2]; scales uint8[rows, columns / 16].
    """
    if (len(data), data.shape[1] * 2) != (len(scales), scales.shape[1] * _SUB_BLOCK):
        raise wrong_shape(f"{name}.weight_scale", scales.shape, (len(data), data.shape[1] * 2 // _SUB_BLOCK))
    return NvMatrix(name, factor, scales, nibbles_of(data))


def mx_matrix(name: str, data: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> StoredMatrix:
    """Return MXFP4 or MXFP6, as the sizes say. Raises: CorruptFileError if they are of neither.

    Shapes: data uint8[rows, columns / 2 or columns * 3 / 4]; exponents uint8[rows, columns / 32].
    """
    num_columns = exponents.shape[1] * _MX_BLOCK
    if len(data) == len(exponents) and 2 * data.shape[1] == num_columns:
        return MxMatrix(name, exponents, nibbles_of(data))
    if len(data) == len(exponents) and 4 * data.shape[1] == 3 * num_columns:
        return _mxfp6_matrix(name, data, exponents)
    wanted = (len(data), data.shape[1] * 2 // _MX_BLOCK)
    raise wrong_shape(f"{name}.weight_scale", exponents.shape, wanted, " for groups of 32")


def _mxfp6_matrix(name: str, data: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> GroupedMatrix:
    """Return MXFP6 (E2M3) as integers of an eighth: they reach from -60 to 60, and keep every weight exactly.

    Shapes: data uint8[rows, columns * 3 / 4]; exponents uint8[rows, columns / 32].
    """
    codes = np.arange(64)
    exponent, mantissa = codes >> 3 & 3, codes & 7
    eighths = np.where(exponent == 0, mantissa, (8 + mantissa) << np.maximum(exponent, 1) - 1)
    table = (64 + np.where(codes >= 32, -eighths, eighths)).astype(np.uint8)
    scales = exponent_values(exponents, name) * np.float32(0.125)
    groups = (np.arange(exponents.shape[1] * _MX_BLOCK) // _MX_BLOCK).astype(np.int32)

    zeros = np.full(scales.shape, 64, np.int16)
    return grouped_matrix(name, 7, scales, zeros, groups, lambda rows: table[unpack_words(data[span_of(rows)], 6)])


def nvfp4_factor(divisor: float, name: str) -> float:
    """The factor that a global scale stands for where weights are divided by it.

    Raises: CorruptFileError if it is zero.
    """
    if not divisor or not math.isfinite(1.0 / divisor):
        raise CorruptFileError(f"{name} is {divisor}; wanted a number other than zero. {AGAIN}")
    return 1.0 / divisor


_BLOCK_BYTES = 16


class Mxfp4Reader(ModuleReader):
    """Reads stacks of experts, one matrix of them at a time."""

    leaves = ("blocks", "scales")

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is."""
        for leaf in self.leaves:
            if name.endswith(f"_{leaf}"):
                return name.removesuffix(f"_{leaf}"), leaf
        return super().split_name(name)

    def codes_leaf(self, module: str) -> str | None:
        """Return `blocks` for a quantized stack, None for plain numbers."""
        return "blocks" if f"{module.partition('#')[0]}_blocks" in self._folder.tensors else None

    def matrix(self, module: str) -> StoredMatrix:
        """Return one expert's matrix. Raises: CorruptFileError if the tensors do not fit each other."""
        stack, _, expert = module.partition("#")
        blocks, scales = self._folder.tensor(f"{stack}_blocks"), self._folder.tensor(f"{stack}_scales")
        for tensor, dimensions in ((blocks, 4), (scales, 3)):
            if tensor.dtype != "U8" or len(tensor.shape) != dimensions or 0 in tensor.shape:
                raise wrong_type(self._folder, tensor.name, f"U8 of {dimensions} dimensions")
        if blocks.shape != (*scales.shape, _BLOCK_BYTES):
            raise wrong_shape(blocks.name, blocks.shape, (*scales.shape, _BLOCK_BYTES))
        index = int(expert or 0)
        if index >= len(self._folder.array(scales.name)):
            raise wrong_shape(scales.name, scales.shape, (index + 1, *scales.shape[1:]), " for its experts")
        data = self._folder.array(blocks.name)[index].reshape(scales.shape[1], -1)
        return mx_matrix(module, data, self._folder.array(scales.name)[index])


EXPONENT_DTYPES = ("U8", "F8_E8M0")
USUAL_BLOCK = (128, 128)

_NAMES = {"F8_E4M3": "FP8 (E4M3)", "F8_E5M2": "FP8 (E5M2)"}


@dataclass(frozen=True)
class ScaleGrid:
    """Scales of a matrix: that of [r, k] is values[row_of[r], column_of[k]].

    Shapes: values float32[a, b]; row_of int32[rows] below a; column_of int32[columns] below b. description: the
    elements that share a scale.
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
    """True if a module's weight is stored in one byte per element."""
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

    integer_bits: the width of integers by the settings. group_sizes: of the settings; any where there are none. block:
    rows and columns that share a scale, if the scales' shape is that of blocks.
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
        super().__init__(folder, settings)
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
        return self._stored_matrix(module).shape

    def matrix(self, module: str) -> StoredMatrix:
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
            return mx_matrix(module, data, scales)
        return nvfp4_matrix(module, data, scales, scalar_of(folder, f"{module}.weight_scale_2"))
