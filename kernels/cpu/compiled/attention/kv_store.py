"""Writing keys and values into the cache's pages, and quantizing the queries of quantized keys.

No byte of a page belongs to two positions, so rows may be stored in any order by any thread, and again after they were
rejected.
"""

from typing import Any

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
from localinfer.kernels.cpu.compiled.simd.memory import (
    load_f32,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_f32,
    store_half,
    store_halves,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.compiled.simd.pool import row_op, scratch
from localinfer.kernels.cpu.kernel_abi import KIND_F16, KIND_Q8_0
from localinfer.kernels.cpu.parameters import BATCH, QUANTIZE_QUERIES, STORE_KV
from localinfer.kernels.jit.numba import Source, compose, inline
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


@compose
def _store_floats(kind: int, source: int, target: int, first: int, stride: int, size: int) -> None:
    """Write a head's row as elements `first`, `first` + `stride` (literal), ... of what begins at target."""
    if kind == KIND_F16:
        whole = size // 16 * 16
        for d in range(0, whole, 16):
            store_halves(target + 2 * (first + stride * d), source + 4 * d, stride)
        for d in range(whole, size):
            store_half(target + 2 * (first + stride * d), load_f32(source + 4 * d))
    else:
        for d in range(size):
            store_f32(target + 4 * (first + stride * d), load_f32(source + 4 * d))


@inline
def _store_key_codes(
    is_q8_0: bool, memory: int, target: int, scales: int, slot: int, columns: int, blocks: int
) -> None:
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
    _store_scales(memory, scales + group * 32 * blocks + 2 * lane, 32, blocks)


@inline
def _store_value_codes(
    is_q8_0: bool, memory: int, target: int, scales: int, slot: int, columns: int, blocks: int
) -> None:
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
    _store_scales(memory, scales + 2 * slot, 64, blocks)


@inline
def _store_scales(memory: int, place: int, stride: int, blocks: int) -> None:
    for block in range(blocks):
        store_u16(place + stride * block, load_u16_anywhere(memory + _RECORDS + 8 * block))


def _store(any_codes: bool) -> Source:
    """Write rows of keys and values; any_codes: keys or values are quantized."""

    @row_op(STORE_KV, lambda p: p.heads, in_runs=True)
    def store(p: Any, batch: int, thread: int, row: int, head: int) -> None:
        position = load_i64(BATCH.positions(batch) + 8 * row)
        tables = load_i64(load_i64(batch + p.tables) + 8 * row)
        place = load_i64(tables + 8 * (position // PAGE_TOKENS)) + head * p.head_bytes
        memory, slot = scratch(batch, thread), position % PAGE_TOKENS
        source, target = p.keys_source + row * p.keys_stride + 4 * head * p.keys_size, place + p.keys_first
        if not any_codes or p.keys_kind <= KIND_F16:
            first = slot // 16 * 16 * p.keys_size + slot % 16
            _store_floats(p.keys_kind, source, target, first, 16, p.keys_size)
        else:
            is_q8_0, scales = p.keys_kind == KIND_Q8_0, target + p.keys_scales
            blocks = _quantize(memory, source, p.keys_size, p.keys_rotation, is_q8_0)
            _store_key_codes(is_q8_0, memory, target, scales, slot, p.keys_columns, blocks)
        source, target = p.values_source + row * p.values_stride + 4 * head * p.values_size, place + p.values_first
        if not any_codes or p.values_kind <= KIND_F16:
            _store_floats(p.values_kind, source, target, slot * p.values_columns, 1, p.values_size)
        else:
            is_q8_0, scales = p.values_kind == KIND_Q8_0, target + p.values_scales
            blocks = _quantize(memory, source, p.values_size, p.values_rotation, is_q8_0)
            _store_value_codes(is_q8_0, memory, target, scales, slot, p.values_columns, blocks)

    return store


KERNELS = {"store_floats": _store(False), "store_codes": _store(True)}


@row_op(QUANTIZE_QUERIES, lambda p: p.num_heads, in_runs=True)
def quantize_queries(p: Any, batch: int, thread: int, index: int, head: int) -> None:
    """Rotate every head of every row of queries as its keys were, and quantize it to int8.

    Per head: codes, then per scale block a float32 scale (times that of the scores), then per scale block an int32
    start that compensates the bias of the keys' codes.
    """
    memory = scratch(batch, thread)
    row, records = memory + attention_scratch.ROW, memory + _RECORDS
    blocks = (p.size + SCALE_BLOCK - 1) // SCALE_BLOCK
    copy_padded(row, p.queries + index * p.queries_stride + 4 * head * p.size, p.size)
    rotate(row, p.size, p.rotation)
    target = p.target + index * p.target_stride + head * p.target_head_bytes
    for block in range(blocks):
        codes = target + SCALE_BLOCK * block
        quantize_values(TO_QUERY, row + 4 * SCALE_BLOCK * block, codes, records + 8 * block)
    # The last codes may reach beyond the columns, so what follows the columns is written after them.
    for block in range(blocks):
        place = target + p.columns + 4 * block
        store_f32(place, load_f32(records + 8 * block) * p.scale)
        store_u32(place + 4 * blocks, np.uint32(-p.code_bias * np.int32(load_u32_anywhere(records + 8 * block + 4))))
