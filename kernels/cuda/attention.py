"""The launches of RoPE, the cache and attention."""

from collections.abc import Iterator
from dataclasses import dataclass

from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.gemm import TENSOR_CORES, THREADS, Builder, Place, Quantized, Shape, column_launch
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape

KV_BYTES = {"q4_0": 0, "q8_0": 1, "f16": 2, "f32": 4}
"""The kernels' constants for types of keys and values: the whole bytes of an element."""

_CODES, _FLOATS = KV_BYTES["q8_0"], KV_BYTES["f32"]
"""Types up to the first are codes, of heads that were rotated."""

_RANGES = 2
"""The kernels' constant for rows that attend to ranges of positions which the batch gives."""

_ROWS = 32
"""Rows of a prompt whose attention is computed at a time: what every chunk gives is kept until they are merged."""

_HEADS = 8
"""Query heads that one block computes at most."""

_TILED_ROWS = 8
"""Rows of one sequence from which on they share their keys and values in tiles."""

_TILE_COLUMNS, _MAX_SHARED_BYTES = 128, 48 << 10


@dataclass(frozen=True)
class HeadRotation:
    """A rotation of every head: where the cosines and sines of a batch are, pairs, and where in a head they begin."""

    angles: int
    num_pairs: int
    halves: int
    head_size: int
    offset: int


@dataclass(frozen=True)
class FreshRows:
    """Keys, still without their rotation, and values of a batch, which are to be stored in a layer's cache."""

    layer: int
    keys: Place
    values: Place
    rope: HeadRotation


def store_steps(layout: KVLayout, layer: int, keys: Place, values: Place, rope: HeadRotation) -> Builder:
    """Write keys, rotated, and values into the cache."""
    kept, head = layout.layers[layer], layout.head(layer)
    heads, sizes = kept.num_kv_heads, (kept.key_size, kept.value_size)
    kinds = (KV_BYTES[layout.key_type], KV_BYTES[layout.value_type])
    place = (layout.layer_offset(layer), head.num_bytes)
    rotation = (rope.angles, rope.num_pairs, rope.halves, rope.offset)

    def build(shape: Shape) -> Iterator[Step]:
        rows = (*keys, *values, shape.kept, shape.page_tables, *place)
        if min(kinds) <= _CODES:
            offsets: tuple[int, ...] = (head.key_scales, head.values, head.value_scales, head.value_columns)
            grid = (heads, shape.batch_rows, 2)
            yield Launch("kv_store.store_codes", (*kinds, *sizes), grid, THREADS, (*rows, *offsets, *rotation))
        else:
            width = heads * (kept.key_size + head.value_columns)
            offsets = (head.values, heads, *sizes, head.value_columns)
            yield column_launch("kv_store.store_rows", kinds, width, shape.batch_rows, (*rows, *offsets, *rotation))

    return build


