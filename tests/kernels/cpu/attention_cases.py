"""Attention of many shapes: what it is called with, and what the NumPy oracle says."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout, parse_kv_type
from localinfer.kernels.ops import AttentionShape, Buffer, KVLayerShape
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import Write, random_rows
from tests.support.oracle_formulas import Float64Array, attend
from tests.support.oracle_kv import kept, kept_query

PLAIN = AttentionShape(num_heads=4, num_kv_heads=2, key_size=24, value_size=24, scale=0.2)
SHAPES = {
    "plain": PLAIN,
    "one query per key": replace(PLAIN, num_heads=2),
    "eleven queries per key": replace(PLAIN, num_heads=11, num_kv_heads=1),
    "odd sizes": replace(PLAIN, key_size=20, value_size=37),
    "three queries per key": replace(PLAIN, num_heads=6),
    "several scales": replace(PLAIN, key_size=80, value_size=72),
    "wide values": replace(PLAIN, key_size=8, value_size=144),
    "window": replace(PLAIN, window=40),
    "window of one": replace(PLAIN, window=1),
    "window beyond a chunk": replace(PLAIN, window=150),
    "local chunks": replace(PLAIN, chunk=50),
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, sinks=np.array([-3.0, 0.0, 2.0, 30.0], np.float32)),
    "alibi": replace(PLAIN, alibi_slopes=np.array([0.5, 0.25, 0.125, 0.01], np.float32)),
    "large scores": replace(PLAIN, scale=8.0),
    "everything": replace(
        PLAIN, window=70, softcap=3.0, sinks=np.ones(4, np.float32), alibi_slopes=np.full(4, 0.1, np.float32)
    ),
}
ERROR_BUDGETS = {"f32": 2e-6, "f16": 2e-6, "q8_0": 1e-4, "q4_0": 1e-4, "q8_0/q4_0": 1e-4, "f16/q8_0": 1e-4}
"""Relative L2 against float64 over the same cached numbers and rounded queries; kernels/README.md repeats it."""


def varied(names: Iterable[str], kv_types: Iterable[str]) -> list[tuple[str, str]]:
    """Each case with every other type of a cache, and each type with every other case."""
    pairs = itertools.product(enumerate(names), enumerate(kv_types))
    return [(name, kv_type) for (first, name), (second, kv_type) in pairs if (first + second) % 2 == 0]


def cache_of(shape: AttentionShape, kv_type: str) -> KVLayout:
    """A cache with another layer before the one in use."""
    return KVLayout(
        kv_type, [KVLayerShape(1, 16, 16), KVLayerShape(shape.num_kv_heads, shape.key_size, shape.value_size)]
    )


def inputs_of(shape: AttentionShape, rows: int, seed: int) -> list[FloatArray]:
    """Queries, keys and values."""
    kv_heads = shape.num_kv_heads
    widths = [shape.num_heads * shape.key_size, kv_heads * shape.key_size, kv_heads * shape.value_size]
    return [random_rows(rows, width, seed + index) for index, width in enumerate(widths)]


def attention_of(shape: AttentionShape) -> Write:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", shape.num_heads * shape.value_size)
        tape.store_kv(1, inputs[1], inputs[2])
        tape.attention(out, inputs[0], 1, shape)
        return out

    return write


def oracle(
    inputs: list[FloatArray], shape: AttentionShape, kv_type: str, *, exact_queries: bool = False
) -> Float64Array:
    """Every row by itself, over what the cache keeps of keys and values, of queries rounded as they are for it."""
    key_type, value_type = parse_kv_type(kv_type)
    queries, keys, values = (part.astype(np.float64) for part in inputs)
    if not exact_queries:
        queries = kept_query(queries, shape.key_size, key_type)
    keys, values = kept(keys, shape.key_size, key_type), kept(values, shape.value_size, value_type)
    rows = []
    for position, query in enumerate(queries):
        first = max(0, position - shape.window + 1) if shape.window else 0
        if shape.chunk:
            first = max(first, position // shape.chunk * shape.chunk)
        last = position
        if shape.bidirectional:
            reach = shape.window // 2 if shape.window else len(queries)
            first, last = max(0, position - reach), min(len(queries) - 1, position + reach)
        seen = range(first, last + 1)
        rows.append(attend(query, keys[first : last + 1], values[first : last + 1], seen, shape, position))
    return np.stack(rows)
