"""Grouped matrices in the layouts that the CPU's kernels run: the smallest that holds every weight exactly.

| codes | groups are runs of | layout | bits per weight |
|---|---|---|---|
| 2 or 4 bits | 128 columns or a multiple | INT4_128 | 4.25 |
| 2 bits; 4 bits, every zero point 8 | 32 | Q4_0 | 4.5 |
| 4 bits | 64 | INT4_64 | 4.5 |
| 4 bits | 32 | INT4_32 | 5 |
| 8 bits, code - zero fits eight | 32 | Q8_0 | 8.5 |
| 8 bits | 32 | INT8_32 | 9 |
| scales beyond float16, other groups | | F32 | 32 |

A checkpoint with groups of 128 takes 4.16 bits in its file; the rest here is that zero points take 16 bits, not 4, so
that a tile's codes stay aligned. Which layout it is changes no result: all give the same bits.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.layouts import SIZES, Layout
from localinfer.quant.checkpoint.grouped import GroupedMatrix, common_type, pack_nibbles
from localinfer.quant.formats.types import TensorType

_GROUPS = {128: Layout.INT4_128, 64: Layout.INT4_64, 32: Layout.INT4_32}


def kernel_layout(matrices: Sequence[GroupedMatrix]) -> Layout:
    """Return the smallest layout that holds all of some matrices of one shape and width exactly."""
    if any(matrix.run_groups(32) is None or not matrix.scales_fit for matrix in matrices):
        return Layout.F32
    type = common_type(matrices)
    if matrices[0].bits == 8:
        return Layout.Q8_0 if type is TensorType.Q8_0 else Layout.INT8_32
    run = next(run for run in _GROUPS if all(matrix.run_groups(run) is not None for matrix in matrices))
    return Layout.Q4_0 if run < 128 and type is TensorType.Q4_0 else _GROUPS[run]


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
        packed = codes if layout is Layout.INT8_32 else pack_nibbles(codes)
        units["codes"][rows] = packed.reshape(len(rows), *units["codes"].shape[1:])
    return units.reshape(-1).view(np.uint8)
