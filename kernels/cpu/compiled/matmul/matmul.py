"""Matrix products on tiles: one op per weight layout, for one row or a thousand.

Threads take tiles as they get free. Rows are taken in blocks whose activations fit the second-level cache, so a tile
is read from memory once per block and from the first-level cache after that.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.tiles import tile_product
from localinfer.kernels.cpu.compiled.simd.batch import num_rows, rows_at_once, scratch
from localinfer.kernels.cpu.compiled.simd.memory import float_bits, load_i64, store_i64
from localinfer.kernels.cpu.compiled.simd.pool import stretch, take_units
from localinfer.kernels.cpu.kernel_abi import CONTROL
from localinfer.kernels.jit.numba import compose, inline, op

# Words of a `matmul` op's parameters: its header, then one record per projection.
HEADER_WORDS = 6
"""x, x stride, columns, is output, projections, rows per block."""
PROJECTION_WORDS = 12
"""weights, tile bytes, tiles, rows, out, out stride, residual, residual stride, bias, bias stride, scale bits,
spare."""

# Words of an `expert_matmul` op's parameters: x, x stride, bytes from one slot of x to the next, columns, experts,
# selected, groups, weights, expert bytes, tile bytes, tiles, rows, out, out stride, bias, bias stride per expert,
# zeros.


@inline
def _set_row(table: int, slot: int, x: int, out: int, residual: int) -> None:
    store_i64(table + 8 * slot, x)
    store_i64(table + 64 + 8 * slot, out)
    store_i64(table + 128 + 8 * slot, residual)


@inline
def _width(left: int) -> int:
    """For how many rows the next product is written; 3 or 7 rows take the width of one more and compute the last twice.

    That is the cheaper: a tile's codes are unpacked once. Verifying 3 tokens of a 1.1B Q4_0 model took 1.42 times as
    long as decoding one, and 4 tokens 1.16 times.
    """
    return left + 1 if left == 3 or left == 7 else rows_at_once(left)


@compose
def _product(
    layout: int, count: int, weights: int, k: int, table: int, bias: int, scale: float, column: int, lanes: int
) -> None:
    """`tile_product` for 1, 2, 4 or 8 rows."""
    if count == 8:
        tile_product(layout, 8, weights, k, table, bias, scale, column, lanes)
    elif count == 4:
        tile_product(layout, 4, weights, k, table, bias, scale, column, lanes)
    elif count == 2:
        tile_product(layout, 2, weights, k, table, bias, scale, column, lanes)
    else:
        tile_product(layout, 1, weights, k, table, bias, scale, column, lanes)


@compose
def _products(layout: int, first: int, last: int, table: int, p: int, tile: int, x: int, x_stride: int, k: int) -> None:
    """Rows first..last of one tile, as many at a time as registers hold."""
    weights = load_i64(p) + tile * load_i64(p + 8)
    out, out_stride = load_i64(p + 32), load_i64(p + 40)
    residual, residual_stride = load_i64(p + 48), load_i64(p + 56)
    bias = load_i64(p + 64) + tile * load_i64(p + 72)
    scale = float_bits(load_i64(p + 80))
    column = 16 * tile
    count = min(16, load_i64(p + 24) - column)
    row = first
    while row < last:
        step = _width(last - row)
        for slot in range(step):
            index = min(row + slot, last - 1)
            _set_row(table, slot, x + index * x_stride, out + index * out_stride, residual + index * residual_stride)
        _product(layout, step, weights, k, table, bias, scale, column, count)
        row += step


@compose
def _matmul(layout: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    x, x_stride, k = load_i64(parameters), load_i64(parameters + 8), load_i64(parameters + 16)
    rows = num_rows(batch, load_i64(parameters + 24))
    projections, rows_per_block = load_i64(parameters + 32), load_i64(parameters + 40)
    control, table = load_i64(batch + CONTROL), scratch(batch, thread)
    records = parameters + 8 * HEADER_WORDS
    tiles = 0
    for index in range(projections):
        tiles += load_i64(records + 8 * PROJECTION_WORDS * index + 16)
    blocks = (rows + rows_per_block - 1) // rows_per_block
    units = blocks * tiles
    # The first stretch is the thread's own; the others go to whoever is free.
    start, end = stretch(thread, units, num_threads)
    while start < units:
        for unit in range(start, end):
            first = (unit // tiles) * rows_per_block
            tile = unit % tiles
            p = records
            while tile >= load_i64(p + 16):
                tile -= load_i64(p + 16)
                p += 8 * PROJECTION_WORDS
            _products(layout, first, min(first + rows_per_block, rows), table, p, tile, x, x_stride, k)
        start, end = stretch(num_threads + take_units(control, 1), units, num_threads)


@compose
def _expert_matmul(layout: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    x, x_stride, slot_stride = load_i64(parameters), load_i64(parameters + 8), load_i64(parameters + 16)
    k, experts, selected = load_i64(parameters + 24), load_i64(parameters + 32), load_i64(parameters + 40)
    groups, weights = load_i64(parameters + 48), load_i64(parameters + 56)
    expert_bytes, tile_bytes = load_i64(parameters + 64), load_i64(parameters + 72)
    tiles, rows, out = load_i64(parameters + 80), load_i64(parameters + 88), load_i64(parameters + 96)
    out_stride, bias, bias_stride = load_i64(parameters + 104), load_i64(parameters + 112), load_i64(parameters + 120)
    zeros = load_i64(parameters + 128)
    control, table = load_i64(batch + CONTROL), scratch(batch, thread)
    entries = groups + 8 * (experts + 2)
    units = experts * tiles
    claim = max(1, tiles // (8 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            expert, tile = unit // tiles, unit % tiles
            entry, last = load_i64(groups + 8 * expert), load_i64(groups + 8 * expert + 8)
            tile_address = weights + expert * expert_bytes + tile * tile_bytes
            tile_bias = zeros if bias == 0 else bias + expert * bias_stride + 64 * tile
            column = 16 * tile
            count = min(16, rows - column)
            while entry < last:
                step = _width(last - entry)
                for slot in range(step):
                    place = load_i64(entries + 8 * min(entry + slot, last - 1))
                    row, choice = place // selected, place % selected
                    source = x + row * x_stride + choice * slot_stride
                    _set_row(table, slot, source, out + row * out_stride + 4 * rows * choice, zeros - 4 * column)
                _product(layout, step, tile_address, k, table, tile_bias, np.float32(1), column, count)
                entry += step


_F32, _F16, _BF16, _Q8_0, _Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q4_K, _Q5_K, _Q6_K = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
_INT4_32, _INT4_64, _INT4_128, _INT8_32 = 11, 12, 13, 14


@op
def matmul_f32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_F32, parameters, batch, thread, num_threads)


@op
def expert_matmul_f32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_F32, parameters, batch, thread, num_threads)


@op
def matmul_f16(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_F16, parameters, batch, thread, num_threads)


@op
def expert_matmul_f16(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_F16, parameters, batch, thread, num_threads)


@op
def matmul_bf16(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_BF16, parameters, batch, thread, num_threads)


@op
def expert_matmul_bf16(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_BF16, parameters, batch, thread, num_threads)


@op
def matmul_q8_0(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q8_0, parameters, batch, thread, num_threads)


@op
def expert_matmul_q8_0(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q8_0, parameters, batch, thread, num_threads)


@op
def matmul_q4_0(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q4_0, parameters, batch, thread, num_threads)


@op
def expert_matmul_q4_0(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q4_0, parameters, batch, thread, num_threads)


@op
def matmul_q4_1(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q4_1, parameters, batch, thread, num_threads)


@op
def expert_matmul_q4_1(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q4_1, parameters, batch, thread, num_threads)


@op
def matmul_q5_0(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q5_0, parameters, batch, thread, num_threads)


@op
def expert_matmul_q5_0(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q5_0, parameters, batch, thread, num_threads)


@op
def matmul_q5_1(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q5_1, parameters, batch, thread, num_threads)


@op
def expert_matmul_q5_1(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q5_1, parameters, batch, thread, num_threads)


@op
def matmul_q4_k(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q4_K, parameters, batch, thread, num_threads)


@op
def expert_matmul_q4_k(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q4_K, parameters, batch, thread, num_threads)


@op
def matmul_q5_k(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q5_K, parameters, batch, thread, num_threads)


@op
def expert_matmul_q5_k(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q5_K, parameters, batch, thread, num_threads)


@op
def matmul_q6_k(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_Q6_K, parameters, batch, thread, num_threads)


@op
def expert_matmul_q6_k(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_Q6_K, parameters, batch, thread, num_threads)


@op
def matmul_int4_32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_INT4_32, parameters, batch, thread, num_threads)


@op
def expert_matmul_int4_32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_INT4_32, parameters, batch, thread, num_threads)


@op
def matmul_int4_64(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_INT4_64, parameters, batch, thread, num_threads)


@op
def expert_matmul_int4_64(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_INT4_64, parameters, batch, thread, num_threads)


@op
def matmul_int4_128(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_INT4_128, parameters, batch, thread, num_threads)


@op
def expert_matmul_int4_128(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_INT4_128, parameters, batch, thread, num_threads)


@op
def matmul_int8_32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _matmul(_INT8_32, parameters, batch, thread, num_threads)


@op
def expert_matmul_int8_32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    _expert_matmul(_INT8_32, parameters, batch, thread, num_threads)
