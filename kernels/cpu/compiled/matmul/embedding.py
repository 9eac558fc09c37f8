"""Look up rows of a table in the file's layout: without a converted copy."""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.packing import scale_code
from localinfer.kernels.cpu.compiled.simd.batch import row_op
from localinfer.kernels.cpu.compiled.simd.memory import (
    float_bits,
    load_f32,
    load_half,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_f32,
)
from localinfer.kernels.cpu.parameters import BATCH, EMBED
from localinfer.kernels.jit.numba import inline


@inline
def _byte(address: int) -> np.int64:
    return np.int64(load_u8(address))


@inline
def _signed(address: int) -> np.int64:
    return np.int64(np.int8(load_u8(address)))


@inline
def _nibble(codes: int, column: int) -> int:
    """Code of a column of 32: low nibbles first."""
    return (_byte(codes + column % 16) >> (column // 16 * 4)) & 15


@inline
def _fifth(bits: int, column: int) -> np.int64:
    return np.int64((load_u32_anywhere(bits) >> np.uint32(column)) & np.uint32(1)) << 4


@inline
def _block_value(layout: int, block: int, column: int) -> float:
    """Value of one of the 32 columns of a block of Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1."""
    d = load_half(block)
    if layout == 3:
        return d * np.float32(_signed(block + 2 + column))
    if layout == 4:
        return d * np.float32(_nibble(block + 2, column) - 8)
    if layout == 5:
        return d * np.float32(_nibble(block + 4, column)) + load_half(block + 2)
    if layout == 6:
        return d * np.float32((_nibble(block + 6, column) | _fifth(block + 2, column)) - 16)
    return d * np.float32(_nibble(block + 8, column) | _fifth(block + 4, column)) + load_half(block + 2)


@inline
def _super_block_value(layout: int, block: int, column: int) -> float:
    """Value of one of the 256 columns of a super-block of Q4_K, Q5_K or Q6_K."""
    if layout == 10:
        half, k, low = column // 128, column % 128 // 32, column % 32
        code = (_byte(block + 64 * half + 32 * (k % 2) + low) >> (k // 2 * 4)) & 15
        code |= ((_byte(block + 128 + 32 * half + low) >> (2 * k)) & 3) << 4
        scale = load_half(block + 208) * np.float32(_signed(block + 192 + column // 16))
        return scale * np.float32(code - 32)
    group = column // 32
    codes = block + (16 if layout == 8 else 48)
    code = (_byte(codes + 32 * (column // 64) + column % 32) >> (group % 2 * 4)) & 15
    if layout == 9:
        code |= ((_byte(block + 16 + column % 32) >> group) & 1) << 4
    scale = load_half(block) * np.float32(scale_code(block + 4, group))
    minimum = load_half(block + 2) * np.float32(scale_code(block + 4, 8 + group))
    return scale * np.float32(code) - minimum


@inline
def _value(layout: int, row: int, column: int, unit: int, unit_bytes: int) -> float:
    if layout == 0:
        return load_f32(row + 4 * column)
    if layout == 1:
        return load_half(row + 2 * column)
    if layout == 2:
        return float_bits(np.int64(load_u16_anywhere(row + 2 * column)) << 16)
    block = row + column // unit * unit_bytes
    if unit == 32:
        return _block_value(layout, block, column % 32)
    return _super_block_value(layout, block, column % 256)


@row_op(EMBED)
def embed(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = scale * table[index] (+ out)."""
    indices = BATCH.positions(batch) if p.by_position == 1 else BATCH.token_ids(batch)
    source = p.table + load_i64(indices + 8 * row) * p.row_bytes
    target = p.out + row * p.out_stride
    for column in range(p.columns):
        value = p.scale * _value(p.layout, source, column, p.unit, p.unit_bytes)
        if p.by_position == 1:
            value += load_f32(target + 4 * column)
        store_f32(target + 4 * column, value)
