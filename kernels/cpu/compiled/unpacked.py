"""Products of many rows of activations with codes that are unpacked once: one super-block of a tile at a time.

To put a code of Q4_K, Q5_K or Q6_K together takes as many operations as to multiply it by several rows, and registers
that sums of eight rows need. Here a super-block's codes become bytes, and its scales float32, in memory that the
first-level cache holds, before all rows of a block are multiplied by them; totals of the rows wait in memory meanwhile.
Every total is the chain of operations of `blocks.py`, in its order.
"""

from collections.abc import Sequence

from numba import types

from localinfer.kernels.cpu.compiled.blocks import bits_from, six_bit_scales
from localinfer.kernels.cpu.compiled.emit import I8, I16, I32, I64, LITERAL, VOID, Emitter, Value, emitted, vector
from localinfer.kernels.cpu.compiled.tile import MINUS_8_HALF, Tile
from localinfer.kernels.cpu.kernel_abi import RECORD_BYTES
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import AVX512, ISA
from localinfer.kernels.layouts import Layout

UNPACKED = (Layout.Q4_K, Layout.Q5_K, Layout.Q6_K) if isa.SELECTED in AVX512 | {ISA.AVX2} else ()
"""Layouts that are multiplied so, where that was measured to be faster."""
ROWS = 4 if isa.SELECTED is ISA.AVX2 else 8
"""Rows of activations of a product."""
LEAST_ROWS = {Layout.Q4_K: 16 if isa.SELECTED is ISA.AVX2 else 32, Layout.Q5_K: 16, Layout.Q6_K: 16}
"""Rows from which on a super-block is unpacked: for fewer its bytes are written and read again for too few products."""
MOST_ROWS = 1024
"""Rows whose totals there is memory for."""

_SCALES = 4096
_MINIMUMS = _SCALES + 8 * 64
_STARTS = _SCALES + 16 * 64
BUFFER_BYTES = _STARTS + ROWS * 64
"""Of a super-block: codes of sixteen rows and 256 columns, sixteen vectors of scales, or eight and minimums, and of
each row of activations the starts of sixteen dot products."""


@emitted(VOID, LITERAL, *[types.int64] * 4)
def unpack(
    emit: Emitter, layout: int, tile_address: Value, column_count: Value, unit_number: Value, buffer_address: Value
) -> None:
    """Unpack one super-block of a tile."""
    tile = Tile(emit, Layout(layout), tile_address, column_count, [])
    write = _unpack_six_bits if tile.layout is Layout.Q6_K else _unpack_pairs
    write(tile, unit_number, buffer_address)


