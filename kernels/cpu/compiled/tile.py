"""One product of a tile and rows of activations: addresses, codes, activations and their records, prefetching.

The products of all layouts are written with a `Tile`. It has all sixteen rows of a tile's weights, or eight of them
where registers hold the sums of no more: with NEON, whose vectors have four lanes. A lane has the same bits in both.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localinfer.kernels.cpu.compiled.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    Emitter,
    Value,
    vector,
)
from localinfer.kernels.cpu.kernel_abi import PAIR_BIAS, PAIR_BYTES, PAIR_CODES, RECORD_BYTES
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.layouts import SHARED_LAYOUTS, SHARED_PAIRED_LAYOUTS, SIZES, WHOLE_LAYOUTS, Layout

SCALE, SCALED_SUM, MINUS_8_SUM, MINUS_8_HALF = 0, 4, 8, 12
"""Fields of an activation record."""

_SUPER_BLOCK_LAYOUTS = tuple(layout for layout in Layout if SIZES[layout].unit == 256)


_IN_PLACE = (Layout.Q4_0, Layout.Q4_1, Layout.Q4_K, Layout.INT4_32, Layout.INT4_64, Layout.INT4_128)
"""Layouts of which one row takes upper nibbles where they are; more would have a sum each to shift."""

GRIDS = (Layout.IQ2_XXS, Layout.IQ2_XS, Layout.IQ2_S, Layout.IQ3_XXS, Layout.IQ3_S)
"""Layouts whose codes select vectors of a table."""
_SLOW_LAYOUTS = (Layout.IQ4_XS, *GRIDS)
"""Layouts that AVX2 multiplies slower than memory is read: prefetches gain nothing."""

FLOAT_ELEMENT = {Layout.F32: F32, Layout.F16: F16, Layout.BF16: I16}
"""Elements of the layouts of floats."""

WHOLE = 0x4B400000
"""Bits of the float32 3 * 2**22, whose last bits count whole numbers."""


def places_of(field: int) -> tuple[int, ...]:
    """Offsets of a field in a record, or in the first record of a pair."""
    if not isa.pairs_rows():
        return (field,)
    return (4 * field, 4 * field + 8) if field < MINUS_8_SUM else (2 * field + 16,)


def prefetch_distance(layout: Layout, num_rows: int, path: ISA) -> tuple[int, int] | None:
    """Prefetch distance of a tile in bytes and cache level (3: the first level); None: no prefetch.

    With one row hardware prefetchers saturate the memory bandwidth where the work per byte is small, and software
    prefetches would only occupy miss buffers. Where it is not they are late: with AVX2, and in the codes of Q6_K, whose
    second half is read beside the first. They do not follow the indices and masks of IQ3 either, two streams in a unit.
    Several rows are more work per byte, and a longer distance helps. Measured: tests/bench/RESULTS.md.
    """
    if num_rows == 1:
        if path is ISA.AVX2 and layout not in _SLOW_LAYOUTS:
            return 3072, 3
        if layout is not Layout.Q6_K:
            return (2048, 3) if layout in (Layout.IQ3_XXS, Layout.IQ3_S) else None
    return (4096, 3) if num_rows == 2 and layout not in _SUPER_BLOCK_LAYOUTS else (16384, 2)


class Tile:
    """State of one product: weight addresses and activation rows.

    first, count: the rows of weights that are multiplied, of the tile's sixteen.
    """

    def __init__(
        self,
        emit: Emitter,
        layout: Layout,
        tile: Value,
        columns: Value,
        rows: Sequence[Value],
        first: int = 0,
        count: int = LANES,
    ) -> None:
        self.emit = emit
        self.tile = tile
        self.columns = columns
        self.num_rows = len(rows)
        self.rows: list[Any] = list(rows)
        """Addresses of activation rows that are multiplied together: here of one, of a `PairTile` of two."""
        self.sizes = SIZES[layout]
        self.layout = layout
        self.units = emit.builder.udiv(columns, emit.i64(self.sizes.unit))
        self.first, self.count = first, count
        self.lanes = count
        """Lanes of a dot product."""
        self.has_pairs = isa.pairs_rows()
        """Rows of activations lie in pairs."""
        shared = SHARED_PAIRED_LAYOUTS if self.has_pairs else SHARED_LAYOUTS
        self.shares_bytes = isa.shares_bytes() and layout in shared
        """A byte has codes of two rows of weights, the upper of which is signed: see `nibbles`."""
        self.multiplies_both = self.shares_bytes and (count > 4 or self.has_pairs)
        """Both rows are of this tile, which multiplies with such bytes as they are."""
        self.has_whole_codes = isa.shares_bytes() and layout in WHOLE_LAYOUTS
        """A byte has a whole code of five or six bits, and bits of another one."""
        self.has_byte_planes = isa.shares_bytes() and layout is Layout.IQ4_XS
        """Numbers of sixteen rows that scales are made of lie byte by byte."""
        self.keeps_places = emit.multiplies_unsigned and self.num_rows == 1 and layout in _IN_PLACE
        """Upper nibbles are multiplied where they are, as 16 times the code, and the sum is shifted: see `whole`."""
        self._loaded: dict[tuple[Any, ...], Value] = {}
        """Activations and addresses of the present turn."""
        self._num_turns = 0
        self.is_ordered = emit.isa is ISA.AVX2
        """Loads wait for the products before them: LLVM would load for more products than registers hold."""
        self._latest: dict[Any, Value] = {}
        """By block of LLVM's and address: the same address, known when the last product is there."""
        self._used: list[tuple[Any, Value]] = []
        """Keys and addresses of what was loaded since then."""

    def parts(self, unit: Value) -> tuple[Value, Value]:
        """Addresses of a unit's header and body."""
        header = self.at(self.tile, unit, self.sizes.unit_bytes)
        return header, self.emit.builder.add(header, self.emit.i64(self.sizes.header_bytes))

    def prefetch(self, unit: Value, unit_bytes: int, part: int, parts: int) -> None:
        """Prefetch part `part` of `parts` of the unit at the prefetch distance, in the next tile if need be.

        Prefetches are spread over a unit's work: a burst of them fills the miss buffers and stalls loads. With NEON
        there are none: LLVM moves no load past a prefetch, so that all loads came first, into more registers than
        there are.
        """
        chosen = prefetch_distance(self.layout, self.num_rows, self.emit.isa)
        if chosen is None or self.emit.is_neon:
            return
        distance, level = chosen
        address = self.at(self.tile, unit, unit_bytes)
        lines = -(-unit_bytes // 64)
        for line in range(lines * part // parts, lines * (part + 1) // parts):
            self.emit.prefetch(address, distance + 64 * line, locality=level)

    def at(self, base: Value, index: Value, stride: int) -> Value:
        return self.emit.builder.add(base, self.emit.builder.mul(index, self.emit.i64(stride)))

    # Weights

    def vector(self, kind: Any) -> Any:
        return vector(kind, self.count)

    def constant(self, kind: Any, value: float) -> Value:
        return self.emit.splat_constant(kind, value, self.count)

    def splat(self, value: Value) -> Value:
        return self.emit.splat(value, self.count)

    def values(self, address: Value, kind: Any, offset: int = 0, align: int = 32) -> Value:
        """The rows' values of a vector of sixteen in a unit; align: of the address and the offset, in bytes."""
        size = kind.width // 8
        align = min(align, size * self.count)
        return self.emit.load(address, self.vector(kind), offset + size * self.first, align)

    def some_bytes(self, address: Value, offset: int) -> Value:
        """The rows' bytes of a vector of sixteen, and some that follow where half a register would not be full."""
        return self.emit.load(address, vector(I8, max(self.count, 8)), offset + self.first, align=1)

    def floats(self, address: Value, offset: int = 0, element: Any = F16) -> Value:
        """The rows' values of a vector of sixteen numbers, as float32."""
        size = 4 if element is F32 else 2
        return self.emit.load_floats(address, offset + size * self.first, element, self.count)

    def load_codes(self, address: Value, vector_number: int, step: int = 64, start: int = 0) -> Value:
        """Four bytes of every row: a vector of those that are `step` bytes apart from `start` on."""
        first, count = self.first, self.count
        if self.shares_bytes and not self.multiplies_both:
            first, count = first // 8 * 8, 8
        offset = start + step * vector_number + 4 * first
        align = min(16 if self.layout is Layout.MXFP4 else 32, 4 * count)
        return self.emit.load(self.ordered(address), vector(I8, 4 * count), offset, align)

    def load_bits(self, address: Value, offset: int) -> Value:
        """A vector whose bytes have bits of several vectors of codes, for `column_bits`."""
        return self.load_codes(address, 0, start=offset)

    def column_bits(self, bits: Value, start: int, width: int, number: int, target: int) -> Value:
        """Bits of every code of vector `number`, `width` of them from start + width * number on, moved to `target`."""
        return self.moved_bits(bits, start + width * number, (1 << width) - 1, target)

    def nibbles(self, loaded: Value, vector_number: int) -> tuple[Value, Value]:
        """Codes of two vectors of columns: the lower and the upper nibbles of what `load_codes` found.

        Where rows share bytes, of the first of two registers there are lower nibbles, and of the second the same bytes
        as they are, 16 * (code of the second row) + code of the first one: a shift less, and `number` takes off what
        is too much. A tile of one register's rows has the upper nibbles less 8.
        """
        if self.keeps_places:
            upper = self.emit.splat_constant(I8, 0xF0, loaded.type.count)
            return self.low(loaded), self.emit.builder.and_(loaded, upper)
        if not self.shares_bytes:
            return self.low(loaded), self.high(loaded)
        registers = [self.emit.lanes(loaded, start, 16) for start in range(0, loaded.type.count, 16)]
        if not self.multiplies_both:
            low, high = (self._of_one_row(register) for register in registers)
            return low, high
        low, high = (self._shared(registers[half::2], vector_number) for half in range(2))
        return low, high

    def sums(self, starts: list[Value]) -> list[list[Value]]:
        """Dot products of a block in the making: one sum for each half of it where there is one row, else one for both.

        A product waits for the one before it in its sum, and one row has no other sums to go on with. Takes products
        of half h as sums[h % len(sums)]; `joined` has the dot products.
        """
        if self.num_rows > 1 or not self.emit.multiplies_unsigned:
            return [starts]
        return [starts, [self.emit.zeros(I32)]]

    def joined(self, sums: list[list[Value]]) -> list[Value]:
        """The dot products of `sums`."""
        if len(sums) == 1:
            return sums[0]
        return [self.emit.builder.add(*both) for both in zip(sums[0], self.whole(sums[1]), strict=True)]

    def whole(self, dots: list[Value]) -> list[Value]:
        """Dot products of upper nibbles alone, from sums of 16 times as much where they were multiplied in place."""
        if not self.keeps_places:
            return dots
        return [self.emit.builder.ashr(dot, self.constant(I32, 4)) for dot in dots]

    def _of_one_row(self, shared: Value) -> Value:
        if self.first % 8 == 0:
            return self.low(shared)
        return self.emit.builder.ashr(shared, self.emit.splat_constant(I8, 4, 16))

    def _shared(self, registers: list[Value], vector_number: int) -> Value:
        return self.emit.join([codes for shared in registers for codes in (self.low(shared), shared)])

    def indices(self, loaded: Value) -> tuple[Value, Value]:
        """The lower and the upper nibbles of bytes for `Emitter.lookup`, with other bits above where it takes any."""
        if not self.emit.has_byte_permutes:
            return self.low(loaded), self.high(loaded)
        words = self.emit.bitcast(loaded, vector(I32))
        return loaded, self.emit.bitcast(self.emit.builder.lshr(words, self.constant(I32, 4)), loaded.type)

    def low(self, codes: Value) -> Value:
        return self.emit.builder.and_(codes, self.emit.splat_constant(I8, 15, codes.type.count))

    def high(self, codes: Value) -> Value:
        return self.moved_bits(codes, 4, 15, 0)

    def moved_bits(self, bits: Value, start: int, mask: int, target: int) -> Value:
        """Take the bits of `mask` at position `start` of every byte to position `target`.

        On x86-64 shifted in words, whose stray bits the mask removes: a shift of bytes would become a Galois-field
        product, which takes a multiplier's turn. NEON shifts bytes, and the highest bits need no mask then.
        """
        b, emit, count = self.emit.builder, self.emit, bits.type.count
        shifts_bytes = emit.is_neon
        if start != target:
            words = bits if shifts_bytes else emit.bitcast(bits, vector(I32, count // 4))
            distance = emit.splat_constant(words.type.element, abs(target - start), words.type.count)
            words = b.shl(words, distance) if start < target else b.lshr(words, distance)
            bits = words if shifts_bytes else emit.bitcast(words, vector(I8, count))
            if shifts_bytes and target == 0 and start + mask.bit_length() == 8:
                return bits
        return b.and_(bits, emit.splat_constant(I8, mask << target, count))

    def turns(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[int], Callable[[Value], Value]]]:
        """Blocks that share their bytes: those whose dot products are made in one turn, and the addresses to read then.

        NEON's registers hold the dot products of one block where there are several activation rows, and nothing of the
        turn before: its bytes are read again, from an address of which LLVM does not know that it is the same.
        """
        if not self.emit.is_neon:
            # AVX2's registers hold no dot products of four rows and two blocks. Addresses are new by `_in_order`.
            for some in [[block] for block in blocks] if self.is_ordered and self.num_rows > 2 else [blocks]:
                yield some, lambda address: address
            return
        together = self.num_rows == 1 and not self.shares_bytes
        for some in [blocks] if together else [[block] for block in blocks]:
            self._num_turns += 1
            self._loaded.clear()
            yield some, functools.partial(self._again, self._num_turns)

    def halves(self, count: int = 2) -> Iterator[tuple[Sequence[int], Callable[[Value], Value]]]:
        """As `turns`, of the halves of a block that share their bytes; count: 1 for codes that are bytes."""
        yield range(count), lambda address: address

    def _again(self, turn: int, address: Value) -> Value:
        key = (turn, address)
        if key not in self._loaded:
            self._loaded[key] = self.emit.opaque(address, address, turn)
        return self._loaded[key]

    # Activations

    @property
    def takes_signed(self) -> bool:
        """True if `dot` takes signed codes."""
        return self.emit.is_neon

    def no_dots(self, block: Value) -> list[Value]:
        """Dot products of nothing, for all activation rows of a block."""
        return [self.no_dot(block, number) for number in range(len(self.rows))]

    def no_dot(self, block: Any, number: int = 0) -> Value:
        if not self._counts_in_floats:
            return self.emit.zeros(I32, self.lanes)
        return self._from_scalar(I32(WHOLE), block, number)

    def unsigned_starts(self, block: Value) -> list[Value]:
        """Dot products of nothing, for codes 0..15 of `nibbles`."""
        if not self.shares_bytes:
            return self.no_dots(block)
        return [self._shared_start(record) for record in self.records(block)]

    def _shared_start(self, record: Any) -> Value:
        """The start of a dot product: of second rows at 8 * sum(x), since their codes are less 8, or 16 times that."""
        b, base = self.emit.builder, I32(WHOLE if self._counts_in_floats else 0)
        word = self.emit.load(record, I32, places_of(MINUS_8_SUM)[0], align=4)
        if not self.multiplies_both:
            start = b.sub(base, word) if self.first % 8 else base
            return self._by_turns(start, start, record)
        return self._by_turns(base, b.sub(base, b.shl(word, I32(4))), record)

    def _by_turns(self, first: Value, second: Value, block: Value) -> Value:
        """A scalar in every second register from the first on, and another one in the others."""
        emit = self.emit
        words = [emit.opaque((first, second)[register % 2], block, register) for register in range(self.lanes // 4)]
        joined = emit.join([emit.splat(word, 128 // word.type.width) for word in words])
        return emit.bitcast(joined, vector(I32, self.lanes))

    def zero_points(self, zero: Value) -> Value:
        """Zero points of the rows of a dot product, as factors of -sum(x) that it starts at."""
        if not self.shares_bytes:
            return zero
        emit, b = self.emit, self.emit.builder
        parts = [emit.lanes(zero, start, 4) for start in range(0, self.lanes, 4)]
        for register in range(1, len(parts), 2):
            sixteenfold = b.shl(parts[register], emit.splat_constant(I32, 4, 4))
            less = b.sub(parts[register - 1], emit.splat_constant(I32, 128, 4))
            parts[register] = b.add(sixteenfold, less)
        return emit.join(parts)

    @property
    def _counts_in_floats(self) -> bool:
        """True if dot products are added to the bits of a float32, as they are with NEON.

        A float32 of that size counts whole numbers below 2**22 in its last bits, so that a difference makes the dot
        product a number, where a conversion takes two turns.
        """
        return self.emit.is_neon

    def started(self, start: Value) -> Value:
        """The start of a dot product, from an integer, below 2**22 with all that is added to it."""
        if not self._counts_in_floats:
            return start
        return self.emit.builder.add(start, self.emit.splat_constant(I32, WHOLE, self.lanes))

    def started_from(self, record: Value, field: int, shift: int = 0) -> Value:
        """The start of a dot product at an integer of a record, shifted left."""
        b = self.emit.builder
        if not self._counts_in_floats:
            return self.record_int(record, field, shift)
        return self.of_record(record, I32, field, lambda word: b.add(b.shl(word, I32(shift)), I32(WHOLE)))

    def biased_start(self, record: Value) -> Value:
        """The start of a chain of `Emitter.dot_biased` or `dot_levels`."""
        if self._counts_in_floats:
            return self.no_dot(record)
        return self.emit.biased_start(self.record_int(record, MINUS_8_SUM, shift=4))

    def no_totals(self) -> list[Value]:
        return [self.emit.zeros(F32, self.count) for _ in self.rows]

    def by_row(self, totals: Sequence[Value]) -> list[Value]:
        """Totals as vectors with the lanes of one activation row each."""
        return list(totals)

    def spread(self, weights: Value) -> Value:
        """Lanes of weights as those of dot products."""
        return weights

    def record(self, row: Any, block: Value) -> Any:
        """Address of the record of a block."""
        emit, b = self.emit, self.emit.builder
        if self.has_pairs:
            # Fields are half as far apart as the codes of the two rows.
            start = b.sub(row, b.lshr(b.and_(row, emit.i64(8)), emit.i64(1)))
            return b.add(start, b.add(b.mul(block, emit.i64(PAIR_BYTES)), emit.i64(PAIR_CODES)))
        offset = emit.builder.add(self.columns, emit.builder.mul(block, emit.i64(RECORD_BYTES)))
        return emit.builder.add(row, offset)

    def records(self, block: Value) -> list[Value]:
        """Addresses of the records of a block, of every activation row."""
        return [self.record(row, block) for row in self.rows]

    def of_record(self, record: Value, kind: Any, field: int, change: Callable[[Value], Value] | None = None) -> Value:
        """A number of a record, changed by a function if there is one, in all lanes."""
        word = self.emit.load(record, kind, places_of(field)[0], align=4)
        if self.has_pairs and kind is I32:
            word = self.emit.builder.sub(word, I32(PAIR_BIAS))
        word = change(word) if change else word
        if self.emit.is_neon and change:
            return self._from_scalar(word, record)
        return self.emit.splat(word, self.count)

    def _from_scalar(self, word: Value, block: Value, number: int = 0) -> Value:
        """As `Emitter.splat`: a register from a scalar takes no turn of the vector units, one from another one does.

        block: what changes with the block that the scalar is for: an index or a record. number: of the activation row,
        where others have the same scalar of the same block.
        """
        count = self.lanes // 4
        words = [self.emit.opaque(word, block, count * number + register) for register in range(count)]
        return self.emit.join([self.emit.splat(word, 4) for word in words])

    def record_float(self, record: Value, field: int) -> Value:
        return self.of_record(record, F32, field)

    def record_int(self, record: Value, field: int, shift: int = 0) -> Value:
        value = self.of_record(record, I32, field)
        return self.emit.builder.shl(value, self.emit.splat_constant(I32, shift, self.lanes)) if shift else value

    def minus_sum(self, record: Value) -> Value:
        """-sum(x) of a block in all lanes, cut to 16 bits, which hold it, so that products take one instruction."""
        b = self.emit.builder
        return self.of_record(record, I32, MINUS_8_SUM, lambda word: b.sext(b.trunc(b.ashr(word, I32(3)), I16), I32))

    def minus_12_sum(self, record: Value, field: int) -> Value:
        """The start of a dot product at -12 * sum(x) of a block or half of one (a field of -8 * sum(x))."""
        b = self.emit.builder
        return self.of_record(record, I32, field, lambda word: b.add(word, b.ashr(word, I32(1))))

    def dot(
        self,
        dots: list[Value],
        codes: Value,
        column: Value,
        offset: int,
        product: Callable[..., Value] | None = None,
        largest: int = 127,
    ) -> list[Value]:
        """dots + codes * the four activations from column + offset on, of every row.

        product: `Emitter.dot_codes`, or another of its dot products. largest: code that `dot_codes` is given.
        """
        if product is None and self.emit.isa is ISA.AVX2:
            product = functools.partial(self.emit.chained, largest=largest)
        product = product or self.emit.dot_codes
        sums = [
            product(dot, codes, self._bytes4(row, column, offset)) for dot, row in zip(dots, self.rows, strict=True)
        ]
        return self._in_order(sums) if self.is_ordered else sums

    def _in_order(self, sums: list[Any]) -> list[Any]:
        """The same sums, which LLVM has made before it loads again from the addresses that these took."""
        addresses = list(self._used)
        self._used.clear()
        for number, (key, address) in enumerate(addresses):
            t = min(number, len(sums) - 1)
            sums[t], self._latest[key] = self.emit.ordered(sums[t], address)
        return sums

    def _address(self, key: Any, address: Callable[[], Value]) -> Value:
        """The address to load from: the one that came last out of `_in_order`."""
        if not self.is_ordered:
            return address()
        key = (self.emit.builder.block, key)
        if key not in self._latest:
            self._latest[key] = address()
        if all(key != used for used, _ in self._used):
            self._used.append((key, self._latest[key]))
        return self._latest[key]

    def ordered(self, address: Value) -> Value:
        """An address, known when the products before are there where loads wait for them."""
        return self._address(address, lambda: address)

    def _bytes4(self, row: Value, column: Value, offset: int) -> Value:
        """Four activation bytes, broadcast to all lanes."""
        emit = self.emit
        if emit.is_neon:
            # One lane of a register is a factor by itself.
            width = 2 if self.has_pairs else 4
            key = (row, column, offset // (4 * width))
            if key not in self._loaded:
                address, place = self.place(row, column, offset // (4 * width) * (4 * width))
                self._loaded[key] = emit.load(address, vector(I32, width), place, align=4)
            words = emit.shuffle(self._loaded[key], [offset // 4 % width] * self.count)
            return emit.bitcast(words, vector(I8, 4 * self.count))
        if self.has_pairs:
            address, place = self.place(row, column, offset)
        else:
            address, place = self._address((row, column), lambda: emit.builder.add(row, column)), offset
        word = emit.load(address, I32, place, align=4)
        return emit.bitcast(emit.splat(word, self.count), vector(I8, 4 * self.count))

    def place(self, row: Value, column: Value, offset: int) -> tuple[Value, int]:
        """Address and offset of a column of a row of activations. column: the first one of a block."""
        b, emit = self.emit.builder, self.emit
        if not self.has_pairs:
            return b.add(row, column), offset
        block, inner = divmod(offset, 32)
        start = b.add(row, b.mul(column, emit.i64(PAIR_BYTES // 32)))
        return start, PAIR_BYTES * block + inner // 8 * 16 + inner % 8

    def accumulate(
        self, total: Value, dot: Value, weight_scale: Value, record: Value, *, is_started: bool = False
    ) -> Value:
        """total + dot * (weight scale * activation scale): only here does an integer dot become a float.

        is_started: True if it began as `started` does.
        """
        emit = self.emit
        scale = emit.mul(weight_scale, self.record_float(record, SCALE))
        return emit.fma(self.number(dot) if is_started else emit.to_float(dot), scale, total)

    def number(self, dot: Value) -> Value:
        """A dot product that began as `started` does, as float32."""
        dot = self.emit.dot_total(dot)
        if self.multiplies_both:
            return self._shared_number(dot)
        emit, count = self.emit, dot.type.count
        if not self._counts_in_floats:
            return emit.to_float(dot)
        offset = emit.bitcast(emit.splat_constant(I32, WHOLE, count), vector(F32, count))
        return emit.sub(emit.bitcast(dot, vector(F32, count)), offset)

    def _shared_number(self, dot: Value) -> Value:
        """As `number`: the second of two registers has 16 times its sum, and the sum of the first one."""
        emit, b = self.emit, self.emit.builder
        parts = [emit.lanes(dot, start, 4) for start in range(0, dot.type.count, 4)]
        numbers = []
        for first, second in zip(parts[::2], parts[1::2], strict=True):
            if not self._counts_in_floats:
                rest = b.ashr(b.sub(second, first), emit.splat_constant(I32, 4, 4))
                numbers += [emit.to_float(first), emit.to_float(rest)]
                continue
            whole, left, right = (
                emit.bitcast(part, vector(F32, 4)) for part in (emit.splat_constant(I32, WHOLE, 4), first, second)
            )
            numbers += [emit.sub(left, whole), emit.mul(emit.sub(right, left), emit.splat_constant(F32, 0.0625, 4))]
        return emit.join(numbers)

    def add_dots(self, totals: list[Value], dots: list[Value], weight_scale: Value, block: list[Value]) -> list[Value]:
        """`accumulate` for every activation row; block: the rows' records of it."""
        return [
            self.accumulate(total, dot, weight_scale, record, is_started=True)
            for total, dot, record in zip(totals, dots, block, strict=True)
        ]

    def add_minimums(self, totals: list[Value], minimum: Value, block: list[Value]) -> list[Value]:
        """totals + minimum * the scaled sums of the activations, for every row."""
        return [
            self.emit.fma(minimum, self.record_float(record, SCALED_SUM), total)
            for total, record in zip(totals, block, strict=True)
        ]
