"""Weights of HQQ checkpoints (Half-Quadratic Quantization, the published method of Badri and Shaji, 2023).

The matrix, reshaped so that each row (axis 1) or column (axis 0) of it is one group, is scale * (code - zero), where a
zero point need not be whole. W_q packs the codes of rows that lie a fixed step apart into one element: uint8 with the
first row in the upper bits, and of three bits int32 with ten. nbits, group_size, shape, axis and packing lie beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.groups import grouped_matrix
from localinfer.quant.checkpoint.module_reader import (
    AGAIN,
    CodeReader,
    DecodedMatrix,
    ModuleReader,
    StoredMatrix,
    floats_of,
    sizes_of,
    wrong_shape,
    wrong_type,
)
from localinfer.quant.formats.types import TensorType, pack_codes
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

    def shape(self, module: str) -> tuple[int, int]:
        return sizes_of(self._folder, f"{module}.shape")

    def matrix(self, module: str) -> StoredMatrix:
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
        """Groups that are not runs of columns: every weight is found by its index in the flattened matrix."""

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

    bits: int
    scales: FloatArray
    minimums: FloatArray
    groups: NDArray[np.int32]
    read: CodeReader
    by_row = ("scales", "minimums")
    own_change = "scales and minimums are rounded to float16, within 0.05 %"

    @property
    def description(self) -> str:
        size = len(self.groups) // self.scales.shape[1]
        return f"{self.bits}-bit integers, groups of {size}, fractional zero points"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), len(self.groups)

    def decode(self, rows: NDArray[np.intp]) -> FloatArray:
        return self.scales[rows][:, self.groups] * self.read(rows) + self.minimums[rows][:, self.groups]

    def gguf_type(self) -> TensorType:
        """Return Q4_1, Q8_0 where groups end inside its blocks, BF16 where float16 does not reach."""
        size = len(self.groups) // self.scales.shape[1]
        reach = max(float(np.abs(self.scales).max()), float(np.abs(self.minimums).max()))
        if reach > _LARGEST_FLOAT16 or len(self.groups) % _BLOCK:
            return TensorType.BF16
        return TensorType.Q8_0 if size % _BLOCK else TensorType.Q4_1

    def fields(self, rows: NDArray[np.intp], type: TensorType) -> Mapping[str, NDArray[Any]]:
        if type is not TensorType.Q4_1:
            return super().fields(rows, type)
        groups = self.groups[::_BLOCK]
        codes = pack_codes(self.read(rows).reshape(-1, _BLOCK), type)
        return {"d": self.scales[rows][:, groups], "m": self.minimums[rows][:, groups], **codes}
