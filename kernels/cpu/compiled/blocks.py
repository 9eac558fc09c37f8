"""Products of layouts whose codes are numbers: blocks of 32 columns, groups of them, super-blocks of 256."""

from collections.abc import Callable, Sequence

from localinfer.kernels.cpu.compiled.codebooks import grid_body, iq4_body, mxfp4_body, nvfp4_body
from localinfer.kernels.cpu.compiled.emit import F32, I8, I16, I32, Value, vector
from localinfer.kernels.cpu.compiled.tile import MINUS_8_HALF, MINUS_8_SUM, Tile
from localinfer.kernels.layouts import Layout


def block_body(tile: Tile, block: Value, totals: list[Value]) -> list[Value]:
    """One block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0."""
    emit, layout, sizes = tile.emit, tile.layout, tile.sizes
    header, codes = tile.parts(block)
    scale = tile.floats(header)
    column = emit.builder.mul(block, emit.i64(32))
    records = tile.records(block)
    fifth = tile.load_bits(codes, 256) if layout in (Layout.Q5_0, Layout.Q5_1) else None
    largest = 15 if fifth is None else 31

    if layout is Layout.Q8_0:
        sums = tile.sums([tile.biased_start(record) for record in records])
        for j in range(8):
            tile.prefetch(block, sizes.unit_bytes, j, 8)
            chosen = j // 4 % len(sums)
            sums[chosen] = tile.dot(sums[chosen], tile.load_codes(codes, j), column, 4 * j, emit.dot_biased)
    else:
        if layout in (Layout.Q4_0, Layout.Q5_0):
            shift = 0 if layout is Layout.Q4_0 else 1
            sums = tile.sums([tile.started_from(record, MINUS_8_SUM, shift) for record in records])
        else:
            sums = tile.sums(tile.unsigned_starts(block))
        for halves, again in tile.halves():
            for j in range(4):
                tile.prefetch(block, sizes.unit_bytes, j, 4)
                loaded = tile.load_codes(again(codes), j)
                both = tile.nibbles(loaded, j)
                for half in halves:
                    nibbles = both[half]
                    if fifth is not None:
                        nibbles = emit.builder.or_(nibbles, tile.column_bits(fifth, 0, 1, 4 * half + j, 4))
                    chosen = half % len(sums)
                    sums[chosen] = tile.dot(sums[chosen], nibbles, column, 16 * half + 4 * j, largest=largest)
    dots = tile.joined(sums)
    totals = tile.add_dots(totals, dots, scale, records)
    if layout in (Layout.Q4_1, Layout.Q5_1):
        totals = tile.add_minimums(totals, tile.floats(header, 32), records)
    return totals


