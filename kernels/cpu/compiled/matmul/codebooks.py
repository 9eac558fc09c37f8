"""Products of layouts whose codes are places in a table of sixteen levels: MXFP4, NVFP4, IQ4_NL and IQ4_XS.

A byte shuffle looks up 64 codes at once. MXFP4 and NVFP4: Open Compute Project Microscaling Formats 1.0, section 5.3.
"""

from collections.abc import Sequence

from localinfer.kernels.cpu.compiled.matmul.tile import MINUS_8_HALF, MINUS_8_SUM, Tile
from localinfer.kernels.cpu.compiled.simd.emit import F16, F32, I8, I16, I32, Value, vector
from localinfer.kernels.layouts import Layout

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODES = tuple(12 + level for level in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice what the codes of E2M1 stand for, plus 12."""


def iq4_body(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """One block of IQ4_NL or one super-block of IQ4_XS."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    d = emit.load_floats(header, 0, F16)
    if tile.layout is Layout.IQ4_NL:
        return _iq4_block(tile, unit, body, d, tile.sizes.unit_bytes, totals)
    high = b.zext(emit.load(header, vector(I16), 32, align=32), vector(I32))
    low = emit.load(header, vector(I32), 64, align=32)
    first = b.mul(unit, emit.i64(8))

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        twice = b.trunc(b.mul(index, emit.i64(2)), I32)
        upper = b.and_(b.lshr(high, emit.splat(twice)), emit.splat_constant(I32, 3))
        lower = b.and_(b.lshr(low, emit.splat(b.add(twice, twice))), emit.splat_constant(I32, 15))
        code = b.or_(lower, b.shl(upper, emit.splat_constant(I32, 4)))
        scale = emit.mul(d, emit.to_float(b.sub(code, emit.splat_constant(I32, 32))))
        codes = tile.at(body, index, 256)
        return _iq4_block(tile, b.add(first, index), codes, scale, tile.sizes.unit_bytes // 8, totals)

    return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body)


def _iq4_block(
    tile: Tile, block: Value, codes: Value, scale: Value, num_bytes: int, totals: list[Value]
) -> list[Value]:
    emit = tile.emit
    column = emit.builder.mul(block, emit.i64(32))
    records = [tile.record(row, block) for row in tile.rows]
    dots = [emit.biased_start(tile.record_int(record, MINUS_8_SUM, shift=4)) for record in records]
    for j in range(4):
        tile.prefetch(block, num_bytes, j, 4)
        loaded = tile.load_codes(codes, 64 * j)
        for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
            levels = emit.lookup_levels(IQ4_LEVELS, nibbles)
            dots = [
                emit.dot_levels(dot, levels, tile.bytes4(row, column, 16 * half + 4 * j))
                for dot, row in zip(dots, tile.rows, strict=True)
            ]
    return [
        tile.accumulate(total, dot, scale, record) for total, dot, record in zip(totals, dots, records, strict=True)
    ]


def mxfp4_body(tile: Tile, block: Value, totals: list[Value]) -> list[Value]:
    """One block of MXFP4, whose scale byte e stands for 2 ** (e - 128) of doubled E2M1."""
    emit, b = tile.emit, tile.emit.builder
    header, codes = tile.parts(block)
    exponent = b.zext(emit.load(header, vector(I8), align=16), vector(I32))
    normal = b.shl(b.sub(exponent, emit.splat_constant(I32, 1)), emit.splat_constant(I32, 23))
    # Float32 has 2 ** -128 and 2 ** -127 as subnormal numbers only.
    subnormal = b.shl(emit.splat_constant(I32, 1 << 21), exponent)
    is_subnormal = b.icmp_unsigned("<", exponent, emit.splat_constant(I32, 2))
    scale = emit.bitcast(b.select(is_subnormal, subnormal, normal), vector(F32))
    column = b.mul(block, emit.i64(32))
    records = [tile.record(row, block) for row in tile.rows]
    dots = [tile.minus_12_sum(record, MINUS_8_SUM) for record in records]
    for j in range(4):
        tile.prefetch(block, tile.sizes.unit_bytes, j, 4)
        loaded = tile.load_codes(codes, 64 * j)
        for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
            doubled = emit.lookup(E2M1_CODES, nibbles)
            dots = [
                emit.dot_codes(dot, doubled, tile.bytes4(row, column, 16 * half + 4 * j))
                for dot, row in zip(dots, tile.rows, strict=True)
            ]
    return [
        tile.accumulate(total, dot, scale, record) for total, dot, record in zip(totals, dots, records, strict=True)
    ]


def nvfp4_body(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """64 columns of NVFP4: two blocks, each of whose halves has a scale of its own."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    scales = emit.load(header, vector(I32), align=64)
    first = b.mul(unit, emit.i64(2))
    for index in range(2):
        block = b.add(first, emit.i64(index))
        column = b.mul(block, emit.i64(32))
        records = [tile.record(row, block) for row in tile.rows]
        for half in range(2):
            group = 2 * index + half
            dots = [tile.minus_12_sum(record, MINUS_8_HALF + 4 * half) for record in records]
            for j in range(2):
                tile.prefetch(unit, tile.sizes.unit_bytes, 2 * group + j, 8)
                loaded = tile.load_codes(body, 64 * (2 * group + j))
                for part, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
                    doubled = emit.lookup(E2M1_CODES, nibbles)
                    dots = [
                        emit.dot_codes(dot, doubled, tile.bytes4(row, column, 16 * half + 8 * part + 4 * j))
                        for dot, row in zip(dots, tile.rows, strict=True)
                    ]
            scale = _half_of_e4m3(tile, b.lshr(scales, emit.splat_constant(I32, 8 * group)))
            totals = [
                tile.accumulate(total, dot, scale, record)
                for total, dot, record in zip(totals, dots, records, strict=True)
            ]
    return totals


def _half_of_e4m3(tile: Tile, words: Value) -> Value:
    """Half of the unsigned E4M3 numbers (bias 7) in the low bytes of words; 0x7F is read as zero, bit 7 ignored."""
    emit, b = tile.emit, tile.emit.builder
    code = b.and_(words, emit.splat_constant(I32, 255))
    # In float32's place the exponent is 119 short (120, and 1 for the half); the product is right for subnormals too.
    bits = b.shl(b.and_(code, emit.splat_constant(I32, 127)), emit.splat_constant(I32, 20))
    value = emit.mul(emit.bitcast(bits, vector(F32)), emit.splat_constant(F32, 2.0**119))
    is_nan = b.icmp_unsigned("==", code, emit.splat_constant(I32, 127))
    return b.select(is_nan, emit.zeros(F32), value)
