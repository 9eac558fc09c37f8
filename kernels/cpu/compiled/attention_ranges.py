"""Attention of rows that each see a range of positions which the batch gives: pictures, and windows of them.

The op of `attention` knows from a row's position what it sees, and that later rows see no less. Here a row sees the
positions of its range that its window holds, whatever its neighbours see, and those from a given one on that its window
does not hold: a prompt may see all of itself where what follows it sees a window. Everything else is as there: the same
tiles, the same chunks of absolute positions, merged in the same order, so a row whose range ends with its own position
has the same bits in either op. Tiles are not split by chunks: a batch with pictures has rows for every thread.
"""

import numpy as np

from localinfer.kernels.cpu.compiled import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention import (
    add_relative,
    finish_row,
    lowest_position,
    merge,
    out_address,
    set_pages,
    set_queries,
    set_unit,
)
from localinfer.kernels.cpu.compiled.attention_scratch import SCORE_STRIDE
from localinfer.kernels.cpu.compiled.attention_tiles import softmax_chunk
from localinfer.kernels.cpu.compiled.elementwise import exp_of
from localinfer.kernels.cpu.compiled.memory import call_op, load_f32, load_i64, store_f32, store_i64
from localinfer.kernels.cpu.compiled.pool import num_rows, scratch as scratch_of, take_units
from localinfer.kernels.cpu.kernel_abi import CHUNK
from localinfer.kernels.cpu.parameters import ATTENTION, BATCH, SEGMENT
from localinfer.kernels.jit.numba import inline, op

_SEGMENT_BYTES = SEGMENT.num_bytes


@inline
def _first_seen(p: int, memory: int, row: int) -> int:
    """First position that a row of the unit sees."""
    given = load_i64(load_i64(memory + scratch.KEY_STARTS) + 8 * row)
    lowest = lowest_position(p, load_i64(memory + scratch.POSITION) + row)
    return max(given, min(lowest, load_i64(load_i64(memory + scratch.WINDOW_STARTS) + 8 * row)))


@inline
def _end_seen(memory: int, row: int) -> int:
    """The position after the last one that a row of the unit sees."""
    return load_i64(load_i64(memory + scratch.KEY_ENDS) + 8 * row)


@inline
def _first_of_rows(p: int, memory: int, first: int, last: int) -> int:
    """First position that any row from first to last sees."""
    lowest = _first_seen(p, memory, first)
    for row in range(first + 1, last + 1):
        lowest = min(lowest, _first_seen(p, memory, row))
    return lowest


@inline
def _end_of_rows(memory: int, first: int, last: int) -> int:
    """The position after the last one that any row from first to last sees."""
    highest = _end_seen(memory, first)
    for row in range(first + 1, last + 1):
        highest = max(highest, _end_seen(memory, row))
    return highest


@inline
def _attend(p: int, memory: int, chunk: int, first_query: int, count: int, place: int) -> None:
    """`count` queries of a tile against a chunk: maxima, sums and weighted values of it alone, 16, 16 and 8 rows."""
    group, kv_head = ATTENTION.group(p), load_i64(memory + scratch.KV_HEAD)
    position, start = load_i64(memory + scratch.POSITION), chunk * CHUNK
    first_row, last_row = first_query // group, (first_query + count - 1) // group
    low = max(0, _first_of_rows(p, memory, first_row, last_row) - start)
    high = min(CHUNK, _end_of_rows(memory, first_row, last_row) - start)
    for q in range(8):
        store_f32(place + 4 * q, np.float32(-np.inf))
    if low >= high:
        return
    set_queries(p, memory, first_query, count)
    store_i64(memory + scratch.CHUNK_VALUES, place + 128)
    first_block, last_block = low // 16, (high + 15) // 16
    call_op(ATTENTION.score_keys(p), p, memory, first_block, last_block)
    softcap, slopes = ATTENTION.softcap(p), ATTENTION.slopes(p)
    for q in range(count):
        query = first_query + q
        row = query // group
        here = position + row
        if ATTENTION.buckets(p) != 0:
            scores, head = memory + scratch.SCORES + SCORE_STRIDE * q, kv_head * group + query % group
            add_relative(p, memory, scores, head, row, start, start - here, 16 * first_block, high)
        slope = np.float32(0)
        if slopes != 0:
            slope = load_f32(slopes + 4 * (kv_head * group + query % group))
        softmax_chunk(
            memory + scratch.SCORES + SCORE_STRIDE * q,
            16 * first_block,
            16 * last_block,
            _first_seen(p, memory, row) - start,
            min(high, _end_seen(memory, row) - start),
            softcap,
            slope,
            start - here,
            place + 4 * q,
            place + 64 + 4 * q,
        )
    call_op(ATTENTION.weigh_values(p), p, memory, 16 * first_block, high)


@inline
def _attend_tile(p: int, memory: int) -> None:
    """All chunks of a tile, merged and divided by the sums."""
    rows, group, sinks = load_i64(memory + scratch.ROWS), ATTENTION.group(p), ATTENTION.sinks(p)
    queries, end = rows * group, _end_of_rows(memory, 0, rows - 1)
    for query in range(queries):
        store_f32(memory + scratch.MAXIMA + 4 * query, np.float32(-np.inf))
    for chunk in range(_first_of_rows(p, memory, 0, rows - 1) // CHUNK, (end + CHUNK - 1) // CHUNK):
        set_pages(p, memory, chunk, end)
        for first in range(0, queries, 8):
            count = min(8, queries - first)
            _attend(p, memory, chunk, first, count, memory + scratch.CHUNK)
            merge(p, memory, first, count, memory + scratch.CHUNK)
    for query in range(queries):
        total = load_f32(memory + scratch.TOTALS + 4 * query)
        if sinks != 0:
            sink = load_f32(sinks + 4 * (load_i64(memory + scratch.KV_HEAD) * group + query % group))
            total += exp_of(sink - load_f32(memory + scratch.MAXIMA + 4 * query))
        finish_row(p, memory, out_address(p, memory, query), total)


@op
def attention(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Attention over a cache of any type, of rows that see ranges of positions."""
    p, memory, control = parameters, scratch_of(batch, thread), BATCH.control(batch)
    kv_heads, segments, num_segments = ATTENTION.kv_heads(p), BATCH.segments(batch), BATCH.num_segments(batch)
    # Smaller tiles, if there are too few for all threads.
    rows_per_tile = max(1, min(ATTENTION.rows_per_unit(p), num_rows(batch, 0) * kv_heads // (4 * num_threads)))
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
            units = tiles * kv_heads
        unit -= passed
        first_row = (tiles - 1 - unit // kv_heads) * rows_per_tile
        rows = min(rows_per_tile, SEGMENT.num_rows(segment) - first_row)
        set_unit(p, memory, segment, first_row, rows, unit % kv_heads)
        offset = 8 * (SEGMENT.first_row(segment) + first_row)
        store_i64(memory + scratch.KEY_STARTS, BATCH.key_starts(batch) + offset)
        store_i64(memory + scratch.KEY_ENDS, BATCH.key_ends(batch) + offset)
        store_i64(memory + scratch.WINDOW_STARTS, BATCH.window_starts(batch) + offset)
        _attend_tile(p, memory)
