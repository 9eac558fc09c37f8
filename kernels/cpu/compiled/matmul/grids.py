"""Products of layouts whose codes are places in a grid of vectors of four or eight levels: IQ2 and IQ3.

Levels are looked up for sixteen rows at once: with AVX-512 VBMI by byte shuffles over the whole grid, packed as two
bytes per vector, and elsewhere by one load per vector from memory. A byte of signs belongs to eight columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from localinfer.kernels.cpu.compiled.matmul.tile import MINUS_8_HALF, MINUS_8_SUM, Tile
from localinfer.kernels.cpu.compiled.simd.emit import F16, F32, I8, I32, I64, Emitter, Value, vector
from localinfer.kernels.grid_tables import grid_vectors
from localinfer.kernels.layouts import Layout

BIAS = 64
"""Levels with their signs, plus this, are the codes that are multiplied: 2 to 126."""


@dataclass(frozen=True)
class _Block:
    """32 columns of sixteen rows.

    indices: low bytes of places in the grid, four to a lane. high: for each, what is above them, a byte each, or None.
    signs: a bit per column. codes: one or two odd whole numbers that scale them.
    """

    indices: Sequence[Value]
    high: Sequence[Value] | None
    signs: Value
    codes: Sequence[Value]


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
    header, body = tile.parts(super_block)
    d = emit.mul(emit.load_floats(header, 0, F16), emit.splat_constant(F32, _UNIT_OF_SCALES[tile.layout]))
    first = b.mul(super_block, emit.i64(8))

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        block = b.add(first, index)
        column = b.mul(block, emit.i64(32))
        records = [tile.record(row, block) for row in tile.rows]
        found = _READERS[tile.layout](tile, header, body, index)
        levels = _levels(tile, found)
        groups = len(found.codes)
        field = MINUS_8_SUM if groups == 1 else MINUS_8_HALF
        vectors = 8 // groups
        for group, code in enumerate(found.codes):
            dots = [tile.record_int(record, field + 4 * group, shift=3) for record in records]
            for j in range(vectors * group, vectors * (group + 1)):
                tile.prefetch(block, tile.sizes.unit_bytes // 8, j, 8)
                dots = [
                    emit.dot_codes(dot, levels[j], tile.bytes4(row, column, 4 * j))
                    for dot, row in zip(dots, tile.rows, strict=True)
                ]
            scale = emit.mul(d, emit.to_float(code))
            totals = [
                tile.accumulate(total, dot, scale, record)
                for total, dot, record in zip(totals, dots, records, strict=True)
            ]
        return totals

    return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body)


def _levels(tile: Tile, block: _Block) -> list[Value]:
    """Eight vectors of four columns: levels with signs, plus the bias."""
    emit, b = tile.emit, tile.emit.builder
    signs = emit.bitcast(block.signs, vector(I8, 64))
    if emit.has_byte_permutes:
        return _by_shuffles(tile, block, signs)
    results = []
    for j, magnitude in enumerate(_by_loads(tile, block)):
        ours = emit.shuffle(signs, [4 * (byte // 4) + j // 2 for byte in range(64)])
        bits = ir.Constant(vector(I8, 64), [1 << (4 * (j % 2) + byte % 4) for byte in range(64)])
        is_minus = b.icmp_unsigned("!=", b.and_(ours, bits), emit.zeros(I8, 64))
        opposite = b.sub(emit.splat_constant(I8, 2 * BIAS, 64), magnitude)
        results.append(b.select(is_minus, opposite, magnitude))
    return results


def _by_shuffles(tile: Tile, block: _Block, signs: Value) -> list[Value]:
    """Two lookups give what a whole grid vector is, as small codes; each of these and its sign choose a level."""
    emit = tile.emit
    levels, tables = _small_codes(tile.layout)
    found = []
    for word, indices in enumerate(block.indices):
        high = None if block.high is None else block.high[word]
        halves = [_look_up(emit, table, indices, high) for table in tables]
        if len(levels) == 3:
            # A byte has the codes of four columns, two bits each.
            for j in range(8):
                found.append(_signed_levels(emit, halves[j % 2], 8 * (j // 2), levels, 2, signs, 4 * j))
            continue
        # A byte has the codes of two columns, four bits each.
        for pair in range(2):
            lanes = [
                4 * lane + 2 * pair + byte + 64 * half for lane in range(16) for byte in range(2) for half in range(2)
            ]
            both = emit.builder.shuffle_vector(halves[0], halves[1], ir.Constant(vector(I32, 64), lanes))
            for index in range(2):
                column = 4 * (4 * word + 2 * pair + index)
                found.append(_signed_levels(emit, both, 16 * index, levels, 4, signs, column))
    return found


def _signed_levels(
    emit: Emitter, packed: Value, place: int, levels: Sequence[int], bits: int, signs: Value, first_sign: int
) -> Value:
    """Biased levels of the codes of `bits` bits at a place of every lane, with signs from another."""
    sign_bit = (len(levels) - 1).bit_length()
    codes = emit.bits_to_bytes(packed, [place + bits * column for column in range(4)])
    flags = emit.bits_to_bytes(signs, [first_sign + column - sign_bit for column in range(4)])
    mask = emit.splat_constant(I8, (1 << sign_bit) - 1, 64)
    rest = emit.splat_constant(I8, 256 - (1 << sign_bit), 64)
    chosen = emit.builder.or_(emit.builder.and_(codes, mask), emit.builder.and_(flags, rest))
    # The bits above the sign belong to others: every place that they can lead to holds the same.
    both = [[BIAS + sign * level for level in levels] + [0] * ((1 << sign_bit) - len(levels)) for sign in (1, -1)]
    table = (both[0] + both[1]) * (64 >> sign_bit + 1)
    return emit.call("llvm.x86.avx512.permvar.qi.512", vector(I8, 64), [ir.Constant(vector(I8, 64), table), chosen])


def _look_up(emit: Emitter, table: NDArray[np.uint8], indices: Value, high: Value | None) -> Value:
    """Bytes of a table of 256, 512 or 1,024."""
    b = emit.builder
    pieces = [ir.Constant(vector(I8, 64), part.tolist()) for part in table.reshape(-1, 64)]
    found = [
        emit.call("llvm.x86.avx512.vpermi2var.qi.512", vector(I8, 64), [left, indices, right])
        for left, right in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    is_upper = b.icmp_signed("<", indices, emit.zeros(I8, 64))
    found = [b.select(is_upper, two, one) for one, two in zip(found[::2], found[1::2], strict=True)]
    bit = 1
    while len(found) > 1:
        is_set = b.icmp_unsigned("!=", b.and_(high, emit.splat_constant(I8, bit, 64)), emit.zeros(I8, 64))
        found = [b.select(is_set, two, one) for one, two in zip(found[::2], found[1::2], strict=True)]
        bit *= 2
    return found[0]


def _small_codes(layout: Layout) -> tuple[list[int], tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """The levels of a grid, and its vectors as two bytes of places in them."""
    grid = grid_vectors(layout.name)
    levels = np.unique(grid)
    codes = np.searchsorted(levels, grid).astype(np.uint8).reshape(len(grid), 2, -1)
    bits = 8 // codes.shape[2]
    packed = np.bitwise_or.reduce(codes << (np.arange(codes.shape[2], dtype=np.uint8) * np.uint8(bits)), axis=2)
    return levels.tolist(), (packed[:, 0], packed[:, 1])


def _by_loads(tile: Tile, block: _Block) -> list[Value]:
    """The same by one load for every vector of the grid and row."""
    emit, b = tile.emit, tile.emit.builder
    grid = grid_vectors(tile.layout.name)
    start, element = grid_address(emit, tile.layout), {4: I32, 8: I64}[grid.shape[1]]
    found = []
    for word, indices in enumerate(block.indices):
        high = None if block.high is None else block.high[word]
        for number in range(4):
            places = _byte_of(emit, indices, number)
            if high is not None:
                upper = b.shl(_byte_of(emit, high, number), emit.splat_constant(I32, 8))
                places = b.or_(places, upper)
            levels: Any = ir.Constant(vector(element), ir.Undefined)
            for lane in range(16):
                place = b.zext(b.extract_element(places, emit.i32(lane)), I64)
                one = emit.load(b.add(start, b.mul(place, emit.i64(grid.shape[1]))), element, align=1)
                levels = b.insert_element(levels, one, emit.i32(lane))
            if element is I32:
                found.append(emit.bitcast(levels, vector(I8, 64)))
                continue
            words = emit.bitcast(levels, vector(I32, 32))
            for half in range(2):
                found.append(emit.bitcast(emit.shuffle(words, list(range(half, 32, 2))), vector(I8, 64)))
    return found


def _byte_of(emit: Emitter, words: Value, number: int) -> Value:
    lanes = emit.bitcast(words, vector(I32))
    moved = emit.builder.lshr(lanes, emit.splat_constant(I32, 8 * number))
    return emit.builder.and_(moved, emit.splat_constant(I32, 255))


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


def _byte_in_words(tile: Tile, header: Value, offset: int, index: Value) -> Value:
    """Byte `index` (0 to 7) of every row, of the two vectors at an offset of the header; other bits above it."""
    emit, b = tile.emit, tile.emit.builder
    words = _word(tile, tile.at(header, b.lshr(index, emit.i64(2)), 64), offset)
    shift = b.mul(b.and_(index, emit.i64(3)), emit.i64(8))
    return b.lshr(words, emit.splat(b.trunc(shift, I32)))


def _odd(tile: Tile, words: Value, start: int) -> Value:
    """2 * s + 1 of the four bits at a place of every word."""
    b, emit = tile.emit.builder, tile.emit
    code = b.and_(_shifted(tile, words, start), emit.splat_constant(I32, 15))
    return b.add(b.add(code, code), emit.splat_constant(I32, 1))


def _shifted(tile: Tile, words: Value, distance: int) -> Value:
    b, emit = tile.emit.builder, tile.emit
    if distance == 0:
        return words
    amount = emit.splat_constant(I32, abs(distance))
    return b.lshr(words, amount) if distance > 0 else b.shl(words, amount)


def _spread(tile: Tile, words: Value, bits: int) -> Value:
    """Four neighbouring fields of every word, one to each of its bytes."""
    b, emit = tile.emit.builder, tile.emit
    mask = (1 << bits) - 1
    if emit.has_byte_permutes:
        fields = emit.bits_to_bytes(emit.bitcast(words, vector(I8, 64)), [bits * byte for byte in range(4)])
        return emit.bitcast(b.and_(fields, emit.splat_constant(I8, mask, 64)), vector(I32))
    result = b.and_(words, emit.splat_constant(I32, mask))
    for byte in range(1, 4):
        moved = _shifted(tile, words, -(8 - bits) * byte)
        result = b.or_(result, b.and_(moved, emit.splat_constant(I32, mask << 8 * byte)))
    return result


def _even_signs(tile: Tile, words: Value) -> Value:
    """The eighth sign of every byte of seven: the number of minus signs is even."""
    b, emit = tile.emit.builder, tile.emit
    counts = emit.call("llvm.ctpop.v64i8", vector(I8, 64), [emit.bitcast(words, vector(I8, 64))])
    eighth = b.shl(emit.bitcast(counts, vector(I32)), emit.splat_constant(I32, 7))
    return b.or_(words, b.and_(eighth, emit.splat_constant(I32, 0x80808080)))


def _bytes_of(emit: Emitter, words: Value) -> Value:
    return emit.bitcast(words, vector(I8, 64))


def _iq2_xxs(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    place = tile.at(body, index, 128)
    indices, words = _word(tile, place, 0), _word(tile, place, 64)
    signs = _even_signs(tile, _spread(tile, words, 7))
    return _Block([_bytes_of(tile.emit, indices)], None, signs, [_odd(tile, words, 28)])


def _iq2_xs(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    emit, b = tile.emit, tile.emit.builder
    place = tile.at(body, index, 128)
    first, second = (_bytes_of(emit, _word(tile, place, 64 * i)) for i in range(2))
    low, high = (
        b.shuffle_vector(
            first,
            second,
            ir.Constant(
                vector(I32, 64),
                [4 * lane + 2 * i + part + 64 * word for lane in range(16) for word in range(2) for i in range(2)],
            ),
        )
        for part in range(2)
    )
    upper = b.lshr(emit.bitcast(high, vector(I32)), emit.splat_constant(I32, 1))
    signs = _even_signs(tile, b.and_(upper, emit.splat_constant(I32, 0x7F7F7F7F)))
    ninth = b.and_(high, emit.splat_constant(I8, 1, 64))
    scales = _byte_in_words(tile, header, 32, index)
    return _Block([low], [ninth], signs, [_odd(tile, scales, 0), _odd(tile, scales, 4)])


def _iq2_s(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    place = tile.at(body, index, 128)
    indices, signs = _word(tile, place, 0), _word(tile, place, 64)
    high = _spread(tile, _byte_in_words(tile, header, 32, index), 2)
    scales = _byte_in_words(tile, header, 160, index)
    codes = [_odd(tile, scales, 0), _odd(tile, scales, 4)]
    return _Block([_bytes_of(tile.emit, indices)], [_bytes_of(tile.emit, high)], signs, codes)


def _iq3_xxs(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    place = tile.at(body, index, 128)
    indices = [_bytes_of(tile.emit, _word(tile, place, 64 * i)) for i in range(2)]
    words = _word(tile, tile.at(body, index, 64), 1024)
    return _Block(indices, None, _even_signs(tile, _spread(tile, words, 7)), [_odd(tile, words, 28)])


def _iq3_s(tile: Tile, header: Value, body: Value, index: Value) -> _Block:
    emit, b = tile.emit, tile.emit.builder
    place = tile.at(body, index, 128)
    indices = [_bytes_of(emit, _word(tile, place, 64 * i)) for i in range(2)]
    upper = _byte_in_words(tile, header, 96, index)
    high = [_bytes_of(emit, _spread(tile, _shifted(tile, upper, 4 * i), 1)) for i in range(2)]
    signs = _word(tile, tile.at(body, index, 64), 1024)
    shift = b.trunc(b.mul(index, emit.i64(4)), I32)
    scales = b.lshr(_word(tile, header, 32), emit.splat(shift))
    return _Block(indices, high, signs, [_odd(tile, scales, 0)])


_READERS = {
    Layout.IQ2_XXS: _iq2_xxs,
    Layout.IQ2_XS: _iq2_xs,
    Layout.IQ2_S: _iq2_s,
    Layout.IQ3_XXS: _iq3_xxs,
    Layout.IQ3_S: _iq3_s,
}
