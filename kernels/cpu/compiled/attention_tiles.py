"""The innermost loops of attention: over keys, over scores, and over values, float32, float16 or quantized.

A chunk is CHUNK absolute positions, wherever a batch begins. Per chunk and query: scores, their maximum, the
exponentials, their sum and the weighted values; then the chunk is merged into the running state. Chunks merge in
order, so the result depends only on the query's own prefix. The method is online softmax (Milakov and Gimelshein,
arXiv 1805.02867) over fixed chunks.

One, two, four or eight queries at once: each step exists for every count, and a query's own arithmetic is the same in
all of them.

Of quantized keys scores are integer dot products of their codes with queries as int8, so their only rounding is that of
the queries. Of quantized values the scale of a position goes into its probability, probabilities of a chunk become
int16 under one scale (a step is 1 / 32767 of the largest), and sums of a chunk are exact integers. Nothing is ever
dequantized in memory. `kv_layout.py` draws how codes lie.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention_scratch import CODE_STRIDE, PAGES_PER_CHUNK, SCORE_STRIDE
from localinfer.kernels.cpu.compiled.emit import (
    F16,
    F32,
    FLOAT,
    I8,
    I16,
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
from localinfer.kernels.cpu.compiled.memory import words_of
from localinfer.kernels.cpu.parameters import ATTENTION
from localinfer.kernels.jit.numba import stamp
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK

F32_CACHE, F16_CACHE = 0, 1
"""Literal codes of the cache's unquantized types."""

QUERY_COUNTS = (1, 2, 4, 8)

_MINUS_INFINITY = float("-inf")
_IN_SECOND_LEVEL = 2


def for_count(emit: Emitter, count: Value, body: Callable[[int], None]) -> None:
    """Run the body for the number of queries, one of QUERY_COUNTS, that `count` is."""
    for number in QUERY_COUNTS:
        with emit.builder.if_then(emit.builder.icmp_signed("==", count, emit.i64(number))):
            body(number)


def each_page(
    emit: Emitter, pages: Value, bounds: tuple[Value, Value], carried: Sequence[Value],
    body: Callable[[Value, Value, Value, Value, list[Value]], Sequence[Value]],
) -> list[Value]:  # fmt: skip
    """carried = body(page address, position in the chunk of its first, first, last position in the page, carried)."""
    b = emit.builder
    first, last = bounds
    shift = emit.i64(PAGE_TOKENS.bit_length() - 1)

    def step(index: Value, values: list[Value]) -> Sequence[Value]:
        page = emit.load(b.add(pages, b.mul(index, emit.i64(8))), I64, align=8)
        begin = b.shl(index, shift)
        low, high = b.sub(first, begin), b.sub(last, begin)
        low = b.select(b.icmp_signed("<", low, emit.i64(0)), emit.i64(0), low)
        full = emit.i64(PAGE_TOKENS)
        high = b.select(b.icmp_signed(">", high, full), full, high)
        return body(page, begin, low, high, values)

    stop = b.ashr(b.add(last, emit.i64(PAGE_TOKENS - 1)), shift)
    return emit.loop(b.ashr(first, shift), stop, 1, carried, step)


def key_block(emit: Emitter, pages: Value, block: Value) -> tuple[Value, Value, Value]:
    """Page of a block of sixteen positions, page of the same block a chunk later, and which half of the page it is."""
    b = emit.builder
    entry = b.add(pages, b.mul(b.ashr(block, emit.i64(1)), emit.i64(8)))
    page, following = (emit.load(entry, I64, offset, align=8) for offset in (0, 8 * PAGES_PER_CHUNK))
    return page, following, b.and_(block, emit.i64(1))


def fetch(emit: Emitter, *addresses: Value) -> None:
    """Ask for lines that are read a chunk, or half a chunk, from now."""
    for address in addresses:
        emit.prefetch(address, locality=_IN_SECOND_LEVEL)


def operands(emit: Emitter, p: Value, memory: Value, names: str) -> tuple[Value, list[Value]]:
    """Number of queries that are computed at once, and words of the op's parameters."""
    return emit.load(memory, I64, scratch.COUNT, align=8), words_of(emit, ATTENTION, p, names)


def places(emit: Emitter, memory: Value, *offsets: int) -> list[Value]:
    """Addresses in scratch memory."""
    return [emit.builder.add(memory, emit.i64(offset)) for offset in offsets]


