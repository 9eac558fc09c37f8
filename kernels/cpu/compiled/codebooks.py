"""Products of layouts whose codes are looked up, in tables of sixteen levels or in grids of vectors of four or eight.

Tables (MXFP4, NVFP4, IQ4_NL, IQ4_XS): a byte shuffle looks up 64 codes at once. MXFP4 and NVFP4: Open Compute Project
Microscaling Formats 1.0, section 5.3.

Grids (IQ2, IQ3): levels are looked up for sixteen rows at once: with AVX-512 VBMI by byte shuffles over the whole grid,
packed as two bytes per vector, and elsewhere by one load per vector from memory. Signs, and bits of indices above the
eighth, lie in a tile as masks: bit 4 * r + c of 64 is that of row r and column (or index) c of four.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from localinfer.kernels.cpu.compiled.emit import F16, F32, I1, I8, I16, I32, I64, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.tile import MINUS_8_HALF, MINUS_8_SUM, Tile
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.layouts import Layout, grid_vectors

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODES = tuple(12 + level for level in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice the values of the codes of E2M1, plus 12."""


def iq4_body(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """One block of IQ4_NL or one super-block of IQ4_XS."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    d = tile.floats(header)
    if tile.layout is Layout.IQ4_NL:
        return _iq4_block(tile, unit, body, d, tile.sizes.unit_bytes, totals)
    first = b.mul(unit, emit.i64(8))

    def block_body_of_planes(index: Value, totals: list[Value]) -> Sequence[Value]:
        # Of eight rows the sums leave no register for it.
        factor = d if tile.num_rows < 8 else tile.floats(emit.opaque(header, index))
        scale = emit.mul(factor, _scale_of_planes(tile, header, index))
        return _iq4_block(tile, b.add(first, index), tile.at(body, index, 256), scale, 0, totals)

    if tile.has_byte_planes:
        return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body_of_planes)

    high, low = b.zext(tile.values(header, I16, 32), tile.vector(I32)), tile.values(header, I32, 64)

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        twice = b.trunc(b.mul(index, emit.i64(2)), I32)
        upper = b.and_(b.lshr(high, tile.splat(twice)), tile.constant(I32, 3))
        lower = b.and_(b.lshr(low, tile.splat(b.add(twice, twice))), tile.constant(I32, 15))
        code = b.or_(lower, b.shl(upper, tile.constant(I32, 4)))
        scale = emit.mul(d, emit.to_float(b.sub(code, tile.constant(I32, 32))))
        codes = tile.at(body, index, 256)
        return _iq4_block(tile, b.add(first, index), codes, scale, tile.sizes.unit_bytes // 8, totals)

    if tile.num_rows == 1 and not emit.is_neon:
        # Shifts by constants: those by numbers take the scales of one row a third of its time.
        for index in range(8):
            totals = list(block_body(emit.i64(index), totals))
        return totals
    return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body)


def _scale_of_planes(tile: Tile, header: Value, index: Value) -> Value:
    """Six bits less 32 of a block of IQ4_XS, as float32, from planes with the bytes of sixteen rows."""
    emit, b = tile.emit, tile.emit.builder

    def field(offset: int, bits: int, target: int) -> Value:
        per_byte = 8 // bits
        place = tile.at(header, b.udiv(index, emit.i64(per_byte)), 16)
        codes = tile.some_bytes(place, offset)
        start = b.trunc(b.mul(b.and_(index, emit.i64(per_byte - 1)), emit.i64(bits)), I8)
        count = codes.type.count
        if emit.is_neon:
            moved = emit.shifted(codes, emit.splat(b.sub(I8(target), start), count))
            return b.and_(moved, emit.splat_constant(I8, ((1 << bits) - 1) << target, count))
        kept = b.and_(b.lshr(codes, emit.splat(start, count)), emit.splat_constant(I8, (1 << bits) - 1, count))
        return b.shl(kept, emit.splat_constant(I8, target, count))

    return emit.bytes_to_floats(b.or_(field(64, 4, 0), field(32, 2, 4)), tile.count, less=32)


def _iq4_block(
    tile: Tile, block: Value, codes: Value, scale: Value, num_bytes: int, totals: list[Value]
) -> list[Value]:
    emit = tile.emit
    column = emit.builder.mul(block, emit.i64(32))
    records = tile.records(block)
    sums = tile.sums([tile.biased_start(record) for record in records])
    for halves, again in tile.halves():
        for j in range(4):
            tile.prefetch(block, num_bytes, j, 4)
            loaded = tile.load_codes(again(codes), j)
            both = tile.indices(loaded)
            for half in halves:
                levels = emit.lookup_levels(IQ4_LEVELS, both[half])
                chosen = half % len(sums)
                sums[chosen] = tile.dot(sums[chosen], levels, column, 16 * half + 4 * j, emit.dot_levels)
    return tile.add_dots(totals, tile.joined(sums), scale, records)


def _e2m1_codes(tile: Tile) -> Sequence[int]:
    """Numbers that codes of E2M1 are multiplied as, signed where products take it."""
    return [code - 12 for code in E2M1_CODES] if tile.takes_signed else E2M1_CODES


def _e2m1_starts(tile: Tile, records: list[Any], field: int) -> list[Value]:
    """Starts of dot products with these codes, from the sums of the activations in a field."""
    if tile.takes_signed:
        return [tile.no_dot(record) for record in records]
    return [tile.minus_12_sum(record, field) for record in records]


def _power_of_two(tile: Tile, header: Value) -> Value:
    """2 ** (e - 128) of the rows' bytes e."""
    emit, b = tile.emit, tile.emit.builder
    if emit.is_neon:
        doubled = emit.bitcast(emit.bytes_to_exponents(tile.some_bytes(header, 0), tile.count), tile.vector(F32))
        half = emit.bitcast(emit.mul(doubled, tile.constant(F32, 0.5)), tile.vector(I32))
        # Of e = 0 the product is 0, and of others larger than 2 ** -128.
        least = tile.constant(I32, 1 << 21)
        return emit.bitcast(emit.call(f"llvm.umax.v{tile.count}i32", half.type, [half, least]), tile.vector(F32))
    exponent = b.zext(tile.values(header, I8), tile.vector(I32))
    normal = b.shl(b.sub(exponent, tile.constant(I32, 1)), tile.constant(I32, 23))
    # Float32 has 2 ** -128 and 2 ** -127 as subnormal numbers only.
    subnormal = b.shl(tile.constant(I32, 1 << 21), exponent)
    is_subnormal = b.icmp_unsigned("<", exponent, tile.constant(I32, 2))
    return emit.bitcast(b.select(is_subnormal, subnormal, normal), tile.vector(F32))


def mxfp4_body(tile: Tile, block: Value, totals: list[Value]) -> list[Value]:
    """One block of MXFP4, whose scale byte e stands for 2 ** (e - 128) of doubled E2M1."""
    emit, b = tile.emit, tile.emit.builder
    header, codes = tile.parts(block)
    scale = _power_of_two(tile, header)
    column = b.mul(block, emit.i64(32))
    records = tile.records(block)
    sums = tile.sums(_e2m1_starts(tile, records, MINUS_8_SUM))
    for halves, again in tile.halves():
        for j in range(4):
            tile.prefetch(block, tile.sizes.unit_bytes, j, 4)
            loaded = tile.load_codes(again(codes), j)
            both = tile.indices(loaded)
            for half in halves:
                doubled = emit.lookup(_e2m1_codes(tile), both[half])
                chosen = half % len(sums)
                sums[chosen] = tile.dot(sums[chosen], doubled, column, 16 * half + 4 * j, largest=max(E2M1_CODES))
    return tile.add_dots(totals, tile.joined(sums), scale, records)


def nvfp4_body(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """64 columns of NVFP4: two blocks, each of whose halves has a scale of its own."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    scales = tile.values(header, I32, align=64)
    first = b.mul(unit, emit.i64(2))
    for index in range(2):
        block = b.add(first, emit.i64(index))
        column = b.mul(block, emit.i64(32))
        records = tile.records(block)
        for half in range(2):
            group = 2 * index + half
            dots = _e2m1_starts(tile, records, MINUS_8_HALF + 4 * half)
            for j in range(2):
                tile.prefetch(unit, tile.sizes.unit_bytes, 2 * group + j, 8)
                loaded = tile.load_codes(body, 2 * group + j)
                for part, nibbles in enumerate(tile.indices(loaded)):
                    doubled = emit.lookup(_e2m1_codes(tile), nibbles)
                    dots = tile.dot(dots, doubled, column, 16 * half + 8 * part + 4 * j, largest=max(E2M1_CODES))
            scale = _half_of_e4m3(tile, b.lshr(scales, tile.constant(I32, 8 * group)))
            totals = tile.add_dots(totals, dots, scale, records)
    return totals


def _half_of_e4m3(tile: Tile, words: Value) -> Value:
    """Half of the unsigned E4M3 numbers (bias 7) in the low bytes of words; 0x7F is read as zero, bit 7 ignored."""
    emit, b = tile.emit, tile.emit.builder
    code = b.and_(words, tile.constant(I32, 255))
    # As a float32 its exponent is 119 short (120, and 1 for the half); the product is right for subnormals too.
    bits = b.shl(b.and_(code, tile.constant(I32, 127)), tile.constant(I32, 20))
    value = emit.mul(emit.bitcast(bits, tile.vector(F32)), tile.constant(F32, 2.0**119))
    is_nan = b.icmp_unsigned("==", code, tile.constant(I32, 127))
    return b.select(is_nan, tile.constant(F32, 0), value)


BIAS = 64
"""Levels with their signs, plus this, are the codes that are multiplied: 2 to 126."""


@dataclass(frozen=True)
class _Block:
    """32 columns of sixteen rows."""

    indices: Sequence[Value]
    """Addresses of vectors of low bytes of grid indices, four to a lane."""
    high: Sequence[Sequence[Value]]
    """For each such vector, masks of the bits above."""
    signs: Sequence[Value]
    """Eight masks, of four columns each."""
    codes: Sequence[Value]
    """One or two odd whole numbers that scale the columns."""


_UNIT_OF_SCALES = {
    Layout.IQ2_XXS: 0.125,
    Layout.IQ2_XS: 0.125,
    Layout.IQ2_S: 0.125,
    Layout.IQ3_XXS: 0.25,
    Layout.IQ3_S: 1.0,
}


def grid_body(tile: Tile, super_block: Value, totals: list[Value]) -> list[Value]:
    """One super-block, block by block."""
    emit, b = tile.emit, tile.emit.builder
    first = b.mul(super_block, emit.i64(8))

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        block = b.add(first, index)
        levels, scales = grid_block(tile, super_block, index)

        def level(j: int) -> Value:
            tile.prefetch(block, tile.sizes.unit_bytes // 8, j, 8)
            return next(levels)

        return add_grid_block(tile, block, totals, level, scales)

    return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body)


def grid_block(tile: Tile, super_block: Value, index: Value) -> tuple[Iterator[Value], list[Value]]:
    """Biased levels of a block of a super-block, vectors of four columns, and scales of all columns or of halves.

    A vector is looked up when it is taken: AVX2's registers do not hold all eight.
    """
    emit = tile.emit
    header, body = tile.parts(super_block)
    d = emit.mul(emit.load_floats(header, 0, F16), emit.splat_constant(F32, _UNIT_OF_SCALES[tile.layout]))
    found = _READERS[tile.layout](tile, header, body, index)
    return _levels(tile, found), [emit.mul(d, emit.to_float(code)) for code in found.codes]


def add_grid_block(
    tile: Tile, block: Value, totals: list[Value], level: Callable[[int], Value], scales: Sequence[Value]
) -> list[Value]:
    """Add the products of a block's levels, vector by vector, to totals."""
    column = tile.emit.builder.mul(block, tile.emit.i64(32))
    records = tile.records(block)
    field = MINUS_8_SUM if len(scales) == 1 else MINUS_8_HALF
    vectors = 8 // len(scales)
    for group, scale in enumerate(scales):
        dots = [tile.started_from(record, field + 4 * group, shift=3) for record in records]
        for j in range(vectors * group, vectors * (group + 1)):
            dots = tile.dot(dots, level(j), column, 4 * j)
        totals = tile.add_dots(totals, dots, scale, records)
    return totals


def _levels(tile: Tile, block: _Block) -> Iterator[Value]:
    """Eight vectors of four columns: levels with signs, plus the bias."""
    emit, b = tile.emit, tile.emit.builder
    magnitudes = _by_shuffles(tile, block) if emit.has_byte_permutes else _by_loads(tile, block)
    for mask, magnitude in zip(block.signs, magnitudes, strict=True):
        opposite = b.sub(emit.splat_constant(I8, 2 * BIAS, 64), magnitude)
        yield b.select(_lanes_of(emit, mask), opposite, magnitude)


def _lanes_of(emit: Emitter, mask: Value) -> Value:
    return emit.bitcast(mask, vector(I1, 64))


def _by_shuffles(tile: Tile, block: _Block) -> list[Value]:
    """Vectors of biased magnitudes: two lookups give what a whole grid vector is, as small codes."""
    emit = tile.emit
    levels, tables = _small_codes(tile.layout)
    found = []
    for word, address in enumerate(block.indices):
        indices = tile.load_codes(address, 0)
        halves = [_look_up(emit, table, indices, block.high[word]) for table in tables]
        if len(levels) == 3:
            # A byte has the codes of four columns, two bits each.
            for j in range(8):
                found.append(_codes_at(emit, halves[j % 2], 8 * (j // 2), levels, 2))
            continue
        # A byte has the codes of two columns, four bits each.
        for pair in range(2):
            lanes = [
                4 * lane + 2 * pair + byte + 64 * half for lane in range(16) for byte in range(2) for half in range(2)
            ]
            both = emit.builder.shuffle_vector(halves[0], halves[1], ir.Constant(vector(I32, 64), lanes))
            for index in range(2):
                found.append(_codes_at(emit, both, 16 * index, levels, 4))
    return found


def _codes_at(emit: Emitter, packed: Value, place: int, levels: Sequence[int], bits: int) -> Value:
    """Biased levels of four codes, the first at a bit of every lane."""
    codes = emit.bits_to_bytes(packed, [place + bits * column for column in range(4)])
    # The bits above a code belong to others: every entry that they can lead to holds the same.
    table = [BIAS + level for level in levels] + [0] * ((1 << bits) - len(levels))
    operands = [ir.Constant(vector(I8, 64), table * (64 >> bits)), codes]
    return emit.call("llvm.x86.avx512.permvar.qi.512", vector(I8, 64), operands)


def _look_up(emit: Emitter, table: NDArray[np.uint8], indices: Value, high: Sequence[Value]) -> Value:
    """Bytes of a table of 256, 512 or 1,024."""
    b = emit.builder
    pieces = [ir.Constant(vector(I8, 64), part.tolist()) for part in table.reshape(-1, 64)]
    found = [
        emit.call("llvm.x86.avx512.vpermi2var.qi.512", vector(I8, 64), [left, indices, right])
        for left, right in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    is_upper = b.icmp_signed("<", indices, emit.zeros(I8, 64))
    found = [b.select(is_upper, two, one) for one, two in zip(found[::2], found[1::2], strict=True)]
    for mask in high:
        is_set = _lanes_of(emit, mask)
        found = [b.select(is_set, two, one) for one, two in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _small_codes(layout: Layout) -> tuple[list[int], tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """The levels of a grid, and its vectors as two bytes of indices into them."""
    grid = grid_vectors(layout.name)
    levels = np.unique(grid)
    codes = np.searchsorted(levels, grid).astype(np.uint8).reshape(len(grid), 2, -1)
    bits = 8 // codes.shape[2]
    packed = np.bitwise_or.reduce(codes << (np.arange(codes.shape[2], dtype=np.uint8) * np.uint8(bits)), axis=2)
    return levels.tolist(), (packed[:, 0], packed[:, 1])


def _by_loads(tile: Tile, block: _Block) -> Iterator[Value]:
    """The same by one load for every vector of the grid and row."""
    emit, b = tile.emit, tile.emit.builder
    grid = grid_vectors(tile.layout.name)
    start, element = grid_address(emit, tile.layout), {4: I32, 8: I64}[grid.shape[1]]
    # Two registers of AVX2 give every first or second word of their lanes in this order by one instruction.
    lanes = _FOR_TWO_REGISTERS if element is I64 and emit.isa in _WITHOUT_MASKS else range(16)
    for word, address in enumerate(block.indices):
        wide = _wide_indices(emit, tile.load_codes(address, 0), block.high[word]) if block.high[word] else None
        for number in range(4):
            source = tile.ordered(address if wide is None else wide)
            levels: Any = ir.Constant(vector(element), ir.Undefined)
            for place, lane in enumerate(lanes):
                index = 4 * lane + number
                if wide is None:
                    entry = b.zext(emit.load(source, I8, index), I64)
                else:
                    entry = b.zext(emit.load(source, I16, 2 * _WIDE_PLACES[index], align=2), I64)
                one = emit.load(b.add(start, b.mul(entry, emit.i64(grid.shape[1]))), element, align=1)
                levels = b.insert_element(levels, one, emit.i32(place))
            if element is I32:
                yield emit.bitcast(levels, vector(I8, 64))
                continue
            words = emit.bitcast(levels, vector(I32, 32))
            for half in range(2):
                chosen = [2 * lanes.index(lane) + half for lane in range(16)]
                yield emit.bitcast(emit.shuffle(words, chosen), vector(I8, 64))


_WITHOUT_MASKS = (ISA.AVX2, ISA.AVX_VNNI)
"""Paths of vectors of 32 bytes, which have no registers for masks."""
_FOR_TWO_REGISTERS = (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)

_WIDE_PLACES = [index & 32 | (index & 8) << 1 | (index & 16) >> 1 | index & 7 for index in range(64)]
"""Places of indices in what `_wide_indices` stores: AVX2 interleaves bytes of eight of every sixteen."""


def _wide_indices(emit: Emitter, low: Value, high: Sequence[Value]) -> Value:
    """Address of 64 indices of 16 bits, of their low bytes and masks of the bits above.

    In memory, since LLVM would take each bit out of its mask for a load, in registers that are not there.
    """
    b = emit.builder
    upper = emit.zeros(I8, 64)
    for bit, mask in enumerate(high):
        one = b.select(_lanes_of(emit, mask), emit.splat_constant(I8, 1 << bit, 64), emit.zeros(I8, 64))
        upper = b.or_(upper, one)
    order = sorted(range(64), key=_WIDE_PLACES.__getitem__)
    lanes = [index + 64 * part for index in order for part in range(2)]
    return emit.stored(b.shuffle_vector(low, upper, ir.Constant(vector(I32, 128), lanes)))


def grid_address(emit: Emitter, layout: Layout) -> Value:
    """Address of a layout's grid in memory: biased levels, a byte each, vector after vector."""
    name = f"grid_{layout.name.lower()}"
    module = emit.builder.module
    found = module.globals.get(name)
    if found is None:
        values = (grid_vectors(layout.name).astype(np.int64).reshape(-1) + BIAS).tolist()
        kind = ir.ArrayType(I8, len(values))
        found = ir.GlobalVariable(module, kind, name)
        found.global_constant, found.linkage, found.align = True, "internal", 64
        found.initializer = ir.Constant(kind, bytearray(values))
    return emit.builder.ptrtoint(found, I64)


# Where each layout has its indices, signs and scales.


def _word(tile: Tile, place: Value, offset: int) -> Value:
    return tile.emit.load(place, vector(I32), offset, align=32)


def _masks(tile: Tile, place: Value, offset: int, count: int) -> list[Value]:
    return [tile.emit.load(place, I64, offset + 8 * j, align=8) for j in range(count)]


def _odd_codes(tile: Tile, header: Value, offset: int, index: Value) -> list[Value]:
    """2 * s + 1 of both nibbles of byte `index` of every row, of the two vectors at an offset of the header."""
    emit, b = tile.emit, tile.emit.builder
    words = _word(tile, tile.at(header, b.lshr(index, emit.i64(2)), 64), offset)
    shift = b.mul(b.and_(index, emit.i64(3)), emit.i64(8))
    return [_odd(tile, words, b.add(shift, emit.i64(place))) for place in (0, 4)]


def _odd(tile: Tile, words: Value, start: Value) -> Value:
    """2 * s + 1 of four bits of every word, from `start` on."""
    b, emit = tile.emit.builder, tile.emit
    code = b.and_(b.lshr(words, emit.splat(b.trunc(start, I32))), emit.splat_constant(I32, 15))
    return b.add(b.add(code, code), emit.splat_constant(I32, 1))


_EIGHTHS = 0x8888888888888888
"""Bits of the eighth column in masks of columns 4 to 7 of eight."""


def _even_signs(tile: Tile, place: Value, offset: int) -> tuple[list[Value], Value]:
    """Signs of which every eighth makes the number of minus signs even, and a mask of the bits stored instead of it."""
    b, emit = tile.emit.builder, tile.emit
    if emit.isa in _WITHOUT_MASKS:
        return _even_signs_by_vectors(tile, place, offset)
    masks = _masks(tile, place, offset, 8)
    others = emit.i64(0)
    for index in range(4):
        odd = masks[2 * index + 1]
        stored = b.and_(odd, emit.i64(_EIGHTHS))
        others = b.or_(others, b.lshr(stored, emit.i64(3 - index)))
        seven = b.xor(masks[2 * index], b.and_(odd, emit.i64(_EIGHTHS ^ (1 << 64) - 1)))
        pairs = b.xor(seven, b.lshr(seven, emit.i64(2)))
        parity = b.shl(b.xor(pairs, b.lshr(pairs, emit.i64(1))), emit.i64(3))
        masks[2 * index + 1] = b.or_(
            b.and_(odd, emit.i64(_EIGHTHS ^ (1 << 64) - 1)), b.and_(parity, emit.i64(_EIGHTHS))
        )
    return masks, others


def _even_signs_by_vectors(tile: Tile, place: Value, offset: int) -> tuple[list[Value], Value]:
    """The same, four masks at once: without registers for masks, each becomes a vector of bytes by vectors."""
    b, emit = tile.emit.builder, tile.emit

    def splat(value: int) -> Value:
        return emit.splat_constant(I64, value, 4)

    masks = emit.load(place, vector(I64, 8), offset, align=8)
    even, odd = (b.shuffle_vector(masks, masks, emit.constants(I32, list(range(half, 8, 2)))) for half in range(2))
    stored, seven_of_odd = b.and_(odd, splat(_EIGHTHS)), b.and_(odd, splat(_EIGHTHS ^ (1 << 64) - 1))
    seven = b.xor(even, seven_of_odd)
    pairs = b.xor(seven, b.lshr(seven, splat(2)))
    parity = b.and_(b.shl(b.xor(pairs, b.lshr(pairs, splat(1))), splat(3)), splat(_EIGHTHS))
    whole = b.or_(seven_of_odd, parity)
    moved = b.lshr(stored, emit.constants(I64, [3, 2, 1, 0]))
    others = emit.call("llvm.vector.reduce.or.v4i64", I64, [moved])
    return [b.extract_element((even, whole)[j % 2], emit.i32(j // 2)) for j in range(8)], others


def _odd_of_mask(tile: Tile, mask: Value) -> Value:
    """2 * s + 1 of the four bits that a mask has for every row."""
    emit = tile.emit
    bits = ir.Constant(vector(I8, 64), [2 << byte % 4 for byte in range(64)])
    chosen = emit.builder.select(_lanes_of(emit, mask), bits, emit.zeros(I8, 64))
    return emit.dot_codes(emit.splat_constant(I32, 1), chosen, emit.splat_constant(I8, 1, 64))


def _iq2_xxs(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    place = tile.at(body, index, 128)
    signs, scale = _even_signs(tile, place, 64)
    return _Block([place], [[]], signs, [_odd_of_mask(tile, scale)])


def _iq2_xs(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    place = tile.at(body, index, 128)
    signs, ninth = _even_signs(tile, place, 64)
    codes = _odd_codes(tile, header, 32, index)
    return _Block([place], [[ninth]], signs, codes)


def _iq2_s(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    place = tile.at(body, index, 128)
    high = _masks(tile, tile.at(header, index, 16), 160, 2)
    codes = _odd_codes(tile, header, 32, index)
    return _Block([place], [high], _masks(tile, place, 64, 8), codes)


def _four_levels(tile: Tile, body: Value, index: Value) -> list[Value]:
    """Addresses of two vectors of indices of vectors of four."""
    place = tile.at(body, index, 128)
    return [place, tile.emit.builder.add(place, tile.emit.i64(64))]


def _iq3_xxs(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    signs, scale = _even_signs(tile, tile.at(body, index, 64), 1024)
    return _Block(_four_levels(tile, body, index), [[], []], signs, [_odd_of_mask(tile, scale)])


def _iq3_s(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    emit, b = tile.emit, tile.emit.builder
    high = [[mask] for mask in _masks(tile, tile.at(header, index, 16), 96, 2)]
    signs = _masks(tile, tile.at(body, index, 64), 1024, 8)
    code = _odd(tile, _word(tile, header, 32), b.mul(index, emit.i64(4)))
    return _Block(_four_levels(tile, body, index), high, signs, [code])


_READERS = {
    Layout.IQ2_XXS: _iq2_xxs,
    Layout.IQ2_XS: _iq2_xs,
    Layout.IQ2_S: _iq2_s,
    Layout.IQ3_XXS: _iq3_xxs,
    Layout.IQ3_S: _iq3_s,
}
