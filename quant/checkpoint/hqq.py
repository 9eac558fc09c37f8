"""Weights of HQQ checkpoints (Half-Quadratic Quantization, the published method of Badri and Shaji, 2023).

The matrix, reshaped so that each row (axis 1) or column (axis 0) of it is one group, is scale * (code - zero), where a
zero point need not be whole. W_q packs the codes of rows that lie a fixed step apart into one element: uint8 with the
first row in the upper bits, and of three bits int32 with ten. nbits, group_size, shape, axis and packing lie beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import CodeReader, grouped_matrix
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    ROUNDED,
    TO_BFLOAT16,
    DecodedMatrix,
    ModuleReader,
    StoredMatrix,
    encode_rows,
    finite_weights,
    floats_of,
    wrong_shape,
    wrong_type,
)
from localinfer.quant.formats.types import TensorType, block_dtype, pack_codes, row_bytes
from localinfer.types import FloatArray

_CODES_PER_ELEMENT = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
_BLOCK = 32
_LARGEST_FLOAT16 = 65504.0


class _GridReader(Protocol):
    """Codes of the reshaped matrix: uint8[n, columns] of whole rows, or of n elements by row and column."""

    def __call__(self, rows: NDArray[np.intp], columns: NDArray[np.intp] | None) -> NDArray[np.uint8]: ...


class HqqReader(ModuleReader):
    """Reads the quantized modules of an HQQ checkpoint."""

    leaves = (
        *("W_q", "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "optimize"),
        *("view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
        *("stores_quant_config", "channel_wise", "round_zero"),
    )

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder)

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""
        shape = self._folder.array(f"{module}.shape").reshape(-1)
        if shape.dtype.kind not in "iu" or shape.size != 2 or not (shape > 0).all() or (shape >= 1 << 31).any():
            raise CorruptFileError(f"{module}.shape is {shape.tolist()!r:.60}; wanted rows and columns. {AGAIN}")
        return int(shape[0]), int(shape[1])

    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other."""
        for flag in ("view_as_float", "quant_scale", "quant_zero"):
            if self._integer(module, flag, 0):
                raise UnsupportedFormatError(
                    f"{module}.{flag} is set; this version reads HQQ's codes as integers, and scales and zero points "
                    "that are plain numbers. Quantize the model again without it, or choose another copy."
                )
        num_rows, num_columns = self.shape(module)
        bits, axis = self._integer(module, "nbits", 4), self._integer(module, "axis", 1)
        if bits not in _CODES_PER_ELEMENT or axis not in (0, 1):
            raise UnsupportedFormatError(
                f"{module} has {bits} bits, groups along axis {axis}; this version reads HQQ of 1, 2, 3, 4 and 8 bits "
                "along axis 0 or 1. Choose another copy."
            )
        weights = num_rows * num_columns
        size = self._integer(module, "group_size", num_columns if axis else num_rows)
        if size < 1 or weights % size:
            raise CorruptFileError(f"{module}: {weights} weights do not split into groups of {size}. {AGAIN}")
        grid = (weights // size, size) if axis else (size, weights // size)
        codes = self._codes(module, bits, grid)
        scales, zeros = (floats_of(self._folder, f"{module}.{leaf}").reshape(-1) for leaf in ("scale", "zero"))
        for leaf, values in (("scale", scales), ("zero", zeros)):
            if values.size != weights // size or not np.isfinite(values).all():
                raise wrong_shape(f"{module}.{leaf}", values.shape, (weights // size,), " finite numbers")
        if axis == 0 or num_columns % size:
            return self._scattered(module, bits, (num_rows, num_columns), grid, axis, codes, scales, zeros)
        num_groups = num_columns // size

        def by_row(rows: NDArray[np.intp]) -> NDArray[np.uint8]:
            first = rows[:, None] * num_groups + np.arange(num_groups)
            return codes(first.reshape(-1), None).reshape(len(rows), -1)

        by_group = num_rows, num_groups
        row_scales: FloatArray = scales.reshape(by_group)
        row_zeros: FloatArray = zeros.reshape(by_group)
        groups = (np.arange(num_columns) // size).astype(np.int32)
        if (zeros == np.rint(zeros)).all() and zeros.min() >= 0 and zeros.max() < 1 << bits:
            return grouped_matrix(module, max(bits, 2), row_scales, row_zeros.astype(np.int16), groups, by_row)
        if bits <= 4:
            return AffineMatrix(module, bits, row_scales, -row_scales * row_zeros, groups, by_row)
        return DecodedMatrix(
            module,
            f"HQQ of {bits} bits, groups of {size}",
            (num_rows, num_columns),
            lambda rows: row_scales[rows][:, groups] * (by_row(rows) - row_zeros[rows][:, groups]),
            _reach(scales, zeros, bits),
        )

    def _scattered(
        self,
        module: str,
        bits: int,
        shape: tuple[int, int],
        grid: tuple[int, int],
        axis: int,
        codes: _GridReader,
        scales: FloatArray,
        zeros: FloatArray,
    ) -> DecodedMatrix:
        """Groups that no run of columns is: every weight is found by its place in the flattened matrix."""

        def read(rows: NDArray[np.intp]) -> FloatArray:
            flat = rows[:, None] * shape[1] + np.arange(shape[1])
            row, column = flat // grid[1], flat % grid[1]
            group = row if axis else column
            found: FloatArray = scales[group] * (codes(row, column) - zeros[group])
            return found

        size = grid[1] if axis else grid[0]
        stored_as = f"HQQ of {bits} bits, {size} to a group along axis {axis}"
        return DecodedMatrix(module, stored_as, shape, read, _reach(scales, zeros, bits))

    def _codes(self, module: str, bits: int, grid: tuple[int, int]) -> _GridReader:
        name, per_element = f"{module}.W_q", _CODES_PER_ELEMENT[bits]
        wanted_dtype = "I32" if bits == 3 else "U8"
        tensor = self._folder.tensor(name)
        if tensor.dtype != wanted_dtype or len(tensor.shape) != 2:
            raise wrong_type(self._folder, name, f"a matrix of {wanted_dtype}")
        step = -(-grid[0] // per_element)
        if tensor.shape != (step, grid[1]) or (bits != 3 and grid[0] % per_element):
            raise wrong_shape(name, tensor.shape, (step, grid[1]))
        packed = self._folder.array(name)
        unsigned = packed.view(np.uint32 if bits == 3 else np.uint8)

        def read(rows: NDArray[np.intp], columns: NDArray[np.intp] | None) -> NDArray[np.uint8]:
            shifts = ((per_element - 1 - rows // step) * bits).astype(unsigned.dtype)
            if columns is None:
                found = unsigned[rows % step] >> shifts[:, None]
            else:
                found = unsigned[rows % step, columns] >> shifts
            codes: NDArray[np.uint8] = (found & unsigned.dtype.type((1 << bits) - 1)).astype(np.uint8)
            return codes

        return read

    def _integer(self, module: str, leaf: str, default: int) -> int:
        name = f"{module}.{leaf}"
        if name not in self._folder.tensors:
            return default
        values = self._folder.array(name).reshape(-1)
        if values.size != 1 or values.dtype.kind not in "iu":
            raise wrong_type(self._folder, name, "one whole number")
        return int(values[0])


def _reach(scales: FloatArray, zeros: FloatArray, bits: int) -> float:
    """The largest weight that there can be."""
    return float((np.abs(scales) * np.maximum(np.abs(zeros), np.abs((1 << bits) - zeros))).max())


@dataclass(frozen=True)
class AffineMatrix(StoredMatrix):
    """w[r, k] = scales[r, g] * code[r, k] + minimums[r, g], codes of at most four bits, which is Q4_1.

    Shapes: scales, minimums float32[rows, G]; groups int32[columns], each a run of columns.
    """

    name: str
    bits: int
    scales: FloatArray
    minimums: FloatArray
    groups: NDArray[np.int32]
    read_codes: CodeReader

    @property
    def description(self) -> str:
        """How the checkpoint stores it."""
        size = len(self.groups) // self.scales.shape[1]
        return f"{self.bits}-bit integers, groups of {size}, fractional zero points"

    @property
    def change(self) -> str:
        """What becomes of the weights."""
        return {
            TensorType.Q4_1: "scales and minimums are rounded to float16, within 0.05 %",
            TensorType.Q8_0: ROUNDED,
        }.get(self.gguf_type(), TO_BFLOAT16)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.scales), len(self.groups)

    def rows(self, order: NDArray[np.intp]) -> "AffineMatrix":
        """Return the matrix of these rows, in this order."""
        read = self.read_codes
        return replace(
            self, scales=self.scales[order], minimums=self.minimums[order], read_codes=lambda rows: read(order[rows])
        )

    def dequantize_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns]. Raises: CorruptFileError if a weight is infinite."""

        def compute() -> FloatArray:
            return self.scales[rows][:, self.groups] * self.read_codes(rows) + self.minimums[rows][:, self.groups]

        return finite_weights(self.name, compute)

    def gguf_type(self) -> TensorType:
        """Return Q4_1, Q8_0 where groups end inside its blocks, BF16 where float16 does not reach."""
        size = len(self.groups) // self.scales.shape[1]
        reach = max(float(np.abs(self.scales).max()), float(np.abs(self.minimums).max()))
        if reach > _LARGEST_FLOAT16 or len(self.groups) % _BLOCK:
            return TensorType.BF16
        return TensorType.Q8_0 if size % _BLOCK else TensorType.Q4_1

    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks."""
        if type is not TensorType.Q4_1:
            return encode_rows(self, type)
        result = np.empty((self.shape[0], row_bytes(type, self.shape[1])), np.uint8)
        blocks, groups = result.view(block_dtype(type)), self.groups[::_BLOCK]
        for rows in self.chunks():
            part = blocks[rows]
            part["d"], part["m"] = self.scales[rows][:, groups], self.minimums[rows][:, groups]
            part["qs"] = pack_codes(self.read_codes(rows).reshape(-1, _BLOCK), type)["qs"].reshape(part["qs"].shape)
            blocks[rows] = part
        return result.reshape(-1)
