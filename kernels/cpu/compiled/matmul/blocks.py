"""Products of blocks of 32 columns with codes that are numbers, and of groups of such blocks."""

from collections.abc import Sequence

from localinfer.kernels.cpu.compiled.matmul.tile import MINUS_8_SUM, SCALED_SUM, Tile
from localinfer.kernels.cpu.compiled.simd.emit import F16, I16, I32, Value, vector
from localinfer.kernels.layouts import Layout


def block_body(tile: Tile, block: Value, totals: list[Value]) -> list[Value]:
    """One block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0."""
    emit, layout, sizes = tile.emit, tile.layout, tile.sizes
    header, codes = tile.parts(block)
    scale = emit.load_floats(header, 0, F16)
    column = emit.builder.mul(block, emit.i64(32))
    records = [tile.record(row, block) for row in tile.rows]
    fifth = tile.load_codes(codes, 256) if layout in (Layout.Q5_0, Layout.Q5_1) else None

    if layout is Layout.Q8_0:
        dots = [emit.biased_start(tile.record_int(record, MINUS_8_SUM, shift=4)) for record in records]
        for j in range(8):
            tile.prefetch(block, sizes.unit_bytes, j, 8)
            loaded = tile.load_codes(codes, 64 * j)
            dots = [
                emit.dot_biased(dot, loaded, tile.bytes4(row, column, 4 * j))
                for dot, row in zip(dots, tile.rows, strict=True)
            ]
    else:
        if layout in (Layout.Q4_0, Layout.Q5_0):
            shift = 0 if layout is Layout.Q4_0 else 1
            dots = [tile.record_int(record, MINUS_8_SUM, shift) for record in records]
        else:
            dots = [emit.zeros(I32) for _ in records]
        for j in range(4):
            tile.prefetch(block, sizes.unit_bytes, j, 4)
            loaded = tile.load_codes(codes, 64 * j)
            for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
                if fifth is not None:
                    nibbles = emit.builder.or_(nibbles, tile.moved_bits(fifth, 4 * half + j, 1, 4))
                dots = [
                    emit.dot_codes(dot, nibbles, tile.bytes4(row, column, 16 * half + 4 * j))
                    for dot, row in zip(dots, tile.rows, strict=True)
                ]
    totals = [
        tile.accumulate(total, dot, scale, record) for total, dot, record in zip(totals, dots, records, strict=True)
    ]
    if layout in (Layout.Q4_1, Layout.Q5_1):
        minimum = emit.load_floats(header, 32, F16)
        totals = [
            emit.fma(minimum, tile.record_float(record, SCALED_SUM), total)
            for total, record in zip(totals, records, strict=True)
        ]
    return totals


def group_body(tile: Tile, group: Value, totals: list[Value]) -> list[Value]:
    """One group of INT4 or INT8: one or more blocks with one scale and one zero point.

    Integer sums start at -zero * sum(x), so these layouts give the bits that Q4_0, Q5_0 or Q8_0 give for equal weights.
    """
    emit, b, sizes = tile.emit, tile.emit.builder, tile.sizes
    is_byte = tile.layout is Layout.INT8_32
    blocks, block_bytes = sizes.unit // 32, 512 if is_byte else 256
    header, body = tile.parts(group)
    scale = emit.load_floats(header, 0, F16)
    zero = b.sext(emit.load(header, vector(I16), 32, align=32), vector(I32))
    first = b.mul(group, emit.i64(blocks))

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        block = b.add(first, index)
        codes = tile.at(body, index, block_bytes)
        column = b.mul(block, emit.i64(32))
        records = [tile.record(row, block) for row in tile.rows]
        if is_byte:
            offset = b.sub(zero, emit.splat_constant(I32, 128))
            biases = [emit.biased_start(tile.record_int(record, MINUS_8_SUM, shift=4)) for record in records]
            dots = [
                b.add(bias, b.mul(offset, tile.minus_sum(record))) for bias, record in zip(biases, records, strict=True)
            ]
        else:
            dots = [b.mul(zero, tile.minus_sum(record)) for record in records]
        vectors = block_bytes // 64
        for j in range(vectors):
            tile.prefetch(block, sizes.unit_bytes // blocks, j, vectors)
            loaded = tile.load_codes(codes, 64 * j)
            if is_byte:
                dots = [
                    emit.dot_biased(dot, loaded, tile.bytes4(row, column, 4 * j))
                    for dot, row in zip(dots, tile.rows, strict=True)
                ]
                continue
            for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
                dots = [
                    emit.dot_codes(dot, nibbles, tile.bytes4(row, column, 16 * half + 4 * j))
                    for dot, row in zip(dots, tile.rows, strict=True)
                ]
        return [
            tile.accumulate(total, dot, scale, record) for total, dot, record in zip(totals, dots, records, strict=True)
        ]

    if blocks == 1:
        return list(block_body(emit.i64(0), totals))
    return emit.loop(emit.i64(0), emit.i64(blocks), 1, totals, block_body)


def few_bits_body(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """Two blocks of Q2_0 or four of Q1_0: codes less one, of Q1_0 doubled codes, times one scale."""
    emit, b = tile.emit, tile.emit.builder
    bits = 1 if tile.layout is Layout.Q1_0 else 2
    blocks = tile.sizes.unit // 32
    header, body = tile.parts(unit)
    scale = emit.load_floats(header, 0, F16)
    for index in range(blocks):
        block = b.add(b.mul(unit, emit.i64(blocks)), emit.i64(index))
        column = b.mul(block, emit.i64(32))
        records = [tile.record(row, block) for row in tile.rows]
        dots = [tile.minus_sum(record) for record in records]
        for j in range(8):
            tile.prefetch(unit, tile.sizes.unit_bytes, 8 * index + j, 8 * blocks)
            loaded = tile.load_codes(body, 64 * ((8 * index + j) * bits // 8))
            codes = tile.moved_bits(loaded, j * bits % 8, (1 << bits) - 1, 2 - bits)
            dots = [
                emit.dot_codes(dot, codes, tile.bytes4(row, column, 4 * j))
                for dot, row in zip(dots, tile.rows, strict=True)
            ]
        totals = [
            tile.accumulate(total, dot, scale, record) for total, dot, record in zip(totals, dots, records, strict=True)
        ]
    return totals
