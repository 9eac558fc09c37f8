"""Activations as int8: per row, blocks of 32 with a float32 scale, rounded to nearest even.

Row record: int8[K], then per block of 32 a record of RECORD_BYTES (see `tiles.py`). It includes sums, which weight
layouts with an offset or a minimum need.
"""

from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F32, I8, I32, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import VOID, emitted
from localinfer.kernels.cpu.compiled.simd.pool import row_op
from localinfer.kernels.cpu.kernel_abi import RECORD_BYTES
from localinfer.kernels.cpu.parameters import QUANTIZE

BLOCKS_PER_UNIT = 32


@emitted(VOID, types.int64, types.int64, types.int64)
def quantize_block(emit: Emitter, source_address: Value, codes_address: Value, record_address: Value) -> None:
    """Quantize 32 float32 at `source` into 32 codes and one record."""
    b = emit.builder
    halves = [emit.load_floats(source_address, 64 * half) for half in range(2)]
    magnitudes = [emit.call("llvm.fabs.v16f32", vector(F32), [half]) for half in halves]
    largest = emit.reduce_max(emit.maximum(*magnitudes))
    limit = ir.Constant(F32, 127.0)
    scale = b.fdiv(largest, limit)
    # Below this the inverse would be infinite: such a block is quantized to zeros.
    is_zero = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-36))
    inverse = b.select(is_zero, ir.Constant(F32, 0.0), b.fdiv(limit, largest))
    sums = []
    for half, values in enumerate(halves):
        scaled = emit.mul(values, emit.splat(inverse))
        whole = b.fptosi(emit.call("llvm.rint.v16f32", vector(F32), [scaled]), vector(I32))
        emit.store(b.trunc(whole, vector(I8)), codes_address, 16 * half, align=16)
        sums.append(emit.call("llvm.vector.reduce.add.v16i32", I32, [whole]))
    total = b.add(*sums)
    emit.store(scale, record_address, 0, align=4)
    emit.store(b.fmul(scale, b.sitofp(total, F32)), record_address, 4, align=4)
    for field, value in ((8, total), (12, sums[0]), (16, sums[1])):
        emit.store(b.mul(value, emit.i32(-8)), record_address, field, align=4)


@row_op(QUANTIZE, lambda p: p.slots * ((p.columns // 32 + BLOCKS_PER_UNIT - 1) // BLOCKS_PER_UNIT))
def quantize_rows(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Quantize rows. A row of the batch may hold several slots (experts, heads), each quantized into its own row."""
    blocks = p.columns // 32
    units_per_slot = (blocks + BLOCKS_PER_UNIT - 1) // BLOCKS_PER_UNIT
    slot, first = part // units_per_slot, part % units_per_slot * BLOCKS_PER_UNIT
    source = p.source + row * p.source_stride + slot * p.slot_stride
    target = p.target + (row * p.slots + slot) * p.target_stride
    for block in range(first, min(first + BLOCKS_PER_UNIT, blocks)):
        quantize_block(source + 128 * block, target + 32 * block, target + p.columns + block * RECORD_BYTES)
