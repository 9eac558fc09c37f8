"""The innermost loops of attention over quantized keys and values; `kv_layout.py` draws how their codes lie.

Scores are integer dot products of the keys' codes with queries as int8, so their only rounding is that of the queries.
Values: the scale of a position goes into its probability, probabilities of a chunk become int16 under one scale (a step
is 1 / 32767 of the largest), and sums of a chunk are exact integers. Nothing is ever dequantized in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention.attention_scratch import CODE_STRIDE, SCORE_STRIDE
from localinfer.kernels.cpu.compiled.attention.attention_tiles import (
    each_page,
    fetch,
    for_count,
    key_block,
    operands,
    places,
)
from localinfer.kernels.cpu.compiled.simd.emit import F16, F32, I8, I16, I32, I64, LANES, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import LITERAL, VOID, emitted
from localinfer.kernels.jit.numba import stamp
from localinfer.kernels.kv_layout import SCALE_BLOCK

Q8_0, Q4_0 = 0, 1
"""Literal codes of the cache's quantized types."""

_LARGEST_WEIGHT = 32767.0


@emitted(VOID, LITERAL, *[types.int64] * 4)
def score_codes(emit: Emitter, kind: int, p: Value, memory: Value, first: Value, last: Value) -> None:
    """scores[q][position in the chunk] = query q . key, for blocks of sixteen positions.

    Quantized queries: int8[key_columns], then per scale block a float32 scale, then per scale block an int32 start that
    takes the codes' bias out again. `value_step` bytes of values are fetched per vector of keys. Else as
    `attention_tiles.score_keys`.
    """
    b = emit.builder
    table, page_table, target = places(emit, memory, scratch.QUERY_TABLE, scratch.PAGES, scratch.SCORES)
    names = "key_columns key_scales values value_step"
    number, (columns, scale_place, value_place, step_bytes) = operands(emit, p, memory, names)
    is_q8_0 = kind == Q8_0
    columns_per_vector = 4 if is_q8_0 else 8
    vectors_per_block = SCALE_BLOCK // columns_per_vector
    num_vectors = b.udiv(columns, emit.i64(columns_per_vector))
    blocks = b.udiv(b.add(columns, emit.i64(SCALE_BLOCK - 1)), emit.i64(SCALE_BLOCK))

    def unpacked(codes: Value) -> list[Value]:
        """Codes of four dimensions, or of four and the next four."""
        if is_q8_0:
            return [codes]
        low_nibbles = emit.splat_constant(I8, 15, 64)
        shifted = b.lshr(emit.bitcast(codes, vector(I16, 32)), emit.splat_constant(I16, 4, 32))
        return [b.and_(codes, low_nibbles), b.and_(emit.bitcast(shifted, vector(I8, 64)), low_nibbles)]

    def dot(v: Value, codes: list[Value], row: Value, total: Value) -> Value:
        for part, code in enumerate(codes):
            at = b.add(row, b.mul(v, emit.i64(columns_per_vector)))
            words = emit.bitcast(emit.splat(emit.load(at, I32, 4 * part, align=4)), vector(I8, 64))
            total = emit.dot_biased(total, code, words) if is_q8_0 else emit.dot_codes(total, code, words)
        return total

    def start(record: Value) -> Value:
        value = emit.splat(emit.load(b.add(record, b.mul(blocks, emit.i64(4))), I32, align=4))
        return emit.biased_start(value) if is_q8_0 else value

    def score(queries_here: int) -> None:
        rows = [emit.load(table, I64, 8 * q, align=8) for q in range(queries_here)]

        def per_position_block(block: Value, carried: list[Value]) -> Sequence[Value]:
            page, following, half = key_block(emit, page_table, block)
            offset = b.mul(half, b.mul(num_vectors, emit.i64(64)))
            keys, next_keys = b.add(page, offset), b.add(following, offset)
            next_values = b.add(b.add(page, value_place), b.mul(half, b.mul(num_vectors, step_bytes)))
            scales = b.add(b.add(page, scale_place), b.mul(half, b.mul(blocks, emit.i64(32))))
            fetch(emit, b.add(following, scale_place))

            def per_vector(v: Value, sums: list[Value]) -> Sequence[Value]:
                place = b.mul(v, emit.i64(64))
                fetch(emit, b.add(next_values, b.mul(v, step_bytes)), b.add(next_keys, place))
                codes = unpacked(emit.load(b.add(keys, place), vector(I8, 64), align=64))
                return [dot(v, codes, row, total) for row, total in zip(rows, sums, strict=True)]

            def per_scale_block(index: Value, totals: list[Value]) -> Sequence[Value]:
                begin = b.mul(index, emit.i64(vectors_per_block))
                end = b.add(begin, emit.i64(vectors_per_block))
                end = b.select(b.icmp_signed("<", end, num_vectors), end, num_vectors)
                after_codes = b.add(columns, b.mul(index, emit.i64(4)))
                records = [b.add(row, after_codes) for row in rows]
                sums = emit.loop(begin, end, 1, [start(record) for record in records], per_vector)
                key_scale = emit.load_floats(b.add(scales, b.mul(index, emit.i64(32))), 0, F16)
                both = [emit.mul(key_scale, emit.splat(emit.load(record, F32, align=4))) for record in records]
                return [
                    emit.fma(emit.to_float(product), factor, total)
                    for product, factor, total in zip(sums, both, totals, strict=True)
                ]

            zeros = [emit.zeros(F32)] * queries_here
            totals = emit.loop(emit.i64(0), blocks, 1, zeros, per_scale_block)
            for q, total in enumerate(totals):
                emit.store(total, b.add(target, b.mul(block, emit.i64(64))), SCORE_STRIDE * q, align=64)
            return carried

        emit.loop(first, last, 1, [], per_position_block)

    for_count(emit, number, score)


