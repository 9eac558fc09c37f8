"""GEMM on tiles: one op per weight layout, for any number of rows.

Threads claim tiles dynamically. Rows are computed in blocks whose activations fit the second-level cache, so a tile is
read from memory once per block and from the first-level cache after that.

The inner loop multiplies one tile of sixteen weight rows by one to eight rows of activations. Every output element is
one chain of fused multiply-adds over the blocks of its row in order, the same for any number of activation rows and on
every instruction set.

An activation row for quantized weights is int8[K], blocks of 32 rounded to nearest even, then per block a record of
RECORD_BYTES: a float32 scale, and the sums that layouts with an offset or a minimum need. For float weights it is
float32[K].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.blocks import BODIES
from localinfer.kernels.cpu.compiled.emit import (
    F32,
    FLOAT,
    I8,
    I32,
    I64,
    LANES,
    LITERAL,
    VOID,
    Emitter,
    Value,
    emitted,
    vector,
)
from localinfer.kernels.cpu.compiled.memory import load_i64, store_i64
from localinfer.kernels.cpu.compiled.pair_tile import PairTile
from localinfer.kernels.cpu.compiled.pool import (
    num_rows,
    row_op,
    rows_at_once,
    scratch,
    stretch,
    take_absent,
    take_first,
    take_units,
)
from localinfer.kernels.cpu.compiled.tile import (
    FLOAT_ELEMENT,
    GRIDS,
    MINUS_8_HALF,
    MINUS_8_SUM,
    SCALE,
    SCALED_SUM,
    Tile,
    places_of,
)
from localinfer.kernels.cpu.compiled.unpacked import (
    BUFFER_BYTES,
    CHUNK_COLUMNS,
    COLUMNS,
    FEW_MATRIX_ROWS,
    LEAST_ROWS,
    MATRIX_BYTES,
    MOST_ROWS,
    ROWS,
    SIXTEEN_REGISTERS,
    UNPACKED,
    emit_product,
    join_totals,
    load_totals,
    num_chains,
    unpack,
    unpacked_product,
)
from localinfer.kernels.cpu.kernel_abi import PAIR_BIAS, PAIR_BYTES, PAIR_CODES, RECORD_BYTES, SCRATCH_BYTES
from localinfer.kernels.cpu.parameters import BATCH, EXPERT_MATMUL, MATMUL, PROJECTION, QUANTIZE
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import AVX512, ISA, NEON
from localinfer.kernels.jit.numba import compose, inline, stamp
from localinfer.kernels.layouts import PAIRED_LAYOUTS, Layout

BLOCKS_PER_UNIT = 32


@emitted(VOID, types.int64, types.int64, types.int64)
def quantize_block(emit: Emitter, source_address: Value, codes_address: Value, record_address: Value) -> None:
    """Quantize 32 float32 at `source` into 32 codes and one record, which may be of a pair's block."""
    b, has_pairs = emit.builder, isa.pairs_rows()
    halves = [emit.load_floats(source_address, 64 * half) for half in range(2)]
    magnitudes = [emit.call("llvm.fabs.v16f32", vector(F32), [half]) for half in halves]
    largest = emit.reduce_max(emit.maximum(*magnitudes))
    limit = ir.Constant(F32, 127.0)
    scale = b.fdiv(largest, limit)
    # Below this the inverse would be infinite: such a block is quantized to zeros.
    is_zero = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-36))
    inverse = b.select(is_zero, ir.Constant(F32, 0.0), b.fdiv(limit, largest))
    sums = []
    for half, values in enumerate(halves):
        scaled = emit.mul(values, emit.splat(inverse))
        whole = b.fptosi(emit.call("llvm.rint.v16f32", vector(F32), [scaled]), vector(I32))
        codes = b.trunc(whole, vector(I8))
        if has_pairs:
            for index in range(2):
                emit.store(emit.lanes(codes, 8 * index, 8), codes_address, 32 * half + 16 * index, align=8)
        else:
            emit.store(codes, codes_address, 16 * half, align=16)
        sums.append(emit.call("llvm.vector.reduce.add.v16i32", I32, [whole]))
    total = b.add(*sums)
    for place in places_of(SCALE):
        emit.store(scale, record_address, place, align=4)
    scaled_sum = b.fmul(scale, b.sitofp(total, F32))
    for place in places_of(SCALED_SUM):
        emit.store(scaled_sum, record_address, place, align=4)
    for field, value in ((MINUS_8_SUM, total), (MINUS_8_HALF, sums[0]), (MINUS_8_HALF + 4, sums[1])):
        value = b.mul(value, emit.i32(-8))
        value = b.add(value, emit.i32(PAIR_BIAS)) if has_pairs else value
        emit.store(value, record_address, places_of(field)[0], align=4)


