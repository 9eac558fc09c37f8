"""Products of blocks of 32 columns with codes that are numbers, of groups of them, and of super-blocks of 256 columns.

`Tile` is shared by the products of all layouts: addresses in a tile, activations and their records, codes, prefetching.
"""

from collections.abc import Callable, Sequence

from localinfer.kernels.cpu.compiled.emit import F16, F32, I8, I16, I32, Emitter, Value, vector
from localinfer.kernels.cpu.kernel_abi import RECORD_BYTES
from localinfer.kernels.layouts import SIZES, Layout

SCALE, SCALED_SUM, MINUS_8_SUM, MINUS_8_HALF = 0, 4, 8, 12
"""Fields of an activation record."""

_SUPER_BLOCK_LAYOUTS = tuple(layout for layout in Layout if SIZES[layout].unit == 256)


def prefetch_distance(layout: Layout, num_rows: int) -> tuple[int, int] | None:
    """Prefetch distance of a tile in bytes and cache level (3: the first level); None: no prefetch.

    With one row hardware prefetchers saturate the memory bandwidth, and software prefetches would only occupy miss
    buffers; but they do not follow the indices and masks of IQ3, two streams in a unit. With more work per byte they
    are slower, and a longer distance helps. Measured: tests/bench/RESULTS.md.
    """
    if num_rows == 1:
        return (2048, 3) if layout in (Layout.IQ3_XXS, Layout.IQ3_S) else None
    return (4096, 3) if num_rows == 2 and layout not in _SUPER_BLOCK_LAYOUTS else (16384, 2)


