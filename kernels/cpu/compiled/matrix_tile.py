"""Products of many rows of activations by AMX: sixteen rows by sixteen outputs by 16 or 32 columns in one instruction.

A tile of weights is multiplied by chunks of 256 columns. Their codes are unpacked once, to signed bytes in memory that
the first-level cache holds, and multiplied by all rows of a block; the dot products come back through memory as int32.
What a layout does is not written again: its body (`blocks.py`, `codebooks.py`) runs twice over the same unit, first
with an `UnpackingTile`, which keeps only the codes that it would multiply, then with a `SummingTile`, which takes the
dot products of whole groups of columns in their place and leaves every float step as it is. So totals have the bits of
other instruction sets.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from localinfer.kernels.cpu.compiled.emit import I8, I32, I64, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.tile import Tile
from localinfer.kernels.cpu.kernel_abi import RECORD_BYTES
from localinfer.kernels.layouts import Layout

Body = Callable[[Tile, Value, list[Value]], list[Value]]

CHUNK_COLUMNS = 256
"""Columns that are unpacked at a time: a super-block, or as many blocks."""
ROWS = 16
"""Rows of activations of one product; of the last one eight."""
FEW_ROWS = 8

_HALVES = (Layout.Q6_K, Layout.NVFP4, Layout.Q2_K, Layout.Q3_K, Layout.TQ2_0, Layout.IQ2_XS, Layout.IQ2_S)
"""Layouts of which a body sums 16 columns at a time, since each has a scale of its own; of others 32."""
_WITH_MINIMUMS = (Layout.Q4_1, Layout.Q5_1, Layout.Q4_K, Layout.Q5_K)
"""Layouts whose dot products are followed by minimums."""

_SUMS = 16 * CHUNK_COLUMNS
_CONFIGURATION = _SUMS + CHUNK_COLUMNS // 16 * 64 * ROWS
MATRIX_BYTES = _CONFIGURATION + 64
"""Of a chunk: codes of sixteen outputs, dot products of groups of columns, int32[groups][ROWS][16], and what registers
are configured by."""

_TOTALS, _LEFT, _RIGHT, _FEW_TOTALS, _FEW_LEFT = (0, 1), (2, 3), (4, 5), 6, 7
"""Numbers of registers: sums and activations of sixteen rows, weights, sums and activations of eight rows."""


def group_columns(layout: Layout) -> int:
    """Columns of one dot product."""
    return 16 if layout in _HALVES else 32


class UnpackingTile(Tile):
    """Keeps the codes of a unit as signed bytes, in the order of columns, and computes nothing.

    Codes for which a dot product starts at a multiple of the activations' sum are stored less that multiple.
    """

    def __init__(self, emit: Emitter, layout: Layout, tile: Value, columns: Value, target: Value) -> None:
        # As many rows as no body treats apart.
        super().__init__(emit, layout, tile, columns, [None] * FEW_ROWS)
        self.target = target
        """Address of what would be the codes of column 0."""
        self._offset = 0
        """What codes are stored less."""

    @property
    def takes_signed(self) -> bool:
        return True

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
        self, dots: list[Value], codes: Value, column: Value, offset: int, product: Callable[..., Value] | None = None
    ) -> list[Value]:
        emit = self.emit
        less = 128 if product == emit.dot_biased else self._offset
        signed = emit.builder.sub(codes, emit.splat_constant(I8, less, 64)) if less else codes
        emit.store(signed, self.at(self.target, column, 16), 16 * offset, align=64)
        return dots

    def accumulate(
        self, total: Value, dot: Value, weight_scale: Value, record: Any, *, is_started: bool = False
    ) -> Value:
        return total

    def add_minimums(self, totals: list[Value], minimum: Value, block: list[Any]) -> list[Value]:
        return totals


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
        self, dots: list[Value], codes: Value, column: Value, offset: int, product: Callable[..., Value] | None = None
    ) -> list[Value]:
        if offset % self._group:
            return dots
        emit, b = self.emit, self.emit.builder
        group = self.at(self.sums_address, column, 64 * ROWS // self._group)
        start = 64 * ROWS * (offset // self._group)
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
    """totals = x @ tile.T for `num_rows` rows, a multiple of FEW_ROWS.

    x: address of the first row of activations, the others `stride` bytes apart. memory: MATRIX_BYTES of the thread.
    totals: address of float32[num_rows][16].
    """
    b = emit.builder
    products = _Products(emit, body, layout, tile, columns, x, stride, memory, totals)
    emit.loop(emit.i64(0), num_rows, 1, [], lambda row, _: _zero_totals(emit, totals, row))
    products.configure()
    last_whole = b.and_(num_rows, emit.i64(-ROWS))

    def chunk(first: Value, _: list[Value]) -> Sequence[Value]:
        left = b.sub(columns, first)
        is_whole = b.icmp_signed(">=", left, emit.i64(CHUNK_COLUMNS))
        last = b.select(is_whole, b.add(first, emit.i64(CHUNK_COLUMNS)), columns)
        products.unpack(first, last)
        emit.loop(emit.i64(0), last_whole, ROWS, [], lambda row, _: products.add(first, last, row, ROWS))
        emit.loop(last_whole, num_rows, FEW_ROWS, [], lambda row, _: products.add(first, last, row, FEW_ROWS))
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
            rows[number] = group // 4 if is_right else FEW_ROWS if number in (_FEW_TOTALS, _FEW_LEFT) else ROWS
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

        def unit_body(unit: Value, _: list[Value]) -> Sequence[Value]:
            self._body(tile, unit, tile.no_totals())
            return []

        emit.loop(*self._units(first, last), 1, [], unit_body)

    def add(self, first: Value, last: Value, row: Value, count: int) -> Sequence[Value]:
        """Add the chunk's products by `count` rows (literal), from `row` on, to their totals."""
        emit, b = self._emit, self._emit.builder
        x = b.add(self._x, b.mul(row, self._stride))
        self._multiply(first, last, x, count)
        sums = b.sub(b.add(self._memory, emit.i64(_SUMS)), b.mul(first, emit.i64(64 * ROWS // self._group)))
        place = b.add(self._totals, b.mul(row, emit.i64(64)))
        tile = SummingTile(emit, self._layout, self._tile, self._columns, count, x, self._stride, sums)
        totals = [emit.load_floats(place, 64 * t) for t in range(count)]
        totals = emit.loop(*self._units(first, last), 1, totals, lambda unit, found: self._body(tile, unit, found))
        for t, total in enumerate(totals):
            emit.store(total, place, 64 * t, align=64)
        return []

    def _units(self, first: Value, last: Value) -> tuple[Value, Value]:
        unit = self._emit.i64(Tile(self._emit, self._layout, self._tile, self._columns, []).sizes.unit)
        return self._emit.builder.udiv(first, unit), self._emit.builder.udiv(last, unit)

    def _multiply(self, first: Value, last: Value, x: Value, count: int) -> None:
        """Dot products of every group of the chunk, to memory."""
        emit, b, group = self._emit, self._emit.builder, self._group
        left = b.add(x, first)
        sums = b.add(self._memory, emit.i64(_SUMS))
        row_bytes = emit.i64(64)

        def block(column: Value, _: list[Value], size: int) -> Sequence[Value]:
            """`size` columns from one of the chunk on."""
            codes, target = (
                b.add(base, b.mul(column, emit.i64(each)))
                for base, each in ((self._memory, 16), (sums, 64 * ROWS // group))
            )
            for index in range(size // group):
                turn = index % 2
                total, factor = (_TOTALS[turn], _LEFT[turn]) if count == ROWS else (_FEW_TOTALS, _FEW_LEFT)
                emit.matrix_zero(total)
                emit.matrix_load(factor, b.add(b.add(left, column), emit.i64(group * index)), self._stride)
                emit.matrix_load(_RIGHT[turn], b.add(codes, emit.i64(16 * group * index)), row_bytes)
                emit.matrix_dot(total, factor, _RIGHT[turn])
                emit.matrix_store(total, b.add(target, emit.i64(64 * ROWS * index)), row_bytes)
            return []

        num_columns = b.sub(last, first)
        whole = b.and_(num_columns, emit.i64(-64))
        emit.loop(emit.i64(0), whole, 64, [], lambda column, _: block(column, _, 64))
        emit.loop(whole, num_columns, 32, [], lambda column, _: block(column, _, 32))
