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

| codes | groups are runs of | in the CPU kernels' layouts | bits per weight |
|---|---|---|---|
| 2 or 4 bits | 128 columns or a multiple | INT4_128 | 4.25 |
| 2 bits; 4 bits, every zero point 8 | 32 | Q4_0 | 4.5 |
| 4 bits | 64 | INT4_64 | 4.5 |
| 4 bits | 32 | INT4_32 | 5 |
| 8 bits, code - zero fits eight | 32 | Q8_0 | 8.5 |
| 8 bits | 32 | INT8_32 | 9 |
| scales beyond float16, other groups | | F32 | 32 |

All of these give the same float32 weights, bit for bit. (A checkpoint with groups of 128 takes 4.16 bits in its file;
the rest here is that zero points take 16 bits, not 4, so that a tile's codes stay aligned.) Act-order checkpoints
scatter the columns of a group; sorted by group (`in_group_order`), with activations in the same order, they are as good
as any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.kernels.layouts import SIZES, Layout
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.formats.packing import pack_bits, pack_codes
from localinfer.quant.formats.reference import LEVEL_OFFSETS
from localinfer.quant.formats.types import TensorType, block_dtype, row_bytes

CodeReader = Callable[[NDArray[np.intp]], NDArray[np.uint8]]

AGAIN = "Download the checkpoint again, or another one"
WEIGHTS_PER_CHUNK = 1 << 20
"""Weights unpacked at a time, so that what is in flight takes a few MiB however large the matrix."""

_BLOCK = 32
_LAYOUTS_BY_RUN = {128: Layout.INT4_128, 64: Layout.INT4_64, 32: Layout.INT4_32}


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
        groups = self.run_groups(_BLOCK)
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
        groups = self.run_groups(_BLOCK)
        assert groups is not None, "only such a matrix has a block type"
        result = np.empty((num_rows, row_bytes(type, num_columns)), np.uint8)
        blocks = result.view(block_dtype(type))
        # What decides between Q4_0 and Q5_0 also says whether codes are already those of Q4_0.
        is_plain = type is TensorType.Q4_0 and self.bits == 4
        for rows in self.chunks():
            part = blocks[rows]
            part["d"] = self.scales[rows][:, groups]
            codes = self.read_codes(rows) if is_plain else self._differences(rows) + LEVEL_OFFSETS.get(type, 0)
            for name, values in pack_codes(codes.reshape(-1, _BLOCK), type).items():
                part[name] = values.reshape(part[name].shape)
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
        raise CorruptFileError(f"{name}: a scale is infinite or NaN. {AGAIN}")
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise CorruptFileError(
            f"{name}: columns belong to groups {groups.min()} to {groups.max()}; wanted 0 to {scales.shape[1] - 1}, as "
            f"there are scales. {AGAIN}"
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


def kernel_layout(matrices: Sequence[GroupedMatrix]) -> Layout:
    """Return the smallest layout that holds all of some matrices of one shape and width exactly."""
    if any(matrix.run_groups(32) is None or not matrix.scales_fit for matrix in matrices):
        return Layout.F32
    type = common_type(matrices)
    if matrices[0].bits == 8:
        return Layout.Q8_0 if type is TensorType.Q8_0 else Layout.INT8_32
    run = next(run for run in _LAYOUTS_BY_RUN if all(matrix.run_groups(run) is not None for matrix in matrices))
    return Layout.Q4_0 if run < 128 and type is TensorType.Q4_0 else _LAYOUTS_BY_RUN[run]


def kernel_rows(matrix: GroupedMatrix, layout: Layout) -> NDArray[np.uint8]:
    """Return the rows of a matrix as `kernels.cpu.packing.pack` takes them, in what `kernel_layout` gave."""
    if layout.name in TensorType.__members__:
        return matrix.gguf_bytes(TensorType[layout.name])
    sizes = SIZES[layout]
    num_rows, num_columns = matrix.shape
    groups = matrix.run_groups(sizes.unit)
    assert groups is not None, "kernel_layout has seen that there are such runs"
    fields = [("d", "<f2"), ("zero", "<i2"), ("codes", "u1", sizes.file_bytes - 4)]
    units = np.empty((num_rows, num_columns // sizes.unit), np.dtype(fields))
    units["d"] = matrix.scales[:, groups]
    units["zero"] = matrix.zeros[:, groups]
    for rows in matrix.chunks():
        codes = matrix.read_codes(rows)
        packed = codes if layout is Layout.INT8_32 else pack_bits(codes.reshape(-1, _BLOCK), 4, _BLOCK // 2)
        units["codes"][rows] = packed.reshape(len(rows), *units["codes"].shape[1:])
    return units.reshape(-1).view(np.uint8)


def words_of(folder: CheckpointFolder, name: str, dimensions: int) -> NDArray[np.int32]:
    """Return a tensor of 32-bit words. Raises: CorruptFileError if it is missing or of another type."""
    tensor = folder.tensor(name)
    if tensor.dtype not in ("I32", "U32") or len(tensor.shape) != dimensions:
        raise CorruptFileError(
            f"{name} is {tensor.dtype} of shape {tensor.shape}; wanted I32 of {dimensions} dimensions. {AGAIN}"
        )
    array: NDArray[np.int32] = folder.array(name).view(np.int32)
    return array


def scales_of(folder: CheckpointFolder, name: str) -> NDArray[np.float32]:
    """Return a matrix of scales as float32. Raises: CorruptFileError if it is missing or of another type."""
    tensor = folder.tensor(name)
    if tensor.dtype not in ("F16", "BF16", "F32") or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CorruptFileError(
            f"{name} is {tensor.dtype} of shape {tensor.shape}; wanted a matrix of F16, BF16 or F32. {AGAIN}"
        )
    array = folder.array(name)
    if tensor.dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def group_numbers(folder: CheckpointFolder, name: str, regular: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return int32[columns]: the group of each column by a checkpoint's tensor, or `regular` where it has none.

    Raises: CorruptFileError if the tensor is of another type or size.
    """
    if name not in folder.tensors:
        return regular
    groups = words_of(folder, name, 1)
    if groups.shape != regular.shape:
        raise wrong_shape(name, groups.shape, regular.shape)
    return np.array(groups)


def wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], why: str = "") -> CorruptFileError:
    """An error, to be raised by the caller, for tensors that do not fit each other."""
    return CorruptFileError(f"{name} has shape {found}; wanted {wanted}{why}, to fit its neighbours. {AGAIN}")
