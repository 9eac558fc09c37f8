"""Look up rows of a table in the file's layout: without a converted copy.

Each layout has a function of (address of a unit's bytes, column in the unit) that returns a value, and a kernel.
"""

from typing import Any

import numpy as np
from numba import types

from localinfer.kernels.cpu.compiled.codebooks import BIAS, E2M1_CODES, IQ4_LEVELS, grid_address
from localinfer.kernels.cpu.compiled.emit import ADDRESS, I8, I64, LITERAL, Emitter, Value, emitted
from localinfer.kernels.cpu.compiled.memory import (
    float_bits,
    load_f32,
    load_half,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_f32,
)
from localinfer.kernels.cpu.compiled.packing import scale_code
from localinfer.kernels.cpu.compiled.pool import row_op
from localinfer.kernels.cpu.parameters import EMBED
from localinfer.kernels.jit.numba import Source, inline
from localinfer.kernels.layouts import SIZES, Layout

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
def _f32(unit: int, column: int) -> float:
    return load_f32(unit)


@inline
def _f16(unit: int, column: int) -> float:
    return load_half(unit)


@inline
def _bf16(unit: int, column: int) -> float:
    return float_bits(np.int64(load_u16_anywhere(unit)) << 16)


@inline
def _mxfp4(block: int, column: int) -> float:
    exponent = _byte(block)
    scale = float_bits(0x200000 << exponent if exponent < 2 else (exponent - 1) << 23)
    return scale * np.float32(_E2M1[_nibble(block + 1, column)] - 12)


@inline
def _iq4_nl(block: int, column: int) -> float:
    return load_half(block) * np.float32(_IQ4[_nibble(block + 2, column)])


@inline
def _q8_0(block: int, column: int) -> float:
    return load_half(block) * np.float32(_signed(block + 2 + column))


@inline
def _q4_0(block: int, column: int) -> float:
    return load_half(block) * np.float32(_nibble(block + 2, column) - 8)


@inline
def _q4_1(block: int, column: int) -> float:
    return load_half(block) * np.float32(_nibble(block + 4, column)) + load_half(block + 2)


@inline
def _q5_0(block: int, column: int) -> float:
    return load_half(block) * np.float32((_nibble(block + 6, column) | _fifth(block + 2, column)) - 16)


@inline
def _q5_1(block: int, column: int) -> float:
    code = _nibble(block + 8, column) | _fifth(block + 4, column)
    return load_half(block) * np.float32(code) + load_half(block + 2)


