"""Rotating and quantizing one head's row, in scratch memory: for a quantized cache and its queries.

The rotation is the orthonormal Walsh-Hadamard transform (as in QuaRot, arXiv 2404.00456, section 4): it spreads what is
large in few dimensions over all of them, leaves dot products as they are, and is its own inverse.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F32, I8, I32, LANES, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import FLOAT, LITERAL, VOID, emitted
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, store_f32
from localinfer.kernels.jit.numba import inline
from localinfer.kernels.kv_layout import SCALE_BLOCK

TO_QUERY, TO_Q8_0, TO_Q4_0 = 0, 1, 2
"""Literal codes of what a block becomes."""


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
