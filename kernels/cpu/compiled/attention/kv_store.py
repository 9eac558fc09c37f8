"""Writing keys and values into the cache's pages, and quantizing the queries that meet quantized keys.

Everything of one position is written by itself: no byte of a page belongs to two positions, so rows may be stored in
any order by any thread, and again after they were rejected.
"""

import numpy as np

from localinfer.kernels.cpu.attention import (
    CODE_BIAS,
    KIND_F16,
    KIND_Q8_0,
    NUM_HEADS,
    PART_COLUMNS,
    PART_KIND,
    PART_OFFSET,
    PART_ROTATION,
    PART_SCALES,
    PART_SIZE,
    PART_SOURCE,
    PART_STRIDE,
    QUERIES,
    QUERIES_STRIDE,
    QUERY_COLUMNS,
    QUERY_ROTATION,
    QUERY_SCALE,
    QUERY_SIZE,
    STORE_HEAD_BYTES,
    STORE_HEADS,
    STORE_KEYS,
    STORE_TABLES,
    STORE_VALUES,
    TARGET,
    TARGET_HEAD_BYTES,
    TARGET_STRIDE,
)
from localinfer.kernels.cpu.compiled.attention import attention_scratch
from localinfer.kernels.cpu.compiled.attention.rotation import (
    TO_Q4_0,
    TO_Q8_0,
    TO_QUERY,
    copy_padded,
    quantize_values,
    rotate,
)
from localinfer.kernels.cpu.compiled.simd.batch import num_rows, scratch
from localinfer.kernels.cpu.compiled.simd.memory import (
    float_bits,
    load_f32,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_f32,
    store_half,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.kernel_abi import CONTROL, POSITIONS
from localinfer.kernels.jit.numba import inline, op
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK

_RECORDS = attention_scratch.WORK
"""Eight bytes per scale block in scratch memory."""


@inline
def _quantize(memory: int, source: int, size: int, rotation: int, is_q8_0: bool) -> int:
    """Codes of one head's row and a scale per block, in scratch memory; returns the number of blocks."""
    row, blocks = memory + attention_scratch.ROW, (size + SCALE_BLOCK - 1) // SCALE_BLOCK
    copy_padded(row, source, size)
    rotate(row, size, rotation)
    for block in range(blocks):
        codes = memory + attention_scratch.CODES + SCALE_BLOCK * block
        if is_q8_0:
            quantize_values(TO_Q8_0, row + 4 * SCALE_BLOCK * block, codes, memory + _RECORDS + 8 * block)
        else:
            quantize_values(TO_Q4_0, row + 4 * SCALE_BLOCK * block, codes, memory + _RECORDS + 8 * block)
    return blocks


@inline
def _store_float_key(kind: int, source: int, target: int, slot: int, size: int) -> None:
    if kind == KIND_F16:
        place = target + slot // 16 * 32 * size + 2 * (slot % 16)
        for d in range(size):
            store_half(place + 32 * d, load_f32(source + 4 * d))
    else:
        place = target + slot // 16 * 64 * size + 4 * (slot % 16)
        for d in range(size):
            store_f32(place + 64 * d, load_f32(source + 4 * d))


@inline
def _store_float_value(kind: int, source: int, target: int, slot: int, size: int, columns: int) -> None:
    if kind == KIND_F16:
        place = target + 2 * slot * columns
        for d in range(size):
            store_half(place + 2 * d, load_f32(source + 4 * d))
    else:
        place = target + 4 * slot * columns
        for d in range(size):
            store_f32(place + 4 * d, load_f32(source + 4 * d))


@inline
def _store_key_codes(part: int, memory: int, source: int, target: int, slot: int) -> None:
    columns, is_q8_0 = load_i64(part + PART_COLUMNS), load_i64(part + PART_KIND) == KIND_Q8_0
    blocks = _quantize(memory, source, load_i64(part + PART_SIZE), load_i64(part + PART_ROTATION), is_q8_0)
    codes, group, lane = memory + attention_scratch.CODES, slot // 16, slot % 16
    if is_q8_0:
        place = target + group * 16 * columns + 4 * lane
        for word in range(columns // 4):
            store_u32(place + 64 * word, load_u32_anywhere(codes + 4 * word) ^ np.uint32(0x80808080))
    else:
        place = target + group * 8 * columns + 4 * lane
        for word in range(columns // 8):
            low, high = load_u32_anywhere(codes + 8 * word), load_u32_anywhere(codes + 8 * word + 4)
            store_u32(place + 64 * word, low | high << np.uint32(4))
    place = target + load_i64(part + PART_SCALES) + group * 32 * blocks + 2 * lane
    for block in range(blocks):
        store_u16(place + 32 * block, load_u16_anywhere(memory + _RECORDS + 8 * block))


@inline
def _store_value_codes(part: int, memory: int, source: int, target: int, slot: int) -> None:
    columns, is_q8_0 = load_i64(part + PART_COLUMNS), load_i64(part + PART_KIND) == KIND_Q8_0
    blocks = _quantize(memory, source, load_i64(part + PART_SIZE), load_i64(part + PART_ROTATION), is_q8_0)
    codes = memory + attention_scratch.CODES
    if is_q8_0:
        place = target + slot // 2 * 2 * columns + slot % 2
        for d in range(columns):
            store_u8(place + 2 * d, load_u8(codes + d))
    else:
        place = target + slot // 4 * 2 * columns + slot % 2 * 2 + slot % 4 // 2
        for vector in range(columns // 32):
            for lane in range(16):
                d = codes + 32 * vector + lane
                store_u8(place + 64 * vector + 4 * lane, load_u8(d) | load_u8(d + 16) << np.uint8(4))
    place = target + load_i64(part + PART_SCALES) + 2 * slot
    for block in range(blocks):
        store_u16(place + 64 * block, load_u16_anywhere(memory + _RECORDS + 8 * block))


@inline
def _source(part: int, row: int, head: int) -> int:
    return load_i64(part + PART_SOURCE) + row * load_i64(part + PART_STRIDE) + 4 * head * load_i64(part + PART_SIZE)


@op
def store_floats(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Write rows of keys and values, neither of them quantized."""
    keys, values = parameters + STORE_KEYS, parameters + STORE_VALUES
    heads, head_bytes = load_i64(parameters + STORE_HEADS), load_i64(parameters + STORE_HEAD_BYTES)
    control, positions = load_i64(batch + CONTROL), load_i64(batch + POSITIONS)
    tables = load_i64(batch + load_i64(parameters + STORE_TABLES))
    units = num_rows(batch, 0) * heads
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row, head = unit // heads, unit % heads
            position = load_i64(positions + 8 * row)
            place = load_i64(load_i64(tables + 8 * row) + 8 * (position // PAGE_TOKENS)) + head * head_bytes
            slot = position % PAGE_TOKENS
            target, size = place + load_i64(keys + PART_OFFSET), load_i64(keys + PART_SIZE)
            _store_float_key(load_i64(keys + PART_KIND), _source(keys, row, head), target, slot, size)
            target, size = place + load_i64(values + PART_OFFSET), load_i64(values + PART_SIZE)
            kind, columns = load_i64(values + PART_KIND), load_i64(values + PART_COLUMNS)
            _store_float_value(kind, _source(values, row, head), target, slot, size, columns)


@op
def store_codes(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Write rows of keys and values, at least one of them quantized."""
    keys, values, memory = parameters + STORE_KEYS, parameters + STORE_VALUES, scratch(batch, thread)
    heads, head_bytes = load_i64(parameters + STORE_HEADS), load_i64(parameters + STORE_HEAD_BYTES)
    control, positions = load_i64(batch + CONTROL), load_i64(batch + POSITIONS)
    tables = load_i64(batch + load_i64(parameters + STORE_TABLES))
    units = num_rows(batch, 0) * heads
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row, head = unit // heads, unit % heads
            position = load_i64(positions + 8 * row)
            place = load_i64(load_i64(tables + 8 * row) + 8 * (position // PAGE_TOKENS)) + head * head_bytes
            slot = position % PAGE_TOKENS
            target, kind = place + load_i64(keys + PART_OFFSET), load_i64(keys + PART_KIND)
            if kind <= KIND_F16:
                _store_float_key(kind, _source(keys, row, head), target, slot, load_i64(keys + PART_SIZE))
            else:
                _store_key_codes(keys, memory, _source(keys, row, head), target, slot)
            target, kind = place + load_i64(values + PART_OFFSET), load_i64(values + PART_KIND)
            if kind <= KIND_F16:
                size, columns = load_i64(values + PART_SIZE), load_i64(values + PART_COLUMNS)
                _store_float_value(kind, _source(values, row, head), target, slot, size, columns)
            else:
                _store_value_codes(values, memory, _source(values, row, head), target, slot)


@op
def quantize_queries(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Rotate every head of every row of queries as its keys were, and quantize it to int8.

    Per head: codes, then per scale block a float32 scale (the scores' own in it), then per scale block an int32 start:
    what the bias of the keys' codes will have added, taken away.
    """
    p, memory, control = parameters, scratch(batch, thread), load_i64(batch + CONTROL)
    heads, size, columns = load_i64(p + NUM_HEADS), load_i64(p + QUERY_SIZE), load_i64(p + QUERY_COLUMNS)
    rotation, bias, scale = load_i64(p + QUERY_ROTATION), load_i64(p + CODE_BIAS), float_bits(load_i64(p + QUERY_SCALE))
    row, records = memory + attention_scratch.ROW, memory + _RECORDS
    blocks = (size + SCALE_BLOCK - 1) // SCALE_BLOCK
    units = num_rows(batch, 0) * heads
    claim = max(1, units // (4 * num_threads))
    while True:
        first = take_units(control, claim)
        if first >= units:
            return
        for unit in range(first, min(first + claim, units)):
            index, head = unit // heads, unit % heads
            copy_padded(row, load_i64(p + QUERIES) + index * load_i64(p + QUERIES_STRIDE) + 4 * head * size, size)
            rotate(row, size, rotation)
            target = load_i64(p + TARGET) + index * load_i64(p + TARGET_STRIDE) + head * load_i64(p + TARGET_HEAD_BYTES)
            for block in range(blocks):
                codes = target + SCALE_BLOCK * block
                quantize_values(TO_QUERY, row + 4 * SCALE_BLOCK * block, codes, records + 8 * block)
            # The last codes may reach beyond the columns, so what follows the columns is written after them.
            for block in range(blocks):
                place = target + columns + 4 * block
                store_f32(place, load_f32(records + 8 * block) * scale)
                store_u32(place + 4 * blocks, np.uint32(-bias * np.int32(load_u32_anywhere(records + 8 * block + 4))))
