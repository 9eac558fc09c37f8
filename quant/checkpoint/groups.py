"""Matrices of integers: codes, and a scale and zero point per group of columns.

Lossless means: the weights that kernels multiply are exactly scale * (code - zero), the numbers the checkpoint states.
GGUF's own Q4_1 cannot promise that, because its float16 minimum would hold -scale * zero only rounded (by up to 1.5 %
of a step). So the zero point stays an integer:

| codes | in GGUF's blocks | bits per weight |
|---|---|---|
| 2 or 3 bits; 4 bits, every zero point 8 | Q4_0: code - zero + 8 | 4.5 |
| 4 bits, any zero point; 5 bits, every zero point 16 | Q5_0: code - zero fits five bits | 5.5 |
| 6 bits, every zero point 32, groups of 256 or a multiple | Q6_K | 6.5625 |
| 5 to 8 bits, code - zero fits eight | Q8_0 | 8.5 |
| scales beyond float16, groups that end inside a block, 8 bits with other zero points | F32 | 32 |

| codes | groups are runs of | in the CPU kernels' layouts | bits per weight |
|---|---|---|---|
| 2 to 4 bits | 128 columns or a multiple | INT4_128 | 4.25 |
| 2 or 3 bits; 4 bits, every zero point 8 | 32 | Q4_0 | 4.5 |
| 4 bits | 64 | INT4_64 | 4.5 |
| 4 bits | 32 | INT4_32 | 5 |
| 5 to 8 bits | 32 | Q5_0, Q6_K or Q8_0 as above | 5.5 to 8.5 |
| 8 bits, other zero points | 32 | INT8_32 | 9 |
| scales beyond float16, other groups | | F32 | 32 |

All of these give the same float32 weights, bit for bit, unless scales are stored as float32: they are rounded to
float16, by 0.05 % at most, because 32 bits per weight would be of no use. (A checkpoint with groups of 128 takes 4.16
bits in its file; the rest here is that zero points take 16 bits, not 4, so that a tile's codes stay aligned.) Act-order
checkpoints scatter the columns of a group; sorted by group (`in_group_order`), with activations in the same order, they
are as good as any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.kernels.layouts import LARGEST_STEP, SIZES, Layout
from localinfer.quant.checkpoint.module_reader import AGAIN, CodeReader, StoredForm, StoredMatrix, common_type
from localinfer.quant.formats.dequantize import LEVEL_OFFSETS
from localinfer.quant.formats.types import TensorType, bits_per_weight, block_size, pack_bits, pack_codes

_BLOCK = 32
_SUPER_BLOCK = 256
_LAYOUTS_BY_RUN = {128: Layout.INT4_128, 64: Layout.INT4_64, 32: Layout.INT4_32}
_MAX_SCALE_CHANGE = 2.0**-10
"""Relative change of a scale by rounding to float16: of one in float32, within its normal range, at most half of it."""


@dataclass(frozen=True)
class GroupedMatrix(StoredMatrix):
    """w[r, k] = scales[r, groups[k]] * (code[r, k] - zeros[r, groups[k]]).

    Shapes: scales float32[rows, G]; zeros int16[rows, G]; groups int32[columns]. Codes are below 2^bits.
    """

    bits: int
    scales: NDArray[np.float32]
    zeros: NDArray[np.int16]
    groups: NDArray[np.int32]
    read: CodeReader
    by_row = ("scales", "zeros")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), len(self.groups)

    @cached_property
    def is_in_order(self) -> bool:
        """True if the columns of every group are neighbours."""
        return bool((np.diff(self.groups) >= 0).all())

    def in_group_order(self) -> tuple[NDArray[np.int32], "GroupedMatrix"]:
        """Return int32[columns], which column comes where, and the matrix of the columns so sorted by group."""
        order = np.argsort(self.groups, kind="stable").astype(np.int32)
        read = self.read
        return order, replace(self, groups=self.groups[order], read=lambda rows: read(rows)[:, order])

    @property
    def description(self) -> str:
        """Width of the codes, size of the groups, and whether they have zero points."""
        num_rows, num_columns = self.shape
        num_groups = self.scales.shape[1]
        group = "a scale per row" if num_groups == 1 else f"groups of {-(-num_columns // num_groups)}"
        has_zeros = num_rows > 0 and bool((self.zeros != 1 << (self.bits - 1)).any())
        order = "" if self.is_in_order else ", act-order"
        return f"{self.bits}-bit integers, {group}{', zero points' if has_zeros else ''}{order}"

    @property
    def change(self) -> str:
        """Empty, or that scales are rounded."""
        is_rounded = self.scales_fit and self._scale_change > 0
        return "scales are rounded to float16, within 0.05 %" if is_rounded else ""

    def decode(self, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        return self.scales[rows][:, self.groups] * self._differences(rows)

    def gguf_type(self) -> TensorType:
        """Return the smallest GGUF type that holds exactly these weights, float32 scales aside."""
        groups = self.run_groups(_BLOCK)
        if groups is None or not self.scales_fit:
            return TensorType.F32
        middle = 1 << (self.bits - 1)
        is_symmetric = bool((self.zeros == middle).all())
        if self.bits <= 4:
            return TensorType.Q4_0 if self.bits < 4 or is_symmetric else TensorType.Q5_0
        if is_symmetric:
            if self.bits == 6 and self.run_groups(_SUPER_BLOCK) is not None:
                return TensorType.Q6_K
            return TensorType.Q5_0 if self.bits == 5 else TensorType.Q8_0
        lowest, highest = (-127, 127) if self.bits < 8 else self._reach
        return TensorType.Q8_0 if lowest >= -128 and highest <= 127 else TensorType.F32

    def fields(self, rows: NDArray[np.intp], type: TensorType) -> Mapping[str, NDArray[Any]]:
        """Return the fields of blocks of some rows, with the codes' own steps but in types of plain numbers."""
        length = block_size(type)
        if length == 1:
            return super().fields(rows, type)
        groups = self.run_groups(length)
        assert groups is not None, "only such a matrix has a block type"
        # What decides between Q4_0 and Q5_0 also says whether codes are already those of Q4_0.
        is_plain = type is TensorType.Q4_0 and self.bits == 4
        codes = self.read(rows) if is_plain else self._differences(rows) + LEVEL_OFFSETS.get(type, 0)
        found = {"d": self.scales[rows][:, groups], **pack_codes(codes.reshape(-1, length), type)}
        if type is TensorType.Q6_K:
            found["scales"] = np.ones((len(rows), len(groups), length // 16), np.int8)
        return found

    def layout(self, *others: "GroupedMatrix") -> Layout:
        """Return the smallest layout that holds this matrix and others of its shape exactly, float32 scales aside.

        A single one with scattered groups is packed as `in_group_order` sorts it, unless that is F32.
        """
        matrices = (self, *others) if others or self.is_in_order else (self.in_group_order()[1],)
        if any(matrix.run_groups(_BLOCK) is None or not matrix.scales_fit for matrix in matrices):
            return Layout.F32
        type = common_type(matrices)
        if any(matrix.bits > 4 for matrix in matrices):
            return Layout.INT8_32 if type is TensorType.F32 else Layout[type.name]
        run = next(run for run in _LAYOUTS_BY_RUN if all(matrix.run_groups(run) is not None for matrix in matrices))
        return Layout.Q4_0 if run < 128 and type is TensorType.Q4_0 else _LAYOUTS_BY_RUN[run]

    def kernel_rows(self, layout: Layout) -> NDArray[np.uint8]:
        """Return the rows as `kernels.cpu.weights.pack` takes them, in what `layout` gave."""
        if layout.name in TensorType.__members__:
            return self.gguf_bytes(TensorType[layout.name])
        sizes = SIZES[layout]
        num_rows, num_columns = self.shape
        groups = self.run_groups(sizes.unit)
        assert groups is not None, "`layout` has seen that there are such runs"
        fields = [("d", "<f2"), ("zero", "<i2"), ("codes", "u1", sizes.file_bytes - 4)]
        units = np.empty((num_rows, num_columns // sizes.unit), np.dtype(fields))
        units["d"] = self.scales[:, groups]
        units["zero"] = self.zeros[:, groups]
        for rows in self.chunks():
            codes = self.read(rows)
            packed = codes if layout is Layout.INT8_32 else pack_bits(codes.reshape(-1, _BLOCK), 4, _BLOCK // 2)
            units["codes"][rows] = packed.reshape(len(rows), *units["codes"].shape[1:])
        return units.reshape(-1).view(np.uint8)

    def run_groups(self, length: int) -> NDArray[np.int32] | None:
        """int32[columns / length]: the group of each run of columns, None where one has several or columns are left."""
        if len(self.groups) % length:
            return None
        runs = self.groups.reshape(-1, length)
        return runs[:, 0].copy() if (runs == runs[:, :1]).all() else None

    @property
    def scales_fit(self) -> bool:
        """True if float16 holds every scale, exactly but for float32's last bits."""
        return self._scale_change <= _MAX_SCALE_CHANGE

    @cached_property
    def _scale_change(self) -> float:
        """The largest relative change of a scale by float16, infinite where it overflows."""
        with np.errstate(over="ignore"):
            change = np.abs(self.scales.astype(np.float16).astype(np.float32) - self.scales)
        return float((change / np.maximum(np.abs(self.scales), np.float32(1e-38))).max())

    @cached_property
    def _reach(self) -> tuple[int, int]:
        """The lowest and the highest code - zero."""
        ends = [(int(part.min()), int(part.max())) for part in map(self._differences, self.chunks())]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _differences(self, rows: NDArray[np.intp]) -> NDArray[np.int16]:
        return self.read(rows).astype(np.int16) - self.zeros[rows][:, self.groups]


def grouped_matrix(
    name: str,
    bits: int,
    scales: NDArray[np.float32],
    zeros: NDArray[np.integer],
    groups: NDArray[np.int32],
    read_codes: CodeReader,
) -> GroupedMatrix:
    """Check what every kind of checkpoint could get wrong, and build the matrix.

    Raises: CorruptFileError if a scale is not finite, a group number has no scale, or a zero point is far from a code.
    """
    if not np.isfinite(scales).all():
        raise CorruptFileError(f"{name}: a scale is infinite or NaN. {AGAIN}")
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise CorruptFileError(
            f"{name}: columns belong to groups {groups.min()} to {groups.max()}; wanted 0 to {scales.shape[1] - 1}, as "
            f"there are scales. {AGAIN}"
        )
    lowest, highest = (1 << bits) - 1 - LARGEST_STEP, LARGEST_STEP
    if zeros.size and not lowest <= int(zeros.min()) <= int(zeros.max()) <= highest:
        raise CorruptFileError(
            f"{name}: zero points are {zeros.min()} to {zeros.max()}; wanted {lowest} to {highest}, so that products "
            f"with codes of {bits} bits can be summed exactly. {AGAIN}"
        )
    return GroupedMatrix(name, bits, np.ascontiguousarray(scales), zeros.astype(np.int16), groups, read_codes)


def stored_form(matrices: Sequence[StoredMatrix]) -> StoredForm:
    """Describe how a weight (a matrix, or a stack of experts) is stored and the layout it runs in."""
    type, first = common_type(matrices), matrices[0]
    name, bits = type.name, bits_per_weight(type)
    grouped = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    if len(grouped) == len(matrices):
        layout = grouped[0].layout(*grouped[1:])
        name, bits = layout.name, 8 * SIZES[layout].file_bytes / SIZES[layout].unit
    return StoredForm(first.description, name, bits, first.change, len(matrices))
