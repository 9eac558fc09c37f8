"""GEMM on tiles: one op per weight layout, for any number of rows.

Threads claim tiles dynamically. Rows are computed in blocks whose activations fit the second-level cache, so a tile is
read from memory once per block and from the first-level cache after that.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.tiles import tile_product
from localinfer.kernels.cpu.compiled.simd.memory import load_i64, store_i64
from localinfer.kernels.cpu.compiled.simd.pool import (
    num_rows,
    rows_at_once,
    scratch,
    stretch,
    take_absent,
    take_first,
    take_units,
)
from localinfer.kernels.cpu.parameters import BATCH, EXPERT_MATMUL, MATMUL, PROJECTION
from localinfer.kernels.jit.numba import compose, inline, stamp
from localinfer.kernels.layouts import Layout

_MATMUL_BYTES, _PROJECTION_BYTES = MATMUL.num_bytes, PROJECTION.num_bytes


@inline
def _set_row(table: int, slot: int, x: int, out: int, residual: int) -> None:
    store_i64(table + 8 * slot, x)
    store_i64(table + 64 + 8 * slot, out)
    store_i64(table + 128 + 8 * slot, residual)


@inline
def _width(left: int) -> int:
    """Rows of the next product; 3 or 7 rows are padded by one, computed twice.

    That is faster, because a tile's codes are unpacked once. Verifying 3 tokens of a 1.1B Q4_0 model took 1.42 times as
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
    weights = PROJECTION.weights(p) + tile * PROJECTION.tile_bytes(p)
    out, out_stride = PROJECTION.out(p), PROJECTION.out_stride(p)
    residual, residual_stride = PROJECTION.residual(p), PROJECTION.residual_stride(p)
    bias = PROJECTION.bias(p) + tile * PROJECTION.bias_stride(p)
    scale = PROJECTION.scale(p)
    column = 16 * tile
    count = min(16, PROJECTION.rows(p) - column)
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
    # Field by field, in this order: loading the whole block costs registers that the products need.
    p = parameters
    x, x_stride, k = MATMUL.x(p), MATMUL.x_stride(p), MATMUL.columns(p)
    rows = num_rows(batch, MATMUL.is_output(p))
    projections, rows_per_block = MATMUL.projections(p), MATMUL.rows_per_block(p)
    control, table = BATCH.control(batch), scratch(batch, thread)
    records = parameters + _MATMUL_BYTES
    tiles = 0
    for index in range(projections):
        tiles += PROJECTION.tiles(records + _PROJECTION_BYTES * index)
    blocks = (rows + rows_per_block - 1) // rows_per_block
    units = blocks * tiles
    # The first stretch of a thread is the same for every token, so that it may be in its processor's cache. Others are
    # claimed dynamically, and at last the first ones of threads that have not come.
    chosen = thread if take_first(control, thread) else num_threads + take_units(control, 1)
    while True:
        start, end = stretch(chosen, units, num_threads)
        if start >= units:
            chosen = take_absent(control, num_threads)
            if chosen == num_threads:
                return
            start, end = stretch(chosen, units, num_threads)
        for unit in range(start, end):
            first = (unit // tiles) * rows_per_block
            tile = unit % tiles
            record = records
            while tile >= PROJECTION.tiles(record):
                tile -= PROJECTION.tiles(record)
                record += _PROJECTION_BYTES
            _products(layout, first, min(first + rows_per_block, rows), table, record, tile, x, x_stride, k)
        chosen = num_threads + take_units(control, 1)


@compose
def _expert_matmul(layout: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    p = EXPERT_MATMUL.load(parameters)
    control, table = BATCH.control(batch), scratch(batch, thread)
    entries = p.groups + 8 * (p.experts + 2)
    units = p.experts * p.tiles
    claim = max(1, p.tiles // (8 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            expert, tile = unit // p.tiles, unit % p.tiles
            entry, last = load_i64(p.groups + 8 * expert), load_i64(p.groups + 8 * expert + 8)
            tile_address = p.weights + expert * p.expert_bytes + tile * p.tile_bytes
            tile_bias = p.zeros if p.bias == 0 else p.bias + expert * p.bias_stride + 64 * tile
            column = 16 * tile
            count = min(16, p.rows - column)
            while entry < last:
                step = _width(last - entry)
                for slot in range(step):
                    place = load_i64(entries + 8 * min(entry + slot, last - 1))
                    row, choice = place // p.selected, place % p.selected
                    source = p.x + row * p.x_stride + choice * p.slot_stride
                    out = p.out + row * p.out_stride + 4 * p.rows * choice
                    _set_row(table, slot, source, out, p.zeros - 4 * column)
                _product(layout, step, tile_address, p.columns, table, tile_bias, np.float32(1), column, count)
                entry += step


KERNELS = {
    f"{name}_{layout.name.lower()}": stamp(body, int(layout))
    for name, body in (("matmul", _matmul), ("expert_matmul", _expert_matmul))
    for layout in Layout
}
