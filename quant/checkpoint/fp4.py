"""Weights of four-bit floating point (E2M1) with scales per 32 or 16 columns: MXFP4 and NVFP4; and MXFP6.

A byte holds two neighbouring columns, the first in its lower half. MXFP4: a power of two (E8M0) per 32 columns.
NVFP4: an E4M3 number per 16 columns, times one number of the whole tensor. MXFP6: E2M3 codes, four in three bytes.
Sources: OCP Microscaling Formats 1.0, section 5; the model cards of NVIDIA's NVFP4 checkpoints.

gpt-oss's own MXFP4: the matrices of all experts of a layer in two tensors.

NAME_blocks uint8[experts, rows, columns / 32, 16], two neighbouring codes to a byte, the first in its lower half;
NAME_scales uint8[experts, rows, columns / 32], powers of two (E8M0). Expert e of the module NAME is NAME#e here.
Source: the model card of gpt-oss (arXiv 2508.10925, section 2.1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import GroupedMatrix, grouped_matrix
from localinfer.quant.checkpoint.module_reader import (
    ROUNDED,
    TO_BFLOAT16,
    ModuleReader,
    StoredMatrix,
    encode_rows,
    finite_weights,
)
from localinfer.quant.checkpoint.module_tensors import (
    AGAIN,
    exponent_values,
    fp8_values,
    span_of,
    unpack_words,
    wrong_shape,
    wrong_type,
)
from localinfer.quant.formats.packing import pack_codes
from localinfer.quant.formats.types import TensorType, block_dtype, row_bytes
from localinfer.types import FloatArray

CodeReader = Callable[[NDArray[np.intp]], NDArray[np.uint8]]

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the number of each E2M1 code."""

_SUPER_BLOCK, _SUB_BLOCK, _MX_BLOCK = 256, 16, 32
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
_SMALLEST_REACH, _LARGEST_REACH = 2.0**-9, 2.0**15


def nibbles_of(data: NDArray[np.uint8]) -> CodeReader:
    """Return the reader of codes uint8[n, columns] of bytes [rows, columns / 2]."""

    def read(rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        chosen = data[span_of(rows)]
        codes = np.empty((*chosen.shape, 2), np.uint8)
        np.bitwise_and(chosen, 15, out=codes[..., 0])
        np.right_shift(chosen, 4, out=codes[..., 1])
        return codes.reshape(len(chosen), -1)

    return read


@dataclass(frozen=True)
class MxMatrix(StoredMatrix):
    """MXFP4, which GGUF has too. exponents: uint8[rows, columns / 32], of E8M0."""

    name: str
    exponents: NDArray[np.uint8]
    read_codes: CodeReader

    @property
    def description(self) -> str:
        """How the checkpoint stores it."""
        return "MXFP4, groups of 32"

    @property
    def change(self) -> str:
        """Weights stay as they are."""
        return ""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.exponents), self.exponents.shape[1] * _MX_BLOCK

    def rows(self, order: NDArray[np.intp]) -> "MxMatrix":
        """Return the matrix of these rows, in this order."""
        read = self.read_codes
        return replace(self, exponents=self.exponents[order], read_codes=lambda rows: read(order[rows]))

    def dequantize_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns], exactly. Raises: CorruptFileError if float32 does not hold one."""
        scales = exponent_values(self.exponents[rows], self.name) * np.float32(0.5)
        levels: FloatArray = DOUBLED[self.read_codes(rows)].astype(np.float32)
        return finite_weights(self.name, lambda: levels * np.repeat(scales, _MX_BLOCK, axis=1))

    def gguf_type(self) -> TensorType:
        """Return MXFP4."""
        return TensorType.MXFP4

    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks, MXFP4's with its codes unchanged."""
        if type is not TensorType.MXFP4:
            return encode_rows(self, type)
        if (self.exponents == 255).any():
            raise CorruptFileError(f"{self.name}: a scale is NaN (the byte 255). {AGAIN}")
        result = np.empty((self.shape[0], row_bytes(type, self.shape[1])), np.uint8)
        blocks = result.view(block_dtype(type))
        for rows in self.chunks():
            part = blocks[rows]
            part["e"] = self.exponents[rows]
            part["qs"] = pack_codes(self.read_codes(rows).reshape(-1, _MX_BLOCK), type)["qs"].reshape(part["qs"].shape)
            blocks[rows] = part
        return result.reshape(-1)


