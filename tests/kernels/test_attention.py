"""Attention over pages, against the NumPy oracle, and its bits however a batch is cut."""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape, Buffer, FloatArray, KVLayerShape, Segment
from tests.kernels.tape_runs import RowProgram, Write, assert_same_bits, random_rows, relative_error, run_rows
from tests.oracle_formulas import Float64Array, attend

PLAIN = AttentionShape(num_heads=4, num_kv_heads=2, key_size=24, value_size=24, scale=0.2)
SHAPES = {
    "plain": PLAIN,
    "one query per key": replace(PLAIN, num_heads=2),
    "eleven queries per key": replace(PLAIN, num_heads=11, num_kv_heads=1),
    "odd sizes": replace(PLAIN, key_size=20, value_size=37),
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
ERROR_BUDGET = 2e-6
"""Relative L2 against float64 over the same cached numbers; kernels/README.md repeats it."""


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
    def write(tape: CpuTape, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", shape.num_heads * shape.value_size)
        tape.store_kv(1, inputs[1], inputs[2])
        tape.attention(out, inputs[0], 1, shape)
        return out

    return write


def oracle(inputs: list[FloatArray], shape: AttentionShape, kv_type: str) -> Float64Array:
    """Every row by itself, over what the cache keeps of keys and values."""
    kept = np.float16 if kv_type == "f16" else np.float32
    queries = inputs[0].astype(np.float64)
    keys, values = (part.astype(kept).astype(np.float64) for part in inputs[1:])
    rows = []
    for position, query in enumerate(queries):
        first = max(0, position - shape.window + 1) if shape.window else 0
        if shape.chunk:
            first = max(first, position // shape.chunk * shape.chunk)
        seen = range(first, position + 1)
        rows.append(attend(query, keys[first : position + 1], values[first : position + 1], seen, shape))
    return np.stack(rows)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("rows", [1, 31, 33, 127, 128, 129, 300])
def test_attention_equals_the_oracle_at_every_length(rows: int, kv_type: str, pool: ThreadPool) -> None:
    inputs = inputs_of(PLAIN, rows, seed=rows)
    found = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=cache_of(PLAIN, kv_type))
    assert relative_error(found, oracle(inputs, PLAIN, kv_type)) <= ERROR_BUDGET


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_the_oracle_and_itself_in_any_batch(
    name: str, kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape, rows = SHAPES[name], 261
    inputs, kv_layout = inputs_of(shape, rows, seed=1), cache_of(shape, kv_type)
    found = run_rows(pool, inputs, attention_of(shape), kv_layout=kv_layout)
    assert relative_error(found, oracle(inputs, shape, kv_type)) <= ERROR_BUDGET
    for splits in ([1] * rows, [7] * 37 + [2], [130, 1, 1, 64, 65]):
        assert_same_bits(run_rows(pool, inputs, attention_of(shape), splits, kv_layout), found)
    assert_same_bits(run_rows(two_threads, inputs, attention_of(shape), [100, 161], kv_layout), found)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_attention_keeps_the_sequences_of_a_batch_apart(
    kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    rows, kv_layout = 150, cache_of(PLAIN, kv_type)
    inputs = inputs_of(PLAIN, rows, seed=5)
    wanted = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=kv_layout)
    other = run_rows(pool, [part[::-1] for part in inputs], attention_of(PLAIN), kv_layout=kv_layout)
    for threads in (pool, two_threads):
        program = RowProgram(threads, inputs, attention_of(PLAIN), 2 * rows, kv_layout)
        first, second, third = (program.pages(rows) for _ in range(3))
        forward, backward = list(range(rows)), list(range(rows))[::-1]
        found = program.run(forward[:140] + backward[:3], [Segment(0, 140, first), Segment(0, 3, second)])
        assert_same_bits(found, np.concatenate([wanted[:140], other[:3]]))
        ids = forward[140:] + backward[3:100] + forward[:1]
        found = program.run(ids, [Segment(140, 10, first), Segment(3, 97, second), Segment(0, 1, third)])
        assert_same_bits(found, np.concatenate([wanted[140:], other[3:100], wanted[:1]]))


def test_attention_reads_shared_and_scattered_pages(pool: ThreadPool) -> None:
    rows, kv_layout = 100, cache_of(PLAIN, "f16")
    inputs = inputs_of(PLAIN, rows, seed=6)
    wanted = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=kv_layout)
    program = RowProgram(pool, inputs, attention_of(PLAIN), rows, kv_layout)
    pages = program.pages(320)[[7, 2, 9, 4]]
    program.run(range(64), [Segment(0, 64, pages)])
    branch = pages.copy()
    branch[2:] = program.pages(64)
    assert_same_bits(program.run(range(64, 100), [Segment(64, 36, pages)]), wanted[64:])
    assert_same_bits(program.run(range(64, 100), [Segment(64, 36, branch)]), wanted[64:])


def test_attention_overwrites_rejected_positions(pool: ThreadPool) -> None:
    rows, kv_layout = 70, cache_of(PLAIN, "f32")
    inputs = inputs_of(PLAIN, rows, seed=7)
    wanted = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=kv_layout)
    program = RowProgram(pool, inputs, attention_of(PLAIN), rows, kv_layout)
    pages = program.pages(rows)
    program.run([*range(60), 3, 3, 3], [Segment(0, 63, pages)])
    assert_same_bits(program.run(range(60, 70), [Segment(60, 10, pages)]), wanted[60:])


def test_cached_float16_is_rounded_to_nearest_even(pool: ThreadPool) -> None:
    shape = AttentionShape(1, 1, 16, 16, scale=0.0)
    inputs = [np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)]
    inputs[2][0, :6] = [1e-8, 6e-8, 1.00048828125, 1.00146484375, 65504, -65519]
    found = run_rows(pool, inputs, attention_of(shape), kv_layout=cache_of(shape, "f16"))
    np.testing.assert_array_equal(found[0], inputs[2][0].astype(np.float16).astype(np.float32))
