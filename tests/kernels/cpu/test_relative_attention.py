"""Biases of attention by distance: against a plain loop in float64, in any company, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, Relative
from localinfer.kernels.program import Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import ERROR_BUDGETS, PLAIN, cache_of, inputs_of
from tests.kernels.cpu.tape_runs import RowProgram, Write, assert_same_bits, random_rows, relative_error, run_rows
from tests.support.oracle_formulas import Float64Array, attend

SHAPE = replace(PLAIN, bidirectional=True)
HEADS, COUNT, REACH = SHAPE.num_heads, 5, 17
BUCKETS = np.random.default_rng(1).integers(0, COUNT, 2 * REACH + 1)
TABLE = random_rows(HEADS, COUNT, 2)
KINDS = {"table": (True, False, False), "rows": (False, True, False), "keys": (False, False, True), "all": (True,) * 3}
SIZES = [3, 140, 1, 33, 70]


def all_inputs(rows: int, seed: int) -> list[FloatArray]:
    return [*inputs_of(SHAPE, rows, seed), *(random_rows(rows, HEADS * COUNT, seed + 7 + index) for index in range(2))]


def relative_of(kind: str, inputs: list[Buffer]) -> Relative:
    by_table, by_row, by_key = KINDS[kind]
    return Relative(
        BUCKETS, COUNT, TABLE if by_table else None, inputs[3] if by_row else None, inputs[4] if by_key else None
    )


def attention_of(kind: str) -> Write:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", HEADS * SHAPE.value_size)
        tape.store_kv(1, inputs[1], inputs[2])
        tape.attention(out, inputs[0], 1, SHAPE, None, relative_of(kind, inputs))
        return out

    return write


def wanted(kind: str, inputs: list[FloatArray]) -> Float64Array:
    """Every row by itself; a bucket is looked up for every pair of positions."""
    queries, keys, values, rows, others = (part.astype(np.float64) for part in inputs)
    by_table, by_row, by_key = KINDS[kind]
    count = len(queries)
    found = []
    for position in range(count):
        scaled, plain = np.zeros((HEADS, count)), np.zeros((HEADS, count))
        for key in range(count):
            bucket = BUCKETS[REACH + max(-REACH, min(REACH, key - position))]
            for head in range(HEADS):
                plain[head, key] = TABLE[head, bucket] * by_table
                scaled[head, key] = rows[position, head * COUNT + bucket] * by_row
                scaled[head, key] += others[key, head * COUNT + bucket] * by_key
        found.append(attend(queries[position], keys, values, range(count), SHAPE, position, None, (scaled, plain)))
    return np.stack(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 33, 150])
def test_biases_by_distance_are_those_of_a_plain_loop(
    kind: str, rows: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    inputs, layout = all_inputs(rows, rows), cache_of(SHAPE, "f32")
    found = run_rows(pool, inputs, attention_of(kind), kv_layout=layout)
    assert relative_error(found, wanted(kind, inputs)) <= ERROR_BUDGETS["f32"]
    assert_same_bits(run_rows(two_threads, inputs, attention_of(kind), kv_layout=layout), found)


def test_texts_of_a_batch_keep_their_own_biases(pool: ThreadPool, two_threads: ThreadPool) -> None:
    inputs, layout = all_inputs(sum(SIZES), 4), cache_of(SHAPE, "f32")
    starts = np.cumsum([0, *SIZES[:-1]]).tolist()
    alone = [
        run_rows(pool, [part[start : start + size] for part in inputs], attention_of("all"), kv_layout=layout)
        for start, size in zip(starts, SIZES, strict=True)
    ]
    for threads in (pool, two_threads):
        program = RowProgram(threads, inputs, attention_of("all"), sum(SIZES), layout)
        segments = [Segment(0, size, program.pages(size)) for size in SIZES]
        assert_same_bits(program.run(range(sum(SIZES)), segments), np.concatenate(alone))


def test_a_text_that_goes_on_is_refused(pool: ThreadPool) -> None:
    program = RowProgram(pool, all_inputs(4, 0), attention_of("keys"), 4, cache_of(SHAPE, "f32"))
    with pytest.raises(RequestError, match="begins at position 2; this model computes whole texts only"):
        program.run(range(2), [Segment(2, 2, program.pages(4))])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"buckets": BUCKETS[1:]}, "odd number"),
        ({"num_buckets": COUNT - 1}, "outside the 4 buckets"),
        ({"buckets": BUCKETS - 1}, "outside the 5 buckets"),
        ({"table": TABLE[1:]}, "biases by distance are"),
        ({"by_row": 0}, "not 4 x 5"),
    ],
)
def test_biases_that_do_not_fit_are_refused(changes: dict[str, object], words: str, pool: ThreadPool) -> None:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        changed = {
            name: inputs[value] if type(value) is int and name[:3] == "by_" else value
            for name, value in changes.items()
        }
        out = tape.buffer("out", HEADS * SHAPE.value_size)
        tape.attention(out, inputs[0], 1, SHAPE, None, replace(relative_of("all", inputs), **changed))  # type: ignore[arg-type]
        return out

    with pytest.raises(ShapeError, match=words):
        run_rows(pool, all_inputs(2, 0), write, kv_layout=cache_of(SHAPE, "f32"))


def test_texts_that_are_read_on_the_way_have_no_biases_by_distance(pool: ThreadPool) -> None:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.attention(
            tape.buffer("out", HEADS * SHAPE.value_size), inputs[0], 1, PLAIN, None, relative_of("all", inputs)
        )
        return inputs[0]

    with pytest.raises(ShapeError, match="computed whole"):
        run_rows(pool, all_inputs(2, 0), write, kv_layout=cache_of(SHAPE, "f32"))
