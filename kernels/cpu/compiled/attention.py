"""Attention over the paged cache, and writing keys and values into it.

A unit of work is a few consecutive rows of one sequence and one KV head. Its queries, all heads of the group of all
its rows, meet each chunk of keys and values in groups of eight, so a chunk is read from memory once per unit.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.attention_tiles import (
    divide_row,
    key_scores,
    merge_chunk,
    softmax_chunk,
    weigh_values,
)
from localinfer.kernels.cpu.compiled.batch import num_rows, rows_at_once, scratch
from localinfer.kernels.cpu.compiled.memory import float_bits, load_f32, load_i64, store_f32, store_half, store_i64
from localinfer.kernels.cpu.compiled.pool import take_units
from localinfer.kernels.cpu.compiled.rows import exp_of
from localinfer.kernels.cpu.protocol import (
    CHUNK,
    CONTROL,
    MAX_VALUE_SIZE,
    NUM_SEGMENTS,
    PAGE_TABLES,
    POSITIONS,
    SEGMENTS,
)
from localinfer.kernels.jit import compose, inline, op
from localinfer.kernels.kv_layout import PAGE_TOKENS

# Words of an `attention` op's parameters: queries, queries stride, out, out stride, heads per KV head, KV heads, key
# size, value size, value stride, layer offset, head bytes, scale bits, softcap bits, window, chunk, sinks, slopes,
# element bytes, rows per unit.

# Scratch of a thread: query addresses, then scores, chunk values, chunk states and running states.
_SCORES = 64
_VALUES = _SCORES + 8 * CHUNK * 4
_CHUNK_STATES = _VALUES + 8 * MAX_VALUE_SIZE * 4
_UNIT = _CHUNK_STATES + 64
_STATES = _UNIT + 64

_F32, _F16 = 0, 1


@inline
def _lowest_position(position: int, window: int, chunk: int) -> int:
    """First position that a query at `position` may see."""
    low = 0
    if window > 0:
        low = max(low, position - window + 1)
    if chunk > 0:
        low = max(low, position // chunk * chunk)
    return low


@compose
def _scores(kind: int, count: int, queries: int, keys: int, key_size: int, scale: float, out: int) -> None:
    """`key_scores` for 1, 2, 4 or 8 queries."""
    if count == 8:
        key_scores(kind, 8, queries, keys, key_size, scale, out, 4 * CHUNK)
    elif count == 4:
        key_scores(kind, 4, queries, keys, key_size, scale, out, 4 * CHUNK)
    elif count == 2:
        key_scores(kind, 2, queries, keys, key_size, scale, out, 4 * CHUNK)
    else:
        key_scores(kind, 1, queries, keys, key_size, scale, out, 4 * CHUNK)


@compose
def _values(
    kind: int, count: int, weights: int, values: int, positions: int, stride: int, vectors: int, out: int
) -> None:
    """`weigh_values` for 1, 2, 4 or 8 queries."""
    if count == 8:
        weigh_values(kind, 8, weights, 4 * CHUNK, values, positions, stride, vectors, out, 64 * vectors)
    elif count == 4:
        weigh_values(kind, 4, weights, 4 * CHUNK, values, positions, stride, vectors, out, 64 * vectors)
    elif count == 2:
        weigh_values(kind, 2, weights, 4 * CHUNK, values, positions, stride, vectors, out, 64 * vectors)
    else:
        weigh_values(kind, 1, weights, 4 * CHUNK, values, positions, stride, vectors, out, 64 * vectors)


@compose
def _group(
    kind: int, count: int, p: int, unit: int, memory: int, pages: int, start: int, high: int, first_query: int
) -> None:
    """`count` queries of a unit against the positions start..high of one chunk.

    unit: address of int64[4]: first position, query row, output row and KV head of the unit.
    """
    queries_stride, out_stride, group_size = load_i64(p + 8), load_i64(p + 24), load_i64(p + 32)
    key_size, value_size, value_stride = load_i64(p + 48), load_i64(p + 56), load_i64(p + 64)
    scale, softcap = float_bits(load_i64(p + 88)), float_bits(load_i64(p + 96))
    window, local, slopes, element = load_i64(p + 104), load_i64(p + 112), load_i64(p + 128), load_i64(p + 136)
    first_position, query_row, out_row, kv_head = (
        load_i64(unit),
        load_i64(unit + 8),
        load_i64(unit + 16),
        load_i64(unit + 24),
    )
    head_offset = load_i64(p + 72) + kv_head * load_i64(p + 80)
    value_bytes = value_stride * element
    first_head = kv_head * group_size
    # Blocks of sixteen positions that no query of the group sees are left out; the chunk's own grid stays.
    low = max(start, _lowest_position(first_position + first_query // group_size, window, local))
    base = low // 16 * 16
    num_scores = (high - base + 15) // 16 * 16
    for q in range(count):
        query = first_query + q
        head = first_head + query % group_size
        store_i64(memory + 8 * q, query_row + query // group_size * queries_stride + 4 * key_size * head)
    for offset in range(0, num_scores, 16):
        position = base + offset
        page = load_i64(pages + 8 * (position // PAGE_TOKENS)) + head_offset
        keys = page + position % PAGE_TOKENS * key_size * element
        _scores(kind, count, memory, keys, key_size, scale, memory + _SCORES + 4 * offset)
    for q in range(count):
        query = first_query + q
        position = first_position + query // group_size
        slope = np.float32(0)
        if slopes != 0:
            slope = load_f32(slopes + 4 * (first_head + query % group_size))
        lowest = _lowest_position(position, window, local)
        scores, state = memory + _SCORES + 4 * CHUNK * q, memory + _CHUNK_STATES + 8 * q
        softmax_chunk(scores, num_scores, base, lowest, min(high, position + 1), softcap, slope, position, state)
        for column in range(value_stride):
            store_f32(memory + _VALUES + 4 * (value_stride * q + column), np.float32(0))
    position = base
    while position < high:
        count_here = min(high - position, PAGE_TOKENS - position % PAGE_TOKENS)
        page = load_i64(pages + 8 * (position // PAGE_TOKENS)) + head_offset
        values = page + PAGE_TOKENS * key_size * element + position % PAGE_TOKENS * value_bytes
        weights = memory + _SCORES + 4 * (position - base)
        _values(kind, count, weights, values, count_here, value_bytes, value_stride // 16, memory + _VALUES)
        position += count_here
    for q in range(count):
        query = first_query + q
        target = out_row + query // group_size * out_stride + 4 * value_size * (first_head + query % group_size)
        chunk_state, chunk_values = memory + _CHUNK_STATES + 8 * q, memory + _VALUES + 4 * value_stride * q
        merge_chunk(memory + _STATES + 8 * query, target, chunk_state, chunk_values, value_size)


@compose
def _unit(kind: int, p: int, unit: int, memory: int, pages: int, rows: int) -> None:
    """All queries of `rows` rows and one KV head over everything they may see."""
    out_stride, group_size, value_size = load_i64(p + 24), load_i64(p + 32), load_i64(p + 56)
    window, local, sinks = load_i64(p + 104), load_i64(p + 112), load_i64(p + 120)
    first_position, out_row, kv_head = load_i64(unit), load_i64(unit + 16), load_i64(unit + 24)
    queries = rows * group_size
    for query in range(queries):
        store_f32(memory + _STATES + 8 * query, np.float32(-np.inf))
        store_f32(memory + _STATES + 8 * query + 4, np.float32(0))
        target = (
            out_row + query // group_size * out_stride + 4 * value_size * (kv_head * group_size + query % group_size)
        )
        for column in range(value_size):
            store_f32(target + 4 * column, np.float32(0))
    start = _lowest_position(first_position, window, local) // CHUNK * CHUNK
    end = first_position + rows
    while start < end:
        query = 0
        while query < queries:
            step = rows_at_once(queries - query)
            last_position = first_position + (query + step - 1) // group_size
            high = min(start + CHUNK, last_position + 1)
            if high > max(start, _lowest_position(first_position + query // group_size, window, local)):
                _group(kind, step, p, unit, memory, pages, start, high, query)
            query += step
        start += CHUNK
    for query in range(queries):
        head = kv_head * group_size + query % group_size
        maximum, total = load_f32(memory + _STATES + 8 * query), load_f32(memory + _STATES + 8 * query + 4)
        if sinks != 0:
            total += exp_of(load_f32(sinks + 4 * head) - maximum)
        divide_row(out_row + query // group_size * out_stride + 4 * value_size * head, total, value_size)


@compose
def _attention(kind: int, p: int, batch: int, thread: int) -> None:
    control, memory = load_i64(batch + CONTROL), scratch(batch, thread)
    kv_heads, rows_per_unit = load_i64(p + 40), load_i64(p + 144)
    num_segments, segments = load_i64(batch + NUM_SEGMENTS), load_i64(batch + SEGMENTS)
    unit_record = memory + _UNIT
    units = 0
    for index in range(num_segments):
        units += (load_i64(segments + 32 * index + 8) + rows_per_unit - 1) // rows_per_unit * kv_heads
    while True:
        unit = take_units(control, 1)
        if unit >= units:
            return
        # The last rows of a prompt see the most, so they come first and no thread ends with a long unit.
        unit = units - 1 - unit
        segment = segments
        while True:
            here = (load_i64(segment + 8) + rows_per_unit - 1) // rows_per_unit * kv_heads
            if unit < here:
                break
            unit -= here
            segment += 32
        first = unit // kv_heads * rows_per_unit
        row = load_i64(segment) + first
        store_i64(unit_record, load_i64(segment + 16) + first)
        store_i64(unit_record + 8, load_i64(p) + row * load_i64(p + 8))
        store_i64(unit_record + 16, load_i64(p + 16) + row * load_i64(p + 24))
        store_i64(unit_record + 24, unit % kv_heads)
        rows = min(rows_per_unit, load_i64(segment + 8) - first)
        _unit(kind, p, unit_record, memory, load_i64(segment + 24), rows)


@op
def attention_f32(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Attention over a float32 cache."""
    _attention(_F32, parameters, batch, thread)


