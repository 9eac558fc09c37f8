"""Attention to later positions: against the NumPy oracle, and its bits whatever shares the batch and the threads."""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Buffer, KVLayerShape, Rows
from localinfer.kernels.program import Segment
from tests.kernels.cpu.attention_cases import ERROR_BUDGETS, PLAIN, attention_of, cache_of, inputs_of, oracle
from tests.kernels.cpu.tape_runs import RowProgram, assert_same_bits, random_rows, relative_error, run_rows

BOTH_WAYS = replace(PLAIN, bidirectional=True)
SHAPES = {
    "plain": BOTH_WAYS,
    "one query per key": replace(BOTH_WAYS, num_heads=2),
    "odd sizes": replace(BOTH_WAYS, key_size=20, value_size=37),
    "one query per key, odd sizes": replace(BOTH_WAYS, num_heads=2, key_size=20, value_size=37),
    "one query per key, few columns": replace(BOTH_WAYS, num_heads=2, key_size=5, value_size=3),
    "one query per key, many columns": replace(BOTH_WAYS, num_heads=2, key_size=340, value_size=512, scale=0.05),
    "one query per key, more columns": replace(BOTH_WAYS, num_heads=2, key_size=24, value_size=528),
    "one query per key, large scores": replace(BOTH_WAYS, num_heads=2, scale=8.0),
    "window": replace(BOTH_WAYS, window=40),
    "odd window": replace(BOTH_WAYS, window=41),
    "window of one": replace(BOTH_WAYS, window=1),
    "window beyond a chunk": replace(BOTH_WAYS, window=300),
    "alibi": replace(BOTH_WAYS, alibi_slopes=np.array([0.5, 0.25, 0.125, 0.01], np.float32)),
    "window and alibi": replace(BOTH_WAYS, window=70, alibi_slopes=np.full(4, 0.1, np.float32)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 33, 129, 300])
def test_bidirectional_attention_equals_the_oracle(
    name: str, rows: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape = SHAPES[name]
    inputs = inputs_of(shape, rows, seed=rows)
    found = run_rows(pool, inputs, attention_of(shape), kv_layout=cache_of(shape, "f32"))
    assert relative_error(found, oracle(inputs, shape, "f32")) <= ERROR_BUDGETS["f32"]
    again = run_rows(two_threads, inputs, attention_of(shape), kv_layout=cache_of(shape, "f32"))
    assert_same_bits(again, found)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0/q4_0"])
def test_bidirectional_attention_reads_any_cache(kv_type: str, pool: ThreadPool) -> None:
    inputs = inputs_of(BOTH_WAYS, 150, seed=2)
    found = run_rows(pool, inputs, attention_of(BOTH_WAYS), kv_layout=cache_of(BOTH_WAYS, kv_type))
    assert relative_error(found, oracle(inputs, BOTH_WAYS, kv_type)) <= ERROR_BUDGETS[kv_type]


@pytest.mark.parametrize("name", ["plain", "window", "alibi", "one query per key, odd sizes"])
def test_texts_of_a_batch_do_not_see_each_other(name: str, pool: ThreadPool, two_threads: ThreadPool) -> None:
    shape, sizes = SHAPES[name], [3, 140, 1, 33, 70]
    inputs, layout = inputs_of(shape, sum(sizes), seed=4), cache_of(shape, "f32")
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    wanted = [
        run_rows(pool, [part[start : start + size] for part in inputs], attention_of(shape), kv_layout=layout)
        for start, size in zip(starts, sizes, strict=True)
    ]
    for threads in (pool, two_threads):
        program = RowProgram(threads, inputs, attention_of(shape), sum(sizes), layout)
        segments = [Segment(0, size, program.pages(size)) for size in sizes]
        assert_same_bits(program.run(range(sum(sizes)), segments), np.concatenate(wanted))


def test_dropped_positions_and_chunks_are_refused(pool: ThreadPool) -> None:
    layout = KVLayout("f16", [KVLayerShape(1, 16, 16), KVLayerShape(2, 24, 24, window=40)])
    shape = replace(BOTH_WAYS, window=40)
    with pytest.raises(ShapeError, match="later ones still see"):
        RowProgram(pool, inputs_of(shape, 1, 0), attention_of(shape), 1, layout)
    shape = replace(BOTH_WAYS, chunk=40)
    with pytest.raises(ShapeError, match="has no chunks"):
        RowProgram(pool, inputs_of(shape, 1, 0), attention_of(shape), 1, cache_of(shape, "f16"))


@pytest.mark.parametrize("width", [1, 37, 1100])
def test_means_are_of_the_text_of_each_output_row(width: int, pool: ThreadPool, two_threads: ThreadPool) -> None:
    sizes = [3, 140, 1, 33]
    x = random_rows(sum(sizes), width, 1)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("mean", width, Rows.OUTPUT)
        tape.mean_rows(out, inputs[0])
        return out

    parts = np.split(x.astype(np.float64), np.cumsum(sizes)[:-1])
    wanted = np.repeat([part.mean(axis=0) for part in parts], sizes, axis=0)
    found = []
    for threads in (pool, two_threads):
        program = RowProgram(threads, [x], write, len(x))
        segments = [Segment(0, size, program.pages(size)) for size in sizes]
        found.append(program.run(range(len(x)), segments))
        assert relative_error(found[-1], wanted) <= 1e-6
    assert_same_bits(found[1], found[0])
    assert_same_bits(run_rows(pool, [parts[1].astype(np.float32)], write), found[0][3:143])


@pytest.mark.parametrize(("width", "taps"), [(5, 3), (300, 7)])
def test_convolutions_around_rows_stay_in_their_text(
    width: int, taps: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    sizes = [3, 40, 1, 2]
    x, weight = random_rows(sum(sizes), width, 1), random_rows(width, taps, 2)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", width)
        with pytest.raises(ShapeError, match="is over 2 of them"):
            tape.centred_convolution(out, inputs[0], weight[:, :2])
        tape.centred_convolution(out, inputs[0], weight)
        return out

    parts = [np.pad(part.astype(np.float64), ((taps // 2,) * 2, (0, 0))) for part in np.split(x, np.cumsum(sizes)[:-1])]
    wanted = [sum(weight[:, i] * part[i : len(part) - taps + 1 + i] for i in range(taps)) for part in parts]
    found = []
    for threads in (pool, two_threads):
        program = RowProgram(threads, [x], write, len(x))
        segments = [Segment(0, size, program.pages(size)) for size in sizes]
        found.append(program.run(range(len(x)), segments))
        assert relative_error(found[-1], np.concatenate(wanted)) <= 1e-6
    assert_same_bits(found[1], found[0])
    assert_same_bits(run_rows(pool, [x[3:43]], write), found[0][3:43])


def test_vector_is_added_to_every_row(pool: ThreadPool) -> None:
    x, vector = random_rows(9, 37, 1), random_rows(1, 37, 2)[0]

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.add_vector(inputs[0], vector)
        return inputs[0]

    assert_same_bits(run_rows(pool, [x], write), x + vector)

    def wrong(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.add_vector(inputs[0], vector[1:])
        return inputs[0]

    with pytest.raises(ShapeError, match="36 values; 37 are needed"):
        run_rows(pool, [x], wrong)