def _unpack_pairs(tile: Tile, unit: Value, buffer: Value) -> None:
    """Q4_K or Q5_K, two blocks at a time."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    fifth_bits = body if tile.layout is Layout.Q5_K else None
    codes_start = b.add(body, emit.i64(512)) if fifth_bits is not None else body
    d, minus_dmin = tile.floats(header), b.fneg(tile.floats(header, 32))

    def pair_body(pair: Value, carried: list[Value]) -> Sequence[Value]:
        codes, target, place = (
            tile.at(*one) for one in ((codes_start, pair, 512), (buffer, pair, 1024), (buffer, pair, 128))
        )
        first_bit = b.trunc(b.mul(pair, emit.i64(2)), I16)
        for j in range(8):
            tile.prefetch(b.add(b.mul(unit, emit.i64(4)), pair), tile.sizes.unit_bytes // 4, j, 8)
            loaded = tile.load_codes(codes, j)
            fifth = None if fifth_bits is None else bits_from(tile, fifth_bits, j, first_bit)
            for half, nibbles in enumerate((tile.low(loaded), tile.high(loaded))):
                whole = nibbles if fifth is None else b.or_(nibbles, fifth(half))
                emit.store(whole, target, 512 * half + 64 * j, align=64)
        scales, minimums = six_bit_scales(tile, header, pair, d, minus_dmin)
        for half in range(2):
            emit.store(scales[half], place, _SCALES + 64 * half, align=64)
            emit.store(minimums[half], place, _MINIMUMS + 64 * half, align=64)
        return []

    emit.loop(emit.i64(0), emit.i64(4), 1, [], pair_body)


def _unpack_six_bits(tile: Tile, unit: Value, buffer: Value) -> None:
    """Q6_K, 128 columns at a time."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    d = tile.floats(header)

    def half_body(half: Value, carried: list[Value]) -> Sequence[Value]:
        codes, target = tile.at(body, half, 1536), tile.at(buffer, half, 2048)
        for j in range(8):
            tile.prefetch(b.add(b.mul(unit, emit.i64(2)), half), tile.sizes.unit_bytes // 2, j, 8)
            upper = tile.load_codes(codes, j, 128, 64)
            for first, place in enumerate(((128, 0), (64, 1024))):
                loaded = tile.load_codes(codes, j, *place)
                for k, lower in ((first, tile.low(loaded)), (first + 2, tile.high(loaded))):
                    whole = b.or_(lower, tile.moved_bits(upper, 2 * k, 3, 4))
                    emit.store(whole, target, 512 * k + 64 * j, align=64)
        scales, place = tile.at(header, half, 128), tile.at(buffer, half, 512)
        for group in range(8):
            code = b.sext(tile.values(scales, I8, 32 + 16 * group), tile.vector(I32))
            emit.store(emit.mul(d, emit.to_float(code)), place, _SCALES + 64 * group, align=64)
        return []

    emit.loop(emit.i64(0), emit.i64(2), 1, [], half_body)


@emitted(VOID, LITERAL, *[types.int64] * 5)
def unpacked_product(
    emit: Emitter, layout: int, table: Value, buffer_address: Value, column_count: Value, unit_number: Value,
    totals_address: Value,
) -> None:  # fmt: skip
    """Add the products of an unpacked super-block and ROWS rows to their totals.

    table: address of int64[ROWS], the addresses of the rows. totals: of float32[ROWS][16].
    """
    rows = [emit.load(table, I64, 8 * t, align=8) for t in range(ROWS)]
    tile = Tile(emit, Layout(layout), buffer_address, column_count, rows)
    add = _add_six_bits if tile.layout is Layout.Q6_K else _add_blocks
    totals = add(tile, unit_number, load_totals(emit, totals_address))
    for t, total in enumerate(totals):
        emit.store(total, totals_address, 64 * t, align=64)


def load_totals(emit: Emitter, address: Value) -> list[Value]:
    """The totals of ROWS rows."""
    return [emit.load_floats(address, 64 * t) for t in range(ROWS)]


def _add_blocks(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    emit, b = tile.emit, tile.emit.builder

    largest = 15 if tile.layout is Layout.Q4_K else 31

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        block = b.add(b.mul(unit, emit.i64(8)), index)
        codes, place = tile.at(tile.tile, index, 512), tile.at(tile.tile, index, 64)
        column, records = b.mul(block, emit.i64(32)), tile.records(block)
        dots = tile.no_dots(block)
        for j in range(8):
            dots = tile.dot(dots, tile.load_codes(codes, j), column, 4 * j, largest=largest)
        totals = tile.add_dots(totals, dots, emit.load_floats(place, _SCALES), records)
        return tile.add_minimums(totals, emit.load_floats(place, _MINIMUMS), records)

    return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body)


def _store_starts(tile: Tile, unit: Value, row: int) -> None:
    """Store -32 * sum(x) of the sixteen halves of blocks of a row.

    A start from memory takes no turn of the vector units, the shift of one would.
    """
    emit, b = tile.emit, tile.emit.builder
    record = tile.record(tile.rows[row], b.mul(unit, emit.i64(8)))
    # Words of eight records, as many as three vectors have: from the first wanted one on, and up to the last.
    wanted = [(RECORD_BYTES * block + MINUS_8_HALF) // 4 + half for block in range(8) for half in range(2)]
    places = [wanted[0], wanted[0] + 16, wanted[-1] - 15]
    first, second, third = (emit.load(record, vector(I32), 4 * place, align=4) for place in places)
    lanes = [word - wanted[0] for word in wanted[:-2]] + [0, 0]
    both = b.shuffle_vector(first, second, emit.constants(I32, lanes))
    lanes = [*range(14), *(16 + word - places[2] for word in wanted[-2:])]
    minus_8_sums = b.shuffle_vector(both, third, emit.constants(I32, lanes))
    starts = b.shl(minus_8_sums, emit.splat_constant(I32, 2))
    emit.store(starts, tile.tile, _STARTS + 64 * row, align=64)


def _add_six_bits(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """Groups of sixteen columns in the order in which packed tiles come to them."""
    emit, b = tile.emit, tile.emit.builder
    for row in range(ROWS):
        _store_starts(tile, unit, row)

    def half_body(half: Value, totals: list[Value]) -> Sequence[Value]:
        first = b.add(b.mul(unit, emit.i64(8)), b.mul(half, emit.i64(4)))
        codes, place = tile.at(tile.tile, half, 2048), tile.at(tile.tile, half, 512)
        column = b.mul(first, emit.i64(32))
        for k, part in ((k, part) for start in range(2) for part in range(2) for k in (start, start + 2)):
            records = tile.records(b.add(first, emit.i64(k)))
            starts = tile.at(tile.tile, half, 32)
            places = [_STARTS + 64 * row + 4 * (2 * k + part) for row in range(ROWS)]
            dots = [emit.splat(emit.load(starts, I32, place, align=4)) for place in places]
            for j in range(4 * part, 4 * part + 4):
                loaded = tile.load_codes(codes, j, start=512 * k)
                dots = tile.dot(dots, loaded, column, 32 * k + 4 * j, largest=63)
            scale = emit.load_floats(place, _SCALES + 64 * (2 * k + part))
            totals = tile.add_dots(totals, dots, scale, records)
        return totals

    return emit.loop(emit.i64(0), emit.i64(2), 1, totals, half_body)
