"""The launches of RoPE, the cache and attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.gemm import TENSOR_CORES, THREADS, Quantized
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.cuda.shape import Builder, Shape
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape

KV_BYTES = {"q8_0": 1, "f16": 2, "f32": 4}
"""Types of keys and values that the kernels know, and the bytes of an element, by which kernels name them."""

_CODES, _FLOATS = KV_BYTES["q8_0"], KV_BYTES["f32"]

_ROWS = 32
"""Rows of a prompt whose attention is computed at a time: what every chunk gives is kept until they are merged."""

_HEADS = 8
"""Query heads that one block computes at most."""

_TILED_ROWS = 8
"""Rows of one sequence from which on they share their keys and values in tiles."""

_TILE_COLUMNS, _MOST_SHARED_BYTES = 128, 48 << 10

Place = tuple[int, int]
"""Address and row stride of a buffer."""


@dataclass(frozen=True)
class Rope:
    """A rotation of every head: where the cosines and sines of a batch are, pairs, and where in a head they begin."""

    angles: int
    num_pairs: int
    halves: int
    head_size: int
    offset: int


def angle_steps(frequencies: int, num_pairs: int, angles: int, magnitude: float) -> Builder:
    """Compute the cosines and sines of every row."""

    def build(shape: Shape) -> Iterator[Step]:
        words = (shape.positions, frequencies, num_pairs, angles, magnitude)
        yield Launch("rows.rope_angles", (), (-(-num_pairs // THREADS), shape.batch_rows, 1), THREADS, words)

    return build


def rope_steps(place: Place, num_heads: int, rope: Rope) -> Builder:
    """Rotate a buffer in place."""

    def build(shape: Shape) -> Iterator[Step]:
        words = (*place, rope.angles, num_heads, rope.head_size, rope.num_pairs, rope.halves, rope.offset)
        grid = (-(-num_heads * rope.num_pairs // THREADS), shape.batch_rows, 1)
        yield Launch("rows.rope", (), grid, THREADS, words)

    return build


def store_steps(layout: KVLayout, layer: int, keys: Place, values: Place, rope: Rope) -> Builder:
    """Write keys, rotated, and values into the cache."""
    kept, head = layout.layers[layer], layout.head(layer)
    kinds = (KV_BYTES[layout.key_type], KV_BYTES[layout.value_type])
    place = (layout.layer_offset(layer), head.num_bytes)
    width = kept.num_kv_heads * (kept.key_size + head.value_columns)
    if _CODES in kinds:
        constants: tuple[int, ...] = (*kinds, kept.key_size, kept.value_size)
        offsets: tuple[int, ...] = (*place, head.key_scales, head.values, head.value_scales, head.value_columns)
    else:
        constants = kinds
        offsets = (*place, head.values, kept.num_kv_heads, kept.key_size, kept.value_size, head.value_columns)

    def build(shape: Shape) -> Iterator[Step]:
        turn = (rope.angles, rope.num_pairs, rope.halves, rope.offset)
        words = (*keys, *values, shape.positions, shape.page_tables, *offsets, *turn)
        if _CODES in kinds:
            grid = (kept.num_kv_heads, shape.batch_rows, 2)
            yield Launch("kv_store.store_codes", constants, grid, THREADS, words)
        else:
            grid = (-(-width // THREADS), shape.batch_rows, 1)
            yield Launch("kv_store.store_rows", constants, grid, THREADS, words)

    return build


def attention_steps(
    memory: DeviceMemory,
    layout: KVLayout,
    layer: int,
    shape: AttentionShape,
    places: tuple[Place, Place],
    constants: tuple[int, int],
    rope: Rope,
    quantized: Callable[[], Quantized | None],
) -> Builder:
    """Attention of queries, rotated here, over the cache.

    places: of queries and of what is written. constants: addresses of ALiBi slopes and sinks, or 0. quantized: asked
    when kernels are launched, where the codes of what is written go too, if anywhere; tiles leave them out, because no
    product of so many rows reads them.
    """
    attention = _Attention(memory, layout, layer, shape, *places, *constants, rope)

    def build(run: Shape) -> Iterator[Step]:
        first = 0
        codes = quantized()
        if run.batch_rows > SMALL_ROWS and attention.has_tiles:
            waiting = 0
            for rows in run.segment_rows:
                end = waiting + rows
                if rows >= _TILED_ROWS:
                    yield from attention.by_chunks(run, first, waiting, codes)
                    yield from attention.by_tiles(run, waiting, end)
                    first = end
                waiting = end
        yield from attention.by_chunks(run, first, run.batch_rows, codes)

    return build


@dataclass(frozen=True)
class _Attention:
    """One attention op."""

    memory: DeviceMemory
    layout: KVLayout
    layer: int
    shape: AttentionShape
    queries: Place
    out: Place
    slopes: int
    sinks: int
    rope: Rope

    @property
    def kinds(self) -> tuple[int, int]:
        return KV_BYTES[self.layout.key_type], KV_BYTES[self.layout.value_type]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def tile_warps(self) -> int:
        """Warps of a tile: four, or as many as fit a block's shared memory."""
        key_words = 8 * -(-self.shape.key_size // 16) + 4
        value_words = 20 * 8 * -(-min(self.shape.value_size, _TILE_COLUMNS) // 8)
        rows = (_MOST_SHARED_BYTES // 4 - value_words) // key_words - 32
        return min(4, rows // 16)

    @property
    def has_tiles(self) -> bool:
        """Whether long runs of rows are computed by tiles."""
        is_rounded = _FLOATS not in self.kinds
        return is_rounded and self.memory.device.capability >= TENSOR_CORES and self.group <= 16 * self.tile_warps

    @property
    def _offsets(self) -> tuple[int, ...]:
        head = self.layout.head(self.layer)
        scales = (head.key_scales, head.values, head.value_scales, head.value_columns)
        return (head.num_bytes, self.layout.layer_offset(self.layer), *scales)

    def by_chunks(self, run: Shape, start: int, end: int, codes: Quantized | None) -> Iterator[Step]:
        """Rows of any sequences, each by itself."""
        shape, group = self.shape, self.group
        heads = min(_HEADS, 1 << (group - 1).bit_length())
        rows = min(_ROWS, end - start)
        row_bytes = shape.num_heads * (4 * shape.value_size + 8)
        blocks = shape.num_kv_heads * -(-group // heads)
        mask = (shape.window, shape.chunk)
        rotated = shape.value_size if self.kinds[1] == _CODES else 0
        for first in range(start, end, _ROWS):
            count = min(rows, end - first)
            partials = self.memory.shared("partial attention", rows * run.num_chunks * row_bytes)
            tables = (run.positions + 8 * first, run.page_tables + 8 * first)
            turn = (self._angles(first), self.rope.num_pairs, self.rope.halves + 2 * self.rope.offset)
            words = (*_after(self.queries, first), *tables, partials, run.num_chunks, shape.num_heads, group)
            values = (*words, *self._offsets, *mask, self.slopes, *turn, shape.scale, shape.softcap)
            grid = (count, blocks, run.num_chunks)
            numbers = (*self.kinds, heads, shape.key_size, shape.value_size)
            yield Launch("attention.attend_chunks", numbers, grid, THREADS, values)
            target = (*_after(self.out, first), *tables, partials, run.num_chunks, shape.num_heads, shape.value_size)
            into = (0, 0, 0, 0) if codes is None else codes.after(first).words
            flags = (int(codes is not None), rotated)
            grid = (shape.num_heads, count, 1)
            yield Launch("attention.merge_chunks", flags, grid, THREADS, (*target, *mask, self.sinks, *into))

    def by_tiles(self, run: Shape, start: int, end: int) -> Iterator[Step]:
        """Rows of one sequence, which share what they read."""
        shape, rope, rows = self.shape, self.rope, end - start
        warps = self.tile_warps
        queries = _after(self.queries, start)
        turn = (self._angles(start), rope.num_pairs, rope.halves, rope.offset)
        if self.kinds[0] == _CODES:
            width = 4 * shape.num_heads * shape.key_size
            place = (self.memory.shared("rotated queries", self.memory.max_input_bytes(width // 4)), width)
            grid = (shape.num_heads, rows, 1)
            yield Launch("rotation.rotate_heads", (shape.key_size,), grid, THREADS, (*place, *queries, *turn))
            queries, turn = place, (0, 0, 0, 0)
        out = _after(self.out, start)
        tiles = -(-rows // (16 * warps // self.group))
        tables = (run.positions + 8 * start, run.page_tables + 8 * start)
        mask = (shape.window, shape.chunk, self.slopes, self.sinks)
        words = (*queries, *out, *tables, rows, self.group, *self._offsets, *mask, *turn, tiles)
        grid = (tiles, shape.num_kv_heads, -(-shape.value_size // _TILE_COLUMNS))
        numbers = (*self.kinds, shape.key_size, shape.value_size, warps)
        values = (*words, shape.scale, shape.softcap)
        yield Launch("attention_tiles.attend_tiles", numbers, grid, 32 * warps, values)
        if self.kinds[1] == _CODES:
            grid = (shape.num_heads, rows, 1)
            yield Launch("rotation.rotate_heads", (shape.value_size,), grid, THREADS, (*out, *out, 0, 0, 0, 0))

    def _angles(self, row: int) -> int:
        return self.rope.angles + row * self.rope.num_pairs * 8


def _after(place: Place, rows: int) -> Place:
    """A place without its first rows."""
    return place[0] + rows * place[1], place[1]
