"""Reading weights out of their planes: the scale and offset of a unit, and a single weight.

Functions here are made for a layout (its number in `kernels.cpu.layouts.Layout`), so that a kernel holds the code of
one. Planes are laid out as `kernels/cuda/weights.py` says.
"""

from numba import float32

from localinfer.kernels.cuda.compiled.ptx import (
    bits_float,
    half_to_float,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    load_v4,
    prefetch,
    thread,
    to_float,
)
from localinfer.kernels.cuda.jit import inline
from localinfer.kernels.layouts import Layout

_ONE_SCALE = (Layout.Q4_0, Layout.Q5_0, Layout.Q8_0)
_K_QUANTS = (Layout.Q4_K, Layout.Q5_K)
_ZERO_POINTS = (Layout.INT4_32, Layout.INT4_64, Layout.INT4_128, Layout.INT8_32)
_GROUP_BLOCKS = {Layout.INT4_32: 1, Layout.INT4_64: 2, Layout.INT4_128: 4, Layout.INT8_32: 1}
_LINE = 128
"""Bytes of a line of the GPU's cache."""
_MIDDLE = {Layout.Q4_0: 8, Layout.Q5_0: 16, Layout.Q8_0: 0}

FIFTH_BITS = (Layout.Q5_0, Layout.Q5_1, Layout.Q5_K)
BYTES = (Layout.Q8_0, Layout.INT8_32)


def scales_of(layout):
    """Make the function of (scales, block) that gives scale and offset of a block: weight = scale * code + offset.

    scales: address of the row's scales. Not for Q6_K, whose halves have scales of their own, nor for plain numbers.
    """
    if layout in _ONE_SCALE:
        middle = _MIDDLE[layout]

        @inline
        def scales_at(scales, block):
            scale = half_to_float(load_u16(scales + 2 * block))
            return scale, -float32(middle) * scale

    elif layout in _K_QUANTS:

        @inline
        def scales_at(scales, block):
            header = load_v4(scales + block // 8 * 16)
            number = block % 8
            shift = number % 4 * 8
            first = (header[1] >> shift) & 255
            second = (header[2] >> shift) & 255
            third = (header[3] >> shift) & 255
            code = first & 63
            least = second & 63
            if number >= 4:
                code = (third & 15) | ((first >> 6) << 4)
                least = (third >> 4) | ((second >> 6) << 4)
            scale = half_to_float(header[0] & 0xFFFF) * to_float(code)
            return scale, -half_to_float(header[0] >> 16) * to_float(least)

    elif layout in _ZERO_POINTS:
        group_blocks = _GROUP_BLOCKS[layout]

        @inline
        def scales_at(scales, block):
            word = load_u32(scales + block // group_blocks * 4)
            scale = half_to_float(word & 0xFFFF)
            zero = ((word >> 16) ^ 0x8000) - 0x8000
            return scale, -to_float(zero) * scale

    else:

        @inline
        def scales_at(scales, block):
            word = load_u32(scales + 4 * block)
            return half_to_float(word & 0xFFFF), half_to_float(word >> 16)

    return scales_at


@inline
def prefetch_rows(place, num_bytes, threads):
    """Have some rows of a plane on their way before anybody waits for them, with all threads of a block."""
    offset = thread() * _LINE
    while offset < num_bytes:
        prefetch(place + offset)
        offset = offset + threads * _LINE


@inline
def half_scales(scales, supers, block):
    """The scales of the two halves of a block in Q6_K."""
    word = load_u16(scales + 2 * block)
    scale = half_to_float(load_u16(supers + block // 8 * 2))
    first = ((word & 255) ^ 128) - 128
    second = ((word >> 8) ^ 128) - 128
    return scale * to_float(first), scale * to_float(second)


@inline
def spread_bits(bits):
    """Four bits as bit 4 of the four bytes of a word."""
    return (((bits & 15) * 0x00204081) & 0x01010101) << 4


def weight_of(layout):
    """Make the function of (codes, scales, extra, supers, column), addresses of a row's planes, that gives a weight."""
    if layout == Layout.F32:

        @inline
        def weight_at(codes, scales, extra, supers, column):
            return load_f32(codes + 4 * column)

    elif layout == Layout.F16:

        @inline
        def weight_at(codes, scales, extra, supers, column):
            return half_to_float(load_u16(codes + 2 * column))

    elif layout == Layout.BF16:

        @inline
        def weight_at(codes, scales, extra, supers, column):
            return bits_float(load_u16(codes + 2 * column) << 16)

    elif layout in BYTES:
        scales_at = scales_of(layout)
        sign = 128 if layout == Layout.Q8_0 else 0

        @inline
        def weight_at(codes, scales, extra, supers, column):
            scale, offset = scales_at(scales, column // 32)
            code = (load_u8(codes + column) ^ sign) - sign
            return scale * to_float(code) + offset

    elif layout == Layout.Q6_K:

        @inline
        def weight_at(codes, scales, extra, supers, column):
            block = column // 32
            half = column // 16 % 2
            within = column % 16
            first, second = half_scales(scales, supers, block)
            scale = first
            if half == 1:
                scale = second
            low = (load_u8(codes + 16 * block + within) >> (4 * half)) & 15
            high = (load_u8(extra + 8 * block + 4 * half + within % 4) >> (within // 4 * 2)) & 3
            return scale * to_float((low | (high << 4)) - 32)

    else:
        scales_at = scales_of(layout)
        has_fifth = layout in FIFTH_BITS

        @inline
        def weight_at(codes, scales, extra, supers, column):
            block = column // 32
            scale, offset = scales_at(scales, block)
            code = (load_u8(codes + 16 * block + column % 16) >> (column // 16 % 2 * 4)) & 15
            if has_fifth:
                code = code | (((load_u32(extra + 4 * block) >> (column % 32)) & 1) << 4)
            return scale * to_float(code) + offset

    return weight_at
