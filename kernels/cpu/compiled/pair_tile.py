"""Products of pairs of activation rows, by NEON's products of small matrices: only where `isa.pairs_rows`.

One instruction multiplies two rows of weights and two of activations, eight columns of each.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localinfer.kernels.cpu.compiled.emit import F32, I8, I32, I64, LANES, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.tile import MINUS_8_SUM, SCALE, SCALED_SUM, WHOLE, Tile, places_of
from localinfer.kernels.cpu.kernel_abi import PAIR_BIAS
from localinfer.kernels.layouts import Layout


class PairTile(Tile):
    """Rows of weights by pairs of rows of activations, or by one row.

    Bodies take two vectors of four columns for what they are of a `Tile`. Here both have the same eight columns, the
    first of half of the rows, the second of the others, since all that bodies do to codes they do to bytes.

    gathers: the rows of a pair are not the two of one pair in memory.
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
        *,
        gathers: bool = False,
    ) -> None:
        super().__init__(emit, layout, tile, columns, rows, first, count)
        self.is_single = len(rows) == 1
        self.gathers = gathers
        if not self.is_single:
            self.rows = list(zip(rows[::2], rows[1::2], strict=True))
        self.lanes = 2 * count

    @property
    def takes_signed(self) -> bool:
        return True

    def load_codes(self, address: Value, vector_number: int, step: int = 64, start: int = 0) -> Value:
        emit, half = self.emit, vector_number % 2
        # Of the two vectors, one has rows 0 to 7 and the other rows 8 to 15.
        share = 4 if self.shares_bytes else 2
        count = max(self.count // 2, share)
        row = self.first + self.count // 2 * half // share * share
        place = start + step * (vector_number - half + row // 8) + 8 * (row % 8)
        return emit.load(address, vector(I8, 8 * count), place, align=16)

    def _shared(self, registers: list[Value], vector_number: int) -> Value:
        if self.count > 4:
            return super()._shared(registers, vector_number)
        # Of four rows, the first two for the former of two vectors, the others for the latter.
        return registers[0] if vector_number % 2 else self.low(registers[0])

    def _shared_number(self, dot: Value) -> Value:
        if not self.is_single:
            return super()._shared_number(dot)
        emit, b = self.emit, self.emit.builder
        numbers = []
        for start in range(0, dot.type.count, 4):
            # Two first rows and two second ones.
            part = emit.lanes(dot, start, 4)
            whole = emit.splat_constant(I32, WHOLE if self._counts_in_floats else 0, 4)
            less = b.shuffle_vector(part, whole, emit.constants(I32, (4, 5, 0, 1)))
            if self._counts_in_floats:
                left, right = (emit.bitcast(one, vector(F32, 4)) for one in (part, less))
                numbers.append(emit.mul(emit.sub(left, right), emit.constants(F32, (1.0, 1.0, 0.0625, 0.0625))))
            else:
                numbers.append(emit.to_float(b.ashr(b.sub(part, less), emit.constants(I32, (0, 0, 4, 4)))))
        return emit.join(numbers)

    def load_bits(self, address: Value, offset: int) -> Value:
        """As `load_codes`, each four bytes twice: for both of the columns that a vector has there."""
        emit = self.emit
        words = emit.load(address, vector(I32, self.count), offset + 4 * self.first, align=16)
        return emit.bitcast(self.spread(words), vector(I8, 8 * self.count))

    def column_bits(self, bits: Value, start: int, width: int, number: int, target: int) -> Value:
        b, emit, size = self.emit.builder, self.emit, 4 * self.count
        half, before = number % 2, number - number % 2
        rows = emit.lanes(bits, size * half, size)
        # The first four bytes of eight are of one vector of columns, the others of the next.
        moves = [start + width * (before + byte // 4 % 2) - target for byte in range(size)]
        left, right = ([max(sign * move, 0) for move in moves] for sign in (-1, 1))
        if any(right):
            rows = b.lshr(rows, emit.constants(I8, right))
        if any(left):
            rows = b.shl(rows, emit.constants(I8, left))
        return b.and_(rows, emit.splat_constant(I8, ((1 << width) - 1) << target, size))

    def spread(self, weights: Value) -> Value:
        return self.emit.shuffle(weights, [lane // 2 for lane in range(self.lanes)])

    def no_totals(self) -> list[Value]:
        return [self.emit.zeros(F32, self.count if self.is_single else self.lanes) for _ in self.rows]

    def by_row(self, totals: Sequence[Value]) -> list[Value]:
        """Totals as vectors with the lanes of one activation row each."""
        if self.is_single:
            return list(totals)
        return [self.emit.shuffle(total, range(row, self.lanes, 2)) for total in totals for row in range(2)]

    def record(self, row: Any, block: Value) -> Any:
        if self.is_single:
            return super().record(row, block)
        first, second = row
        return super().record(first, block), super().record(second, block)

    def record_float(self, record: Any, field: int) -> Value:
        emit, place = self.emit, places_of(field)[0]
        if self.is_single:
            return emit.splat(emit.load(record, F32, place, align=4), self.count)
        if self.gathers:
            return emit.bitcast(emit.splat(self._both(record, field), self.count), vector(F32, self.lanes))
        four = emit.load(record[0], vector(F32, 4), place, align=16)
        return emit.shuffle(four, [lane % 4 for lane in range(self.lanes)])

    def record_int(self, record: Any, field: int, shift: int = 0) -> Value:
        """An integer of a record, shifted left, in all lanes of a dot product."""
        b, emit = self.emit.builder, self.emit
        words = self._spread_word(self._both(record, field))
        words = b.sub(words, emit.splat_constant(I32, PAIR_BIAS, self.lanes))
        return b.shl(words, emit.splat_constant(I32, shift, self.lanes)) if shift else words

    def unsigned_starts(self, block: Value) -> list[Value]:
        return self.no_dots(block)

    def started_from(self, record: Any, field: int, shift: int = 0) -> Value:
        b = self.emit.builder
        if not self._counts_in_floats:
            start = self.record_int(record, field, shift)
            return b.mul(start, self._of_rows(1, 17)) if self.shares_bytes else start
        word = self._both(record, field)
        first = self._with_offset(b.shl(word, word.type(shift)), PAIR_BIAS << shift)
        if not self.shares_bytes:
            return self._from_scalar(first, record)
        second = self._with_offset(
            b.add(b.shl(word, word.type(shift + 4)), b.shl(word, word.type(shift))), PAIR_BIAS * 17 << shift
        )
        return self._by_turns(first, second, record)

    def _of_rows(self, first: int, second: int) -> Value:
        """A constant for first rows of shared bytes, and one for second rows."""
        return self.emit.constants(I32, [(first, second)[lane // 4 % 2] for lane in range(self.lanes)])

    def minus_sum(self, record: Any) -> Value:
        return self.emit.builder.ashr(
            self.record_int(record, MINUS_8_SUM), self.emit.splat_constant(I32, 3, self.lanes)
        )

    def _with_offset(self, word: Value, bias: int) -> Value:
        """The start of a dot product from an integer with a bias, or two of them, none of which becomes negative."""
        offset = WHOLE - bias
        return self.emit.builder.add(word, word.type(offset if word.type is I32 else offset << 32 | offset))

    def _both(self, record: Any, field: int) -> Value:
        """The bits of a number of both records, or of a single one."""
        emit, b, place = self.emit, self.emit.builder, places_of(field)[0]
        if self.is_single:
            return emit.load(record, I32, place, align=4)
        if not self.gathers:
            return emit.load(record[0], I64, place, align=8)
        first, second = (b.zext(emit.load(one, I32, place, align=4), I64) for one in record)
        return b.or_(first, b.shl(second, emit.i64(32)))

    def _spread_word(self, word: Value) -> Value:
        count = self.lanes * 32 // word.type.width
        return self.emit.bitcast(self.emit.splat(word, count), vector(I32, self.lanes))

    def _by_turns(self, first: Value, second: Value, block: Any) -> Value:
        return super()._by_turns(first, second, block[0] if isinstance(block, tuple) else block)

    def _from_scalar(self, word: Value, block: Any, number: int = 0) -> Value:
        block = block[0] if isinstance(block, tuple) else block
        count = self.lanes // 4
        words = [self.emit.opaque(word, block, count * number + register) for register in range(count)]
        joined = self.emit.join([self.emit.splat(word, 128 // word.type.width) for word in words])
        return self.emit.bitcast(joined, vector(I32, self.lanes))

    def dot(
        self,
        dots: list[Value],
        codes: Value,
        column: Value,
        offset: int,
        product: Callable[..., Value] | None = None,
        largest: int = 127,
    ) -> list[Value]:
        """As `Tile.dot`, of the eight columns that two calls are for and of half of the rows; codes are signed."""
        emit = self.emit
        half = offset // 4 % 2
        factors = [emit.lanes(codes, start, 16) for start in range(0, codes.type.count, 16)]
        results = []
        for dot, row in zip(dots, self.rows, strict=True):
            others = self._others(row, column, offset - 4 * half)
            parts = [emit.lanes(dot, start, 4) for start in range(0, self.lanes, 4)]
            for index, factor in enumerate(factors):
                place = len(factors) * half + index
                parts[place] = emit.matrix_product(parts[place], factor, others, is_signed=not self.shares_bytes)
            results.append(emit.join(parts))
        return results

    def _others(self, row: Any, column: Value, offset: int) -> Value:
        """Eight activations of each of two rows; of a single row, eight of it and others."""
        emit, b = self.emit, self.emit.builder
        key = (row, column, offset)
        if key not in self._loaded:
            if self.gathers and not self.is_single:
                places = [self.place(one, column, offset) for one in row]
                halves = [emit.load(address, I64, place, align=8) for address, place in places]
                both = emit.zeros(I64, 2)
                for lane, half in enumerate(halves):
                    both = b.insert_element(both, half, emit.i32(lane))
                self._loaded[key] = emit.bitcast(both, vector(I8, 16))
            else:
                address, place = self.place(row if self.is_single else row[0], column, offset)
                self._loaded[key] = emit.load(address, vector(I8, 16), place, align=8)
        return self._loaded[key]

    def add_dots(self, totals: list[Value], dots: list[Value], weight_scale: Value, block: list[Any]) -> list[Value]:
        if self.is_single:
            dots = [self.emit.shuffle(dot, range(0, self.lanes, 2)) for dot in dots]
            return [self._added(totals[0], dots[0], weight_scale, block[0])]
        scale = self.spread(weight_scale)
        return [self._added(total, dot, scale, record) for total, dot, record in zip(totals, dots, block, strict=True)]

    def _added(self, total: Value, dot: Value, scale: Value, record: Any) -> Value:
        emit = self.emit
        return emit.fma(self.number(dot), emit.mul(scale, self.record_float(record, SCALE)), total)

    def add_minimums(self, totals: list[Value], minimum: Value, block: list[Any]) -> list[Value]:
        minimum = minimum if self.is_single else self.spread(minimum)
        return [
            self.emit.fma(minimum, self.record_float(record, SCALED_SUM), total)
            for total, record in zip(totals, block, strict=True)
        ]

    def halves(self, count: int = 2) -> Iterator[tuple[Sequence[int], Callable[[Value], Value]]]:
        return self.turns(range(count))

    def turns(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[int], Callable[[Value], Value]]]:
        """As of a `Tile`; blocks by turns where registers do not hold the dot products of all of them."""
        if not self.emit.is_neon:
            yield blocks, lambda address: address
            return
        for block in blocks:
            self._num_turns += 1
            self._loaded.clear()
            yield [block], functools.partial(self._again, self._num_turns)
