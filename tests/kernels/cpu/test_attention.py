"""Attention over pages, against the NumPy oracle, and its bits however a batch is cut."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.kv_layout import PAGE_TOKENS, KVLayout
from localinfer.kernels.ops import AttentionShape, KVLayerShape
from localinfer.kernels.program import Segment
from tests.kernels.cpu.attention_cases import (
    ERROR_BUDGETS,
    PLAIN,
    SHAPES,
    attention_of,
    cache_of,
    inputs_of,
    oracle,
    varied,
)
from tests.kernels.cpu.tape_runs import RowProgram, assert_same_bits, relative_error, run_rows

QUERY_BUDGET = 6e-3
"""Relative L2 against unrounded queries, where they meet quantized keys."""


@pytest.mark.parametrize("kv_type", ERROR_BUDGETS)
@pytest.mark.parametrize("rows", [1, 31, 33, 127, 128, 129, 300])
def test_attention_equals_the_oracle_at_every_length(rows: int, kv_type: str, pool: ThreadPool) -> None:
    inputs = inputs_of(PLAIN, rows, seed=rows)
    found = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=cache_of(PLAIN, kv_type))
    assert relative_error(found, oracle(inputs, PLAIN, kv_type)) <= ERROR_BUDGETS[kv_type]


@pytest.mark.parametrize(("name", "kv_type"), varied(SHAPES, ERROR_BUDGETS))
def test_attention_equals_the_oracle_and_itself_in_any_batch(
    name: str, kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape, rows = SHAPES[name], 261
    inputs, kv_layout = inputs_of(shape, rows, seed=1), cache_of(shape, kv_type)
    found = run_rows(pool, inputs, attention_of(shape), kv_layout=kv_layout)
    assert relative_error(found, oracle(inputs, shape, kv_type)) <= ERROR_BUDGETS[kv_type]
    for splits in ([1] * rows, [7] * 37 + [2], [130, 1, 1, 64, 65]):
        assert_same_bits(run_rows(pool, inputs, attention_of(shape), splits, kv_layout), found)
    # Batches of few rows are split by chunks between threads.
    for splits in ([100, 161], [240, 1, 1, 1, 8, 7, 3]):
        assert_same_bits(run_rows(two_threads, inputs, attention_of(shape), splits, kv_layout), found)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0/q4_0"])
@pytest.mark.parametrize("name", ["window", "window of one", "window beyond a chunk", "local chunks"])
def test_windowed_layers_apart_give_the_same_bits_without_what_was_given_back(
    name: str, kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape, rows, joined = SHAPES[name], 261, cache_of(SHAPES[name], kv_type)
    inputs, window = inputs_of(shape, rows, seed=1), shape.window or shape.chunk
    layout = KVLayout(kv_type, [joined.layers[0], replace(joined.layers[1], window=window)])
    assert layout.page_bytes + layout.windowed_bytes == joined.page_bytes and layout.page_bytes > 0
    wanted = run_rows(pool, inputs, attention_of(shape), kv_layout=joined)
    for threads, sizes in ((pool, [130, 1, 1, 64, 65]), (two_threads, [240, 1, 1, 1, 8, 7, 3])):
        program = RowProgram(threads, inputs, attention_of(shape), max(sizes), layout)
        pages, pieces, start = program.pages(rows), program.windowed_pages(rows), 0
        for size in sizes:
            # No memory is there, so a look at it would end the process.
            pieces[: max(0, start - window + 1) // PAGE_TOKENS] = 0
            segment = Segment(start, size, pages, windowed_addresses=pieces)
            assert_same_bits(program.run(range(start, start + size), [segment]), wanted[start : start + size])
            start += size
        pieces[-1] = 0
        with pytest.raises(RequestError, match="needs the sliding-window blocks of the"):
            program.run([260], [Segment(260, 1, pages, windowed_addresses=pieces)])


def test_windowed_layer_refuses_attention_that_sees_more(pool: ThreadPool) -> None:
    shape = replace(PLAIN, window=41)
    layers = [KVLayerShape(1, 16, 16), KVLayerShape(2, 24, 24, window=40)]
    with pytest.raises(ShapeError, match="layer 1 keeps 40 positions, and attention sees 41 of them"):
        RowProgram(pool, inputs_of(shape, 1, 0), attention_of(shape), 1, KVLayout("f16", layers))


@pytest.mark.parametrize("kv_type", ERROR_BUDGETS)
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


@pytest.mark.parametrize("kv_type", ERROR_BUDGETS)
@pytest.mark.parametrize("threads", [2, 3])
def test_few_rows_of_long_sequences_have_the_same_bits_however_threads_share_them(
    threads: int, kv_type: str, pool: ThreadPool
) -> None:
    shape, rows = replace(PLAIN, num_heads=6, window=900), 1100
    inputs, kv_layout = inputs_of(shape, rows, seed=8), cache_of(shape, kv_type)
    wanted = run_rows(pool, inputs, attention_of(shape), [512, 512, 76], kv_layout)
    with closing(ThreadPool(threads)) as shared:
        program = RowProgram(shared, inputs, attention_of(shape), 512, kv_layout)
        long, short = program.pages(rows), program.pages(rows)
        for start in (0, 512):
            program.run(range(start, start + 512), [Segment(start, 512, long)])
        program.run(range(300), [Segment(0, 300, short)])
        for step in range(12):
            ids = [*range(1024 + 5 * step, 1029 + 5 * step), 300 + step]
            found = program.run(ids, [Segment(1024 + 5 * step, 5, long), Segment(300 + step, 1, short)])
            assert_same_bits(found, wanted[ids])


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


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_queries_lose_little_when_they_meet_quantized_keys(kv_type: str, pool: ThreadPool) -> None:
    shape = replace(PLAIN, key_size=64, value_size=64, scale=0.125)
    inputs = inputs_of(shape, 200, seed=9)
    found = run_rows(pool, inputs, attention_of(shape), kv_layout=cache_of(shape, kv_type))
    assert relative_error(found, oracle(inputs, shape, kv_type, exact_queries=True)) <= QUERY_BUDGET


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_zeros_stay_zeros_in_a_quantized_cache(kv_type: str, pool: ThreadPool) -> None:
    inputs = [np.zeros_like(part) for part in inputs_of(PLAIN, 40, seed=0)]
    found = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=cache_of(PLAIN, kv_type))
    np.testing.assert_array_equal(found, np.zeros_like(found))


def test_a_scale_that_float16_can_hardly_hold_does_not_overflow_the_codes(pool: ThreadPool) -> None:
    inputs = inputs_of(PLAIN, 40, seed=10)
    inputs[2] *= np.float32(1e-6)
    found = run_rows(pool, inputs, attention_of(PLAIN), kv_layout=cache_of(PLAIN, "q8_0"))
    assert np.abs(found).max() <= 1e-5