@dataclass(frozen=True)
class NvMatrix(StoredMatrix):
    """NVFP4: scales uint8[rows, columns / 16] of E4M3, and `factor`, which multiplies all of them.

    It becomes Q6_K, whose groups are of 16 columns too: a super-block's scales are whole multiples of a power of two
    up to 240, odd ones up to 127 (larger ones double the group's codes instead), and the factor goes into its float16.
    """

    name: str
    factor: float
    scales: NDArray[np.uint8]
    read_codes: CodeReader

    @property
    def description(self) -> str:
        """How the checkpoint stores it."""
        return "NVFP4, groups of 16"

    @property
    def change(self) -> str:
        """What becomes of the weights."""
        return {
            TensorType.Q6_K: "scales are rounded to float16 times 8 bits",
            TensorType.Q8_0: ROUNDED,
        }.get(self.gguf_type(), TO_BFLOAT16)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.scales), self.scales.shape[1] * _SUB_BLOCK

    def rows(self, order: NDArray[np.intp]) -> "NvMatrix":
        """Return the matrix of these rows, in this order."""
        read = self.read_codes
        return replace(self, scales=self.scales[order], read_codes=lambda rows: read(order[rows]))

    def dequantize_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns]. Raises: CorruptFileError if a scale is NaN, or a weight infinite."""
        scales = self._checked(rows)
        levels: FloatArray = DOUBLED[self.read_codes(rows)].astype(np.float32)

        def compute() -> FloatArray:
            factors = fp8_values("F8_E4M3")[scales] * np.float32(self.factor * 0.5)
            return levels * np.repeat(factors, _SUB_BLOCK, axis=1)

        return finite_weights(self.name, compute)

    def gguf_type(self) -> TensorType:
        """Return Q6_K, or Q8_0 where 256 does not divide the columns, or BF16 where float16 scales are too coarse."""
        reach = abs(self.factor) * _LARGEST_E4M3 * _LARGEST_E2M1
        if not _SMALLEST_REACH <= reach <= _LARGEST_REACH or self.shape[1] % 32:
            return TensorType.BF16
        return TensorType.Q8_0 if self.shape[1] % _SUPER_BLOCK else TensorType.Q6_K

    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks."""
        if type is not TensorType.Q6_K:
            return encode_rows(self, type)
        num_rows, num_columns = self.shape
        result = np.empty((num_rows, row_bytes(type, num_columns)), np.uint8)
        blocks = result.view(block_dtype(type))
        for rows in self.chunks():
            unit, scales, is_doubled = _whole_scales(self._checked(rows).reshape(-1, _SUPER_BLOCK // _SUB_BLOCK))
            levels = DOUBLED[self.read_codes(rows)].reshape(*scales.shape, _SUB_BLOCK) << is_doubled[:, :, None]
            part = blocks[rows]
            part["d"] = (unit * (self.factor * 2.0**-10)).reshape(part["d"].shape)
            part["scales"] = scales.reshape(part["scales"].shape)
            for field, values in pack_codes(levels.reshape(-1, _SUPER_BLOCK) + 32, type).items():
                part[field] = values.reshape(part[field].shape)
            blocks[rows] = part
        return result.reshape(-1)

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

    def read(rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        chosen = np.ascontiguousarray(data[span_of(rows)])
        return table[unpack_words(chosen, 6)]

    return grouped_matrix(name, 7, scales, np.full(scales.shape, 64, np.int16), groups, read)


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

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is."""
        for leaf in self.leaves:
            if name.endswith(f"_{leaf}"):
                return name.removesuffix(f"_{leaf}"), leaf
        return super().split_name(name)

    def codes_leaf(self, module: str) -> str | None:
        """Return `blocks` for a quantized stack, None for plain numbers."""
        return "blocks" if f"{module.partition('#')[0]}_blocks" in self._folder.tensors else None

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of one expert's matrix."""
        return self.matrix(module).shape

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