@emitted(VOID, LITERAL, *[types.int64] * 4)
def score_keys(emit: Emitter, kind: int, p: Value, memory: Value, first: Value, last: Value) -> None:
    """scores[q][position in the chunk] = scale * (query q . key), for blocks of sixteen positions.

    kind: F32_CACHE or F16_CACHE. p: address of the op's parameters; memory: of `attention_scratch`. Values of the next
    chunk are fetched, `value_step` bytes per key dimension.
    """
    b = emit.builder
    table, page_table, target = places(emit, memory, scratch.QUERY_TABLE, scratch.PAGES, scratch.SCORES)
    names = "key_columns scale values value_step"
    num_queries, (size, scale, value_place, step_bytes) = operands(emit, p, memory, names)
    element = (F32, F16)[kind]
    stride = 32 if element is F16 else 64
    scales = emit.splat(scale)
    even_size = b.and_(size, emit.i64(-2))

    def score(number: int) -> None:
        rows = [emit.load(table, I64, 8 * q, align=8) for q in range(number)]

        def per_block(block: Value, carried: list[Value]) -> Sequence[Value]:
            page, following, half = key_block(emit, page_table, block)
            offset = b.mul(half, b.mul(size, emit.i64(stride)))
            keys, next_keys = b.add(page, offset), b.add(following, offset)
            next_values = b.add(b.add(page, value_place), b.mul(half, b.mul(size, step_bytes)))

            def product(d: Value, totals: list[Value]) -> list[Value]:
                place = b.mul(d, emit.i64(stride))
                if element is F32:
                    fetch(emit, b.add(next_values, b.mul(d, step_bytes)), b.add(next_keys, place))
                lanes = emit.load_floats(b.add(keys, place), 0, element)
                return [
                    emit.fma(emit.splat(emit.load(b.add(row, b.mul(d, emit.i64(4))), F32, align=4)), lanes, total)
                    for row, total in zip(rows, totals, strict=True)
                ]

            def two(d: Value, totals: list[Value]) -> Sequence[Value]:
                if element is F16:
                    place = b.mul(d, emit.i64(stride))
                    fetch(emit, b.add(next_values, b.mul(d, step_bytes)), b.add(next_keys, place))
                return product(b.add(d, emit.i64(1)), product(d, totals))

            totals = emit.loop(emit.i64(0), even_size, 2, [emit.zeros(F32)] * number, two)
            totals = emit.loop(even_size, size, 1, totals, product)
            for q, total in enumerate(totals):
                place = b.add(target, b.mul(block, emit.i64(64)))
                emit.store(emit.mul(total, scales), place, SCORE_STRIDE * q, align=64)
            return carried

        emit.loop(first, last, 1, [], per_block)

    for_count(emit, num_queries, score)


@emitted(VOID, *[types.int64] * 5, FLOAT, FLOAT, *[types.int64] * 3)
def softmax_chunk(
    emit: Emitter, address: Value, first: Value, last: Value, lowest: Value, highest: Value, cap: Value, alibi: Value,
    offset: Value, maximum_place: Value, total_place: Value,
) -> None:  # fmt: skip
    """Turn scores into exp(score - maximum) in place; write the maximum and the sum, float32 each, to two addresses.

    Score i is of the chunk's position i and counts if low <= i < high; others become 0. first_score, last_score:
    multiples of sixteen. distance: position of the chunk's first key minus the query's.
    """
    b = emit.builder
    lane_index = ir.Constant(vector(I32), list(range(LANES)))
    minus_infinity, zero = emit.splat_constant(F32, _MINUS_INFINITY), ir.Constant(F32, 0.0)
    has_cap = b.fcmp_ordered(">", cap, zero)

    def place_of(i: Value) -> Value:
        return b.add(address, b.mul(i, emit.i64(4)))

    def transformed(i: Value, lanes: Value) -> Value:
        caps = emit.splat(cap)
        doubled = emit.mul(b.fdiv(lanes, caps), emit.splat_constant(F32, 2.0))
        one = emit.splat_constant(F32, 1.0)
        ratio = b.fdiv(emit.splat_constant(F32, 2.0), emit.add(emit.exp(doubled), one))
        lanes = b.select(emit.splat(has_cap), emit.mul(emit.sub(one, ratio), caps), lanes)
        index = b.add(emit.splat(b.trunc(i, I32)), lane_index)
        relative = b.add(index, emit.splat(b.trunc(offset, I32)))
        nothing = ir.Constant(vector(I32), [0] * LANES)
        relative = b.select(b.icmp_signed(">", relative, nothing), b.sub(nothing, relative), relative)
        distances = emit.to_float(relative)
        value = emit.add(lanes, emit.mul(emit.splat(alibi), distances))
        bounds = [emit.splat(b.trunc(bound, I32)) for bound in (lowest, highest)]
        inside = b.and_(b.icmp_signed(">=", index, bounds[0]), b.icmp_signed("<", index, bounds[1]))
        return b.select(inside, value, minus_infinity)

    def find_maximum(i: Value, carried: list[Value]) -> Sequence[Value]:
        return [emit.maximum(emit.load_floats(place_of(i)), carried[0])]

    def transform(i: Value, carried: list[Value]) -> Sequence[Value]:
        value = transformed(i, emit.load_floats(place_of(i)))
        emit.store(value, place_of(i), align=64)
        return [emit.maximum(value, carried[0])]

    # Most chunks lie in the past as a whole, and most models neither cap nor slope.
    is_whole = b.and_(b.icmp_signed("<=", lowest, first), b.icmp_signed(">=", highest, last))
    is_plain = b.and_(b.not_(has_cap), b.fcmp_ordered("==", alibi, zero))
    with b.if_else(b.and_(is_whole, is_plain)) as (plain, other):
        with plain:
            found = emit.loop(first, last, LANES, [minus_infinity], find_maximum)[0]
            plain_block = b.block
        with other:
            changed = emit.loop(first, last, LANES, [minus_infinity], transform)[0]
            other_block = b.block
    largest = b.phi(vector(F32))
    largest.add_incoming(found, plain_block)
    largest.add_incoming(changed, other_block)
    maximum_value = emit.reduce_max(largest)
    maxima = emit.splat(maximum_value)

    def exponentiate(i: Value, carried: list[Value]) -> Sequence[Value]:
        value = emit.exp(emit.sub(emit.load_floats(place_of(i)), maxima), highest=0.0)
        emit.store(value, place_of(i), align=64)
        return [emit.add(carried[0], value)]

    sums = emit.loop(first, last, LANES, [emit.zeros(F32)], exponentiate)[0]
    emit.store(maximum_value, maximum_place, align=4)
    emit.store(emit.reduce_add(sums), total_place, align=4)


