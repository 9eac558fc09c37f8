"""Reading weights out of their four arrays: scales and high bits of a unit, and a single weight.

Functions here are made for a layout (its number in `kernels.layouts.Layout`), so that a kernel holds the code of one.
The arrays (codes, scales, extra, supers) are laid out as `kernels/cuda/weights.py` says.
"""

from numba import float32, int64

from localinfer.kernels.cuda.compiled import ptx
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


@inline
def row_of(arrays, row_bytes, row):
    """Offsets of a row in the four arrays."""
    return (
        arrays[0] + row * row_bytes[0],
        arrays[1] + row * row_bytes[1],
        arrays[2] + row * row_bytes[2],
        arrays[3] + row * row_bytes[3],
    )


@inline
def signed_halves(word):
    """The lower and the upper half of a word as signed whole numbers."""
    return ((word & 0xFFFF) ^ 0x8000) - 0x8000, ((word >> 16) ^ 0x8000) - 0x8000


def scales_of(layout):
    """Make the function of (scales, block) that gives scale and offset of a block: weight = scale * code + offset.

    scales: address of the row's scales. Not for Q6_K, whose halves have scales of their own, nor for plain numbers.
    """
    if layout in _ONE_SCALE:
        middle = _MIDDLE[layout]

        @inline
        def scales_at(scales, block):
            scale = ptx.half_to_float(ptx.load_u16(scales + 2 * block))
            return scale, -float32(middle) * scale

    elif layout in _K_QUANTS:

        @inline
        def scales_at(scales, block):
            header = ptx.load_v4(scales + block // 8 * 16)
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
            scale = ptx.half_to_float(header[0] & 0xFFFF) * ptx.to_float(code)
            return scale, -ptx.half_to_float(header[0] >> 16) * ptx.to_float(least)

    elif layout in _ZERO_POINTS:
        group_blocks = _GROUP_BLOCKS[layout]

        @inline
        def scales_at(scales, block):
            word = ptx.load_u32(scales + block // group_blocks * 4)
            scale = ptx.half_to_float(word & 0xFFFF)
            zero = ((word >> 16) ^ 0x8000) - 0x8000
            return scale, -ptx.to_float(zero) * scale

    else:

        @inline
        def scales_at(scales, block):
            word = ptx.load_u32(scales + 4 * block)
            return ptx.half_to_float(word & 0xFFFF), ptx.half_to_float(word >> 16)

    return scales_at


@inline
def prefetch_rows(arrays, row_bytes, first, count, threads):
    """Request the cache lines of some rows' codes, scales and extra bits, with all threads of a block."""
    for a in range(3):
        offset = ptx.thread() * _LINE
        while offset < count * row_bytes[a]:
            ptx.prefetch(arrays[a] + first * row_bytes[a] + offset)
            offset = offset + threads * _LINE


@inline
def half_scales(scales, supers, block):
    """The scales of the two halves of a block in Q6_K."""
    word = ptx.load_u16(scales + 2 * block)
    scale = ptx.half_to_float(ptx.load_u16(supers + block // 8 * 2))
    first = ((word & 255) ^ 128) - 128
    second = ((word >> 8) ^ 128) - 128
    return scale * ptx.to_float(first), scale * ptx.to_float(second)


@inline
def spread_bits(bits):
    """Four bits as bit 4 of the four bytes of a word."""
    return (((bits & 15) * 0x00204081) & 0x01010101) << 4


def unit_of(layout):
    """Make the function of (scales, extra, supers, unit) that gives what a unit has beside its codes.

    Scale, offset and fifth bits, or of Q6_K the scales of either half and the upper bits of either half.
    """
    if layout == Layout.Q6_K:

        @inline
        def fields_at(scales, extra, supers, unit):
            first, second = half_scales(scales, supers, unit)
            lower, upper = ptx.load_v2(extra + 8 * unit)
            return first, second, lower, upper

        return fields_at

    scales_at = scales_of(layout)
    has_fifth = layout in FIFTH_BITS
    block_units = 2 if layout in BYTES else 1

    @inline
    def fields_at(scales, extra, supers, unit):
        scale, offset = scales_at(scales, unit // block_units)
        fifth = int64(0)
        if has_fifth:
            fifth = ptx.load_u32(extra + 4 * unit)
        return scale, offset, fifth, int64(0)

    return fields_at


def nibbles_of(layout):
    """Make the function of (word, lower, upper, number) that gives two words of four codes: columns c and c + 16.

    lower, upper: the unit's bits of `unit_of`. number: of the word in its unit.
    """
    is_q6 = layout == Layout.Q6_K
    has_fifth = layout in FIFTH_BITS

    @inline
    def codes_at(word, lower, upper, number):
        low = word & 0x0F0F0F0F
        high = (word >> 4) & 0x0F0F0F0F
        if is_q6:
            low = low | (((lower >> (2 * number)) & 0x03030303) << 4)
            high = high | (((upper >> (2 * number)) & 0x03030303) << 4)
        if has_fifth:
            low = low | spread_bits(lower >> (4 * number))
            high = high | spread_bits(lower >> (4 * number + 16))
        return low, high

    return codes_at


def weight_of(layout):
    """Make the function of (place, column) that gives a weight; place: a row as of `row_of`."""
    if layout == Layout.F32:

        @inline
        def weight_at(place, column):
            return ptx.load_f32(place[0] + 4 * column)

    elif layout == Layout.F16:

        @inline
        def weight_at(place, column):
            return ptx.half_to_float(ptx.load_u16(place[0] + 2 * column))

    elif layout == Layout.BF16:

        @inline
        def weight_at(place, column):
            return ptx.bits_float(ptx.load_u16(place[0] + 2 * column) << 16)

    elif layout in BYTES:
        scales_at = scales_of(layout)
        sign = 128 if layout == Layout.Q8_0 else 0

        @inline
        def weight_at(place, column):
            scale, offset = scales_at(place[1], column // 32)
            code = (ptx.load_u8(place[0] + column) ^ sign) - sign
            return scale * ptx.to_float(code) + offset

    elif layout == Layout.Q6_K:

        @inline
        def weight_at(place, column):
            block = column // 32
            half = column // 16 % 2
            within = column % 16
            first, second = half_scales(place[1], place[3], block)
            scale = first
            if half == 1:
                scale = second
            low = (ptx.load_u8(place[0] + 16 * block + within) >> (4 * half)) & 15
            high = (ptx.load_u8(place[2] + 8 * block + 4 * half + within % 4) >> (within // 4 * 2)) & 3
            return scale * ptx.to_float((low | (high << 4)) - 32)

    else:
        scales_at = scales_of(layout)
        has_fifth = layout in FIFTH_BITS

        @inline
        def weight_at(place, column):
            block = column // 32
            scale, offset = scales_at(place[1], block)
            code = (ptx.load_u8(place[0] + 16 * block + column % 16) >> (column // 16 % 2 * 4)) & 15
            if has_fifth:
                code = code | (((ptx.load_u32(place[2] + 4 * block) >> (column % 32)) & 1) << 4)
            return scale * ptx.to_float(code) + offset

    return weight_at
