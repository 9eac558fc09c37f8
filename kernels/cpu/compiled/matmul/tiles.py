"""The inner loop of GEMM: one tile of sixteen weight rows times one to eight rows of activations.

Every output element is one chain of fused multiply-adds over the blocks of its row in order, the same for any number of
activation rows and on every instruction set.

An activation row for quantized weights is `int8[K]` followed by one record per block of 32 (see `quantize.py`); for
float weights it is `float32[K]`.
"""

from collections.abc import Callable, Sequence

from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F16, F32, I8, I16, I32, I64, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import FLOAT, LITERAL, VOID, emitted
from localinfer.kernels.cpu.kernel_abi import RECORD_BYTES
from localinfer.kernels.layouts import SIZES, Layout

_SCALE, _SCALED_SUM, _MINUS_8_SUM, _MINUS_8_HALF = 0, 4, 8, 12

_SUPER_BLOCK_LAYOUTS = (Layout.Q4_K, Layout.Q5_K, Layout.Q6_K)


def prefetch_distance(layout: Layout, num_rows: int) -> tuple[int, int] | None:
    """Prefetch distance of a tile in bytes and cache level (3: the first level); None: no prefetch.

    With one row hardware prefetchers saturate the memory bandwidth, and software prefetches would only occupy miss
    buffers. With more work per byte they are slower, and a longer distance helps. Measured: tests/bench/RESULTS.md.
    """
    if num_rows == 1:
        return None
    return (4096, 3) if num_rows == 2 and layout not in _SUPER_BLOCK_LAYOUTS else (16384, 2)


class _Tile:
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
        word = b.ashr(emit.load(record, I32, _MINUS_8_SUM, align=4), I32(3))
        return emit.splat(b.sext(b.trunc(word, I16), I32))

    def accumulate(self, total: Value, dot: Value, weight_scale: Value, record: Value) -> Value:
        """total + dot * (weight scale * activation scale): the one place where an integer dot becomes a float."""
        emit = self.emit
        scale = emit.mul(weight_scale, self.record_float(record, _SCALE))
        return emit.fma(emit.to_float(dot), scale, total)

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
        return self.emit.load(address, vector(I8, 64), offset, align=32)


def _block_body(tile: _Tile, block: Value, totals: list[Value]) -> list[Value]:
    """One block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0."""
    emit, layout, sizes = tile.emit, tile.layout, tile.sizes
    header, codes = tile.parts(block)
    scale = emit.load_floats(header, 0, F16)
    column = emit.builder.mul(block, emit.i64(32))
    records = [tile.record(row, block) for row in tile.rows]
    fifth = tile.load_codes(codes, 256) if layout in (Layout.Q5_0, Layout.Q5_1) else None

    if layout is Layout.Q8_0:
        dots = [emit.biased_start(tile.record_int(record, _MINUS_8_SUM, shift=4)) for record in records]
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
            dots = [tile.record_int(record, _MINUS_8_SUM, shift) for record in records]
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
            emit.fma(minimum, tile.record_float(record, _SCALED_SUM), total)
            for total, record in zip(totals, records, strict=True)
        ]
    return totals


def _six_bit_scales(tile: _Tile, header: Value, pair: Value) -> tuple[list[Value], list[Value]]:
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


def _q4_k_body(tile: _Tile, super_block: Value, totals: list[Value]) -> list[Value]:
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
                dots[half] = [
                    emit.dot_codes(dot, nibbles, tile.bytes4(row, column, 32 * half + 4 * j))
                    for dot, row in zip(dots[half], tile.rows, strict=True)
                ]
        for half in range(2):
            records = [tile.record(row, blocks[half]) for row in tile.rows]
            totals = [
                tile.accumulate(total, dot, scales[half], record)
                for total, dot, record in zip(totals, dots[half], records, strict=True)
            ]
            totals = [
                emit.fma(minimums[half], tile.record_float(record, _SCALED_SUM), total)
                for total, record in zip(totals, records, strict=True)
            ]
        return totals

    return emit.loop(emit.i64(0), emit.i64(4), 1, totals, pair_body)


def _q6_k_body(tile: _Tile, super_block: Value, totals: list[Value]) -> list[Value]:
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
                    [tile.record_int(one, _MINUS_8_HALF + 4 * part, shift=2) for one in of_block]
                    for of_block in records
                ]
                for j in range(4 * part, 4 * part + 4):
                    tile.prefetch(unit, sizes.unit_bytes // 2, 8 * first + j, 16)
                    loaded = tile.load_codes(codes, nibbles_place + nibbles_step * j)
                    upper = tile.load_codes(codes, 64 + 128 * j)
                    for index, (k, nibbles) in enumerate(
                        zip(blocks, (tile.low(loaded), tile.high(loaded)), strict=True)
                    ):
                        nibbles = b.or_(nibbles, tile.moved_bits(upper, 2 * k, 3, 4))
                        dots[index] = [
                            emit.dot_codes(dot, nibbles, tile.bytes4(row, column, 32 * k + 4 * j))
                            for dot, row in zip(dots[index], tile.rows, strict=True)
                        ]
                for k, of_block, dots_of_block in zip(blocks, records, dots, strict=True):
                    code = b.sext(emit.load(scales, vector(I8), 32 + 16 * (2 * k + part), align=16), vector(I32))
                    scale = emit.mul(d, emit.to_float(code))
                    totals = [
                        tile.accumulate(total, dot, scale, record)
                        for total, dot, record in zip(totals, dots_of_block, of_block, strict=True)
                    ]
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)