if isa.pairs_rows():

    @compose
    def _quantize(p: Any, row: int, slot: int, source: int, first: int, last: int) -> None:
        """Blocks first..last of a row and slot, into the blocks of the row's pair."""
        second = row & 1
        pair = p.target + ((row - second) * p.slots + 2 * slot) * p.target_stride
        for block in range(first, last):
            target = pair + PAIR_BYTES * block
            quantize_block(source + 128 * block, target + 8 * second, target + PAIR_CODES + 4 * second)

else:

    @compose
    def _quantize(p: Any, row: int, slot: int, source: int, first: int, last: int) -> None:
        """Blocks first..last of a row and slot."""
        target = p.target + (row * p.slots + slot) * p.target_stride
        for block in range(first, last):
            quantize_block(source + 128 * block, target + 32 * block, target + p.columns + block * RECORD_BYTES)


@row_op(QUANTIZE, lambda p: p.slots * ((p.columns // 32 + BLOCKS_PER_UNIT - 1) // BLOCKS_PER_UNIT))
def quantize_rows(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Quantize rows. A row of the batch may hold several slots (experts, heads), each quantized into its own row."""
    blocks = p.columns // 32
    units_per_slot = (blocks + BLOCKS_PER_UNIT - 1) // BLOCKS_PER_UNIT
    slot, first = part // units_per_slot, part % units_per_slot * BLOCKS_PER_UNIT
    source = p.source + row * p.source_stride + slot * p.slot_stride
    _quantize(p, row, slot, source, first, min(first + BLOCKS_PER_UNIT, blocks))


def _float_totals(tile: Tile) -> list[Value]:
    """Float weights: even and odd columns are summed apart, so that two chains hide each other's latency."""
    emit, b = tile.emit, tile.emit.builder
    element, column_bytes = FLOAT_ELEMENT[tile.layout], tile.sizes.unit_bytes
    count = len(tile.rows)

    def step(column: Value, offset: int, totals: list[Value]) -> list[Value]:
        weight = tile.floats(tile.at(tile.tile, column, column_bytes), offset * column_bytes, element)
        return [
            emit.fma(weight, tile.splat(emit.load(tile.at(row, column, 4), F32, 4 * offset, align=4)), total)
            for total, row in zip(totals, tile.rows, strict=True)
        ]

    def quad(column: Value, totals: list[Value]) -> Sequence[Value]:
        tile.prefetch(b.lshr(column, emit.i64(2)), 4 * column_bytes, 0, 1)
        even, odd = totals[:count], totals[count:]
        for offset in (0, 2):
            even, odd = step(column, offset, even), step(column, offset + 1, odd)
        return even + odd

    whole = b.and_(tile.columns, emit.i64(-4))
    totals = emit.loop(emit.i64(0), whole, 4, tile.no_totals() * 2, quad)
    rest = emit.loop(whole, tile.columns, 1, totals[:count], lambda column, even: step(column, 0, even))
    return [emit.add(even, odd) for even, odd in zip(rest, totals[count:], strict=True)]


def _totals(tiles: Sequence[Tile]) -> list[list[Value]]:
    """The products of tiles over all columns, unit by unit of all of them; of each, a total per activation row."""
    first = tiles[0]
    if first.layout in FLOAT_ELEMENT:
        return [_float_totals(tile) for tile in tiles]
    body, count = BODIES[first.layout], len(first.rows)

    def unit_body(unit: Value, totals: list[Value]) -> list[Value]:
        return [
            total
            for index, tile in enumerate(tiles)
            for total in body(tile, unit, totals[count * index : count * (index + 1)])
        ]

    start = [total for tile in tiles for total in tile.no_totals()]
    found = first.emit.loop(first.emit.i64(0), first.units, 1, start, unit_body)
    return [found[count * index : count * (index + 1)] for index in range(len(tiles))]


_BY_HALVES = (Layout.Q5_K, Layout.Q6_K, Layout.Q2_K, Layout.Q3_K)
"""Layouts of which NEON's registers do not hold what one activation row needs of sixteen rows of weights."""
_PAIR_BY_HALVES = (Layout.Q4_K,)
"""Those of which they do not hold what a pair of activation rows needs."""
_BY_QUARTERS = (Layout.Q4_K, Layout.Q5_K, Layout.Q6_K)
"""Those of which they do not hold what four activation rows need of eight rows of weights."""


def _passes(
    emit: Emitter, layout: Layout, tile: Value, columns: Value, rows: list[Value], *, gathers: bool
) -> list[list[Tile]]:
    """Parts of a tile that are multiplied in one pass: all of it; with NEON halves or quarters, alone or by turns.

    What comes from memory is read once, what is used again comes from the first-level cache.
    """
    num_rows, parts = len(rows), list[Tile]()
    if isa.pairs_rows() and layout in PAIRED_LAYOUTS:
        is_read_once = num_rows == 1 or (num_rows == 2 and layout in _PAIR_BY_HALVES)
        count = min(LANES, 2 * LANES // num_rows)
        if layout in _BY_HALVES or (num_rows == 2 and layout in _PAIR_BY_HALVES):
            count = min(count, LANES // 2)
        if num_rows == 4 and layout in _BY_QUARTERS:
            count = LANES // 4
        for first in range(0, LANES, count):
            parts.append(PairTile(emit, layout, tile, columns, rows, first, count, gathers=gathers))
    else:
        is_read_once, count = num_rows == 1, LANES
        # The loads of grids are of sixteen rows.
        if emit.is_neon and layout not in GRIDS and (num_rows > 1 or layout in _BY_HALVES):
            is_quarter = num_rows == 4 and layout in (*_BY_QUARTERS, Layout.IQ4_XS)
            count = LANES // 4 if is_quarter else LANES // 2
        if emit.isa in SIXTEEN_REGISTERS and num_rows > 2 and layout in FLOAT_ELEMENT:
            count = LANES // 2
        for first in range(0, LANES, count):
            parts.append(Tile(emit, layout, tile, columns, rows, first, count))
    return [parts] if is_read_once else [[part] for part in parts]


@emitted(VOID, LITERAL, LITERAL, LITERAL, *[types.int64] * 4, FLOAT, types.int64, types.int64)
def tile_product(
    emit: Emitter, layout: int, num_rows: int, gathers: int, tile_address: Value, column_count: Value, table: Value,
    bias_address: Value, scale_value: Value, first_row: Value, row_limit: Value,
) -> None:  # fmt: skip
    """out = residual + scale * (x @ tile.T + bias) for `num_rows` (literal) activation rows and one tile.

    gathers: 1 if rows are any, where products take pairs of rows; 0 if every second one lies beside the one before it.
    table: address of int64[3][8]: activation row, output and residual addresses of each row; outputs and residuals are
    offset by `first` (the tile's first weight row), of which `count` (1..16) exist. bias: address of 16 float32.
    """
    takes_pairs = isa.pairs_rows() and layout in PAIRED_LAYOUTS
    if num_rows > 4 and (_is_of_four_rows(layout) or (emit.is_neon and not takes_pairs)):
        # `_width` asks for none.
        emit.call("llvm.trap", ir.VoidType(), [])
        return
    rows = [emit.load(table, I64, 8 * t, align=8) for t in range(num_rows)]
    for tiles in _passes(emit, Layout(layout), tile_address, column_count, rows, gathers=bool(gathers)):
        for tile, totals in zip(tiles, _totals(tiles), strict=True):
            _write(emit, tile.first, tile.by_row(totals), table, bias_address, scale_value, first_row, row_limit)


def _write(
    emit: Emitter, start: int, totals: list[Value], table: Value, bias: Value, scale: Value, first: Value, count: Value
) -> None:
    """Apply bias, scale and residual, and store the lanes that exist; start: the row of the tile that has lane 0."""
    b = emit.builder
    lanes = totals[0].type.count
    if start:
        first, count = b.add(first, emit.i64(start)), b.sub(count, emit.i64(start))
    offset = b.mul(first, emit.i64(4))
    bias_lanes = emit.load_floats(bias, 4 * start, lanes=lanes)
    scale_lanes = emit.splat(scale, lanes)
    results = []
    for t, total in enumerate(totals):
        residual = emit.load(table, I64, 8 * (16 + t), align=8)
        value = emit.mul(emit.add(total, bias_lanes), scale_lanes)
        results.append(emit.add(emit.load_floats(b.add(residual, offset), lanes=lanes), value))
    outputs = [b.add(emit.load(table, I64, 8 * (8 + t), align=8), offset) for t in range(len(totals))]
    whole = b.icmp_signed("==" if lanes == LANES else ">=", count, emit.i64(lanes))
    with b.if_else(whole) as (then, otherwise):
        with then:
            for value, output in zip(results, outputs, strict=True):
                emit.store(value, output, align=4)
        with otherwise:
            for value, output in zip(results, outputs, strict=True):
                emit.store_first(value, output, count)


@emitted(VOID, types.int64, types.int64, types.int64, FLOAT, types.int64, types.int64)
def write_totals(
    emit: Emitter, table: Value, totals_address: Value, bias_address: Value, scale_value: Value, first_row: Value,
    row_limit: Value,
) -> None:  # fmt: skip
    """Finish the outputs of rows whose totals lie in memory, as `tile_product` does."""
    _write(emit, 0, load_totals(emit, totals_address), table, bias_address, scale_value, first_row, row_limit)


def _is_of_four_rows(layout: int) -> bool:
    """True if a product takes four rows of activations at most."""
    if isa.SELECTED is ISA.AVX_VNNI:
        return layout in FLOAT_ELEMENT
    return isa.SELECTED is ISA.AVX2 or (layout == Layout.Q4_K and isa.SELECTED in AVX512)


_MATMUL_BYTES, _PROJECTION_BYTES = MATMUL.num_bytes, PROJECTION.num_bytes


@inline
def _set_row(table: int, slot: int, x: int, out: int, residual: int) -> None:
    store_i64(table + 8 * slot, x)
    store_i64(table + 64 + 8 * slot, out)
    store_i64(table + 128 + 8 * slot, residual)


_TABLE_BYTES = 3 * 8 * 8

if isa.pairs_rows():

    @emitted(types.int64, LITERAL, *[types.int64] * 3)
    def _row_address(emit: Emitter, layout: int, start: Value, stride: Value, index: Value) -> Value:
        """Address of a row of activations, which lies beside another one unless they are float32."""
        b = emit.builder
        if layout in FLOAT_ELEMENT:
            return b.add(start, b.mul(index, stride))
        second = b.and_(index, emit.i64(1))
        return b.add(b.add(start, b.mul(b.sub(index, second), stride)), b.mul(second, emit.i64(8)))

    @inline
    def _target(table: int, is_there: bool, out: int, column: int) -> int:
        """Address of a row's output. That of the second row of a pair that has one only is written behind the table."""
        return out if is_there else table + _TABLE_BYTES - 4 * column

else:

    @compose
    def _row_address(layout: int, start: int, stride: int, index: int) -> int:
        """Address of a row of activations."""
        return start + index * stride

    @compose
    def _target(table: int, is_there: bool, out: int, column: int) -> int:
        """Address of a row's output, which is written twice where a row is computed twice."""
        return out


if isa.SELECTED in NEON:

    @emitted(types.int64, LITERAL)
    def _most_rows(emit: Emitter, layout: int) -> Value:
        """Rows of one product, as many as registers hold the sums of."""
        return emit.i64(8 if isa.pairs_rows() and layout in PAIRED_LAYOUTS else 4)

    @compose
    def _width(layout: int, left: int) -> int:
        """Rows of the next product; 3 rows are padded by one, and 7."""
        if left >= 7 and _most_rows(layout) == 8:
            return 8
        return 4 if left >= 3 else left

else:

    @emitted(types.int64, LITERAL)
    def _most_rows(emit: Emitter, layout: int) -> Value:
        """Rows of one product: eight, or four where registers do not hold the sums of so many.

        These are all products with AVX2, of floats with AVX-VNNI, and with AVX-512 those of Q4_K, which has two blocks
        in the making.
        """
        return emit.i64(4 if _is_of_four_rows(layout) else 8)

    @compose
    def _width(layout: int, left: int) -> int:
        """Rows of the next product; 3 or 7 rows are padded by one, computed twice.

        That is faster, because a tile's codes are unpacked once. Verifying 3 tokens of a 1.1B Q4_0 model took 1.42
        times as long as decoding one, and 4 tokens 1.16 times.
        """
        wanted = left + 1 if left == 3 or left == 7 else rows_at_once(left)
        return min(wanted, _most_rows(layout))


@compose
def _product(
    layout: int, gathers: int, count: int, weights: int, k: int, table: int, bias: int, scale: float, column: int,
    lanes: int,
) -> None:  # fmt: skip
    """`tile_product` for 1, 2, 4 or 8 rows."""
    if count == 8:
        tile_product(layout, 8, gathers, weights, k, table, bias, scale, column, lanes)
    elif count == 4:
        tile_product(layout, 4, gathers, weights, k, table, bias, scale, column, lanes)
    elif count == 2:
        tile_product(layout, 2, gathers, weights, k, table, bias, scale, column, lanes)
    else:
        tile_product(layout, 1, gathers, weights, k, table, bias, scale, column, lanes)


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
        step = _width(layout, last - row)
        for slot in range(step):
            index = min(row + slot, last - 1)
            source = _row_address(layout, x, x_stride, index)
            target = _target(table, row + slot < last, out + index * out_stride, column)
            _set_row(table, slot, source, target, residual + index * residual_stride)
        _product(layout, 0, step, weights, k, table, bias, scale, column, count)
        row += step


_BUFFER = 512
"""Bytes of a thread's scratch memory for the table of a product, behind which an unpacked super-block lies."""
assert _BUFFER + max(BUFFER_BYTES, MATRIX_BYTES) + 64 * MOST_ROWS <= SCRATCH_BYTES, (
    "totals of so many rows need more scratch memory"
)


@emitted(types.int64, LITERAL)
def _least_rows(emit: Emitter, layout: int) -> Value:
    """Rows from which on super-blocks are unpacked."""
    return emit.i64(LEAST_ROWS[Layout(layout)])


@compose
def _write_rows(
    table: int, totals: int, p: int, out: int, out_stride: int, residual: int, residual_stride: int, bias: int,
    column: int, row: int, count: int,
) -> None:  # fmt: skip
    """Finish the outputs of `count` rows from `row` on, a multiple of ROWS, whose totals lie in memory."""
    for start in range(0, count, ROWS):
        for slot in range(ROWS):
            index = row + start + slot
            _set_row(table, slot, 0, out + index * out_stride, residual + index * residual_stride)
        scale, lanes = PROJECTION.scale(p), min(16, PROJECTION.rows(p) - column)
        write_totals(table, totals + 64 * start, bias, scale, column, lanes)


@emitted(types.int64, LITERAL)
def _num_chains(emit: Emitter, layout: int) -> Value:
    """Totals of a row whose products are apart until all columns are multiplied."""
    return emit.i64(num_chains(Layout(layout)))


@compose
def _unpacked_products(
    layout: int, first: int, last: int, table: int, p: int, tile: int, x: int, x_stride: int, k: int
) -> None:
    """`_products` of layouts of which a chunk of columns is unpacked for all rows, if there are enough of them."""
    weights = PROJECTION.weights(p) + tile * PROJECTION.tile_bytes(p)
    out, out_stride = PROJECTION.out(p), PROJECTION.out_stride(p)
    residual, residual_stride = PROJECTION.residual(p), PROJECTION.residual_stride(p)
    bias, column = PROJECTION.bias(p) + tile * PROJECTION.bias_stride(p), 16 * tile
    row, buffer = first, table + _BUFFER
    totals, chains = buffer + BUFFER_BYTES, _num_chains(layout)
    while last - row >= _least_rows(layout) and k % COLUMNS == 0:
        count = min(last - row, MOST_ROWS // chains) // ROWS * ROWS
        for word in range(8 * chains * count):
            store_i64(totals + 8 * word, 0)
        for start_column in range(0, k, CHUNK_COLUMNS):
            end_column = min(start_column + CHUNK_COLUMNS, k)
            unpack(layout, weights, k, start_column, end_column, buffer)
            for start in range(0, count, ROWS):
                for slot in range(ROWS):
                    store_i64(table + 8 * slot, x + (row + start + slot) * x_stride)
                total = totals + 64 * chains * start
                unpacked_product(layout, weights, k, table, buffer, start_column, end_column, total)
        for start in range(0, count, ROWS):
            join_totals(layout, totals, start)
        _write_rows(table, totals, p, out, out_stride, residual, residual_stride, bias, column, row, count)
        row += count
    _products(layout, row, last, table, p, tile, x, x_stride, k)


@emitted(VOID, LITERAL, *[types.int64] * 7)
def matrix_product(
    emit: Emitter, layout: int, tile_address: Value, column_count: Value, x: Value, x_stride: Value, num_rows: Value,
    memory: Value, totals_address: Value,
) -> None:  # fmt: skip
    """totals = x @ tile.T for a multiple of eight rows of activations, by AMX: see `unpacked.emit_product`."""
    if not emit.has_matrices:
        # `_least_matrix_rows` asks for none.
        emit.call("llvm.trap", ir.VoidType(), [])
        return
    chosen = Layout(layout)
    emit_product(
        emit, BODIES[chosen], chosen, tile_address, column_count, x, x_stride, num_rows, memory, totals_address
    )


@emitted(types.int64, types.int64)
def _least_matrix_rows(emit: Emitter, wanted: Value) -> Value:
    """Rows from which on they are multiplied as matrices: as many as are wanted, if the target can."""
    return wanted if emit.has_matrices else emit.i64(1 << 62)


def _matrix_products_by(others: Any) -> Any:
    """`_products` by AMX, if there are enough rows; the fewer than eight that remain, or all, by another function."""

    @compose
    def products(
        layout: int, first: int, last: int, table: int, p: int, tile: int, x: int, x_stride: int, k: int
    ) -> None:
        row, memory = first, table + _BUFFER
        if last - first >= _least_matrix_rows(PROJECTION.matrix_rows(p)):
            weights = PROJECTION.weights(p) + tile * PROJECTION.tile_bytes(p)
            out, out_stride = PROJECTION.out(p), PROJECTION.out_stride(p)
            residual, residual_stride = PROJECTION.residual(p), PROJECTION.residual_stride(p)
            bias, column = PROJECTION.bias(p) + tile * PROJECTION.bias_stride(p), 16 * tile
            while last - row >= FEW_MATRIX_ROWS:
                count = min(last - row, MOST_ROWS) // FEW_MATRIX_ROWS * FEW_MATRIX_ROWS
                totals = memory + MATRIX_BYTES
                matrix_product(layout, weights, k, x + row * x_stride, x_stride, count, memory, totals)
                _write_rows(table, totals, p, out, out_stride, residual, residual_stride, bias, column, row, count)
                row += count
        others(layout, row, last, table, p, tile, x, x_stride, k)

    return products


def _matmul_by(products: Any) -> Any:
    """The op of matrices, by a function of rows and a tile."""

    @compose
    def matmul(layout: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
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
        # The first stretch of a thread is the same for every token, so that it may be in its processor's cache.
        # Others are claimed dynamically, and at last the first ones of threads that have not come.
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
                products(layout, first, min(first + rows_per_block, rows), table, record, tile, x, x_stride, k)
            chosen = num_threads + take_units(control, 1)

    return matmul


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
                step = _width(layout, last - entry)
                for slot in range(step):
                    place = load_i64(entries + 8 * min(entry + slot, last - 1))
                    row, choice = place // p.selected, place % p.selected
                    source = _row_address(layout, p.x, p.x_stride, row) + choice * p.slot_stride
                    out = p.out + row * p.out_stride + 4 * p.rows * choice
                    _set_row(table, slot, source, out, p.zeros - 4 * column)
                _product(layout, 1, step, tile_address, p.columns, table, tile_bias, np.float32(1), column, count)
                entry += step


_matmul, _unpacked_matmul = _matmul_by(_products), _matmul_by(_unpacked_products)
_matrix_matmul = _matmul_by(_matrix_products_by(_products))
_unpacked_matrix_matmul = _matmul_by(_matrix_products_by(_unpacked_products))


def _matmul_of(layout: Layout) -> Any:
    """The op of matrices of a layout."""
    if isa.SELECTED is ISA.AMX and layout in BODIES:
        return _unpacked_matrix_matmul if layout in UNPACKED else _matrix_matmul
    return _unpacked_matmul if layout in UNPACKED else _matmul


KERNELS = {
    **{f"matmul_{layout.name.lower()}": stamp(_matmul_of(layout), int(layout)) for layout in Layout},
    **{f"expert_matmul_{layout.name.lower()}": stamp(_expert_matmul, int(layout)) for layout in Layout},
}
