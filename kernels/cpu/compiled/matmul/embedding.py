"""Look up rows of a table in the file's layout: without a converted copy."""

from typing import Any

import numpy as np
from numba import types

from localinfer.kernels.cpu.compiled.matmul.codebooks import E2M1_CODES, IQ4_LEVELS
from localinfer.kernels.cpu.compiled.matmul.grids import BIAS, grid_address
from localinfer.kernels.cpu.compiled.matmul.packing import scale_code
from localinfer.kernels.cpu.compiled.simd.batch import row_op
from localinfer.kernels.cpu.compiled.simd.emit import I8, I64, Emitter, Value
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, LITERAL, emitted
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
from localinfer.kernels.cpu.parameters import EMBED
from localinfer.kernels.jit.numba import compose, inline
from localinfer.kernels.layouts import Layout

_IQ4 = np.array(IQ4_LEVELS, np.int64)
_E2M1 = np.array(E2M1_CODES, np.int64)


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
    """Value of one of the 32 columns of a block of Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4 or IQ4_NL."""
    if layout == 15:
        exponent = _byte(block)
        scale = float_bits(0x200000 << exponent if exponent < 2 else (exponent - 1) << 23)
        return scale * np.float32(_E2M1[_nibble(block + 1, column)] - 12)
    d = load_half(block)
    if layout == 17:
        return d * np.float32(_IQ4[_nibble(block + 2, column)])
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
def _nvfp4_value(block: int, column: int) -> float:
    """Value of one of 64 columns; see `codebooks.py` for the scale."""
    code = _byte(block + column // 16)
    scale = float_bits((0 if code == 127 else code & 127) << 20) * np.float32(2.0**119)
    nibble = (_byte(block + 4 + 8 * (column // 16) + column % 8) >> (column % 16 // 8 * 4)) & 15
    return scale * np.float32(_E2M1[nibble] - 12)


@inline
def _bit_pair(codes: int, column: int) -> int:
    """Two bits of a column of 256: of every 128, the first 32 have the lowest."""
    return (_byte(codes + 32 * (column // 128) + column % 32) >> (column % 128 // 32 * 2)) & 3


@inline
def _few_bits_value(layout: int, block: int, column: int) -> float:
    """Value of one of the 256 columns of a super-block of IQ4_XS, Q2_K, Q3_K or TQ2_0."""
    group = column // 16
    if layout == 18:
        number = column // 32
        code = (_byte(block + 4 + number // 2) >> (number % 2 * 4)) & 15
        code |= ((np.int64(load_u16_anywhere(block + 2)) >> (2 * number)) & 3) << 4
        scale = load_half(block) * np.float32(code - 32)
        return scale * np.float32(_IQ4[_nibble(block + 8 + 16 * number, column % 32)])
    if layout == 19:
        packed = _byte(block + group)
        scale, minimum = (
            load_half(block + 80) * np.float32(packed & 15),
            load_half(block + 82) * np.float32(packed >> 4),
        )
        return scale * np.float32(_bit_pair(block + 16, column)) - minimum
    if layout == 20:
        code = (_byte(block + 96 + group % 8) >> (group // 8 * 4)) & 15
        code |= ((_byte(block + 104 + group % 4) >> (group // 4 * 2)) & 3) << 4
        level = _bit_pair(block + 32, column) + (((_byte(block + column % 32) >> (column // 32)) & 1) << 2) - 4
        return load_half(block + 108) * np.float32(code - 32) * np.float32(level)
    return load_half(block + 64) * np.float32(_bit_pair(block, column) - 1)


@emitted(types.int64, LITERAL, ADDRESS)
def _grid_level(emit: Emitter, layout: int, place: Value) -> Value:
    """The level at a place of a grid: its vector's number times the vector's length, plus the column in it."""
    byte = emit.load(emit.builder.add(grid_address(emit, Layout(layout)), place), I8)
    return emit.builder.sub(emit.builder.zext(byte, I64), emit.i64(BIAS))


@inline
def _with_sign(level: int, signs: int, column: int) -> int:
    return -level if (signs >> (column % 8)) & 1 else level


@inline
def _even_signs(code: int) -> int:
    """Eight signs of a code of seven: the number of minus signs is even."""
    parity = code ^ (code >> 4)
    parity ^= parity >> 2
    return code | ((parity ^ (parity >> 1)) & 1) << 7


@inline
def _grid_value(layout: int, block: int, column: int) -> float:
    """Value of one of the 256 columns of a super-block of IQ2 or IQ3."""
    d, number, eight, four = load_half(block), column // 32, column // 8, column // 4
    if layout == 22 or layout == 25:
        word = np.int64(load_u32_anywhere(block + (6 + 8 * number if layout == 22 else 66 + 4 * number)))
        signs, code = _even_signs((word >> (7 * (eight % 4))) & 127), word >> 28
        if layout == 22:
            level = _grid_level(22, 8 * _byte(block + 2 + 8 * number + eight % 4) + column % 8)
            scale = d * (np.float32(0.5) + np.float32(code)) * np.float32(0.25)
        else:
            level = _grid_level(25, 4 * _byte(block + 2 + four) + column % 4)
            scale = d * (np.float32(0.5) + np.float32(code)) * np.float32(0.5)
        return scale * np.float32(_with_sign(level, signs, column))
    if layout == 26:
        code = (_byte(block + 106 + number // 2) >> (number % 2 * 4)) & 15
        place = _byte(block + 2 + four) | ((_byte(block + 66 + number) >> (four % 8)) & 1) << 8
        signs = _byte(block + 74 + eight)
        level = _grid_level(26, 4 * place + column % 4)
        return d * np.float32(1 + 2 * code) * np.float32(_with_sign(level, signs, column))
    code = (_byte(block + (66 if layout == 23 else 74) + number) >> (column % 32 // 16 * 4)) & 15
    scale = d * (np.float32(0.5) + np.float32(code)) * np.float32(0.25)
    if layout == 23:
        word = np.int64(load_u16_anywhere(block + 2 + 2 * eight))
        level, signs = _grid_level(23, 8 * (word & 511) + column % 8), _even_signs(word >> 9)
    else:
        place = _byte(block + 2 + eight) | ((_byte(block + 66 + number) >> (eight % 4 * 2)) & 3) << 8
        level, signs = _grid_level(24, 8 * place + column % 8), _byte(block + 34 + eight)
    return scale * np.float32(_with_sign(level, signs, column))


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
    if layout == 27:
        bit = (_byte(block + 2 + column % 128 // 8) >> (column % 8)) & 1
        return load_half(block) * np.float32(2 * bit - 1)
    if layout == 28:
        return load_half(block) * np.float32(((_byte(block + 2 + column % 64 // 4) >> (column % 4 * 2)) & 3) - 1)
    if unit == 64:
        return _nvfp4_value(block, column % 64)
    if layout >= 18:
        return _few_bits_value(layout, block, column % 256)
    return _super_block_value(layout, block, column % 256)


@compose
def _look_up(p: Any, layout: int, unit: int, unit_bytes: int, source: int, target: int) -> None:
    for column in range(p.columns):
        value = p.scale * _value(layout, source, column, unit, unit_bytes)
        if p.adds == 1:
            value += load_f32(target + 4 * column)
        store_f32(target + 4 * column, value)


@row_op(EMBED)
def embed(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = scale * table[index] (+ out)."""
    source = p.table + load_i64(load_i64(batch + p.indices) + 8 * row) * p.row_bytes
    target = p.out + row * p.out_stride
    # A layout that is known while compiling leaves no divisions and branches in the loop: the most frequent ones.
    if p.layout == 0:
        _look_up(p, 0, 1, 4, source, target)
    elif p.layout == 1:
        _look_up(p, 1, 1, 2, source, target)
    elif p.layout == 3:
        _look_up(p, 3, 32, 34, source, target)
    else:
        _look_up(p, p.layout, p.unit, p.unit_bytes, source, target)


@row_op(EMBED)
def embed_grid(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """As `embed`, of layouts whose codes are places in a grid: a kernel has no tables that its model does not need."""
    source = p.table + load_i64(load_i64(batch + p.indices) + 8 * row) * p.row_bytes
    target = p.out + row * p.out_stride
    for column in range(p.columns):
        value = p.scale * _grid_value(p.layout, source + column // 256 * p.unit_bytes, column % 256)
        if p.adds == 1:
            value += load_f32(target + 4 * column)
        store_f32(target + 4 * column, value)
