"""Columns of rows in another order, for weights whose columns were sorted by group."""

from typing import Any

from localinfer.kernels.cpu.compiled.simd.batch import row_op
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_i64, store_f32
from localinfer.kernels.cpu.parameters import GATHER

COLUMNS_PER_UNIT = 1024


@row_op(GATHER, lambda p: (p.columns + COLUMNS_PER_UNIT - 1) // COLUMNS_PER_UNIT)
def gather_columns(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out[r, j] = x[r, offsets[j] / 4]."""
    target, source = p.out + row * p.out_stride, p.x + row * p.x_stride
    for column in range(part * COLUMNS_PER_UNIT, min(part * COLUMNS_PER_UNIT + COLUMNS_PER_UNIT, p.columns)):
        store_f32(target + 4 * column, load_f32(source + load_i64(p.offsets + 8 * column)))
