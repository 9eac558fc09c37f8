"""Matrices of GPTQ, AWQ and compressed-tensors checkpoints: integer codes, and a scale and zero point per group.

Lossless means: the weights that kernels multiply are exactly scale * (code - zero), the numbers the checkpoint states.
GGUF's own Q4_1 cannot promise that, because its float16 minimum would hold -scale * zero only rounded (by up to 1.5 %
of a step). So the zero point stays an integer:

| codes | in GGUF's blocks | bits per weight |
|---|---|---|
| 2 bits; 4 bits, every zero point 8 | Q4_0: code - zero + 8 | 4.5 |
| 4 bits, any zero point | Q5_0: code - zero fits five bits | 5.5 |
| 8 bits, code - zero fits eight | Q8_0 | 8.5 |
| scales beyond float16, groups that end inside a block, 8 bits with other zero points | F32 | 32 |

All of these give the same float32 weights, bit for bit. Act-order checkpoints scatter the columns of a group; sorted by
group (`in_group_order`), with activations in the same order, they are as good as any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.formats.packing import pack_bits
from localinfer.quant.formats.types import TensorType, block_dtype, row_bytes

CodeReader = Callable[[NDArray[np.intp]], NDArray[np.uint8]]

BLOCK = 32
WEIGHTS_PER_CHUNK = 1 << 20
"""Weights unpacked at a time, so that what is in flight takes a few MiB however large the matrix."""


@dataclass(frozen=True)
class GroupedMatrix:
    """w[r, k] = scales[r, groups[k]] * (code[r, k] - zeros[r, groups[k]]).

    Shapes: scales float32[rows, G]; zeros int16[rows, G]; groups int32[columns]. read_codes gives uint8[n, columns],
    below 2^bits, for n row numbers.
    """

    name: str
    bits: int
    scales: NDArray[np.float32]
    zeros: NDArray[np.int16]
    groups: NDArray[np.int32]
    read_codes: CodeReader

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.scales), len(self.groups)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the columns of every group are neighbours."""
        return bool((np.diff(self.groups) >= 0).all())

    def rows(self, order: NDArray[np.intp]) -> "GroupedMatrix":
        """Return the matrix of these rows, in this order."""
        read = self.read_codes
        return replace(
            self, scales=self.scales[order], zeros=self.zeros[order], read_codes=lambda rows: read(order[rows])
        )

    def in_group_order(self) -> tuple[NDArray[np.int32], "GroupedMatrix"]:
        """Return int32[columns], which column comes where, and the matrix of the columns so sorted by group."""
        order = np.argsort(self.groups, kind="stable").astype(np.int32)
        read = self.read_codes
        return order, replace(self, groups=self.groups[order], read_codes=lambda rows: read(rows)[:, order])

    def dequantize(self) -> NDArray[np.float32]:
        """Return float32[rows, columns], each weight rounded once."""
        values = np.empty(self.shape, np.float32)
        for rows in self.chunks():
            values[rows] = self.scales[rows][:, self.groups] * self._differences(rows)
        return values

    def gguf_type(self) -> TensorType:
        """Return the smallest GGUF type that holds exactly these weights."""
        groups = self.run_groups(BLOCK)
        if groups is None or not self.scales_fit:
            return TensorType.F32
        if self.bits <= 4:
            return TensorType.Q4_0 if self.bits == 2 or (self.zeros == 8).all() else TensorType.Q5_0
        if (self.zeros == 128).all():
            return TensorType.Q8_0
        lowest, highest = self._reach
        return TensorType.Q8_0 if lowest >= -128 and highest <= 127 else TensorType.F32

    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks of what `gguf_type` gave, or of the larger type that `common_type` did."""
        if type is TensorType.F32:
            return self.dequantize().reshape(-1).view(np.uint8)
        num_rows, num_columns = self.shape
        groups = self.run_groups(BLOCK)
        assert groups is not None, "only such a matrix has a block type"
        result = np.empty((num_rows, row_bytes(type, num_columns)), np.uint8)
        blocks = result.view(block_dtype(type))
        # What decides between Q4_0 and Q5_0 also says whether codes are already those of Q4_0.
        is_plain = type is TensorType.Q4_0 and self.bits == 4
        for rows in self.chunks():
            part = blocks[rows]
            part["d"] = self.scales[rows][:, groups]
            shape = (len(rows), -1)
            if is_plain:
                part["qs"] = pack_nibbles(self.read_codes(rows)).reshape(*shape, BLOCK // 2)
                blocks[rows] = part
                continue
            codes = self._differences(rows).reshape(-1, BLOCK)
            if type is TensorType.Q8_0:
                part["qs"] = codes.astype(np.int8).reshape(*shape, BLOCK)
            elif type is TensorType.Q4_0:
                part["qs"] = pack_bits((codes + 8).astype(np.uint8), 4, 16).reshape(*shape, 16)
            else:
                assert type is TensorType.Q5_0, f"{type.name} is not a type of grouped matrices"
                shifted = (codes + 16).astype(np.uint8)
                part["qs"] = pack_bits(shifted & 15, 4, 16).reshape(*shape, 16)
                part["qh"] = pack_bits(shifted >> 4, 1, 1).reshape(*shape, 4)
            blocks[rows] = part
        return result.reshape(-1)

    def run_groups(self, length: int) -> NDArray[np.int32] | None:
        """int32[columns / length]: the group of each run of columns, None where one has several or columns are left."""
        if len(self.groups) % length:
            return None
        runs = self.groups.reshape(-1, length)
        return runs[:, 0].copy() if (runs == runs[:, :1]).all() else None

    @cached_property
    def scales_fit(self) -> bool:
        """Whether float16 holds every scale exactly."""
        with np.errstate(over="ignore"):
            return bool((self.scales.astype(np.float16).astype(np.float32) == self.scales).all())

    @cached_property
    def _reach(self) -> tuple[int, int]:
        """The lowest and the highest code - zero."""
        ends = [(int(part.min()), int(part.max())) for part in map(self._differences, self.chunks())]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _differences(self, rows: NDArray[np.intp]) -> NDArray[np.int16]:
        return self.read_codes(rows).astype(np.int16) - self.zeros[rows][:, self.groups]

    def chunks(self) -> list[NDArray[np.intp]]:
        """All row numbers, a few MiB of weights at a time."""
        num_rows, num_columns = self.shape
        step = max(8, WEIGHTS_PER_CHUNK // num_columns // 8 * 8)
        return [np.arange(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def grouped_matrix(
    name: str,
    bits: int,
    scales: NDArray[np.float32],
    zeros: NDArray[np.integer],
    groups: NDArray[np.int32],
    read_codes: CodeReader,
) -> GroupedMatrix:
    """Check what every kind of checkpoint could get wrong, and build the matrix.

    Raises: CorruptFileError if a scale is not finite or a group number has no scale.
    """
    if not np.isfinite(scales).all():
        raise CorruptFileError(f"{name}: a scale is infinite or NaN. Download the checkpoint again, or another one")
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise CorruptFileError(
            f"{name}: columns belong to groups {groups.min()} to {groups.max()}; wanted 0 to {scales.shape[1] - 1}, as "
            "there are scales. Download the checkpoint again, or another one"
        )
    return GroupedMatrix(name, bits, np.ascontiguousarray(scales), zeros.astype(np.int16), groups, read_codes)


def common_type(matrices: Sequence[GroupedMatrix]) -> TensorType:
    """Return the smallest GGUF type that holds all of some matrices exactly (those of a stack of experts)."""
    types = {matrix.gguf_type() for matrix in matrices}
    if len(types) == 1:
        return types.pop()
    return TensorType.Q5_0 if types <= {TensorType.Q4_0, TensorType.Q5_0} else TensorType.F32


def even_groups(num_columns: int, num_groups: int, group_size: int) -> NDArray[np.int32]:
    """int32[columns]: the group of each column where groups are runs of `group_size` columns, the last perhaps less."""
    assert num_groups > 0 and -(-num_columns // group_size) == num_groups, "the caller has checked the groups"
    return (np.arange(num_columns) // group_size).astype(np.int32)


def span_of(rows: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Return rows that follow each other as a slice, which NumPy takes without a copy, and others as they are."""
    is_span = len(rows) > 0 and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_span else rows


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes below 16 as GGUF's blocks do, uint8[n, columns] to uint8[n, columns / 2]: k low, k + 16 high."""
    halves = codes.reshape(-1, 2, BLOCK // 2)
    packed: NDArray[np.uint8] = halves[:, 0] | halves[:, 1] << np.uint8(4)
    return packed.reshape(len(codes), -1)


def unpack_words(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Split 32-bit words into codes of 2, 4 or 8 bits, lowest first: [n, words] to uint8[n, words * 32 / bits]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if bits == 4:
        halves = np.empty((*data.shape, 2), np.uint8)
        np.bitwise_and(data, 15, out=halves[..., 0])
        np.right_shift(data, 4, out=halves[..., 1])
        return halves.reshape(len(words), -1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: NDArray[np.uint8] = data[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(words), -1)