class Tile:
    """State of one product: weight addresses, activation rows, and totals."""

    def __init__(self, emit: Emitter, layout: Layout, tile: Value, columns: Value, rows: list[Value]) -> None:
        self.emit = emit
        self.tile = tile
        self.columns = columns
        self.rows = rows
        self.sizes = SIZES[layout]
        self.layout = layout
        self.units = emit.builder.udiv(columns, emit.i64(self.sizes.unit))

    def parts(self, unit: Value) -> tuple[Value, Value]:
        """Addresses of a unit's header and body."""
        header = self.at(self.tile, unit, self.sizes.unit_bytes)
        return header, self.emit.builder.add(header, self.emit.i64(self.sizes.header_bytes))

    def prefetch(self, unit: Value, unit_bytes: int, part: int, parts: int) -> None:
        """Prefetch part `part` of `parts` of the unit at the prefetch distance, in the next tile if need be.

        Prefetches are spread over a unit's work: a burst of them fills the miss buffers and stalls loads.
        """
        chosen = prefetch_distance(self.layout, len(self.rows))
        if chosen is None:
            return
        distance, level = chosen
        address = self.at(self.tile, unit, unit_bytes)
        lines = -(-unit_bytes // 64)
        for line in range(lines * part // parts, lines * (part + 1) // parts):
            self.emit.prefetch(address, distance + 64 * line, locality=level)

    def at(self, base: Value, index: Value, stride: int) -> Value:
        return self.emit.builder.add(base, self.emit.builder.mul(index, self.emit.i64(stride)))

    def bytes4(self, row: Value, column: Value, offset: int) -> Value:
        """Four activation bytes, broadcast to all lanes."""
        emit = self.emit
        word = emit.load(emit.builder.add(row, column), I32, offset, align=4)
        return emit.bitcast(emit.splat(word), vector(I8, 64))

    def record(self, row: Value, block: Value) -> Value:
        emit = self.emit
        offset = emit.builder.add(self.columns, emit.builder.mul(block, emit.i64(RECORD_BYTES)))
        return emit.builder.add(row, offset)

    def record_float(self, record: Value, field: int) -> Value:
        return self.emit.splat(self.emit.load(record, F32, field, align=4))

    def record_int(self, record: Value, field: int, shift: int = 0) -> Value:
        value = self.emit.splat(self.emit.load(record, I32, field, align=4))
        return self.emit.builder.shl(value, self.emit.splat_constant(I32, shift)) if shift else value

    def minus_sum(self, record: Value) -> Value:
        """-sum(x) of a block in all lanes, cut to 16 bits, which hold it, so that products take one instruction."""
        emit, b = self.emit, self.emit.builder
        word = b.ashr(emit.load(record, I32, MINUS_8_SUM, align=4), I32(3))
        return emit.splat(b.sext(b.trunc(word, I16), I32))

    def minus_12_sum(self, record: Value, field: int) -> Value:
        """-12 * sum(x) of a block or half of one (a field of -8 * sum(x)) in all lanes."""
        emit, b = self.emit, self.emit.builder
        word = emit.load(record, I32, field, align=4)
        return emit.splat(b.add(word, b.ashr(word, I32(1))))

    def accumulate(self, total: Value, dot: Value, weight_scale: Value, record: Value) -> Value:
        """total + dot * (weight scale * activation scale): only here does an integer dot become a float."""
        emit = self.emit
        scale = emit.mul(weight_scale, self.record_float(record, SCALE))
        return emit.fma(emit.to_float(dot), scale, total)

    def add_dots(self, totals: list[Value], dots: list[Value], weight_scale: Value, block: list[Value]) -> list[Value]:
        """`accumulate` for every activation row; block: the rows' records of it."""
        return [
            self.accumulate(total, dot, weight_scale, record)
            for total, dot, record in zip(totals, dots, block, strict=True)
        ]

    def add_minimums(self, totals: list[Value], minimum: Value, block: list[Value]) -> list[Value]:
        """totals + minimum * the scaled sums of the activations, for every row."""
        return [
            self.emit.fma(minimum, self.record_float(record, SCALED_SUM), total)
            for total, record in zip(totals, block, strict=True)
        ]

    def records(self, block: Value) -> list[Value]:
        """Addresses of the records of a block, of every activation row."""
        return [self.record(row, block) for row in self.rows]

    def dot(
        self, dots: list[Value], codes: Value, column: Value, offset: int, product: Callable[..., Value] | None = None
    ) -> list[Value]:
        """dots + codes * the four activations from column + offset on, of every row.

        product: `Emitter.dot_codes`, or another of its dot products.
        """
        product = product or self.emit.dot_codes
        return [product(dot, codes, self.bytes4(row, column, offset)) for dot, row in zip(dots, self.rows, strict=True)]

    def low(self, codes: Value) -> Value:
        return self.emit.builder.and_(codes, self.emit.splat_constant(I8, 15, 64))

    def high(self, codes: Value) -> Value:
        return self.moved_bits(codes, 4, 15, 0)

    def moved_bits(self, bits: Value, start: int, mask: int, target: int) -> Value:
        """Take the bits of `mask` at position `start` of every byte to position `target`.

        Shifted in words, whose stray bits the mask removes: a shift of bytes would become a Galois-field product, which
        takes a multiplier's turn.
        """
        b, emit = self.emit.builder, self.emit
        if start != target:
            words = emit.bitcast(bits, vector(I32))
            distance = emit.splat_constant(I32, abs(target - start))
            words = b.shl(words, distance) if start < target else b.lshr(words, distance)
            bits = emit.bitcast(words, vector(I8, 64))
        return b.and_(bits, emit.splat_constant(I8, mask << target, 64))

    def load_codes(self, address: Value, offset: int) -> Value:
        return self.emit.load(address, vector(I8, 64), offset, align=16 if self.layout is Layout.MXFP4 else 32)


def block_body(tile: Tile, block: Value, totals: list[Value]) -> list[Value]:
    """One block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0."""
    emit, layout, sizes = tile.emit, tile.layout, tile.sizes
    header, codes = tile.parts(block)
    scale = emit.load_floats(header, 0, F16)
    column = emit.builder.mul(block, emit.i64(32))
    records = tile.records(block)
    fifth = tile.load_codes(codes, 256) if layout in (Layout.Q5_0, Layout.Q5_1) else None

    if layout is Layout.Q8_0:
        dots = [emit.biased_start(tile.record_int(record, MINUS_8_SUM, shift=4)) for record in records]
        for j in range(8):
            tile.prefetch(block, sizes.unit_bytes, j, 8)
            loaded = tile.load_codes(codes, 64 * j)
            dots = tile.dot(dots, loaded, column, 4 * j, emit.dot_biased)
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
                dots = tile.dot(dots, nibbles, column, 16 * half + 4 * j)
    totals = tile.add_dots(totals, dots, scale, records)
    if layout in (Layout.Q4_1, Layout.Q5_1):
        totals = tile.add_minimums(totals, emit.load_floats(header, 32, F16), records)
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
        records = tile.records(block)
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
                dots = tile.dot(dots, loaded, column, 4 * j, emit.dot_biased)
                continue
            for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
                dots = tile.dot(dots, nibbles, column, 16 * half + 4 * j)
        return tile.add_dots(totals, dots, scale, records)

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
        records = tile.records(block)
        dots = [tile.minus_sum(record) for record in records]
        for j in range(8):
            tile.prefetch(unit, tile.sizes.unit_bytes, 8 * index + j, 8 * blocks)
            loaded = tile.load_codes(body, 64 * ((8 * index + j) * bits // 8))
            codes = tile.moved_bits(loaded, j * bits % 8, (1 << bits) - 1, 2 - bits)
            dots = tile.dot(dots, codes, column, 4 * j)
        totals = tile.add_dots(totals, dots, scale, records)
    return totals


def _six_bit_scales(tile: Tile, header: Value, pair: Value) -> tuple[list[Value], list[Value]]:
    """Scales and minimums of blocks 2p and 2p + 1 of a Q4_K or Q5_K super-block, times d and -dmin."""
    emit, b = tile.emit, tile.emit.builder
    d = emit.load_floats(header, 0, F16)
    minus_dmin = b.fneg(emit.load_floats(header, 32, F16))
    packed = tile.at(header, pair, 48)
    words = [b.zext(emit.load(packed, vector(I8), 64 + 16 * i, align=16), vector(I32)) for i in range(3)]
    low = [b.and_(word, emit.splat_constant(I32, 63)) for word in words]
    parts = [
        b.shl(b.lshr(word, emit.splat_constant(I32, 6)), emit.splat_constant(I32, 2 * i))
        for i, word in enumerate(words)
    ]
    first_minimum = b.or_(b.or_(parts[0], parts[1]), parts[2])
    scales = [emit.mul(d, emit.to_float(code)) for code in low[:2]]
    minimums = [emit.mul(minus_dmin, emit.to_float(code)) for code in (first_minimum, low[2])]
    return scales, minimums


def q4_k_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block of Q4_K or Q5_K, two blocks at a time."""
    emit, b, sizes = tile.emit, tile.emit.builder, tile.sizes
    header, body = tile.parts(super_block)
    fifth_bits = body if tile.layout is Layout.Q5_K else None
    codes_start = b.add(body, emit.i64(512)) if fifth_bits is not None else body
    first_unit = b.mul(super_block, emit.i64(4))

    def pair_body(pair: Value, totals: list[Value]) -> Sequence[Value]:
        unit = b.add(first_unit, pair)
        codes = tile.at(codes_start, pair, 512)
        column = b.mul(unit, emit.i64(64))
        scales, minimums = _six_bit_scales(tile, header, pair)
        blocks = [b.mul(unit, emit.i64(2)), b.add(b.mul(unit, emit.i64(2)), emit.i64(1))]
        dots = [[emit.zeros(I32) for _ in tile.rows] for _ in range(2)]
        shift = emit.splat(b.trunc(b.mul(pair, emit.i64(2)), I16), 32) if fifth_bits is not None else None
        for j in range(8):
            tile.prefetch(unit, sizes.unit_bytes // 4, j, 8)
            loaded = tile.load_codes(codes, 64 * j)
            bits = None
            if fifth_bits is not None:
                raw = emit.bitcast(tile.load_codes(fifth_bits, 64 * j), vector(I16, 32))
                bits = emit.bitcast(b.lshr(raw, shift), vector(I8, 64))
            for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
                if bits is not None:
                    nibbles = b.or_(nibbles, tile.moved_bits(bits, half, 1, 4))
                dots[half] = tile.dot(dots[half], nibbles, column, 32 * half + 4 * j)
        for half in range(2):
            records = tile.records(blocks[half])
            totals = tile.add_dots(totals, dots[half], scales[half], records)
            totals = tile.add_minimums(totals, minimums[half], records)
        return totals

    return emit.loop(emit.i64(0), emit.i64(4), 1, totals, pair_body)


def q6_k_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block of Q6_K, 128 columns at a time, of which blocks 0 and 2, then 1 and 3, share their bytes.

    Each block has one scale per 16 columns.
    """
    emit, b, sizes = tile.emit, tile.emit.builder, tile.sizes
    header, body = tile.parts(super_block)
    d = emit.load_floats(header, 0, F16)
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
                dots = [
                    [tile.record_int(one, MINUS_8_HALF + 4 * part, shift=2) for one in of_block] for of_block in records
                ]
                for j in range(4 * part, 4 * part + 4):
                    tile.prefetch(unit, sizes.unit_bytes // 2, 8 * first + j, 16)
                    loaded = tile.load_codes(codes, nibbles_place + nibbles_step * j)
                    upper = tile.load_codes(codes, 64 + 128 * j)
                    for index, (k, nibbles) in enumerate(
                        zip(blocks, (tile.low(loaded), tile.high(loaded)), strict=True)
                    ):
                        nibbles = b.or_(nibbles, tile.moved_bits(upper, 2 * k, 3, 4))
                        dots[index] = tile.dot(dots[index], nibbles, column, 32 * k + 4 * j)
                for k, of_block, dots_of_block in zip(blocks, records, dots, strict=True):
                    code = b.sext(emit.load(scales, vector(I8), 32 + 16 * (2 * k + part), align=16), vector(I32))
                    scale = emit.mul(d, emit.to_float(code))
                    totals = tile.add_dots(totals, dots_of_block, scale, of_block)
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)


def bit_pair_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block of Q2_K, Q3_K or TQ2_0, 128 columns at a time, whose four blocks share their bytes.

    Scales of groups of 16 columns are multiplied as integers, so a block has one step in float.
    """
    emit, b, layout = tile.emit, tile.emit.builder, tile.layout
    header, body = tile.parts(super_block)
    third_bits = body if layout is Layout.Q3_K else None
    codes_start = b.add(body, emit.i64(512)) if third_bits is not None else body
    d = emit.load_floats(header, 0, F16)
    # The activations' sums are stored times -8.
    eighth = (
        emit.mul(emit.load_floats(header, 32, F16), emit.splat_constant(F32, 0.125)) if layout is Layout.Q2_K else None
    )
    first_unit = b.mul(super_block, emit.i64(2))

    def half_body(half: Value, totals: list[Value]) -> Sequence[Value]:
        unit = b.add(first_unit, half)
        codes = tile.at(codes_start, half, 512)
        column = b.mul(unit, emit.i64(128))
        scales, minimums = _group_scales(tile, header, half)
        shift = emit.splat(b.trunc(b.mul(half, emit.i64(4)), I32))
        for pair in range(2):
            blocks = (2 * pair, 2 * pair + 1)
            records = [
                [tile.record(row, b.add(b.mul(unit, emit.i64(4)), emit.i64(k))) for row in tile.rows] for k in blocks
            ]
            dots: list[list[list[Value]]] = []
            for part in range(2):
                dots.append(
                    [[_start(tile, record, k, part) for record in one] for k, one in zip(blocks, records, strict=True)]
                )
                for j in range(4 * part, 4 * part + 4):
                    tile.prefetch(unit, tile.sizes.unit_bytes // 2, 8 * pair + j, 16)
                    loaded = tile.load_codes(codes, 64 * j)
                    upper = None
                    if third_bits is not None:
                        words = emit.bitcast(tile.load_codes(third_bits, 64 * j), vector(I32))
                        upper = emit.bitcast(b.lshr(words, shift), vector(I8, 64))
                    for index, k in enumerate(blocks):
                        place = _place(tile, k)
                        bits = tile.moved_bits(loaded, 2 * k, 3, place)
                        if upper is not None:
                            bits = b.or_(bits, tile.moved_bits(upper, k, 1, place + 2))
                        dots[part][index] = tile.dot(dots[part][index], bits, column, 32 * k + 4 * j)
            for index, k in enumerate(blocks):
                for t, record in enumerate(records[index]):
                    parts = [_moved_back(tile, dots[part][index][t], k) for part in range(2)]
                    whole = _sum_of_groups(tile, scales[2 * k : 2 * k + 2], parts)
                    totals[t] = tile.accumulate(totals[t], whole, d, record)
                    if eighth is not None:
                        sums = [tile.record_int(record, MINUS_8_HALF + 4 * part) for part in range(2)]
                        least = _sum_of_groups(tile, minimums[2 * k : 2 * k + 2], sums)
                        totals[t] = tile.accumulate(totals[t], least, eighth, record)
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)


def _place(tile: Tile, k: int) -> int:
    """Bit at which codes of block k are multiplied.

    For few rows, where they are, and the sum is shifted instead: one shift for four vectors. The highest are moved by
    one pair, because products take codes up to 127.
    """
    return min(2 * k, 4) if len(tile.rows) <= 2 else 0


def _moved_back(tile: Tile, dot: Value, k: int) -> Value:
    place = _place(tile, k)
    return tile.emit.builder.ashr(dot, tile.emit.splat_constant(I32, place)) if place else dot


def _start(tile: Tile, record: Value, k: int, part: int) -> Value:
    """Start of the sum of a group of 16 columns: their offset times the sum of activations."""
    if tile.layout is Layout.Q2_K:
        return tile.emit.zeros(I32)
    b, emit = tile.emit.builder, tile.emit
    word = emit.load(record, I32, MINUS_8_HALF + 4 * part, align=4)
    offset_shift = 1 if tile.layout is Layout.Q3_K else 3
    return emit.splat(b.shl(b.ashr(word, I32(offset_shift)), I32(_place(tile, k))))


def _group_scales(tile: Tile, header: Value, half: Value) -> tuple[list[Value], list[Value]]:
    """Scales and minimums of the eight groups of 128 columns, whole numbers below 2^15 in lanes of 32 bits."""
    emit, b = tile.emit, tile.emit.builder
    if tile.layout is Layout.TQ2_0:
        return [], []
    four = emit.splat_constant(I32, 4)
    if tile.layout is Layout.Q2_K:
        words = [emit.load(tile.at(header, half, 128), vector(I32), 64 + 64 * i, align=64) for i in range(2)]
        return [_field(tile, words[g // 4], 8 * (g % 4), 15) for g in range(8)], [
            _field(tile, words[g // 4], 8 * (g % 4) + 4, 15) for g in range(8)
        ]
    shift = b.mul(emit.splat(b.trunc(half, I32)), four)
    low, middle, high = (b.lshr(emit.load(header, vector(I32), 32 + 64 * i, align=32), shift) for i in range(3))
    scales = []
    for group in range(8):
        place = 8 * (group % 4)
        lower = _field(tile, low if group < 4 else middle, place, 15)
        upper = _field(tile, high, place + 2 * (group // 4), 3)
        scales.append(b.or_(lower, b.shl(upper, four)))
    return scales, []


def _field(tile: Tile, words: Value, start: int, mask: int) -> Value:
    emit = tile.emit
    moved = emit.builder.lshr(words, emit.splat_constant(I32, start)) if start else words
    return emit.builder.and_(moved, emit.splat_constant(I32, mask))


def _sum_of_groups(tile: Tile, scales: list[Value], sums: list[Value]) -> Value:
    """Sum of the products of two groups, whose factors fit 16 bits; without scales, of the sums."""
    emit, b = tile.emit, tile.emit.builder
    if not scales:
        return b.add(*sums)
    total, shorts = emit.zeros(I32), vector(I16, 32)
    for scale, value in zip(scales, sums, strict=True):
        factors = emit.bitcast(scale, shorts)
        if tile.layout is Layout.Q3_K:
            factors = b.sub(factors, emit.bitcast(emit.splat_constant(I32, 32), shorts))
        # The upper halves of factors are zero, so what is in those of the sums does not matter.
        total = emit.dot_pairs(total, factors, emit.bitcast(value, shorts))
    return total
