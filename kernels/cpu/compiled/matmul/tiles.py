"""The inner loop of GEMM: one tile of sixteen weight rows times one to eight rows of activations.

Every output element is one chain of fused multiply-adds over the blocks of its row in order, the same for any number of
activation rows and on every instruction set.

An activation row for quantized weights is `int8[K]` followed by one record per block of 32 (see `quantize.py`); for
float weights it is `float32[K]`.
"""

from collections.abc import Callable, Sequence

from numba import types

from localinfer.kernels.cpu.compiled.matmul.blocks import (
    bit_pair_body,
    block_body,
    few_bits_body,
    group_body,
    q4_k_body,
    q6_k_body,
)
from localinfer.kernels.cpu.compiled.matmul.codebooks import grid_body, iq4_body, mxfp4_body, nvfp4_body
from localinfer.kernels.cpu.compiled.matmul.tile import Tile
from localinfer.kernels.cpu.compiled.simd.emit import F16, F32, I16, I64, Emitter, Value
from localinfer.kernels.cpu.compiled.simd.intrinsics import FLOAT, LITERAL, VOID, emitted
from localinfer.kernels.layouts import Layout

_BODIES: dict[Layout, Callable[[Tile, Value, list[Value]], list[Value]]] = {
    Layout.Q8_0: block_body,
    Layout.Q4_0: block_body,
    Layout.Q4_1: block_body,
    Layout.Q5_0: block_body,
    Layout.Q5_1: block_body,
    Layout.Q4_K: q4_k_body,
    Layout.Q5_K: q4_k_body,
    Layout.Q6_K: q6_k_body,
    Layout.INT4_32: group_body,
    Layout.INT4_64: group_body,
    Layout.INT4_128: group_body,
    Layout.INT8_32: group_body,
    Layout.MXFP4: mxfp4_body,
    Layout.NVFP4: nvfp4_body,
    Layout.IQ4_NL: iq4_body,
    Layout.IQ4_XS: iq4_body,
    Layout.Q2_K: bit_pair_body,
    Layout.Q3_K: bit_pair_body,
    Layout.TQ2_0: bit_pair_body,
    Layout.IQ2_XXS: grid_body,
    Layout.IQ2_XS: grid_body,
    Layout.IQ2_S: grid_body,
    Layout.IQ3_XXS: grid_body,
    Layout.IQ3_S: grid_body,
    Layout.Q1_0: few_bits_body,
    Layout.Q2_0: few_bits_body,
}

_FLOAT_ELEMENT = {Layout.F32: F32, Layout.F16: F16, Layout.BF16: I16}


def _float_totals(tile: Tile) -> list[Value]:
    """Float weights: even and odd columns are summed apart, so that two chains hide each other's latency."""
    emit, b = tile.emit, tile.emit.builder
    element, column_bytes = _FLOAT_ELEMENT[tile.layout], tile.sizes.unit_bytes
    count = len(tile.rows)

    def step(column: Value, offset: int, totals: list[Value]) -> list[Value]:
        weight = emit.load_floats(tile.at(tile.tile, column, column_bytes), offset * column_bytes, element)
        return [
            emit.fma(weight, emit.splat(emit.load(tile.at(row, column, 4), F32, 4 * offset, align=4)), total)
            for total, row in zip(totals, tile.rows, strict=True)
        ]

    def quad(column: Value, totals: list[Value]) -> Sequence[Value]:
        tile.prefetch(b.lshr(column, emit.i64(2)), 4 * column_bytes, 0, 1)
        even, odd = totals[:count], totals[count:]
        for offset in (0, 2):
            even, odd = step(column, offset, even), step(column, offset + 1, odd)
        return even + odd

    whole = b.and_(tile.columns, emit.i64(-4))
    totals = emit.loop(emit.i64(0), whole, 4, [emit.zeros(F32)] * (2 * count), quad)
    rest = emit.loop(whole, tile.columns, 1, totals[:count], lambda column, even: step(column, 0, even))
    return [emit.add(even, odd) for even, odd in zip(rest, totals[count:], strict=True)]


@emitted(VOID, LITERAL, LITERAL, *[types.int64] * 4, FLOAT, types.int64, types.int64)
def tile_product(
    emit: Emitter, layout: int, num_rows: int, tile_address: Value, column_count: Value, table: Value,
    bias_address: Value, scale_value: Value, first_row: Value, row_limit: Value,
) -> None:  # fmt: skip
    """out = residual + scale * (x @ tile.T + bias) for `num_rows` (literal) activation rows and one tile.

    tables: address of int64[3][8]: activation row, output and residual addresses of each row; outputs and residuals are
    offset by `first` (the tile's first weight row), of which `count` (1..16) exist. bias: address of 16 float32.
    """
    rows = [emit.load(table, I64, 8 * t, align=8) for t in range(num_rows)]
    product = Tile(emit, Layout(layout), tile_address, column_count, rows)
    if product.layout in _FLOAT_ELEMENT:
        totals = _float_totals(product)
    else:
        body = _BODIES[product.layout]
        totals = emit.loop(
            emit.i64(0),
            product.units,
            1,
            [emit.zeros(F32)] * num_rows,
            lambda unit, totals: body(product, unit, totals),
        )
    _write(emit, totals, table, bias_address, scale_value, first_row, row_limit)


def _write(
    emit: Emitter, totals: list[Value], table: Value, bias: Value, scale: Value, first: Value, count: Value
) -> None:
    """Apply bias, scale and residual, and store the lanes that exist."""
    b = emit.builder
    offset = b.mul(first, emit.i64(4))
    bias_lanes = emit.load_floats(bias)
    scale_lanes = emit.splat(scale)
    results = []
    for t, total in enumerate(totals):
        residual = emit.load(table, I64, 8 * (16 + t), align=8)
        value = emit.mul(emit.add(total, bias_lanes), scale_lanes)
        results.append(emit.add(emit.load_floats(b.add(residual, offset)), value))
    outputs = [b.add(emit.load(table, I64, 8 * (8 + t), align=8), offset) for t in range(len(totals))]
    whole = b.icmp_signed("==", count, emit.i64(16))
    with b.if_else(whole) as (then, otherwise):
        with then:
            for value, output in zip(results, outputs, strict=True):
                emit.store(value, output, align=4)
        with otherwise:
            for value, output in zip(results, outputs, strict=True):
                emit.store_first(value, output, count)
