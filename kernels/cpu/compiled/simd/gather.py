"""Columns of rows in another order, for weights whose columns were sorted by group."""

from localinfer.kernels.cpu.compiled.simd.batch import num_rows
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_i64, store_f32
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.parameters import BATCH, GATHER
from localinfer.kernels.jit.numba import op

COLUMNS_PER_UNIT = 1024


@op
def gather_columns(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out[r, j] = x[r, offsets[j] / 4]: out, out stride, x, x stride, offsets int64, columns, is output."""
    p = GATHER.load(parameters)
    control = BATCH.control(batch)
    parts = (p.columns + COLUMNS_PER_UNIT - 1) // COLUMNS_PER_UNIT
    units = num_rows(batch, p.is_output) * parts
    while True:
        unit = take_units(control, 1)
        if unit >= units:
            return
        target, source = p.out + (unit // parts) * p.out_stride, p.x + (unit // parts) * p.x_stride
        first = (unit % parts) * COLUMNS_PER_UNIT
        for column in range(first, min(first + COLUMNS_PER_UNIT, p.columns)):
            store_f32(target + 4 * column, load_f32(source + load_i64(p.offsets + 8 * column)))