@dataclass(frozen=True)
class AttentionLaunches:
    """An attention op over the cache: addresses of queries, rotated here, and of results; ALiBi slopes and sinks
    are addresses, or 0. fresh: of one row, what its attention stores before it reads the cache, if anything.
    takes_ranges: whether rows attend to the ranges of positions that a batch gives."""

    memory: DeviceMemory
    layout: KVLayout
    layer: int
    shape: AttentionShape
    queries: Place
    out: Place
    slopes: int
    sinks: int
    rope: HeadRotation
    fresh: FreshRows | None = None
    takes_ranges: bool = False

    def steps(self, run: Shape, codes: Quantized | None) -> Iterator[Step]:
        """The launches of a batch. codes: output of the codes of what is written, if wanted; tiles leave them out,
        because no GEMM of so many rows reads them."""
        first = start = 0
        if run.batch_rows > SMALL_ROWS and self.has_tiles:
            for rows in run.segment_rows:
                end = start + rows
                if rows >= _TILED_ROWS:
                    yield from self.by_chunks(run, first, start, codes)
                    yield from self.by_tiles(run, start, end)
                    first = end
                start = end
        yield from self.by_chunks(run, first, run.batch_rows, codes)

    @property
    def kinds(self) -> tuple[int, int]:
        return KV_BYTES[self.layout.key_type], KV_BYTES[self.layout.value_type]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def can_store(self) -> bool:
        """True if the attention of one row can store that row: one block reads all of a head of it."""
        return self.group <= _HEADS

    @property
    def tile_warps(self) -> int:
        """Warps of a tile: four, or as many as fit a block's shared memory."""
        key_words = 8 * -(-self.shape.key_size // 16) + 4
        value_words = 20 * 8 * -(-min(self.shape.value_size, _TILE_COLUMNS) // 8)
        rows = (_MAX_SHARED_BYTES // 4 - value_words) // key_words - 32
        return min(4, rows // 16)

    @property
    def has_tiles(self) -> bool:
        """True if long runs of rows are computed by tiles."""
        is_rounded = _FLOATS not in self.kinds
        return is_rounded and self.memory.device.capability >= TENSOR_CORES and self.group <= 16 * self.tile_warps

    @property
    def mask(self) -> tuple[int, int]:
        """The window before a row and the span of local chunks, in positions; 0 for none."""
        return (self.shape.reach[0], self.shape.chunk)

    def _sight(self, run: Shape) -> int:
        """The kernels' constant for how far rows see."""
        if self.takes_ranges and run.media is not None and run.media.key_ends:
            return _RANGES
        return int(self.shape.bidirectional)

    def _reach(self, run: Shape, row: int) -> tuple[int, int, int]:
        """Of rows from `row` on the ranges that they attend to, or later positions and the last of their segments."""
        media = run.media
        if media is not None and self._sight(run) == _RANGES:
            return media.key_starts + 8 * row, media.key_ends + 8 * row, media.window_starts + 8 * row
        return self.shape.reach[1], run.last_positions + 8 * row, 0

    @property
    def _offsets(self) -> tuple[int, ...]:
        head = self.layout.head(self.layer)
        scales = (head.key_scales, head.values, head.value_scales, head.value_columns)
        return (head.num_bytes, self.layout.layer_offset(self.layer), *scales)

    def by_chunks(self, run: Shape, start: int, end: int, codes: Quantized | None) -> Iterator[Step]:
        """Rows of any sequences, each by itself."""
        shape, group, rope = self.shape, self.group, self.rope
        heads = min(_HEADS, 1 << (group - 1).bit_length())
        rows = min(_ROWS, end - start)
        row_bytes = shape.num_heads * (4 * shape.value_size + 8)
        blocks = shape.num_kv_heads * -(-group // heads)
        stores = self.fresh is not None and run.batch_rows == 1
        fresh = (0,) * 6
        if self.fresh is not None and stores:
            turn = self.fresh.rope
            fresh = (self.fresh.keys[0], self.fresh.values[0], turn.angles, turn.num_pairs, turn.halves, turn.offset)
        for first in range(start, end, _ROWS):
            count = min(rows, end - first)
            partials = self.memory.shared("partial attention", rows * run.num_chunks * row_bytes)
            tables = (run.kept + 8 * first, run.page_tables + 8 * first, partials, run.num_chunks, shape.num_heads)
            rotation = (self._angles(first), rope.num_pairs, rope.halves, rope.offset)
            sizes = (heads, shape.key_size, shape.value_size)
            constants = (*self.kinds, *sizes, int(stores), int(codes is not None), self._sight(run))
            place = _after(self.queries, first)
            values = (*place, *tables, group, *self._offsets, *self.mask, self.slopes, *rotation)
            grid = (count, blocks, run.num_chunks)
            counters = self.memory.counters(rows * shape.num_heads)
            into = (0, 0, 0, 0) if codes is None else codes.after(first).parameters
            target = (*_after(self.out, first), self.sinks, counters, *into)
            arguments = (*values, shape.scale, shape.softcap, *fresh, *target, *self._reach(run, first))
            yield Launch("attention.attend_chunks", constants, grid, THREADS, arguments)

    def by_tiles(self, run: Shape, start: int, end: int) -> Iterator[Step]:
        """Rows of one sequence, which share what they read."""
        shape, rope, rows, warps = self.shape, self.rope, end - start, self.tile_warps
        queries, out = _after(self.queries, start), _after(self.out, start)
        rotation = (self._angles(start), rope.num_pairs, rope.halves, rope.offset)
        heads = (shape.num_heads, rows, 1)
        if self.kinds[0] <= _CODES:
            width = 4 * shape.num_heads * shape.key_size
            place = (self.memory.shared("rotated queries", self.memory.max_input_bytes(width // 4)), width)
            yield Launch("rotation.rotate_heads", (shape.key_size,), heads, THREADS, (*place, *queries, *rotation))
            queries, rotation = place, (0, 0, 0, 0)
        tiles = -(-rows // (16 * warps // self.group))
        tables = (run.kept + 8 * start, run.page_tables + 8 * start)
        mask = (*self.mask, self.slopes, self.sinks)
        numbers = (*queries, *out, *tables, rows, self.group, *self._offsets, *mask, *rotation, tiles)
        grid = (tiles, shape.num_kv_heads, -(-shape.value_size // _TILE_COLUMNS))
        constants = (*self.kinds, shape.key_size, shape.value_size, warps, self._sight(run))
        values = (*numbers, shape.scale, shape.softcap, *self._reach(run, start))
        yield Launch("attention_tiles.attend_tiles", constants, grid, 32 * warps, values)
        if self.kinds[1] <= _CODES:
            yield Launch("rotation.rotate_heads", (shape.value_size,), heads, THREADS, (*out, *out, 0, 0, 0, 0))

    def _angles(self, row: int) -> int:
        return self.rope.angles + row * self.rope.num_pairs * 8


def _after(place: Place, rows: int) -> Place:
    """An address without its first rows."""
    return place[0] + rows * place[1], place[1]
