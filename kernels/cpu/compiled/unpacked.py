"""Products of many rows of activations with codes that are unpacked once: one super-block of a tile at a time.

To put a code of Q4_K, Q5_K or Q6_K together takes as many operations as to multiply it by several rows, and registers
that sums of eight rows need; with AVX2 a code of a grid takes far more. Here a super-block's codes become bytes, and
its scales factors that products take, in memory that the first-level cache holds, before all rows of a block are
multiplied by them; totals of the rows wait in memory meanwhile. Every total is the chain of operations of `blocks.py`
or `codebooks.py`, in its order. Of tables only the codes are kept, by the `Tile` that AMX has its codes from. Floats
become float32 in the same way, where there are sixteen vector registers.

Products of such rows by AMX are here as well (`emit_product`): sixteen rows by sixteen outputs by 16 or 32 columns in
one instruction. Chunks of 256 columns of a tile are unpacked to signed bytes and multiplied by all rows of a block; the
dot products come back through memory as int32. A layout is not written again for it: its body (`blocks.py`,
`codebooks.py`) runs twice over the same unit, first with an `UnpackingTile`, which keeps only the codes that it would
multiply, then with a `SummingTile`, which takes the dot products of whole groups of columns in their place and leaves
every float step as it is. So totals have the bits of other instruction sets. Source: Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 1, chapter 18.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.blocks import (
    BODIES,
    Body,
    bit_pair_factors,
    bits_from,
    group_scales,
    six_bit_scales,
)
from localinfer.kernels.cpu.compiled.codebooks import add_grid_block, grid_block
from localinfer.kernels.cpu.compiled.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LITERAL,
    VOID,
    Emitter,
    PairSums,
    Value,
    emitted,
    vector,
)
from localinfer.kernels.cpu.compiled.tile import FLOAT_ELEMENT, GRIDS, MINUS_8_HALF, MINUS_8_SUM, Tile
from localinfer.kernels.cpu.kernel_abi import RECORD_BYTES
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import AVX512, ISA
from localinfer.kernels.layouts import Layout

_BIT_PAIRS = (Layout.Q2_K, Layout.Q3_K, Layout.TQ2_0)
_TABLES = (Layout.IQ4_NL, Layout.IQ4_XS)
SIXTEEN_REGISTERS = (ISA.AVX2, ISA.AVX_VNNI)
"""Paths whose registers hold no sums of even and of odd columns of four rows and sixteen lanes."""
_FOR_AVX2 = (*_BIT_PAIRS, *_TABLES, *GRIDS)
UNPACKED = (
    *((Layout.Q4_K, Layout.Q5_K, Layout.Q6_K) if isa.SELECTED in AVX512 | {ISA.AVX2} else ()),
    *(_FOR_AVX2 if isa.SELECTED is ISA.AVX2 else ()),
    *(FLOAT_ELEMENT if isa.SELECTED in SIXTEEN_REGISTERS else ()),
)
"""Layouts that are multiplied so, where that was measured to be faster."""
ROWS, COLUMNS = 4 if isa.SELECTED in SIXTEEN_REGISTERS else 8, 8
"""Rows of activations of a product, and what columns are a multiple of; others are left to products of few rows."""
LEAST_ROWS = {
    Layout.Q4_K: 16 if isa.SELECTED is ISA.AVX2 else 32,
    Layout.Q5_K: 16,
    Layout.Q6_K: 16,
    **dict.fromkeys((*_FOR_AVX2, *FLOAT_ELEMENT), 8),
}
"""Rows from which on a super-block is unpacked: for fewer its bytes are written and read again for too few products."""
CHUNK_COLUMNS = 256
"""Columns that are unpacked at a time: a super-block, or as many blocks."""
MOST_ROWS = 1024
"""Rows whose totals there is memory for, of one chain each."""

_SCALES = 4096
_MINIMUMS = _SCALES + 8 * 64
_STARTS = _SCALES + 16 * 64
_WORDS_OF_MINIMUMS = _STARTS
_FACTORS = _STARTS + 8 * 64
BUFFER_BYTES = max(_FACTORS + 2 * 64, 64 * CHUNK_COLUMNS)
"""Of a chunk of floats: sixteen rows as float32. Of a super-block: codes of sixteen rows and 256 columns, sixteen
vectors of scales, or eight and minimums; of each row of activations the starts of sixteen dot products, or of each
block a vector of minimums; two vectors of factors."""


@emitted(VOID, LITERAL, *[types.int64] * 5)
def unpack(
    emit: Emitter, layout: int, tile_address: Value, column_count: Value, first: Value, last: Value,
    buffer_address: Value,
) -> None:  # fmt: skip
    """Unpack columns first..last of a tile: a super-block, or as many units as it has columns, or are left."""
    chosen, b = Layout(layout), emit.builder
    if chosen in FLOAT_ELEMENT:
        _widen(Tile(emit, chosen, tile_address, column_count, []), first, last, buffer_address)
        return
    if chosen in _TABLES:
        codes = b.sub(buffer_address, b.mul(first, emit.i64(16)))
        keeping = UnpackingTile(emit, chosen, tile_address, column_count, codes, is_signed=False)
        _unpack_units(BODIES[chosen], keeping, first, last)
        return
    write, _ = _STEPS[chosen]
    write(Tile(emit, chosen, tile_address, column_count, []), b.udiv(first, emit.i64(CHUNK_COLUMNS)), buffer_address)


def _unpack_units(body: Body, tile: "UnpackingTile", first: Value, last: Value) -> None:
    def unit_body(unit: Value, _: list[Value]) -> Sequence[Value]:
        body(tile, unit, tile.no_totals())
        return []

    tile.emit.loop(*_units(tile, first, last), 1, [], unit_body)


def _units(tile: Tile, first: Value, last: Value) -> tuple[Value, Value]:
    """Units of columns first..last."""
    unit = tile.emit.i64(tile.sizes.unit)
    return tile.emit.builder.udiv(first, unit), tile.emit.builder.udiv(last, unit)


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


def _unpack_bit_pairs(tile: Tile, unit: Value, buffer: Value) -> None:
    """Q2_K, Q3_K or TQ2_0, 128 columns at a time."""
    emit, b = tile.emit, tile.emit.builder
    header, body = tile.parts(unit)
    third_bits = body if tile.layout is Layout.Q3_K else None
    codes_start = b.add(body, emit.i64(512)) if third_bits is not None else body

    def half_body(half: Value, carried: list[Value]) -> Sequence[Value]:
        codes, target, place = (
            tile.at(*one) for one in ((codes_start, half, 512), (buffer, half, 2048), (buffer, half, 512))
        )
        first_bit = b.trunc(b.mul(half, emit.i64(4)), I16)
        for j in range(8):
            tile.prefetch(b.add(b.mul(unit, emit.i64(2)), half), tile.sizes.unit_bytes // 2, j, 8)
            loaded = tile.load_codes(codes, j)
            third = None if third_bits is None else bits_from(tile, third_bits, j, first_bit, target=2)
            for k in range(4):
                pairs = tile.moved_bits(loaded, 2 * k, 3, 0)
                emit.store(pairs if third is None else b.or_(pairs, third(k)), target, 512 * k + 64 * j, align=64)
        scales, minimums = group_scales(tile, header, half)
        both = emit.splat_constant(I32, 0x10001)
        for group, scale in enumerate(scales):
            # A product by two words of a dot product adds them as well.
            factors = emit.bitcast(b.mul(scale, both), vector(I16, 32))
            if tile.layout is Layout.Q3_K:
                factors = b.sub(factors, emit.splat_constant(I16, 32, 32))
            emit.store(factors, place, _SCALES + 64 * group, align=64)
        place = tile.at(buffer, half, 256)
        for k in range(len(minimums) // 2):
            upper = b.shl(minimums[2 * k + 1], emit.splat_constant(I32, 16))
            emit.store(b.or_(minimums[2 * k], upper), place, _WORDS_OF_MINIMUMS + 64 * k, align=64)
        return []

    emit.loop(emit.i64(0), emit.i64(2), 1, [], half_body)
    for index, factor in enumerate(bit_pair_factors(tile, header)):
        emit.store(factor, buffer, _FACTORS + 64 * index, align=64)


def _unpack_grid(tile: Tile, unit: Value, buffer: Value) -> None:
    """Levels of a grid, a block at a time."""
    emit, b = tile.emit, tile.emit.builder

    def block_body(index: Value, carried: list[Value]) -> Sequence[Value]:
        block, target = b.add(b.mul(unit, emit.i64(8)), index), tile.at(buffer, index, 512)
        levels, scales = grid_block(tile, unit, index)
        for j, level in enumerate(levels):
            tile.prefetch(block, tile.sizes.unit_bytes // 8, j, 8)
            emit.store(level, target, 64 * j, align=64)
        place = tile.at(buffer, index, 64 * len(scales))
        for group, scale in enumerate(scales):
            emit.store(scale, place, _SCALES + 64 * group, align=64)
        return []

    emit.loop(emit.i64(0), emit.i64(8), 1, [], block_body)


@emitted(VOID, LITERAL, *[types.int64] * 7)
def unpacked_product(
    emit: Emitter, layout: int, tile_address: Value, column_count: Value, table: Value, buffer_address: Value,
    first: Value, last: Value, totals_address: Value,
) -> None:  # fmt: skip
    """Add the products of the unpacked columns first..last and ROWS rows to their totals.

    table: address of int64[ROWS], the addresses of the rows. totals: of float32[ROWS][chains][16].
    """
    chosen, b = Layout(layout), emit.builder
    rows = [emit.load(table, I64, 8 * t, align=8) for t in range(ROWS)]
    if chosen in FLOAT_ELEMENT:
        _add_floats(emit, chosen, tile_address, rows, buffer_address, first, last, totals_address)
        return
    totals = load_totals(emit, totals_address)
    if chosen in _TABLES:
        codes, body = b.sub(buffer_address, b.mul(first, emit.i64(16))), BODIES[chosen]
        unpacked = UnpackedTile(emit, chosen, tile_address, column_count, rows, codes)
        totals = emit.loop(*_units(unpacked, first, last), 1, totals, lambda unit, found: body(unpacked, unit, found))
    else:
        _, add = _STEPS[chosen]
        tile = Tile(emit, chosen, buffer_address, column_count, rows)
        totals = add(tile, b.udiv(first, emit.i64(CHUNK_COLUMNS)), totals)
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


def _add_bit_pairs(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    """Sums of 16 columns and their offset fit words, which take a scale by the product that adds two of them."""
    emit, b, layout = tile.emit, tile.emit.builder, tile.layout
    has_minimums = layout is Layout.Q2_K
    d, *eighth = (emit.load_floats(tile.tile, _FACTORS + 64 * index) for index in range(1 + has_minimums))
    largest, parts = (7 if layout is Layout.Q3_K else 3), (1 if layout is Layout.TQ2_0 else 2)

    def start(record: Value, part: int) -> Value:
        """-sum(x) of a block of TQ2_0, or -4 * sum(x) of half a block of Q3_K, in one of two words."""
        if has_minimums:
            return PairSums(emit.zeros(I32), [], 0)
        field, shift = (MINUS_8_SUM, 3) if parts == 1 else (MINUS_8_HALF + 4 * part, 1)
        word = b.and_(b.ashr(emit.load(record, I32, field, align=4), I32(shift)), I32(0xFFFF))
        return PairSums(emit.zeros(I32), [emit.bitcast(emit.splat(word, 8), vector(I16, 16))] * 2, 64 * 127)

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        block = b.add(b.mul(unit, emit.i64(8)), index)
        codes, place = tile.at(tile.tile, index, 512), tile.at(tile.tile, index, 128)
        column, records = b.mul(block, emit.i64(32)), tile.records(block)
        wholes = [emit.zeros(I32) for _ in records]
        for part in range(parts):
            dots = [start(record, part) for record in records]
            for j in range(8 * part // parts, 8 * (part + 1) // parts):
                dots = tile.dot(dots, tile.load_codes(codes, j), column, 4 * j, largest=largest)
            factors = emit.splat_constant(I16, 1, 32)
            if layout is not Layout.TQ2_0:
                factors = emit.load(place, factors.type, _SCALES + 64 * part, align=64)
            wholes = [
                emit.dot_pairs(whole, factors, emit.join(dot.words)) for whole, dot in zip(wholes, dots, strict=True)
            ]
        for t, record in enumerate(records):
            totals[t] = tile.accumulate(totals[t], wholes[t], d, record)
            if has_minimums:
                first, second = (emit.load(record, I32, MINUS_8_HALF + 4 * part, align=4) for part in range(2))
                word = b.or_(b.and_(first, I32(0xFFFF)), b.shl(second, I32(16)))
                sums = emit.bitcast(emit.splat(word), vector(I16, 32))
                minimums = emit.load(tile.at(tile.tile, index, 64), sums.type, _WORDS_OF_MINIMUMS, align=64)
                least = emit.dot_pairs(emit.zeros(I32), minimums, sums)
                totals[t] = tile.accumulate(totals[t], least, eighth[0], record)
        return totals

    return emit.loop(emit.i64(0), emit.i64(8), 1, totals, block_body)


def _add_grid(tile: Tile, unit: Value, totals: list[Value]) -> list[Value]:
    emit, b = tile.emit, tile.emit.builder
    groups = 32 // group_columns(tile.layout)

    def block_body(index: Value, totals: list[Value]) -> Sequence[Value]:
        codes, place = tile.at(tile.tile, index, 512), tile.at(tile.tile, index, 64 * groups)
        scales = [emit.load_floats(place, _SCALES + 64 * group) for group in range(groups)]
        block = b.add(b.mul(unit, emit.i64(8)), index)
        return add_grid_block(tile, block, totals, lambda j: tile.load_codes(codes, j), scales)

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


_STEPS: dict[Layout, tuple[Callable[[Tile, Value, Value], None], Body]] = {
    **dict.fromkeys((Layout.Q4_K, Layout.Q5_K), (_unpack_pairs, _add_blocks)),
    Layout.Q6_K: (_unpack_six_bits, _add_six_bits),
    **dict.fromkeys(_BIT_PAIRS, (_unpack_bit_pairs, _add_bit_pairs)),
    **dict.fromkeys(GRIDS, (_unpack_grid, _add_grid)),
}
"""Functions that unpack a super-block to a buffer, and that add its products from there."""


# Products of floats.


def num_chains(layout: Layout) -> int:
    """Totals of a row: of floats one of even columns and one of odd ones."""
    return 2 if layout in FLOAT_ELEMENT else 1


def _widen(tile: Tile, first: Value, last: Value, buffer: Value) -> None:
    """Columns first..last of a tile of floats as float32, unless they are."""
    if tile.layout is Layout.F32:
        return
    emit = tile.emit

    def column_body(column: Value, _: list[Value]) -> Sequence[Value]:
        place = tile.at(tile.tile, column, tile.sizes.unit_bytes)
        weights = tile.floats(place, 0, FLOAT_ELEMENT[tile.layout])
        emit.store(weights, tile.at(buffer, emit.builder.sub(column, first), 64), align=64)
        return []

    emit.loop(first, last, 1, [], column_body)


def _add_floats(
    emit: Emitter, layout: Layout, tile: Value, rows: list[Value], buffer: Value, first: Value, last: Value,
    totals_address: Value,
) -> None:  # fmt: skip
    """Add products of widened columns to totals of even columns, then to those of odd ones.

    Totals of one parity leave registers for all lanes: so a weight is loaded once for all rows, and an activation once
    for sixteen weights.
    """
    b = emit.builder
    codes = tile if layout is Layout.F32 else b.sub(buffer, b.mul(first, emit.i64(64)))
    for parity in range(2):

        def body(column: Value, totals: list[Value], parity: int = parity) -> Sequence[Value]:
            place, start = b.add(codes, b.mul(column, emit.i64(64))), b.mul(column, emit.i64(4))
            for offset in range(parity, COLUMNS, 2):
                weight = emit.load_floats(place, 64 * offset)
                totals = [
                    emit.fma(weight, emit.splat(emit.load(b.add(row, start), F32, 4 * offset, align=4)), total)
                    for total, row in zip(totals, rows, strict=True)
                ]
            return totals

        totals = [emit.load_floats(totals_address, 128 * t + 64 * parity) for t in range(ROWS)]
        for t, total in enumerate(emit.loop(first, last, COLUMNS, totals, body)):
            emit.store(total, totals_address, 128 * t + 64 * parity, align=64)


@emitted(VOID, LITERAL, types.int64, types.int64)
def join_totals(emit: Emitter, layout: int, totals_address: Value, first: Value) -> None:
    """Add the chains of ROWS rows from `first` on, in place of the first chains of as many rows."""
    if num_chains(Layout(layout)) == 1:
        return
    b = emit.builder
    source, target = (b.add(totals_address, b.mul(first, emit.i64(size))) for size in (128, 64))
    for t in range(ROWS):
        even, odd = (emit.load_floats(source, 128 * t + 64 * parity) for parity in range(2))
        emit.store(emit.add(even, odd), target, 64 * t, align=64)


# Products by AMX.

MATRIX_ROWS, FEW_MATRIX_ROWS = 16, 8
"""Rows of activations of one product; the last one may be of the few."""

_HALVES = (Layout.Q6_K, Layout.NVFP4, Layout.Q2_K, Layout.Q3_K, Layout.TQ2_0, Layout.IQ2_XS, Layout.IQ2_S)
"""Layouts of which a body sums 16 columns at a time, since each has a scale of its own; of others 32."""
_WITH_MINIMUMS = (Layout.Q4_1, Layout.Q5_1, Layout.Q4_K, Layout.Q5_K)
"""Layouts whose dot products are followed by minimums."""

_MATRIX_SUMS = 16 * CHUNK_COLUMNS
_CONFIGURATION = _MATRIX_SUMS + CHUNK_COLUMNS // 16 * 64 * MATRIX_ROWS
MATRIX_BYTES = _CONFIGURATION + 64
"""Of a chunk: codes of sixteen outputs, dot products of groups of columns, int32[groups][MATRIX_ROWS][16], and what
registers are configured by."""

_TOTALS, _LEFT, _RIGHT, _FEW_TOTALS, _FEW_LEFT = (0, 1), (2, 3), (4, 5), 6, 7
"""Numbers of registers: sums and activations of sixteen rows, weights, sums and activations of eight rows."""


def group_columns(layout: Layout) -> int:
    """Columns of one dot product."""
    return 16 if layout in _HALVES else 32


class UnpackingTile(Tile):
    """Keeps the codes of a unit as signed bytes, in the order of columns, and computes nothing.

    Codes for which a dot product starts at a multiple of the activations' sum are stored less that multiple.
    """

    def __init__(
        self, emit: Emitter, layout: Layout, tile: Value, columns: Value, target: Value, *, is_signed: bool = True
    ) -> None:
        # As many rows as no body treats apart.
        super().__init__(emit, layout, tile, columns, [None] * FEW_MATRIX_ROWS)
        self._is_signed = is_signed
        self.target = target
        """Address of what would be the codes of column 0."""
        self._offset = 0
        """The number that codes are stored less."""

    @property
    def takes_signed(self) -> bool:
        return self._is_signed

    def record(self, row: Any, block: Value) -> Any:
        return None

    def of_record(self, record: Any, kind: Any, field: int, change: Callable[[Value], Value] | None = None) -> Value:
        return self.emit.zeros(kind)

    def started_from(self, record: Any, field: int, shift: int = 0) -> Value:
        self._offset = 8 << shift
        return self.emit.zeros(I32)

    def biased_start(self, record: Any) -> Value:
        self._offset = 128 if self.emit.multiplies_unsigned else 0
        return self.emit.zeros(I32)

    def dot(
        self,
        dots: list[Value],
        codes: Value,
        column: Value,
        offset: int,
        product: Callable[..., Value] | None = None,
        largest: int = 127,
    ) -> list[Value]:
        emit = self.emit
        less = 0 if not self._is_signed else 128 if product == emit.dot_biased else self._offset
        signed = emit.builder.sub(codes, emit.splat_constant(I8, less, 64)) if less else codes
        emit.store(signed, self.at(self.target, column, 16), 16 * offset, align=64)
        return dots

    def accumulate(
        self, total: Value, dot: Value, weight_scale: Value, record: Any, *, is_started: bool = False
    ) -> Value:
        return total

    def add_minimums(self, totals: list[Value], minimum: Value, block: list[Any]) -> list[Value]:
        return totals


class UnpackedTile(Tile):
    """Multiplies codes of a unit that an `UnpackingTile` has kept."""

    def __init__(
        self, emit: Emitter, layout: Layout, tile: Value, columns: Value, rows: Sequence[Value], codes: Value
    ) -> None:
        super().__init__(emit, layout, tile, columns, rows)
        self._codes = codes
        """Address of what would be the codes of column 0."""

    def prefetch(self, unit: Value, unit_bytes: int, part: int, parts: int) -> None:
        """Nothing: the tile has been read."""

    def load_codes(self, address: Value, vector_number: int, step: int = 64, start: int = 0) -> Value:
        return self.emit.zeros(I8, 64)

    def dot(
        self,
        dots: list[Value],
        codes: Value,
        column: Value,
        offset: int,
        product: Callable[..., Value] | None = None,
        largest: int = 127,
    ) -> list[Value]:
        place = self.at(self._codes, column, 16)
        return super().dot(dots, super().load_codes(place, offset // 4), column, offset, product, largest)


class SummingTile(Tile):
    """Adds the dot products of a unit, which lie in memory, to the totals of rows.

    A dot product that would start at a multiple of the activations' sum, which signed codes leave out, starts at zero.
    """

    def __init__(
        self, emit: Emitter, layout: Layout, tile: Value, columns: Value, num_rows: int, x: Value, stride: Value,
        sums: Value,
    ) -> None:  # fmt: skip
        super().__init__(emit, layout, tile, columns, [None] * num_rows)
        self.rows = list(range(num_rows))
        self.sums_address = sums
        """Address of what would be the dot products of the group of column 0."""
        self._x, self._stride = x, stride
        self._group = group_columns(layout)
        self._last: tuple[int, Value] = 0, x
        """The row whose record was read last, and the address of that record."""
        self._num_reads = 0
        self._put_off: tuple[list[Value], Value] = [], None

    @property
    def takes_signed(self) -> bool:
        return True

    def record(self, row: int, block: Value) -> Any:
        emit, b = self.emit, self.emit.builder
        return row, block, b.add(b.add(self._x, self.columns), b.mul(block, emit.i64(RECORD_BYTES)))

    def of_record(self, record: Any, kind: Any, field: int, change: Callable[[Value], Value] | None = None) -> Value:
        """As of other tiles; rows come in order.

        LLVM would hold the distances of sixteen rows in more registers than there are. One addition for each row needs
        none, and takes no turn of the vector units.
        """
        row, block, first = record
        last, address = self._last
        if row != last or row == 0:
            assert row in (0, last + 1), "rows come in order"
            self._num_reads += 1
            next_one = first if row == 0 else self.emit.builder.add(address, self._stride)
            address = self.emit.opaque(next_one, block, self._num_reads)
        self._last = row, address
        return super().of_record(address, kind, field, change)

    def prefetch(self, unit: Value, unit_bytes: int, part: int, parts: int) -> None:
        """Nothing: the tile has been read."""

    def load_codes(self, address: Value, vector_number: int, step: int = 64, start: int = 0) -> Value:
        return self.emit.zeros(I8, 64)

    def started_from(self, record: Value, field: int, shift: int = 0) -> Value:
        return self.emit.zeros(I32)

    def biased_start(self, record: Value) -> Value:
        return self.emit.zeros(I32)

    def dot(
        self,
        dots: list[Value],
        codes: Value,
        column: Value,
        offset: int,
        product: Callable[..., Value] | None = None,
        largest: int = 127,
    ) -> list[Value]:
        if offset % self._group:
            return dots
        emit, b = self.emit, self.emit.builder
        group = self.at(self.sums_address, column, 64 * MATRIX_ROWS // self._group)
        start = 64 * MATRIX_ROWS * (offset // self._group)
        return [b.add(dot, emit.load(group, vector(I32), start + 64 * t, align=64)) for t, dot in enumerate(dots)]

    def add_dots(self, totals: list[Value], dots: list[Value], weight_scale: Value, block: list[Any]) -> list[Value]:
        if self.layout not in _WITH_MINIMUMS:
            return super().add_dots(totals, dots, weight_scale, block)
        # Row by row with the minimums: two passes would need registers for what lies between them.
        self._put_off = dots, weight_scale
        return totals

    def add_minimums(self, totals: list[Value], minimum: Value, block: list[Any]) -> list[Value]:
        dots, weight_scale = self._put_off
        found = []
        for total, dot, record in zip(totals, dots, block, strict=True):
            [added] = super().add_dots([total], [dot], weight_scale, [record])
            found += super().add_minimums([added], minimum, [record])
        return found


def emit_product(
    emit: Emitter, body: Body, layout: Layout, tile: Value, columns: Value, x: Value, stride: Value, num_rows: Value,
    memory: Value, totals: Value,
) -> None:  # fmt: skip
    """totals = x @ tile.T for `num_rows` rows, a multiple of FEW_MATRIX_ROWS.

    x: address of the first row of activations, the others `stride` bytes apart. memory: MATRIX_BYTES of the thread.
    totals: address of float32[num_rows][16].
    """
    b = emit.builder
    products = _Products(emit, body, layout, tile, columns, x, stride, memory, totals)
    emit.loop(emit.i64(0), num_rows, 1, [], lambda row, _: _zero_totals(emit, totals, row))
    products.configure()
    last_whole = b.and_(num_rows, emit.i64(-MATRIX_ROWS))

    def chunk(first: Value, _: list[Value]) -> Sequence[Value]:
        left = b.sub(columns, first)
        is_whole = b.icmp_signed(">=", left, emit.i64(CHUNK_COLUMNS))
        last = b.select(is_whole, b.add(first, emit.i64(CHUNK_COLUMNS)), columns)
        products.unpack(first, last)
        emit.loop(emit.i64(0), last_whole, MATRIX_ROWS, [], lambda row, _: products.add(first, last, row, MATRIX_ROWS))
        emit.loop(
            last_whole, num_rows, FEW_MATRIX_ROWS, [], lambda row, _: products.add(first, last, row, FEW_MATRIX_ROWS)
        )
        return []

    emit.loop(emit.i64(0), columns, CHUNK_COLUMNS, [], chunk)
    emit.matrix_release()


def _zero_totals(emit: Emitter, totals: Value, row: Value) -> Sequence[Value]:
    emit.store(emit.zeros(I64, 8), emit.builder.add(totals, emit.builder.mul(row, emit.i64(64))), align=64)
    return []


class _Products:
    """Steps of a product over a chunk of columns, first..last of `columns`."""

    def __init__(
        self, emit: Emitter, body: Body, layout: Layout, tile: Value, columns: Value, x: Value, stride: Value,
        memory: Value, totals: Value,
    ) -> None:  # fmt: skip
        self._emit, self._body, self._layout = emit, body, layout
        self._tile, self._columns = tile, columns
        self._x, self._stride, self._memory, self._totals = x, stride, memory, totals
        self._group = group_columns(layout)

    def configure(self) -> None:
        """Give this thread's registers their rows and bytes of a row."""
        emit, group = self._emit, self._group
        rows, row_bytes = [0] * 16, [0] * 16
        for number in range(8):
            is_right = number in _RIGHT
            rows[number] = (
                group // 4 if is_right else FEW_MATRIX_ROWS if number in (_FEW_TOTALS, _FEW_LEFT) else MATRIX_ROWS
            )
            row_bytes[number] = group if number in (*_LEFT, _FEW_LEFT) else 64
        words = b"".join(size.to_bytes(2, "little") for size in row_bytes)
        content = bytes([1, *[0] * 15]) + words + bytes(rows)
        place = emit.builder.add(self._memory, emit.i64(_CONFIGURATION))
        emit.store(ir.Constant(vector(I8, 64), list(content)), place, align=64)
        emit.matrix_configure(place)

    def unpack(self, first: Value, last: Value) -> None:
        """Unpack the chunk's codes."""
        emit, b = self._emit, self._emit.builder
        target = b.sub(self._memory, b.mul(first, emit.i64(16)))
        tile = UnpackingTile(emit, self._layout, self._tile, self._columns, target)
        _unpack_units(self._body, tile, first, last)

    def add(self, first: Value, last: Value, row: Value, count: int) -> Sequence[Value]:
        """Add the chunk's products by `count` rows (literal), from `row` on, to their totals."""
        emit, b = self._emit, self._emit.builder
        x = b.add(self._x, b.mul(row, self._stride))
        self._multiply(first, last, x, count)
        sums = b.sub(
            b.add(self._memory, emit.i64(_MATRIX_SUMS)), b.mul(first, emit.i64(64 * MATRIX_ROWS // self._group))
        )
        place = b.add(self._totals, b.mul(row, emit.i64(64)))
        tile = SummingTile(emit, self._layout, self._tile, self._columns, count, x, self._stride, sums)
        totals = [emit.load_floats(place, 64 * t) for t in range(count)]
        totals = emit.loop(*_units(tile, first, last), 1, totals, lambda unit, found: self._body(tile, unit, found))
        for t, total in enumerate(totals):
            emit.store(total, place, 64 * t, align=64)
        return []

    def _multiply(self, first: Value, last: Value, x: Value, count: int) -> None:
        """Dot products of every group of the chunk, to memory."""
        emit, b, group = self._emit, self._emit.builder, self._group
        left = b.add(x, first)
        sums = b.add(self._memory, emit.i64(_MATRIX_SUMS))
        row_bytes = emit.i64(64)

        def block(column: Value, _: list[Value], size: int) -> Sequence[Value]:
            """`size` columns from one of the chunk on."""
            codes, target = (
                b.add(base, b.mul(column, emit.i64(each)))
                for base, each in ((self._memory, 16), (sums, 64 * MATRIX_ROWS // group))
            )
            for index in range(size // group):
                turn = index % 2
                total, factor = (_TOTALS[turn], _LEFT[turn]) if count == MATRIX_ROWS else (_FEW_TOTALS, _FEW_LEFT)
                emit.matrix_zero(total)
                emit.matrix_load(factor, b.add(b.add(left, column), emit.i64(group * index)), self._stride)
                emit.matrix_load(_RIGHT[turn], b.add(codes, emit.i64(16 * group * index)), row_bytes)
                emit.matrix_dot(total, factor, _RIGHT[turn])
                emit.matrix_store(total, b.add(target, emit.i64(64 * MATRIX_ROWS * index)), row_bytes)
            return []

        num_columns = b.sub(last, first)
        whole = b.and_(num_columns, emit.i64(-64))
        emit.loop(emit.i64(0), whole, 64, [], lambda column, _: block(column, _, 64))
        emit.loop(whole, num_columns, 32, [], lambda column, _: block(column, _, 32))