def _group_body(tile: _Tile, group: Value, totals: list[Value]) -> list[Value]:
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
            biases = [emit.biased_start(tile.record_int(record, _MINUS_8_SUM, shift=4)) for record in records]
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


_BODIES: dict[Layout, Callable[[_Tile, Value, list[Value]], list[Value]]] = {
    Layout.Q8_0: _block_body,
    Layout.Q4_0: _block_body,
    Layout.Q4_1: _block_body,
    Layout.Q5_0: _block_body,
    Layout.Q5_1: _block_body,
    Layout.Q4_K: _q4_k_body,
    Layout.Q5_K: _q4_k_body,
    Layout.Q6_K: _q6_k_body,
    Layout.INT4_32: _group_body,
    Layout.INT4_64: _group_body,
    Layout.INT4_128: _group_body,
    Layout.INT8_32: _group_body,
}

_FLOAT_ELEMENT = {Layout.F32: F32, Layout.F16: F16, Layout.BF16: I16}


def _float_totals(tile: _Tile) -> list[Value]:
    """Float weights: even and odd columns are summed apart, so that two chains hide each other's latency."""
    emit, b = tile.emit, tile.emit.builder
    element, column_bytes = _FLOAT_ELEMENT[tile.layout], tile.sizes.unit_bytes
    count = len(tile.rows)

    def step(column: Value, offset: int, totals: list[Value]) -> list[Value]:
        weight = emit.load_floats(tile.at(tile.tile, column, column_bytes), offset * column_bytes, element)
        return [
            emit.fma(weight, emit.splat(emit.load(tile.at(row, column, 4), F32, 4 * offset, align=4)), total)
            for total, row in zip(totals, tile.rows, strict=True)
        ]

    def quad(column: Value, totals: list[Value]) -> Sequence[Value]:
        tile.prefetch(b.lshr(column, emit.i64(2)), 4 * column_bytes, 0, 1)
        even, odd = totals[:count], totals[count:]
        for offset in (0, 2):
            even, odd = step(column, offset, even), step(column, offset + 1, odd)
        return even + odd

    whole = b.and_(tile.columns, emit.i64(-4))
    totals = emit.loop(emit.i64(0), whole, 4, [emit.zeros(F32)] * (2 * count), quad)
    rest = emit.loop(whole, tile.columns, 1, totals[:count], lambda column, even: step(column, 0, even))
    return [emit.add(even, odd) for even, odd in zip(rest, totals[count:], strict=True)]


@emitted(VOID, LITERAL, LITERAL, *[types.int64] * 4, FLOAT, types.int64, types.int64)
def tile_product(
    emit: Emitter, layout: int, num_rows: int, tile_address: Value, column_count: Value, table: Value,
    bias_address: Value, scale_value: Value, first_row: Value, row_limit: Value,
) -> None:  # fmt: skip
    """out = residual + scale * (x @ tile.T + bias) for `num_rows` (literal) activation rows and one tile.

    tables: address of int64[3][8]: activation row, output and residual addresses of each row; outputs and residuals are
    offset by `first` (the tile's first weight row), of which `count` (1..16) exist. bias: address of 16 float32.
    """
    rows = [emit.load(table, I64, 8 * t, align=8) for t in range(num_rows)]
    product = _Tile(emit, Layout(layout), tile_address, column_count, rows)
    if product.layout in _FLOAT_ELEMENT:
        totals = _float_totals(product)
    else:
        body = _BODIES[product.layout]
        totals = emit.loop(
            emit.i64(0),
            product.units,
            1,
            [emit.zeros(F32)] * num_rows,
            lambda unit, totals: body(product, unit, totals),
        )
    _write(emit, totals, table, bias_address, scale_value, first_row, row_limit)


def _write(
    emit: Emitter, totals: list[Value], table: Value, bias: Value, scale: Value, first: Value, count: Value
) -> None:
    """Apply bias, scale and residual, and store the lanes that exist."""
    b = emit.builder
    offset = b.mul(first, emit.i64(4))
    bias_lanes = emit.load_floats(bias)
    scale_lanes = emit.splat(scale)
    results = []
    for t, total in enumerate(totals):
        residual = emit.load(table, I64, 8 * (16 + t), align=8)
        value = emit.mul(emit.add(total, bias_lanes), scale_lanes)
        results.append(emit.add(emit.load_floats(b.add(residual, offset)), value))
    outputs = [b.add(emit.load(table, I64, 8 * (8 + t), align=8), offset) for t in range(len(totals))]
    whole = b.icmp_signed("==", count, emit.i64(16))
    with b.if_else(whole) as (then, otherwise):
        with then:
            for value, output in zip(results, outputs, strict=True):
                emit.store(value, output, align=4)
        with otherwise:
            for value, output in zip(results, outputs, strict=True):
                emit.store_first(value, output, count)