@emitted(VOID, LITERAL, *[types.int64] * 4)
def weigh_values(emit: Emitter, kind: int, p: Value, memory: Value, low: Value, high: Value) -> None:
    """chunk values[q] = sum over positions low..high of a chunk of scores[q][position] * values[position], one by one.

    Values of a page are rows of `value_row_bytes` bytes, results rows of value_columns float32. Else as `score_keys`.
    """
    b = emit.builder
    weight, page_table = places(emit, memory, scratch.SCORES, scratch.PAGES)
    num_queries, target = (emit.load(memory, I64, at, align=8) for at in (scratch.COUNT, scratch.CHUNK_VALUES))
    stride, columns, value_place = words_of(emit, ATTENTION, p, "value_row_bytes value_columns values")
    vectors = b.ashr(columns, emit.i64(4))
    element = (F32, F16)[kind]
    lane_bytes = 32 if element is F16 else 64

    def weigh(number: int) -> None:
        def columns_of(width: int) -> Callable[[Value, list[Value]], Sequence[Value]]:
            def per_vectors(v: Value, carried: list[Value]) -> Sequence[Value]:
                def per_page(page: Value, begin: Value, start: Value, stop: Value, totals: list[Value]) -> Any:
                    column = b.add(b.add(page, value_place), b.mul(v, emit.i64(lane_bytes)))
                    row = b.add(weight, b.mul(begin, emit.i64(4)))

                    def per_position(position: Value, sums: list[Value]) -> Sequence[Value]:
                        place = b.add(column, b.mul(position, stride))
                        lanes = [emit.load_floats(place, lane_bytes * w, element) for w in range(width)]
                        offset = b.add(row, b.mul(position, emit.i64(4)))
                        loads = [emit.load(offset, F32, SCORE_STRIDE * q, align=4) for q in range(number)]
                        shares = [emit.splat(share) for share in loads]
                        return [emit.fma(shares[i // width], lanes[i % width], total) for i, total in enumerate(sums)]

                    return emit.loop(start, stop, 1, totals, per_position)

                zeros = [emit.zeros(F32)] * (number * width)
                totals = each_page(emit, page_table, (low, high), zeros, per_page)
                for i, total in enumerate(totals):
                    row = b.mul(emit.i64(i // width), vectors)
                    place = b.add(target, b.mul(b.add(row, v), emit.i64(64)))
                    emit.store(total, place, 64 * (i % width), align=64)
                return carried

            return per_vectors

        # Few queries leave few chains of sums, so they take several vectors of columns at once.
        width = max(1, 4 // number)
        whole = b.and_(vectors, emit.i64(-width))
        emit.loop(emit.i64(0), whole, width, [], columns_of(width))
        if width > 1:
            emit.loop(whole, vectors, 1, [], columns_of(1))

    for_count(emit, num_queries, weigh)


@emitted(VOID, *[types.int64] * 10)
def merge_chunk(
    emit: Emitter, number: Value, maxima_place: Value, totals_place: Value, table: Value, new_maxima: Value,
    new_totals: Value, source: Value, stride: Value, columns: Value, factors: Value,
) -> None:  # fmt: skip
    """Merge what up to eight queries have of a chunk into what they have of those before.

    maxima, totals and those of the chunk: float32 per query, of which sixteen may be read. targets: address of `count`
    addresses of float32[size]. A chunk of maximum -inf changes nothing; into a state of maximum -inf it is copied.
    work: address of 128 bytes.
    """
    b = emit.builder
    minus_infinity = emit.splat_constant(F32, _MINUS_INFINITY)
    before, fresh = emit.load_floats(maxima_place), emit.load_floats(new_maxima)
    larger = emit.maximum(fresh, before)
    old = emit.exp(emit.sub(before, larger), highest=0.0)
    new = emit.exp(emit.sub(fresh, larger), highest=0.0)
    emit.store(old, factors, align=4)
    emit.store(new, factors, 64, align=4)

    def is_empty(place: Value) -> Value:
        return b.fcmp_ordered("==", emit.load(place, F32, align=4), ir.Constant(F32, _MINUS_INFINITY))

    def per_query(q: Value, carried: list[Value]) -> Sequence[Value]:
        offset = b.mul(q, emit.i64(4))
        kept, added = (emit.splat(emit.load(b.add(factors, offset), F32, at, align=4)) for at in (0, 64))
        target = emit.load(b.add(table, b.mul(q, emit.i64(8))), I64, align=8)
        row = b.add(source, b.mul(q, stride))

        def copied(place: Value, lanes: Value) -> Value:
            return lanes

        def merged(place: Value, lanes: Value) -> Value:
            return emit.add(emit.mul(emit.load_floats(place), kept), emit.mul(lanes, added))

        is_new, is_first = b.not_(is_empty(b.add(new_maxima, offset))), is_empty(b.add(maxima_place, offset))
        with b.if_then(is_new), b.if_else(is_first) as (first, later):
            with first:
                change_row(emit, target, row, columns, copied)
            with later:
                change_row(emit, target, row, columns, merged)
        return carried

    emit.loop(emit.i64(0), number, 1, [], per_query)
    so_far, added = emit.load_floats(totals_place), emit.load_floats(new_totals)
    summed = emit.add(emit.mul(so_far, old), emit.mul(added, new))
    summed = b.select(b.fcmp_ordered("==", before, minus_infinity), added, summed)
    summed = b.select(b.fcmp_ordered("==", fresh, minus_infinity), so_far, summed)
    emit.store_first(summed, totals_place, number)
    emit.store_first(larger, maxima_place, number)


def change_row(
    emit: Emitter, target: Value, source: Value, columns: Value, change: Callable[[Value, Value], Value]
) -> None:
    """target = change(address in target, lanes of source) over `columns` columns; only those are written."""
    b = emit.builder
    whole = b.and_(columns, emit.i64(-LANES))

    def place_of(row: Value, column: Value) -> Value:
        return b.add(row, b.mul(column, emit.i64(4)))

    def step(column: Value, carried: list[Value]) -> Sequence[Value]:
        place = place_of(target, column)
        emit.store(change(place, emit.load_floats(place_of(source, column))), place, align=4)
        return carried

    emit.loop(emit.i64(0), whole, LANES, [], step)
    with b.if_then(b.icmp_signed("<", whole, columns)):
        place = place_of(target, whole)
        emit.store_first(change(place, emit.load_floats(place_of(source, whole))), place, b.sub(columns, whole))


@emitted(VOID, types.int64, FLOAT, types.int64)
def divide_row(emit: Emitter, target: Value, value: Value, columns: Value) -> None:
    """out /= divisor over `size` columns."""
    builder = emit.builder
    lanes = emit.splat(builder.fdiv(ir.Constant(F32, 1.0), value))
    change_row(emit, target, target, columns, lambda place, row: emit.mul(row, lanes))


Q8_0, Q4_0 = 0, 1
"""Literal codes of the cache's quantized types."""

_LARGEST_WEIGHT = 32767.0


@emitted(VOID, LITERAL, *[types.int64] * 4)
def score_codes(emit: Emitter, kind: int, p: Value, memory: Value, first: Value, last: Value) -> None:
    """scores[q][position in the chunk] = query q . key, for blocks of sixteen positions.

    Quantized queries: int8[key_columns], then per scale block a float32 scale, then per scale block an int32 start that
    takes the codes' bias out again. `value_step` bytes of values are fetched per vector of keys. Else as
    `score_keys`.
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

    A position of weight 0 counts nothing, whatever its page holds. Else as `weigh_values`.
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
    for kinds, steps in (
        ({"f32": F32_CACHE, "f16": F16_CACHE}, (score_keys, weigh_values)),
        ({"q8_0": Q8_0, "q4_0": Q4_0}, (score_codes, weigh_codes)),
    )
    for name, body in zip(("score_keys", "weigh_values"), steps, strict=True)
    for kind, code in kinds.items()
}
"""Called by `attention.attention` by address: for blocks of sixteen positions of keys, and for positions of values."""
