"""Attention of rows that see others before and after them: sixteen queries of a head side by side, a lane each.

For encoders, whose pictures, sounds and texts are computed whole, over float32 keys and values. A number of a key or of
a value is one scalar for sixteen queries, and what a query has of its own (its maximum, its sum, its results) is a lane
of vectors: nothing is summed across lanes, and no column is padded. Keys come in chunks of absolute positions, as in
`attention_tiles`; a chunk's results continue the sums of those before, whose scale follows the greatest score so far. A
lane's numbers depend on its own query and the positions that it sees, in their order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from localinfer.kernels.cpu.compiled import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention import set_pages, set_unit
from localinfer.kernels.cpu.compiled.attention_tiles import each_page, fetch, key_block
from localinfer.kernels.cpu.compiled.emit import (
    F32,
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
from localinfer.kernels.cpu.compiled.memory import load_i64, store_i64, store_u32, words_of
from localinfer.kernels.cpu.compiled.pool import num_rows, scratch as scratch_of, take_units
from localinfer.kernels.cpu.kernel_abi import CHUNK, SCRATCH_BYTES
from localinfer.kernels.cpu.parameters import ATTENTION, BATCH, SEGMENT
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import AVX512
from localinfer.kernels.jit.numba import compose, inline, stamp

_AT_ONCE = 16 if isa.SELECTED in AVX512 else 4
"""Sums of sixteen lanes that registers hold."""
_MINUS_INFINITY = float("-inf")
_SEGMENT_BYTES = SEGMENT.num_bytes

_SCORES = scratch.SCORES
_FACTORS = _SCORES + 4 * LANES * CHUNK
_TABLE = _FACTORS + 64
"""Addresses of sixteen rows."""
_GROUPS = _TABLE + 8 * LANES
"""Of sixteen queries each: what follows, then queries and results, a vector per column."""
_STARTS, _ENDS, _MAXIMA, _TOTALS = 0, 64, 128, 192
"""Vectors of lanes: int32 the first position that a query sees and the one after the last, float32 the greatest score
so far and the sum of weights."""
_FIRST, _LAST_START, _FIRST_END, _END = 256, 264, 272, 280
"""Of all lanes: the first start and the last, the first end and the last."""
_QUERIES = 320
_MOST_GROUPS = 8


@emitted(VOID, *[types.int64] * 3)
def _begin_group(emit: Emitter, p: Value, group: Value, table: Value) -> None:
    """Queries times their scale, a vector per column, and results of nothing. table: addresses of sixteen queries."""
    b = emit.builder
    size, value_size, scale = words_of(emit, ATTENTION, p, "key_columns value_size scale")
    scales, target = emit.splat(scale), b.add(group, emit.i64(_QUERIES))
    _turn(emit, table, size, lambda rows, place: [emit.mul(row, scales) for row in rows], target, from_rows=True)
    results = b.add(target, b.mul(size, emit.i64(64)))

    def clear(column: Value, carried: list[Value]) -> Sequence[Value]:
        emit.store(emit.zeros(F32), b.add(results, b.mul(column, emit.i64(64))), align=64)
        return carried

    emit.loop(emit.i64(0), value_size, 1, [], clear)
    emit.store(emit.splat_constant(F32, _MINUS_INFINITY), group, _MAXIMA, align=64)
    emit.store(emit.zeros(F32), group, _TOTALS, align=64)


@emitted(VOID, *[types.int64] * 4)
def _finish_group(emit: Emitter, p: Value, group: Value, table: Value, count: Value) -> None:
    """Results divided by the sums of weights, as rows. table: addresses of sixteen results, of which `count` exist."""
    b = emit.builder
    size, value_size = words_of(emit, ATTENTION, p, "key_columns value_size")
    source = b.add(b.add(group, emit.i64(_QUERIES)), b.mul(size, emit.i64(64)))
    shares = b.fdiv(emit.splat_constant(F32, 1.0), emit.load_floats(group, _TOTALS))
    _turn(emit, table, value_size, lambda rows, place: [emit.mul(row, shares) for row in rows], source, count=count)


def _turn(
    emit: Emitter, table: Value, size: Value, change: Any, columns: Value, *, from_rows: bool = False,
    count: Value | None = None,
) -> None:  # fmt: skip
    """Turn sixteen rows of numbers into vectors per column, or those into `count` rows.

    The last sixteen columns overlap others where the size is odd; fewer than sixteen are moved one by one.
    """
    b = emit.builder
    rows = [emit.load(table, I64, 8 * lane, align=8) for lane in range(LANES)]

    def place_of(start: Value, column: Value, step: int) -> Value:
        return b.add(start, b.mul(column, emit.i64(step)))

    def block(first: Value) -> None:
        place = place_of(columns, first, 64)
        if from_rows:
            for index, lanes in enumerate(emit.transpose([emit.load_floats(place_of(row, first, 4)) for row in rows])):
                emit.store(change([lanes], None)[0], place, 64 * index, align=64)
            return
        vectors = [change([emit.load_floats(place, 64 * index)], None)[0] for index in range(LANES)]
        for lane, numbers in enumerate(emit.transpose(vectors)):
            with b.if_then(b.icmp_signed("<", emit.i64(lane), count)):
                emit.store(numbers, place_of(rows[lane], first, 4), align=4)

    def whole(first: Value, carried: list[Value]) -> Sequence[Value]:
        last = b.sub(size, emit.i64(LANES))
        block(b.select(b.icmp_signed("<", last, first), last, first))
        return carried

    def single(column: Value, carried: list[Value]) -> Sequence[Value]:
        place = place_of(columns, column, 64)
        if from_rows:
            lanes = emit.zeros(F32)
            for lane, row in enumerate(rows):
                number = emit.load(place_of(row, column, 4), F32, align=4)
                lanes = b.insert_element(lanes, number, emit.i32(lane))
            emit.store(change([lanes], None)[0], place, align=64)
            return carried
        lanes = change([emit.load_floats(place)], None)[0]
        for lane, row in enumerate(rows):
            with b.if_then(b.icmp_signed("<", emit.i64(lane), count)):
                emit.store(b.extract_element(lanes, emit.i32(lane)), place_of(row, column, 4), align=4)
        return carried

    with b.if_else(b.icmp_signed(">=", size, emit.i64(LANES))) as (many, few):
        with many:
            emit.loop(emit.i64(0), size, LANES, [], whole)
        with few:
            emit.loop(emit.i64(0), size, 1, [], single)


@emitted(VOID, LITERAL, *[types.int64] * 8)
def _score_keys(
    emit: Emitter, at_once: int, p: Value, group: Value, pages: Value, first: Value, last: Value, target: Value,
    number: Value, count: Value,
) -> None:  # fmt: skip
    """Scores of sixteen queries with blocks first..last of sixteen keys, a vector per key.

    number, count: which group of the tile this is, and how many fetch the next chunk, a share of its blocks each.
    """
    b = emit.builder
    size, value_place, step_bytes = words_of(emit, ATTENTION, p, "key_columns values value_step")
    queries = b.add(group, emit.i64(_QUERIES))

    def per_block(block: Value, carried: list[Value]) -> Sequence[Value]:
        page, following, half = key_block(emit, pages, block)
        keys = b.add(page, b.mul(half, b.mul(size, emit.i64(64))))
        next_keys = b.add(following, b.mul(half, b.mul(size, emit.i64(64))))
        next_values = b.add(b.add(following, value_place), b.mul(half, b.mul(size, step_bytes)))
        is_its_own = b.icmp_signed("==", b.srem(block, count), number)
        next_keys, next_values = (b.select(is_its_own, place, keys) for place in (next_keys, next_values))
        place = b.add(target, b.mul(block, emit.i64(64 * LANES)))
        for start in range(0, LANES, at_once):

            def per_column(column: Value, totals: list[Value], start: int = start) -> Sequence[Value]:
                offset = b.mul(column, emit.i64(64))
                lanes, numbers = emit.load_floats(b.add(queries, offset)), b.add(keys, offset)
                if start == 0:
                    fetch(emit, b.add(next_keys, offset), b.add(next_values, b.mul(column, step_bytes)))
                loads = [emit.load(numbers, F32, 4 * (start + index), align=4) for index in range(at_once)]
                return [emit.fma(emit.splat(number), lanes, total) for number, total in zip(loads, totals, strict=True)]

            totals = emit.loop(emit.i64(0), size, 1, [emit.zeros(F32)] * at_once, per_column)
            for index, total in enumerate(totals):
                emit.store(total, place, 64 * (start + index), align=64)
        return carried

    emit.loop(first, last, 1, [], per_block)


@emitted(VOID, *[types.int64] * 7)
def _weigh_scores(
    emit: Emitter, group: Value, scores: Value, first: Value, last: Value, start: Value, is_whole: Value, factors: Value
) -> None:
    """Turn scores of positions first..last of a chunk into weights, and note what results so far are multiplied by.

    start: the chunk's first position. is_whole: 1 if every lane sees all of them.
    """
    b = emit.builder
    minus_infinity = emit.splat_constant(F32, _MINUS_INFINITY)

    def place_of(position: Value) -> Value:
        return b.add(scores, b.mul(position, emit.i64(64)))

    def find(position: Value, carried: list[Value]) -> Sequence[Value]:
        return [emit.maximum(emit.load_floats(place_of(position)), carried[0])]

    def hide(position: Value, carried: list[Value]) -> Sequence[Value]:
        starts, ends = (emit.load(group, vector(I32), at, align=64) for at in (_STARTS, _ENDS))
        here = emit.splat(b.trunc(b.add(start, position), I32))
        is_seen = b.and_(b.icmp_signed(">=", here, starts), b.icmp_signed("<", here, ends))
        lanes = b.select(is_seen, emit.load_floats(place_of(position)), minus_infinity)
        emit.store(lanes, place_of(position), align=64)
        return [emit.maximum(lanes, carried[0])]

    with b.if_else(b.icmp_signed("!=", is_whole, emit.i64(0))) as (whole, part):
        with whole:
            found = emit.loop(first, last, 1, [minus_infinity], find)[0]
            whole_block = b.block
        with part:
            hidden = emit.loop(first, last, 1, [minus_infinity], hide)[0]
            part_block = b.block
    largest = b.phi(vector(F32))
    largest.add_incoming(found, whole_block)
    largest.add_incoming(hidden, part_block)
    before = emit.load_floats(group, _MAXIMA)
    maxima = emit.maximum(largest, before)
    emit.store(maxima, group, _MAXIMA, align=64)
    # A lane that has seen nothing yet has weights of 0 all the same.
    maxima = b.select(b.fcmp_ordered("==", maxima, minus_infinity), emit.zeros(F32), maxima)
    factor = emit.exp(emit.sub(before, maxima), highest=0.0)

    def weigh(position: Value, carried: list[Value]) -> Sequence[Value]:
        weight = emit.exp(emit.sub(emit.load_floats(place_of(position)), maxima), highest=0.0)
        emit.store(weight, place_of(position), align=64)
        return [emit.add(carried[0], weight)]

    total = emit.mul(emit.load_floats(group, _TOTALS), factor)
    emit.store(emit.loop(first, last, 1, [total], weigh)[0], group, _TOTALS, align=64)
    emit.store(factor, factors, align=64)


@emitted(VOID, LITERAL, *[types.int64] * 7)
def _add_values(
    emit: Emitter, at_once: int, p: Value, group: Value, pages: Value, low: Value, high: Value, weights: Value,
    factors: Value,
) -> None:  # fmt: skip
    """results = results * factor + the weighted values of positions low..high of a chunk, one by one."""
    b = emit.builder
    names = "key_columns value_size values value_row_bytes"
    size, value_size, value_place, stride = words_of(emit, ATTENTION, p, names)
    results = b.add(b.add(group, emit.i64(_QUERIES)), b.mul(size, emit.i64(64)))
    factor = emit.load_floats(factors)

    def columns(first: Value, width: int) -> None:
        place = b.add(results, b.mul(first, emit.i64(64)))
        start = b.add(value_place, b.mul(first, emit.i64(4)))

        def per_page(page: Value, begin: Value, low: Value, high: Value, totals: list[Value]) -> Sequence[Value]:
            row, lanes = b.add(page, start), b.add(weights, b.mul(begin, emit.i64(64)))

            def per_position(position: Value, totals: list[Value]) -> Sequence[Value]:
                weight = emit.load_floats(b.add(lanes, b.mul(position, emit.i64(64))))
                value = b.add(row, b.mul(position, stride))
                loads = [emit.load(value, F32, 4 * index, align=4) for index in range(width)]
                return [emit.fma(emit.splat(one), weight, total) for one, total in zip(loads, totals, strict=True)]

            return emit.loop(low, high, 1, totals, per_position)

        totals = [emit.mul(emit.load_floats(place, 64 * index), factor) for index in range(width)]
        for index, total in enumerate(each_page(emit, pages, (low, high), totals, per_page)):
            emit.store(total, place, 64 * index, align=64)

    def whole(column: Value, carried: list[Value]) -> Sequence[Value]:
        columns(column, at_once)
        return carried

    done = b.and_(value_size, emit.i64(-at_once))
    emit.loop(emit.i64(0), done, at_once, [], whole)
    width = at_once // 2
    while width:
        rest = b.and_(value_size, emit.i64(width))
        with b.if_then(b.icmp_signed("!=", rest, emit.i64(0))):
            columns(done, width)
        done, width = b.add(done, rest), width // 2


@inline
def _set_group(
    p: int, memory: int, group: int, row: int, rows: int, starts: int, ends: int, end: int, queries: int
) -> None:
    """Sixteen queries from `row` of a tile on, of which `rows` exist; the others repeat the last.

    starts, ends: addresses of what each row of the tile sees, or 0 for all up to `end`.
    """
    first, last_start, first_end, last_end = end, 0, end, 0
    for lane in range(16):
        index = row + min(lane, rows - 1)
        start, stop = 0, end
        if starts != 0:
            start, stop = load_i64(starts + 8 * index), load_i64(ends + 8 * index)
        store_u32(group + _STARTS + 4 * lane, np.uint32(start))
        store_u32(group + _ENDS + 4 * lane, np.uint32(stop))
        first, last_start = min(first, start), max(last_start, start)
        first_end, last_end = min(first_end, stop), max(last_end, stop)
        store_i64(memory + _TABLE + 8 * lane, queries + index * ATTENTION.queries_stride(p))
    store_i64(group + _FIRST, first)
    store_i64(group + _LAST_START, last_start)
    store_i64(group + _FIRST_END, first_end)
    store_i64(group + _END, last_end)
    _begin_group(p, group, memory + _TABLE)


@inline
def _attend(p: int, memory: int, group: int, chunk: int, number: int, count: int) -> None:
    """Group `number` of `count` with one chunk."""
    start = chunk * CHUNK
    low, high = max(0, load_i64(group + _FIRST) - start), min(CHUNK, load_i64(group + _END) - start)
    if low >= high:
        return
    first, last = low // 16, (high + 15) // 16
    pages, scores, factors = memory + scratch.PAGES, memory + _SCORES, memory + _FACTORS
    _score_keys(_AT_ONCE, p, group, pages, first, last, scores, number, count)
    is_whole = 0
    if load_i64(group + _LAST_START) <= start + 16 * first and load_i64(group + _FIRST_END) >= start + 16 * last:
        is_whole = 1
    _weigh_scores(group, scores, 16 * first, 16 * last, start, is_whole, factors)
    _add_values(_AT_ONCE, p, group, pages, low, high, scores, factors)


@compose
def _attention(takes_ranges: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """takes_ranges: 1 if the batch says which positions each row sees."""
    p, memory, control = parameters, scratch_of(batch, thread), BATCH.control(batch)
    heads, segments, num_segments = ATTENTION.kv_heads(p), BATCH.segments(batch), BATCH.num_segments(batch)
    group_bytes = _QUERIES + 64 * (ATTENTION.key_columns(p) + ATTENTION.value_size(p))
    groups = min(_MOST_GROUPS, (SCRATCH_BYTES - _GROUPS) // group_bytes)
    # Smaller tiles, if there are too few for all threads.
    groups = max(1, min(groups, num_rows(batch, 0) * heads // (64 * num_threads)))
    rows_per_tile = 16 * groups
    index, passed, units, segment, tiles = num_segments, 0, 0, 0, 0
    while True:
        unit = take_units(control, 1)
        while unit - passed >= units:
            if index == 0:
                return
            passed += units
            index -= 1
            segment = segments + _SEGMENT_BYTES * index
            tiles = (SEGMENT.num_rows(segment) + rows_per_tile - 1) // rows_per_tile
            units = tiles * heads
        unit -= passed
        first_row, head = (tiles - 1 - unit // heads) * rows_per_tile, unit % heads
        rows = min(rows_per_tile, SEGMENT.num_rows(segment) - first_row)
        set_unit(p, memory, segment, first_row, rows, head)
        starts, ends, end = 0, 0, load_i64(memory + scratch.END)
        if takes_ranges:
            offset = 8 * (SEGMENT.first_row(segment) + first_row)
            starts, ends = BATCH.key_starts(batch) + offset, BATCH.key_ends(batch) + offset
        queries = load_i64(memory + scratch.QUERY_ROW) + head * ATTENTION.query_head_bytes(p)
        out = load_i64(memory + scratch.OUT_ROW) + 4 * ATTENTION.value_size(p) * head
        first, last, here = end, 0, (rows + 15) // 16
        for number in range(here):
            group = memory + _GROUPS + number * group_bytes
            _set_group(p, memory, group, 16 * number, min(16, rows - 16 * number), starts, ends, end, queries)
            first, last = min(first, load_i64(group + _FIRST)), max(last, load_i64(group + _END))
        for chunk in range(first // CHUNK, (last + CHUNK - 1) // CHUNK):
            set_pages(p, memory, chunk, last)
            for number in range(here):
                _attend(p, memory, memory + _GROUPS + number * group_bytes, chunk, number, here)
        for number in range(here):
            count = min(16, rows - 16 * number)
            for lane in range(16):
                place = out + (16 * number + min(lane, count - 1)) * ATTENTION.out_stride(p)
                store_i64(memory + _TABLE + 8 * lane, place)
            _finish_group(p, memory + _GROUPS + number * group_bytes, memory + _TABLE, count)


KERNELS = {"attention": stamp(_attention, 0), "attention_of_ranges": stamp(_attention, 1)}