@emitted(VOID, LITERAL, *[types.int64] * 4)
def weigh_codes(emit: Emitter, kind: int, p: Value, memory: Value, low: Value, high: Value) -> None:
    """chunk values[q] = sum over the blocks of positions low..high of scores[q][position] * values[position].

    A position of weight 0 counts nothing, whatever its page holds. Else as `attention_tiles.weigh_values`.
    """
    b = emit.builder
    weight, page_table, work = places(emit, memory, scratch.SCORES, scratch.PAGES, scratch.WORK)
    number, (value_place, columns, scale_place) = operands(emit, p, memory, "values value_columns value_scales")
    target = emit.load(memory, I64, scratch.CHUNK_VALUES, align=8)
    first, last = b.ashr(low, emit.i64(4)), b.ashr(b.add(high, emit.i64(LANES - 1)), emit.i64(4))
    is_q8_0 = kind == Q8_0
    columns_per_vector, positions_per_vector = (16, 2) if is_q8_0 else (32, 4)
    vector_bytes, vectors_per_block = (32, 4) if is_q8_0 else (64, 2)
    sums_per_vector = columns_per_vector // LANES
    num_vectors = b.udiv(columns, emit.i64(columns_per_vector))
    blocks = b.udiv(b.add(columns, emit.i64(SCALE_BLOCK - 1)), emit.i64(SCALE_BLOCK))
    row_bytes = b.mul(num_vectors, emit.i64(vector_bytes))
    codes = b.add(work, emit.i64(SCORE_STRIDE))
    query_scales = b.add(codes, emit.i64(8 * CODE_STRIDE))
    positions = tuple(b.mul(bound, emit.i64(LANES)) for bound in (first, last))

    def quantize_weights(query: Value, scale_block: Value) -> None:
        row = b.add(weight, b.mul(query, emit.i64(SCORE_STRIDE)))

        def scaled(block: Value, carried: list[Value]) -> Sequence[Value]:
            page, _, half = key_block(emit, page_table, block)
            place = b.add(b.mul(scale_block, emit.i64(64)), b.mul(half, emit.i64(32)))
            scales = emit.load_floats(b.add(b.add(page, scale_place), place), 0, F16)
            offset = b.mul(block, emit.i64(64))
            shares = emit.load_floats(b.add(row, offset))
            is_seen = b.fcmp_ordered(">", shares, emit.zeros(F32))
            value = b.select(is_seen, emit.mul(shares, scales), emit.zeros(F32))
            emit.store(value, b.add(work, offset), align=64)
            # Scales of q4_0 have signs.
            magnitude = value if is_q8_0 else emit.call("llvm.fabs.v16f32", vector(F32), [value])
            return [emit.maximum(magnitude, carried[0])]

        largest = emit.reduce_max(emit.loop(first, last, 1, [emit.zeros(F32)], scaled)[0])
        limit = ir.Constant(F32, _LARGEST_WEIGHT)
        is_zero = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-30))
        inverse = emit.splat(b.select(is_zero, ir.Constant(F32, 0.0), b.fdiv(limit, largest)))
        code_row = b.add(codes, b.mul(query, emit.i64(CODE_STRIDE)))

        def rounded(block: Value, carried: list[Value]) -> Sequence[Value]:
            value = emit.mul(emit.load_floats(b.add(work, b.mul(block, emit.i64(64)))), inverse)
            whole = b.fptosi(emit.call("llvm.rint.v16f32", vector(F32), [value]), vector(I32))
            emit.store(b.trunc(whole, vector(I16)), b.add(code_row, b.mul(block, emit.i64(32))), align=32)
            return [b.add(carried[0], whole)] if carried else []

        place = b.add(query_scales, b.mul(query, emit.i64(4)))
        emit.store(b.fdiv(largest, limit), place, align=4)
        sums = emit.loop(first, last, 1, [] if is_q8_0 else [emit.zeros(I32)], rounded)
        if sums:
            total = emit.call("llvm.vector.reduce.add.v16i32", I32, sums)
            emit.store(b.mul(total, emit.i32(-8)), place, 32, align=4)

    def weigh(queries_here: int) -> None:
        def per_scale_block(scale_block: Value, carried: list[Value]) -> Sequence[Value]:
            def per_query(query: Value, nothing: list[Value]) -> Sequence[Value]:
                quantize_weights(query, scale_block)
                return nothing

            emit.loop(emit.i64(0), emit.i64(queries_here), 1, [], per_query)
            begin = b.mul(scale_block, emit.i64(vectors_per_block))
            end = b.add(begin, emit.i64(vectors_per_block))
            end = b.select(b.icmp_signed("<", end, num_vectors), end, num_vectors)
            # As in `weigh_values`: few queries take several vectors at once.
            width = max(1, 4 // (queries_here * sums_per_vector))
            whole = b.add(begin, b.and_(b.sub(end, begin), emit.i64(-width)))
            emit.loop(begin, whole, width, [], columns_of(width))
            if width > 1:
                emit.loop(whole, end, 1, [], columns_of(1))
            return carried

        def columns_of(width: int) -> Callable[[Value, list[Value]], Sequence[Value]]:
            def per_vectors(v: Value, carried: list[Value]) -> Sequence[Value]:
                def per_page(page: Value, begin: Value, start: Value, stop: Value, totals: list[Value]) -> Any:
                    column = b.add(b.add(page, value_place), b.mul(v, emit.i64(vector_bytes)))
                    code_row = b.add(codes, b.mul(begin, emit.i64(2)))

                    def per_positions(position: Value, sums: list[Value]) -> Sequence[Value]:
                        row = b.udiv(position, emit.i64(positions_per_vector))
                        place = b.add(column, b.mul(row, row_bytes))
                        pairs = [self_pairs(place, vector_bytes * w) for w in range(width)]
                        at = b.add(code_row, b.mul(position, emit.i64(2)))
                        result = list(sums)
                        for pair in range(positions_per_vector // 2):
                            for q in range(queries_here):
                                x = emit.load(at, I32, CODE_STRIDE * q + 4 * pair, align=4)
                                x = emit.bitcast(emit.splat(x), vector(I16, 32))
                                for i in range(width * sums_per_vector):
                                    w, part = divmod(i, sums_per_vector)
                                    slot = q * width * sums_per_vector + i
                                    result[slot] = emit.dot_pairs(
                                        result[slot], pairs[w][pair * sums_per_vector + part], x
                                    )
                        return result

                    return emit.loop(start, stop, positions_per_vector, totals, per_positions)

                starts = []
                for q in range(queries_here):
                    start = emit.zeros(I32)
                    if not is_q8_0:
                        start = emit.splat(emit.load(query_scales, I32, 32 + 4 * q, align=4))
                    starts += [start] * (width * sums_per_vector)
                totals = each_page(emit, page_table, positions, starts, per_page)
                for i, total in enumerate(totals):
                    q, part = divmod(i, width * sums_per_vector)
                    scale = emit.splat(emit.load(query_scales, F32, 4 * q, align=4))
                    row = b.add(target, b.mul(columns, emit.i64(4 * q)))
                    place = b.add(row, b.mul(v, emit.i64(4 * columns_per_vector)))
                    emit.store(emit.mul(emit.to_float(total), scale), place, 64 * part, align=64)
                return carried

            return per_vectors

        def self_pairs(place: Value, offset: int) -> list[Value]:
            """Vectors of int16 code pairs: of q4_0, first pair and then second, columns 0-15 and then 16-31."""
            if is_q8_0:
                return [b.sext(emit.load(place, vector(I8, 32), offset, align=32), vector(I16, 32))]
            nibbles = emit.load(place, vector(I16, 32), offset, align=64)
            parts = [b.lshr(nibbles, emit.splat_constant(I16, shift, 32)) for shift in (0, 4, 8, 12)]
            return [b.and_(part, emit.splat_constant(I16, 15, 32)) for part in parts]

        emit.loop(emit.i64(0), blocks, 1, [], per_scale_block)

    for_count(emit, number, weigh)


KERNELS = {
    f"{name}_{kind}": stamp(body, code)
    for name, body in (("score_keys", score_codes), ("weigh_values", weigh_codes))
    for kind, code in (("q8_0", Q8_0), ("q4_0", Q4_0))
}
"""As those of `attention_tiles`."""
