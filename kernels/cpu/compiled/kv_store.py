"""Writing keys and values into the cache's pages, and quantizing the queries of quantized keys.

No byte of a page belongs to two positions, so rows may be stored in any order by any thread, and again after they were
rejected.

A head's row is rotated before it is quantized, by the orthonormal Walsh-Hadamard transform (as in QuaRot, arXiv
2404.00456, section 4): it spreads what is large in few dimensions over all of them, leaves dot products as they are,
and is its own inverse.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled import attention_scratch
from localinfer.kernels.cpu.compiled.emit import (
    F32,
    FLOAT,
    I8,
    I32,
    LANES,
    LITERAL,
    VOID,
    Emitter,
    Value,
    emitted,
    vector,
)
from localinfer.kernels.cpu.compiled.memory import (
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
from localinfer.kernels.cpu.compiled.pool import row_op, scratch
from localinfer.kernels.cpu.kernel_abi import KIND_F16, KIND_Q8_0
from localinfer.kernels.cpu.parameters import BATCH, QUANTIZE_QUERIES, STORE_KV
from localinfer.kernels.jit.numba import Source, compose, inline
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK

TO_QUERY, TO_Q8_0, TO_Q4_0 = 0, 1, 2
"""Literal codes of a block's storage."""


@emitted(VOID, types.int64, types.int64, FLOAT)
def _rotate_lanes(emit: Emitter, place: Value, count: Value, scale: Value) -> None:
    """Transform sixteen float32 in groups of min(size, 16), and multiply by factor."""
    b = emit.builder
    value = emit.mul(emit.load_floats(place), emit.splat(scale))
    for distance in (1, 2, 4, 8):
        partners = ir.Constant(vector(I32), [lane ^ distance for lane in range(LANES)])
        other = b.shuffle_vector(value, value, partners)
        is_second = ir.Constant(vector(ir.IntType(1)), [lane & distance != 0 for lane in range(LANES)])
        changed = b.select(is_second, emit.sub(other, value), emit.add(value, other))
        is_used = b.icmp_signed(">", count, emit.i64(distance))
        value = b.select(emit.splat(is_used), changed, value)
    emit.store(value, place, align=4)


@emitted(VOID, types.int64, types.int64)
def _rotate_vectors(emit: Emitter, first: Value, second: Value) -> None:
    """(first, second) = (first + second, first - second), sixteen float32 each."""
    a, c = (emit.load_floats(place) for place in (first, second))
    emit.store(emit.add(a, c), first, align=4)
    emit.store(emit.sub(a, c), second, align=4)


@inline
def copy_padded(target: int, source: int, count: int) -> None:
    """Copy float32, and zeros after them up to a whole number of scale blocks."""
    for column in range(count):
        store_f32(target + 4 * column, load_f32(source + 4 * column))
    for column in range(count, (count + SCALE_BLOCK - 1) // SCALE_BLOCK * SCALE_BLOCK):
        store_f32(target + 4 * column, np.float32(0))


@inline
def rotate(address: int, count: int, size: int) -> None:
    """Transform float32[count] in place, in groups of `size`, a power of two that divides count; 1 does nothing.

    What follows up to a whole vector must be finite.
    """
    if size < 2:
        return
    factor = np.float32(1.0 / math.sqrt(size))
    for column in range(0, count, LANES):
        _rotate_lanes(address + 4 * column, size, factor)
    distance = LANES
    while distance < size:
        for group in range(0, count, 2 * distance):
            for column in range(group, group + distance, LANES):
                _rotate_vectors(address + 4 * column, address + 4 * (column + distance))
        distance *= 2


@emitted(VOID, LITERAL, *[types.int64] * 3)
def quantize_values(emit: Emitter, becomes: int, source_place: Value, codes_place: Value, record_place: Value) -> None:
    """Quantize SCALE_BLOCK float32 into as many codes, one per byte, and their scale at `record`.

    TO_QUERY: codes -127 to 127; float32 scale, then the int32 sum of codes. TO_Q8_0: the same codes, float16 scale.
    TO_Q4_0: codes 0 to 15, which mean -8 to 7 times the float16 scale; the number of largest magnitude becomes -8.
    """
    b = emit.builder
    vectors = [emit.load_floats(source_place, 64 * i) for i in range(SCALE_BLOCK // LANES)]
    scale = _scale(emit, vectors, becomes)
    if becomes != TO_QUERY:
        bits = emit.float_to_half(scale)
        emit.store(bits, record_place, align=2)
        scale = emit.half_to_float(bits)
    else:
        emit.store(scale, record_place, align=4)
    magnitude = emit.call("llvm.fabs.f32", F32, [scale])
    is_zero = b.fcmp_ordered("<", magnitude, ir.Constant(F32, 1e-36))
    inverse = b.select(is_zero, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, 1.0), scale))
    lowest, highest = (-8.0, 7.0) if becomes == TO_Q4_0 else (-127.0, 127.0)
    low, high = emit.splat_constant(F32, lowest), emit.splat_constant(F32, highest)
    total = emit.zeros(I32)
    for i, values in enumerate(vectors):
        scaled = emit.mul(values, emit.splat(inverse))
        # Scales near float16's smallest numbers are imprecise.
        scaled = b.select(b.fcmp_ordered("<", scaled, low), low, scaled)
        scaled = b.select(b.fcmp_ordered(">", scaled, high), high, scaled)
        whole = b.fptosi(emit.call("llvm.rint.v16f32", vector(F32), [scaled]), vector(I32))
        total = b.add(total, whole)
        if becomes == TO_Q4_0:
            whole = b.add(whole, emit.splat_constant(I32, 8))
        emit.store(b.trunc(whole, vector(I8)), codes_place, 16 * i, align=16)
    if becomes == TO_QUERY:
        emit.store(emit.call("llvm.vector.reduce.add.v16i32", I32, [total]), record_place, 4, align=4)


def _scale(emit: Emitter, vectors: list[Value], becomes: int) -> Value:
    b = emit.builder
    largest, smallest = vectors[0], b.fneg(vectors[0])
    for values in vectors[1:]:
        largest, smallest = emit.maximum(values, largest), emit.maximum(b.fneg(values), smallest)
    highest, lowest = emit.reduce_max(largest), emit.reduce_max(smallest)
    is_positive = b.fcmp_ordered(">", highest, lowest)
    if becomes == TO_Q4_0:
        return b.fdiv(b.select(is_positive, highest, b.fneg(lowest)), ir.Constant(F32, -8.0))
    return b.fdiv(b.select(is_positive, highest, lowest), ir.Constant(F32, 127.0))


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
