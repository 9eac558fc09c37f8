"""Writing keys and values into the cache's pages, and quantizing the queries of quantized keys.

Everything of one position is written by itself: no byte of a page belongs to two positions, so rows may be stored in
any order by any thread, and again after they were rejected.
"""

import numpy as np

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
from localinfer.kernels.cpu.kernel_abi import KIND_F16, KIND_Q8_0
from localinfer.kernels.cpu.parameters import BATCH, QUANTIZE_QUERIES, STORE_KV, STORED_PART
from localinfer.kernels.jit.numba import compose, inline, op, stamp
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK

_KEYS, _VALUES = STORE_KV.offset("keys_source"), STORE_KV.offset("values_source")
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
    columns, is_q8_0 = STORED_PART.columns(part), STORED_PART.kind(part) == KIND_Q8_0
    blocks = _quantize(memory, source, STORED_PART.size(part), STORED_PART.rotation(part), is_q8_0)
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
    place = target + STORED_PART.scales(part) + group * 32 * blocks + 2 * lane
    for block in range(blocks):
        store_u16(place + 32 * block, load_u16_anywhere(memory + _RECORDS + 8 * block))


@inline
def _store_value_codes(part: int, memory: int, source: int, target: int, slot: int) -> None:
    columns, is_q8_0 = STORED_PART.columns(part), STORED_PART.kind(part) == KIND_Q8_0
    blocks = _quantize(memory, source, STORED_PART.size(part), STORED_PART.rotation(part), is_q8_0)
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
    place = target + STORED_PART.scales(part) + 2 * slot
    for block in range(blocks):
        store_u16(place + 64 * block, load_u16_anywhere(memory + _RECORDS + 8 * block))


@inline
def _source(part: int, row: int, head: int) -> int:
    return STORED_PART.source(part) + row * STORED_PART.stride(part) + 4 * head * STORED_PART.size(part)


@compose
def _store(any_codes: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Write rows of keys and values; any_codes: 1 where keys or values are quantized."""
    keys, values, memory = parameters + _KEYS, parameters + _VALUES, scratch(batch, thread)
    heads, head_bytes = STORE_KV.heads(parameters), STORE_KV.head_bytes(parameters)
    control, positions = BATCH.control(batch), BATCH.positions(batch)
    tables = load_i64(batch + STORE_KV.tables(parameters))
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
            target, kind = place + STORED_PART.first(keys), STORED_PART.kind(keys)
            if any_codes == 0 or kind <= KIND_F16:
                _store_float_key(kind, _source(keys, row, head), target, slot, STORED_PART.size(keys))
            else:
                _store_key_codes(keys, memory, _source(keys, row, head), target, slot)
            target, kind = place + STORED_PART.first(values), STORED_PART.kind(values)
            if any_codes == 0 or kind <= KIND_F16:
                size, columns = STORED_PART.size(values), STORED_PART.columns(values)
                _store_float_value(kind, _source(values, row, head), target, slot, size, columns)
            else:
                _store_value_codes(values, memory, _source(values, row, head), target, slot)


KERNELS = {"store_floats": stamp(_store, 0), "store_codes": stamp(_store, 1)}


@op
def quantize_queries(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Rotate every head of every row of queries as its keys were, and quantize it to int8.

    Per head: codes, then per scale block a float32 scale (the scores' own in it), then per scale block an int32 start:
    what the bias of the keys' codes will have added, taken away.
    """
    p, memory, control = parameters, scratch(batch, thread), BATCH.control(batch)
    heads, size, columns = QUANTIZE_QUERIES.num_heads(p), QUANTIZE_QUERIES.size(p), QUANTIZE_QUERIES.columns(p)
    rotation, bias, scale = QUANTIZE_QUERIES.rotation(p), QUANTIZE_QUERIES.code_bias(p), QUANTIZE_QUERIES.scale(p)
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
            copy_padded(
                row, QUANTIZE_QUERIES.queries(p) + index * QUANTIZE_QUERIES.queries_stride(p) + 4 * head * size, size
            )
            rotate(row, size, rotation)
            target = (
                QUANTIZE_QUERIES.target(p)
                + index * QUANTIZE_QUERIES.target_stride(p)
                + head * QUANTIZE_QUERIES.target_head_bytes(p)
            )
            for block in range(blocks):
                codes = target + SCALE_BLOCK * block
                quantize_values(TO_QUERY, row + 4 * SCALE_BLOCK * block, codes, records + 8 * block)
            # The last codes may reach beyond the columns, so what follows the columns is written after them.
            for block in range(blocks):
                place = target + columns + 4 * block
                store_f32(place, load_f32(records + 8 * block) * scale)
                store_u32(place + 4 * blocks, np.uint32(-bias * np.int32(load_u32_anywhere(records + 8 * block + 4))))
