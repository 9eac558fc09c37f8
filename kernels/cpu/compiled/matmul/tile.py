"""What the products of all layouts share: addresses in a tile, activations and their records, codes, prefetching."""

from localinfer.kernels.cpu.compiled.simd.emit import F32, I8, I16, I32, Emitter, Value, vector
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
        """total + dot * (weight scale * activation scale): the one place where an integer dot becomes a float."""
        emit = self.emit
        scale = emit.mul(weight_scale, self.record_float(record, SCALE))
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
        return self.emit.load(address, vector(I8, 64), offset, align=16 if self.layout is Layout.MXFP4 else 32)