@inline
def _nvfp4(block: int, column: int) -> float:
    """See `codebooks.py` for the scale."""
    code = _byte(block + column // 16)
    scale = float_bits((0 if code == 127 else code & 127) << 20) * np.float32(2.0**119)
    nibble = (_byte(block + 4 + 8 * (column // 16) + column % 8) >> (column % 16 // 8 * 4)) & 15
    return scale * np.float32(_E2M1[nibble] - 12)


@inline
def _q1_0(block: int, column: int) -> float:
    bit = (_byte(block + 2 + column // 8) >> (column % 8)) & 1
    return load_half(block) * np.float32(2 * bit - 1)


@inline
def _q2_0(block: int, column: int) -> float:
    return load_half(block) * np.float32(((_byte(block + 2 + column // 4) >> (column % 4 * 2)) & 3) - 1)


@inline
def _bit_pair(codes: int, column: int) -> int:
    """Two bits of a column of 256: of every 128, the first 32 have the lowest."""
    return (_byte(codes + 32 * (column // 128) + column % 32) >> (column % 128 // 32 * 2)) & 3


@inline
def _iq4_xs(block: int, column: int) -> float:
    number = column // 32
    code = (_byte(block + 4 + number // 2) >> (number % 2 * 4)) & 15
    code |= ((np.int64(load_u16_anywhere(block + 2)) >> (2 * number)) & 3) << 4
    scale = load_half(block) * np.float32(code - 32)
    return scale * np.float32(_IQ4[_nibble(block + 8 + 16 * number, column % 32)])


@inline
def _q2_k(block: int, column: int) -> float:
    packed = _byte(block + column // 16)
    scale = load_half(block + 80) * np.float32(packed & 15)
    minimum = load_half(block + 82) * np.float32(packed >> 4)
    return scale * np.float32(_bit_pair(block + 16, column)) - minimum


@inline
def _q3_k(block: int, column: int) -> float:
    group = column // 16
    code = (_byte(block + 96 + group % 8) >> (group // 8 * 4)) & 15
    code |= ((_byte(block + 104 + group % 4) >> (group // 4 * 2)) & 3) << 4
    level = _bit_pair(block + 32, column) + (((_byte(block + column % 32) >> (column // 32)) & 1) << 2) - 4
    return load_half(block + 108) * np.float32(code - 32) * np.float32(level)


@inline
def _tq2_0(block: int, column: int) -> float:
    return load_half(block + 64) * np.float32(_bit_pair(block, column) - 1)


@inline
def _minimum_value(block: int, column: int, code: int) -> float:
    """Value of a code of Q4_K or Q5_K."""
    group = column // 32
    scale = load_half(block) * np.float32(scale_code(block + 4, group))
    minimum = load_half(block + 2) * np.float32(scale_code(block + 4, 8 + group))
    return scale * np.float32(code) - minimum


@inline
def _super_nibble(codes: int, column: int) -> int:
    """Four bits of a column of 256: of every 64, the first 32 have the low ones."""
    return (_byte(codes + 32 * (column // 64) + column % 32) >> (column // 32 % 2 * 4)) & 15


@inline
def _q4_k(block: int, column: int) -> float:
    return _minimum_value(block, column, _super_nibble(block + 16, column))


@inline
def _q5_k(block: int, column: int) -> float:
    code = _super_nibble(block + 48, column) | ((_byte(block + 16 + column % 32) >> (column // 32)) & 1) << 4
    return _minimum_value(block, column, code)


@inline
def _q6_k(block: int, column: int) -> float:
    half, k, low = column // 128, column % 128 // 32, column % 32
    code = (_byte(block + 64 * half + 32 * (k % 2) + low) >> (k // 2 * 4)) & 15
    code |= ((_byte(block + 128 + 32 * half + low) >> (2 * k)) & 3) << 4
    scale = load_half(block + 208) * np.float32(_signed(block + 192 + column // 16))
    return scale * np.float32(code - 32)


@emitted(types.int64, LITERAL, ADDRESS)
def _grid_level(emit: Emitter, layout: int, place: Value) -> Value:
    """The level at an offset in a grid: its vector's number times the vector's length, plus the column in it."""
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
def _iq2_xxs(block: int, column: int) -> float:
    number, eight = column // 32, column // 8
    word = np.int64(load_u32_anywhere(block + 6 + 8 * number))
    level = _grid_level(22, 8 * _byte(block + 2 + 8 * number + eight % 4) + column % 8)
    scale = load_half(block) * (np.float32(0.5) + np.float32(word >> 28)) * np.float32(0.25)
    return scale * np.float32(_with_sign(level, _even_signs((word >> (7 * (eight % 4))) & 127), column))


@inline
def _iq3_xxs(block: int, column: int) -> float:
    number, eight = column // 32, column // 8
    word = np.int64(load_u32_anywhere(block + 66 + 4 * number))
    level = _grid_level(25, 4 * _byte(block + 2 + column // 4) + column % 4)
    scale = load_half(block) * (np.float32(0.5) + np.float32(word >> 28)) * np.float32(0.5)
    return scale * np.float32(_with_sign(level, _even_signs((word >> (7 * (eight % 4))) & 127), column))


@inline
def _iq3_s(block: int, column: int) -> float:
    number, four = column // 32, column // 4
    code = (_byte(block + 106 + number // 2) >> (number % 2 * 4)) & 15
    place = _byte(block + 2 + four) | ((_byte(block + 66 + number) >> (four % 8)) & 1) << 8
    signs = _byte(block + 74 + column // 8)
    level = _grid_level(26, 4 * place + column % 4)
    return load_half(block) * np.float32(1 + 2 * code) * np.float32(_with_sign(level, signs, column))


@inline
def _quarter_scale(block: int, scales: int, column: int) -> float:
    """Scale of a column of IQ2_XS or IQ2_S."""
    code = (_byte(block + scales + column // 32) >> (column % 32 // 16 * 4)) & 15
    return load_half(block) * (np.float32(0.5) + np.float32(code)) * np.float32(0.25)


@inline
def _iq2_xs(block: int, column: int) -> float:
    word = np.int64(load_u16_anywhere(block + 2 + 2 * (column // 8)))
    level = _grid_level(23, 8 * (word & 511) + column % 8)
    return _quarter_scale(block, 66, column) * np.float32(_with_sign(level, _even_signs(word >> 9), column))


@inline
def _iq2_s(block: int, column: int) -> float:
    number, eight = column // 32, column // 8
    place = _byte(block + 2 + eight) | ((_byte(block + 66 + number) >> (eight % 4 * 2)) & 3) << 8
    level = _grid_level(24, 8 * place + column % 8)
    return _quarter_scale(block, 74, column) * np.float32(_with_sign(level, _byte(block + 34 + eight), column))


_VALUES = {
    Layout.F32: _f32, Layout.F16: _f16, Layout.BF16: _bf16, Layout.Q8_0: _q8_0, Layout.Q4_0: _q4_0, Layout.Q4_1: _q4_1,
    Layout.Q5_0: _q5_0, Layout.Q5_1: _q5_1, Layout.Q4_K: _q4_k, Layout.Q5_K: _q5_k, Layout.Q6_K: _q6_k,
    Layout.MXFP4: _mxfp4, Layout.NVFP4: _nvfp4, Layout.IQ4_NL: _iq4_nl, Layout.IQ4_XS: _iq4_xs, Layout.Q2_K: _q2_k,
    Layout.Q3_K: _q3_k, Layout.TQ2_0: _tq2_0, Layout.IQ2_XXS: _iq2_xxs, Layout.IQ2_XS: _iq2_xs, Layout.IQ2_S: _iq2_s,
    Layout.IQ3_XXS: _iq3_xxs, Layout.IQ3_S: _iq3_s, Layout.Q1_0: _q1_0, Layout.Q2_0: _q2_0,
}  # fmt: skip


def _embed(layout: Layout) -> Source:
    """The kernel of a layout. Compile-time constants leave no divisions in the loop."""
    value_of, unit, unit_bytes = _VALUES[layout], SIZES[layout].unit, SIZES[layout].file_bytes

    @row_op(EMBED)
    def embed(p: Any, batch: int, thread: int, row: int, part: int) -> None:
        """out = scale * table[index] (+ out)."""
        source = p.table + load_i64(load_i64(batch + p.indices) + 8 * row) * p.row_bytes
        target = p.out + row * p.out_stride
        for column in range(p.columns):
            value = p.scale * value_of(source + column // unit * unit_bytes, column % unit)
            if p.adds == 1:
                value += load_f32(target + 4 * column)
            store_f32(target + 4 * column, value)

    return embed


KERNELS = {f"embed_{layout.name.lower()}": _embed(layout) for layout in _VALUES}