def group_body(tile: Tile, group: Value, totals: list[Value]) -> list[Value]:
    """One group of INT4 or INT8: one or more blocks with one scale and one zero point.

    Integer sums start at -zero * sum(x), so these layouts give the bits that Q4_0, Q5_0 or Q8_0 give for equal weights.
    """
    emit, b, sizes = tile.emit, tile.emit.builder, tile.sizes
    is_byte = tile.layout is Layout.INT8_32
    blocks, block_bytes = sizes.unit // 32, 512 if is_byte else 256
    header, body = tile.parts(group)
    scale = tile.floats(header)
    zero = tile.zero_points(tile.spread(b.sext(tile.values(header, I16, 32), tile.vector(I32))))
    first = b.mul(group, emit.i64(blocks))

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        block = b.add(first, index)
        codes = tile.at(body, index, block_bytes)
        column = b.mul(block, emit.i64(32))
        records = tile.records(block)
        if is_byte:
            offset = b.sub(zero, emit.splat_constant(I32, 128, tile.lanes))
            biases = [tile.biased_start(record) for record in records]
            dots = [
                b.add(bias, b.mul(offset, tile.minus_sum(record))) for bias, record in zip(biases, records, strict=True)
            ]
        else:
            dots = [tile.started(b.mul(zero, tile.minus_sum(record))) for record in records]
        vectors, sums = block_bytes // 64, tile.sums(dots)
        for halves, again in tile.halves(1 if is_byte else 2):
            for j in range(vectors):
                tile.prefetch(block, sizes.unit_bytes // blocks, j, vectors)
                loaded = tile.load_codes(again(codes), j)
                if is_byte:
                    chosen = j // 4 % len(sums)
                    sums[chosen] = tile.dot(sums[chosen], loaded, column, 4 * j, emit.dot_biased)
                    continue
                both = tile.nibbles(loaded, j)
                for half in halves:
                    chosen = half % len(sums)
                    sums[chosen] = tile.dot(sums[chosen], both[half], column, 16 * half + 4 * j, largest=15)
        return tile.add_dots(totals, tile.joined(sums), scale, records)

    if blocks == 1:
        return list(block_body(emit.i64(0), totals))
    return emit.loop(emit.i64(0), emit.i64(blocks), 1, totals, block_body)


def few_bits_body(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """Two blocks of Q2_0 or four of Q1_0: codes less one, of Q1_0 doubled codes, times one scale."""
    emit, b = tile.emit, tile.emit.builder
    bits = 1 if tile.layout is Layout.Q1_0 else 2
    blocks = tile.sizes.unit // 32
    header, body = tile.parts(unit)
    scale = tile.floats(header)
    for index in range(blocks):
        block = b.add(b.mul(unit, emit.i64(blocks)), emit.i64(index))
        column = b.mul(block, emit.i64(32))
        records = tile.records(block)
        dots = [tile.started(tile.minus_sum(record)) for record in records]
        for j in range(8):
            tile.prefetch(unit, tile.sizes.unit_bytes, 8 * index + j, 8 * blocks)
            loaded = tile.load_codes(body, (8 * index + j) * bits // 8)
            codes = tile.moved_bits(loaded, j * bits % 8, (1 << bits) - 1, 2 - bits)
            dots = tile.dot(dots, codes, column, 4 * j, largest=2)
        totals = tile.add_dots(totals, dots, scale, records)
    return totals


def six_bit_scales(
    tile: Tile, header: Value, pair: Value, d: Value, minus_dmin: Value, halves: Sequence[int] = (0, 1)
) -> tuple[dict[int, Value], dict[int, Value]]:
    """Scales and minimums of blocks 2p and 2p + 1 of a Q4_K or Q5_K super-block, times d and -dmin.

    halves: which of the two blocks; without NEON both.
    """
    emit, b = tile.emit, tile.emit.builder
    packed = tile.at(header, pair, 48)
    if emit.is_neon:
        words = [tile.some_bytes(packed, 64 + 16 * i) for i in range(3)]
        low = [b.and_(word, emit.splat_constant(I8, 63, word.type.count)) for word in words]
        upper = b.lshr(words[2], emit.splat_constant(I8, 2, words[2].type.count))
        first_minimum = emit.inserted(emit.inserted(upper, words[1], 4), words[0], 6)

        def to_float(code: Value) -> Value:
            return emit.bytes_to_floats(code, tile.count)
    else:
        words = [tile.values(packed, I8, 64 + 16 * i) for i in range(3)]
        words = [b.zext(word, tile.vector(I32)) for word in words]
        low = [b.and_(word, tile.constant(I32, 63)) for word in words]
        parts = [b.shl(b.lshr(word, tile.constant(I32, 6)), tile.constant(I32, 2 * i)) for i, word in enumerate(words)]
        first_minimum = b.or_(b.or_(parts[0], parts[1]), parts[2])

        def to_float(code: Value) -> Value:
            return emit.to_float(code)

    scales = {half: emit.mul(d, to_float(low[half])) for half in halves}
    minimums = {half: emit.mul(minus_dmin, to_float((first_minimum, low[2])[half])) for half in halves}
    return scales, minimums


def q4_k_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block of Q4_K or Q5_K, two blocks at a time."""
    emit, b, sizes = tile.emit, tile.emit.builder, tile.sizes
    header, body = tile.parts(super_block)
    fifth_bits = body if tile.layout is Layout.Q5_K else None
    codes_start = b.add(body, emit.i64(512)) if fifth_bits is not None else body
    first_unit = b.mul(super_block, emit.i64(4))
    largest = 15 if fifth_bits is None else 31

    def factors(place: Value) -> tuple[Value, Value]:
        return tile.floats(place), b.fneg(tile.floats(place, 32))

    # NEON's registers do not hold them beside the sums of eight rows, others' beside those of sixteen.
    held = None if tile.num_rows == (8 if emit.is_neon else 16) else factors(header)

    def pair_body(pair: Value, totals: list[Value]) -> Sequence[Value]:
        unit = b.add(first_unit, pair)
        codes = tile.at(codes_start, pair, 512)
        column = b.mul(unit, emit.i64(64))
        scaled = six_bit_scales(tile, header, pair, *held) if held and not emit.is_neon else None
        blocks = [b.mul(unit, emit.i64(2)), b.add(b.mul(unit, emit.i64(2)), emit.i64(1))]
        first_bit = b.trunc(b.mul(pair, emit.i64(2)), I8 if tile.has_whole_codes else I16)
        for halves, again in tile.turns(range(2)):
            if tile.shares_bytes:
                emit.barrier()
            dots = {half: tile.unsigned_starts(blocks[half]) for half in halves}
            for j in range(8):
                tile.prefetch(unit, sizes.unit_bytes // 4, j, 8)
                loaded = tile.load_codes(again(codes), j)
                if tile.has_whole_codes:
                    both = _five_bits(tile, loaded, tile.load_codes(again(fifth_bits), j), first_bit)
                    for half in halves:
                        dots[half] = tile.dot(dots[half], both[half], column, 32 * half + 4 * j)
                    continue
                fifth = None if fifth_bits is None else bits_from(tile, again(fifth_bits), j, first_bit)
                both = tile.nibbles(loaded, j)
                for half in halves:
                    nibbles = both[half]
                    if fifth is not None:
                        nibbles = b.or_(nibbles, fifth(half))
                    dots[half] = tile.dot(dots[half], nibbles, column, 32 * half + 4 * j, largest=largest)
            if held and tile.shares_bytes and emit.is_neon:
                found = six_bit_scales(tile, header, pair, *held, halves)
            elif scaled is None:
                place = header if held else emit.opaque(header, pair)
                found = scaled = six_bit_scales(tile, place, pair, *(held or factors(place)))
            else:
                found = scaled
            scales, minimums = found
            dots = {half: tile.whole(dots[half]) if half else dots[half] for half in halves}
            for half in halves:
                records = tile.records(blocks[half])
                totals = tile.add_dots(totals, dots[half], scales[half], records)
                totals = tile.add_minimums(totals, minimums[half], records)
        return totals

    return emit.loop(emit.i64(0), emit.i64(4), 1, totals, pair_body)


def _five_bits(tile: Tile, loaded: Value, rest: Value, first: Value) -> tuple[Value, Value]:
    """Codes of two blocks: of the former in the lower five bits, of the latter in the others and two bits of `rest`."""
    emit, b, count = tile.emit, tile.emit.builder, loaded.type.count
    if emit.is_neon:
        moved = emit.shifted(rest, emit.splat(b.sub(I8(3), first), count))
    else:
        words = b.shl(b.zext(rest, vector(I16, count)), emit.splat_constant(I16, 3, count))
        moved = b.trunc(b.lshr(words, emit.splat(b.zext(first, I16), count)), rest.type)
    upper = b.and_(moved, emit.splat_constant(I8, 24, count))
    return b.and_(loaded, emit.splat_constant(I8, 31, count)), emit.inserted(upper, loaded, 5)


def bits_from(tile: Tile, place: Value, vector_number: int, first: Value, target: int = 4) -> Callable[[int], Value]:
    """Bits of every byte of a vector, from one on that is no constant; returns what moves one to bit `target`."""
    shifted = _shifted(tile, tile.load_codes(place, vector_number), first)
    return lambda number: tile.moved_bits(shifted, number, 1, target)


def _shifted(tile: Tile, codes: Value, distance: Value) -> Value:
    """Codes shifted right by a distance that is no constant, with bits of their neighbours in the upper ones."""
    emit, size = tile.emit, distance.type.width // 8
    words = emit.bitcast(codes, vector(distance.type, codes.type.count // size))
    moved = emit.builder.lshr(words, emit.splat(distance, words.type.count))
    return emit.bitcast(moved, codes.type)


def q6_k_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block of Q6_K, 128 columns at a time, of which blocks 0 and 2, then 1 and 3, share their bytes.

    Each block has one scale per 16 columns.
    """
    if tile.has_whole_codes:
        return _q6_k_of_whole_codes(tile, super_block, totals)
    emit, b, sizes = tile.emit, tile.emit.builder, tile.sizes
    header, body = tile.parts(super_block)
    d = tile.floats(header)
    first_unit = b.mul(super_block, emit.i64(2))

    def half_body(half: Value, totals: list[Value]) -> Sequence[Value]:
        unit = b.add(first_unit, half)
        codes = tile.at(body, half, 1536)
        scales = tile.at(header, half, 128)
        column = b.mul(unit, emit.i64(128))
        for first in range(2):
            nibbles_place, nibbles_step = (0, 128) if first == 0 else (1024, 64)
            blocks = (first, first + 2)
            records = [
                [tile.record(row, b.add(b.mul(unit, emit.i64(4)), emit.i64(k))) for row in tile.rows] for k in blocks
            ]
            for part in range(2):
                field = MINUS_8_HALF + 4 * part
                for indices, again in tile.turns(range(2)):
                    dots = {i: [tile.started_from(record, field, shift=2) for record in records[i]] for i in indices}
                    for j in range(4 * part, 4 * part + 4):
                        tile.prefetch(unit, sizes.unit_bytes // 2, 8 * first + j, 16)
                        loaded = tile.load_codes(again(codes), j, nibbles_step, nibbles_place)
                        upper = tile.load_codes(again(codes), j, 128, 64)
                        for index, lower in enumerate((tile.low(loaded), tile.high(loaded))):
                            if index not in indices:
                                continue
                            k = blocks[index]
                            whole = b.or_(lower, tile.moved_bits(upper, 2 * k, 3, 4))
                            dots[index] = tile.dot(dots[index], whole, column, 32 * k + 4 * j, largest=63)
                    for index in indices:
                        code = b.sext(tile.values(scales, I8, 32 + 16 * (2 * blocks[index] + part)), tile.vector(I32))
                        scale = emit.mul(d, emit.to_float(code))
                        totals = tile.add_dots(totals, dots[index], scale, records[index])
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)


def _q6_k_of_whole_codes(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """The same of tiles whose bytes have whole codes, block by block."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(super_block)
    d = tile.floats(header)
    first_unit = b.mul(super_block, emit.i64(2))

    def half_body(half: Value, totals: list[Value]) -> Sequence[Value]:
        unit = b.add(first_unit, half)
        codes = tile.at(body, half, 1536)
        scales = tile.at(header, half, 128)
        column = b.mul(unit, emit.i64(128))
        # Sums are added in the order in which other tiles come to them.
        for k, part in ((k, part) for first in range(2) for part in range(2) for k in (first, first + 2)):
            records = [tile.record(row, b.add(b.mul(unit, emit.i64(4)), emit.i64(k))) for row in tile.rows]
            for _, again in tile.turns([k]):
                dots = [tile.started_from(record, MINUS_8_HALF + 4 * part, shift=2) for record in records]
                place = again(codes)
                for j in range(4 * part, 4 * part + 4):
                    dots = tile.dot(dots, _six_bits(tile, place, j, k), column, 32 * k + 4 * j)
                code = b.sext(tile.values(scales, I8, 32 + 16 * (2 * k + part)), tile.vector(I32))
                totals = tile.add_dots(totals, dots, emit.mul(d, emit.to_float(code)), records)
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)


def _six_bits(tile: Tile, place: Value, vector_number: int, block: int) -> Value:
    """Codes of one of four blocks: the last one's are in the upper bits of the others'."""
    emit, b = tile.emit, tile.emit.builder
    where = ((128, 0), (64, 1024), (128, 64))
    if block < 3:
        loaded = tile.load_codes(place, vector_number, *where[block])
        return b.and_(loaded, emit.splat_constant(I8, 63, loaded.type.count))
    first, second, third = (tile.load_codes(place, vector_number, *one) for one in where)
    upper = b.lshr(third, emit.splat_constant(I8, 2, third.type.count))
    return emit.inserted(emit.inserted(upper, second, 4), first, 6)


def bit_pair_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block of Q2_K, Q3_K or TQ2_0, 128 columns at a time, whose four blocks share their bytes.

    Scales of groups of 16 columns are multiplied as integers, so a block has one step in float.
    """
    emit, b, layout = tile.emit, tile.emit.builder, tile.layout
    header, body = tile.parts(super_block)
    third_bits = body if layout is Layout.Q3_K else None
    codes_start = b.add(body, emit.i64(512)) if third_bits is not None else body
    d, *eighth = bit_pair_factors(tile, header)
    first_unit = b.mul(super_block, emit.i64(2))

    def half_body(half: Value, totals: list[Value]) -> Sequence[Value]:
        unit = b.add(first_unit, half)
        codes = tile.at(codes_start, half, 512)
        column = b.mul(unit, emit.i64(128))
        scales, minimums = group_scales(tile, header, half)
        shift = b.trunc(b.mul(half, emit.i64(4)), I32)
        # AVX2's registers hold no dot products of four rows and two blocks.
        together = 1 if tile.is_ordered and tile.num_rows > 2 else 2
        for first in range(0, 4, together):
            blocks = range(first, first + together)
            records = [tile.records(b.add(b.mul(unit, emit.i64(4)), emit.i64(k))) for k in blocks]
            dots: list[list[list[Value]]] = []
            for part in range(2):
                dots.append(
                    [[_start(tile, record, k, part) for record in one] for k, one in zip(blocks, records, strict=True)]
                )
                for j in range(4 * part, 4 * part + 4):
                    tile.prefetch(unit, tile.sizes.unit_bytes // 2, 8 * first // together + j, 32 // together)
                    loaded = tile.load_codes(codes, j)
                    upper = None
                    if third_bits is not None:
                        upper = _shifted(tile, tile.load_codes(third_bits, j), shift)
                    for index, k in enumerate(blocks):
                        place = _place(tile, k)
                        bits = tile.moved_bits(loaded, 2 * k, 3, place)
                        if upper is not None:
                            bits = b.or_(bits, tile.moved_bits(upper, k, 1, place + 2))
                        largest = (7 if upper is not None else 3) << place
                        dots[part][index] = tile.dot(dots[part][index], bits, column, 32 * k + 4 * j, largest=largest)
            for index, k in enumerate(blocks):
                for t, record in enumerate(records[index]):
                    parts = [_moved_back(tile, dots[part][index][t], k) for part in range(2)]
                    whole = _sum_of_groups(tile, scales[2 * k : 2 * k + 2], parts)
                    totals[t] = tile.accumulate(totals[t], whole, d, record)
                    if eighth:
                        sums = [tile.record_int(record, MINUS_8_HALF + 4 * part) for part in range(2)]
                        least = _sum_of_groups(tile, minimums[2 * k : 2 * k + 2], sums)
                        totals[t] = tile.accumulate(totals[t], least, eighth[0], record)
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)


def bit_pair_factors(tile: Tile, header: Value) -> list[Value]:
    """Factors of a super-block's sums and, of Q2_K, of its minimums: an eighth, since records have sums times -8."""
    d = tile.floats(header)
    if tile.layout is not Layout.Q2_K:
        return [d]
    return [d, tile.emit.mul(tile.floats(header, 32), tile.constant(F32, 0.125))]


def _place(tile: Tile, k: int) -> int:
    """Bit at which codes of block k are multiplied.

    For few rows, where they are, and the sum is shifted instead: one shift for four vectors. The highest are moved by
    one pair, because products take codes up to 127.
    """
    return min(2 * k, 4) if len(tile.rows) <= 2 else 0


def _moved_back(tile: Tile, dot: Value, k: int) -> Value:
    dot, place = tile.emit.dot_total(dot), _place(tile, k)
    return tile.emit.builder.ashr(dot, tile.emit.splat_constant(I32, place, tile.count)) if place else dot


def _start(tile: Tile, record: Value, k: int, part: int) -> Value:
    """Start of the sum of a group of 16 columns: their offset times the sum of activations."""
    if tile.layout is Layout.Q2_K:
        return tile.emit.zeros(I32, tile.count)
    b = tile.emit.builder
    offset_shift = 1 if tile.layout is Layout.Q3_K else 3

    def moved(word: Value) -> Value:
        return b.shl(b.ashr(word, I32(offset_shift)), I32(_place(tile, k)))

    return tile.of_record(record, I32, MINUS_8_HALF + 4 * part, moved)


def group_scales(tile: Tile, header: Value, half: Value) -> tuple[list[Value], list[Value]]:
    """Scales and minimums of the eight groups of 128 columns, whole numbers below 2^15 in lanes of 32 bits."""
    b = tile.emit.builder
    if tile.layout is Layout.TQ2_0:
        return [], []
    four = tile.constant(I32, 4)
    if tile.layout is Layout.Q2_K:
        words = [tile.values(tile.at(header, half, 128), I32, 64 + 64 * i, align=64) for i in range(2)]
        return [_field(tile, words[g // 4], 8 * (g % 4), 15) for g in range(8)], [
            _field(tile, words[g // 4], 8 * (g % 4) + 4, 15) for g in range(8)
        ]
    shift = b.mul(tile.splat(b.trunc(half, I32)), four)
    low, middle, high = (b.lshr(tile.values(header, I32, 32 + 64 * i), shift) for i in range(3))
    scales = []
    for group in range(8):
        place = 8 * (group % 4)
        lower = _field(tile, low if group < 4 else middle, place, 15)
        upper = _field(tile, high, place + 2 * (group // 4), 3)
        scales.append(b.or_(lower, b.shl(upper, four)))
    return scales, []


def _field(tile: Tile, words: Value, start: int, mask: int) -> Value:
    b = tile.emit.builder
    moved = b.lshr(words, tile.constant(I32, start)) if start else words
    return b.and_(moved, tile.constant(I32, mask))


def _sum_of_groups(tile: Tile, scales: list[Value], sums: list[Value]) -> Value:
    """Sum of the products of two groups, whose factors fit 16 bits; without scales, of the sums."""
    emit, b = tile.emit, tile.emit.builder
    if not scales:
        return b.add(*sums)
    total, shorts = emit.zeros(I32, tile.count), vector(I16, 2 * tile.count)
    for scale, value in zip(scales, sums, strict=True):
        factors = emit.bitcast(scale, shorts)
        if tile.layout is Layout.Q3_K:
            factors = b.sub(factors, emit.bitcast(emit.splat_constant(I32, 32, tile.count), shorts))
        # The upper halves of factors are zero, so what is in those of the sums does not matter.
        total = emit.dot_pairs(total, factors, emit.bitcast(value, shorts))
    return total


Body = Callable[[Tile, Value, list[Value]], list[Value]]
"""Adds the products of a unit, whose number it is given, to totals."""

BODIES: dict[Layout, Body] = {
    Layout.Q8_0: block_body,
    Layout.Q4_0: block_body,
    Layout.Q4_1: block_body,
    Layout.Q5_0: block_body,
    Layout.Q5_1: block_body,
    Layout.Q4_K: q4_k_body,
    Layout.Q5_K: q4_k_body,
    Layout.Q6_K: q6_k_body,
    Layout.INT4_32: group_body,
    Layout.INT4_64: group_body,
    Layout.INT4_128: group_body,
    Layout.INT8_32: group_body,
    Layout.MXFP4: mxfp4_body,
    Layout.NVFP4: nvfp4_body,
    Layout.IQ4_NL: iq4_body,
    Layout.IQ4_XS: iq4_body,
    Layout.Q2_K: bit_pair_body,
    Layout.Q3_K: bit_pair_body,
    Layout.TQ2_0: bit_pair_body,
    Layout.IQ2_XXS: grid_body,
    Layout.IQ2_XS: grid_body,
    Layout.IQ2_S: grid_body,
    Layout.IQ3_XXS: grid_body,
    Layout.IQ3_S: grid_body,
    Layout.Q1_0: few_bits_body,
    Layout.Q2_0: few_bits_body,
}
"""Products of a unit of each layout whose codes are whole numbers, or select them."""
