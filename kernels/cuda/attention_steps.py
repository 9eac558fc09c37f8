"""The launches of RoPE, the cache and attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.products import THREADS, Quantized
from localinfer.kernels.cuda.shape import Builder, Shape
from localinfer.kernels.cuda.tape_memory import DeviceMemory
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape

KV_BYTES = {"f16": 2, "f32": 4}
"""Types of keys and values that the kernels know."""

_ROWS = 32
"""Rows of a prompt whose attention is computed at a time: what every chunk gives is kept until they are merged."""

_HEADS = 8
"""Query heads that one block computes at most."""

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
    sizes = (layout.layer_offset(layer), head.num_bytes, head.values, kept.num_kv_heads, kept.key_size)
    columns = (kept.value_size, head.value_columns)
    constants = (KV_BYTES[layout.key_type], KV_BYTES[layout.value_type])
    width = kept.num_kv_heads * (kept.key_size + head.value_columns)

    def build(shape: Shape) -> Iterator[Step]:
        turn = (rope.angles, rope.num_pairs, rope.halves, rope.offset)
        words = (*keys, *values, shape.positions, shape.page_tables, *sizes, *columns, *turn)
        yield Launch("attention.store_kv", constants, (-(-width // THREADS), shape.batch_rows, 1), THREADS, words)

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
    when kernels are launched, where the codes of what is written go too, if anywhere.
    """
    group = shape.num_heads // shape.num_kv_heads
    heads = min(_HEADS, 1 << (group - 1).bit_length())
    head = layout.head(layer)
    types = (KV_BYTES[layout.key_type], KV_BYTES[layout.value_type])
    sizes = (shape.num_heads, group, head.num_bytes, layout.layer_offset(layer), head.values, head.value_columns)
    row_bytes = shape.num_heads * (4 * shape.value_size + 8)
    blocks = shape.num_kv_heads * -(-group // heads)
    queries, out = places
    slopes, sinks = constants

    def build(run: Shape) -> Iterator[Step]:
        rows = min(_ROWS, run.batch_rows)
        partials = memory.shared("partial attention", rows * run.num_chunks * row_bytes)
        codes = quantized()
        for first in range(0, run.batch_rows, rows):
            count = min(rows, run.batch_rows - first)
            tables = (run.positions + 8 * first, run.page_tables + 8 * first)
            mask = (shape.window, shape.chunk)
            turn = (rope.angles + first * rope.num_pairs * 8, rope.num_pairs, rope.halves + 2 * rope.offset)
            source = (queries[0] + first * queries[1], queries[1])
            words = (*source, *tables, partials, run.num_chunks, *sizes, *mask, slopes, *turn)
            grid = (count, blocks, run.num_chunks)
            numbers = (*types, heads, shape.key_size, shape.value_size)
            values = (*words, shape.scale, shape.softcap)
            yield Launch("attention.attend_chunks", numbers, grid, THREADS, values)
            target = (out[0] + first * out[1], out[1])
            merged = (*target, *tables, partials, run.num_chunks, shape.num_heads, shape.value_size, *mask, sinks)
            into = (0, 0, 0, 0) if codes is None else codes.after(first).words
            flag = (int(codes is not None),)
            grid = (shape.num_heads, count, 1)
            yield Launch("attention.merge_chunks", flag, grid, THREADS, (*merged, *into))

    return build