@op
def attention_f16(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Attention over a float16 cache."""
    _attention(_F16, parameters, batch, thread)


@op
def store_kv(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Write rows of keys and values into their pages.

    Parameters: keys, keys stride, values, values stride, KV heads, key size, value size, value stride, layer offset,
    head bytes, element bytes.
    """
    keys, keys_stride = load_i64(parameters), load_i64(parameters + 8)
    values, values_stride = load_i64(parameters + 16), load_i64(parameters + 24)
    kv_heads, key_size, value_size = load_i64(parameters + 32), load_i64(parameters + 40), load_i64(parameters + 48)
    value_stride, layer_offset = load_i64(parameters + 56), load_i64(parameters + 64)
    head_bytes, element = load_i64(parameters + 72), load_i64(parameters + 80)
    control = load_i64(batch + CONTROL)
    positions, tables = load_i64(batch + POSITIONS), load_i64(batch + PAGE_TABLES)
    units = num_rows(batch, 0) * kv_heads
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row, head = unit // kv_heads, unit % kv_heads
            position = load_i64(positions + 8 * row)
            page = load_i64(load_i64(tables + 8 * row) + 8 * (position // PAGE_TOKENS))
            target = page + layer_offset + head * head_bytes
            slot = position % PAGE_TOKENS
            key_target = target + (slot // 16 * 16 * key_size + slot % 16) * element
            key_source = keys + row * keys_stride + 4 * head * key_size
            value_target = target + (PAGE_TOKENS * key_size + slot * value_stride) * element
            value_source = values + row * values_stride + 4 * head * value_size
            if element == 2:
                for d in range(key_size):
                    store_half(key_target + 32 * d, load_f32(key_source + 4 * d))
                for d in range(value_size):
                    store_half(value_target + 2 * d, load_f32(value_source + 4 * d))
            else:
                for d in range(key_size):
                    store_f32(key_target + 64 * d, load_f32(key_source + 4 * d))
                for d in range(value_size):
                    store_f32(value_target + 4 * d, load_f32(value_source + 4 * d))
