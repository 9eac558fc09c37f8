"""Choosing positions by cached keys, and attention to the chosen ones, against float64 and itself in any batch."""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout, parse_kv_type
from localinfer.kernels.ops import AttentionShape, Buffer, ChooseBlocks, KVLayerShape, Rows, SparseSelection
from localinfer.kernels.program import Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import ERROR_BUDGETS, PLAIN, attention_of, cache_of, inputs_of, varied
from tests.kernels.cpu.tape_runs import RowProgram, Write, assert_same_bits, random_rows, relative_error, run_rows
from tests.support.oracle_formulas import Float64Array, attend, choose, is_chosen
from tests.support.oracle_kv import kept, kept_query

ROWS = 300
KEY_SIZE = 20
BLOCKS = Buffer(0, "chosen", 1, Rows.BATCH)


def described(num_heads: int, count: int, *, block_size: int = 1, num_local: int = 0, weighted: bool) -> ChooseBlocks:
    """A choice by heads of KEY_SIZE, by its numbers alone."""
    lists = 1 if weighted else num_heads
    chosen = SparseSelection(replace(BLOCKS, width=lists * count), count, block_size)
    weights = replace(BLOCKS, width=num_heads) if weighted else None
    return ChooseBlocks(chosen, BLOCKS, 1, num_heads, KEY_SIZE, 512, 0.3, weights, num_local)


CHOICES = {
    "positions": described(11, 40, weighted=True),
    "one position": described(3, 1, weighted=True),
    "blocks of four": described(2, 9, block_size=4, num_local=1, weighted=False),
    "blocks of a page, three local": described(3, 4, block_size=32, num_local=3, weighted=False),
    "blocks beyond a chunk": described(2, 1, block_size=256, weighted=False),
    "local blocks alone": described(1, 5, block_size=8, num_local=7, weighted=False),
}


def choice_of(op: ChooseBlocks) -> Write:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.store_kv(op.layer, inputs[1], None)
        out = tape.buffer("chosen", op.chosen.blocks.width)
        chosen = replace(op.chosen, blocks=out)
        weights = None if op.weights is None else inputs[2]
        tape.append(replace(op, chosen=chosen, queries=inputs[0], weights=weights))
        return out

    return write


def choice_inputs(op: ChooseBlocks, seed: int) -> list[FloatArray]:
    """Queries, keys and weights of heads."""
    widths = (op.num_heads * KEY_SIZE, KEY_SIZE, op.num_heads)
    return [random_rows(ROWS, width, seed + index) for index, width in enumerate(widths)]


def index_cache(kv_type: str) -> KVLayout:
    return KVLayout(kv_type, [KVLayerShape(1, 16, 16), KVLayerShape(1, KEY_SIZE, 0)])


def wanted_choice(op: ChooseBlocks, inputs: list[FloatArray], kv_type: str) -> Float64Array:
    key_type = parse_kv_type(kv_type)[0]
    queries, keys, weights = (one.astype(np.float64) for one in inputs)
    queries, keys = kept_query(queries, KEY_SIZE, key_type), kept(keys, KEY_SIZE, key_type)
    rows = []
    for row, query in enumerate(queries):
        of_heads = None if op.weights is None else weights[row]
        rows.append(choose(op, query.reshape(op.num_heads, -1), keys[: row + 1], of_heads))
    return np.stack(rows)


@pytest.mark.parametrize(("name", "kv_type"), varied(CHOICES, ["f32", "f16", "q8_0", "q4_0", "q8_0/f16"]))
def test_choice_is_the_oracles_and_the_same_in_any_batch(
    name: str, kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    op, layout = CHOICES[name], index_cache(kv_type)
    inputs = choice_inputs(op, seed=1)
    found = run_rows(pool, inputs, choice_of(op), kv_layout=layout)
    np.testing.assert_array_equal(found, wanted_choice(op, inputs, kv_type))
    assert_same_bits(run_rows(pool, inputs, choice_of(op), [1] * 200 + [7] * 14 + [2], layout), found)
    assert_same_bits(run_rows(two_threads, inputs, choice_of(op), [250, 1, 1, 8, 5, 1, 34], layout), found)


@pytest.mark.parametrize("threads", ["pool", "two_threads"])
def test_of_equal_scores_the_lower_positions_are_chosen(threads: str, request: pytest.FixtureRequest) -> None:
    pool: ThreadPool = request.getfixturevalue(threads)
    op = replace(CHOICES["positions"], scale=0.5)
    # Whole numbers, whose sums are exact in any order.
    queries, keys, weights = (np.rint(2 * part) for part in choice_inputs(op, seed=2))
    # Half of the keys equal one another, the others score 0 or -0.
    keys[::2], keys[1::2] = keys[0], 0.0
    weights[:] = -np.abs(weights)
    weights[:, 0] = 0.0
    found = run_rows(pool, [queries, keys, weights], choice_of(op), [200, 1, 99], index_cache("f32"))
    np.testing.assert_array_equal(found, wanted_choice(op, [queries, keys, weights], "f32"))
    assert found[299, 0] == 1 and found[299, 39] == 79


def chosen_attention(shape: AttentionShape, chosen: SparseSelection) -> Write:
    """The lists are an input."""

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", shape.num_heads * shape.value_size)
        tape.store_kv(1, inputs[1], inputs[2])
        tape.attention(out, inputs[0], 1, shape, replace(chosen, blocks=inputs[3]))
        return out

    return write


def random_lists(chosen: SparseSelection, num_lists: int, seed: int) -> FloatArray:
    """Rising lists of blocks of every row: a row's last few and any others, or all of them."""
    rng = np.random.default_rng(seed)
    lists = np.full((ROWS, num_lists, chosen.count), -1, np.float32)
    for row in range(ROWS):
        num_blocks = row // chosen.block_size + 1
        for one in lists[row]:
            size = min(chosen.count, num_blocks)
            one[:size] = np.sort(rng.choice(num_blocks, size, replace=False))
    return lists.reshape(ROWS, -1)


ATTENTIONS = {
    "positions": (PLAIN, SparseSelection(BLOCKS, 12), 1),
    "lists of KV heads": (PLAIN, SparseSelection(BLOCKS, 30, 3), 2),
    "odd sizes, sinks": (
        replace(PLAIN, num_heads=6, key_size=20, value_size=37, sinks=np.linspace(-2, 2, 6, dtype=np.float32)),
        SparseSelection(BLOCKS, 3, 32),
        2,
    ),
    "many heads of one key": (
        replace(PLAIN, num_heads=11, num_kv_heads=1, value_size=144),
        SparseSelection(BLOCKS, 5, 16),
        1,
    ),
}


@pytest.mark.parametrize(("name", "kv_type"), varied(ATTENTIONS, ERROR_BUDGETS))
def test_attention_to_chosen_positions_is_the_oracles_in_any_batch(
    name: str, kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape, chosen, num_lists = ATTENTIONS[name]
    layout, write = cache_of(shape, kv_type), chosen_attention(shape, chosen)
    chosen = replace(chosen, blocks=replace(BLOCKS, width=num_lists * chosen.count))
    inputs = [*inputs_of(shape, ROWS, seed=3), random_lists(chosen, num_lists, seed=4)]
    found = run_rows(pool, inputs, write, kv_layout=layout)
    key_type, value_type = parse_kv_type(kv_type)
    queries = kept_query(inputs[0].astype(np.float64), shape.key_size, key_type)
    keys = kept(inputs[1].astype(np.float64), shape.key_size, key_type)
    values = kept(inputs[2].astype(np.float64), shape.value_size, value_type)
    wanted = []
    for row, query in enumerate(queries):
        counted = is_chosen(inputs[3][row].astype(np.float64), chosen, row + 1)
        wanted.append(attend(query, keys[: row + 1], values[: row + 1], range(row + 1), shape, chosen=counted))
    assert relative_error(found, np.stack(wanted)) <= ERROR_BUDGETS[kv_type]
    assert_same_bits(run_rows(pool, inputs, write, [1] * 150 + [7] * 21 + [3], layout), found)
    assert_same_bits(run_rows(two_threads, inputs, write, [100, 180, 1, 1, 8, 7, 3], layout), found)


@pytest.mark.parametrize("kv_type", ERROR_BUDGETS)
def test_choosing_every_position_gives_the_bits_of_attention_to_all(
    kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    layout, parts = cache_of(PLAIN, kv_type), inputs_of(PLAIN, ROWS, seed=5)
    wanted = run_rows(pool, parts, attention_of(PLAIN), kv_layout=layout)
    for chosen, threads in ((SparseSelection(BLOCKS, ROWS), pool), (SparseSelection(BLOCKS, 75, 4), two_threads)):
        inputs = [*parts, random_lists(chosen, 1, seed=6)]
        found = run_rows(threads, inputs, chosen_attention(PLAIN, chosen), [256, 44], layout)
        assert_same_bits(found, wanted)


def test_pages_without_a_chosen_position_are_never_read(pool: ThreadPool) -> None:
    """What lies there is NaN, as in every page that nothing was written to."""
    chosen, layout = SparseSelection(BLOCKS, 2, 32), cache_of(PLAIN, "f32")
    inputs = [*inputs_of(PLAIN, ROWS, seed=7), np.tile(np.array([3, 7], np.float32), (ROWS, 1))]
    program = RowProgram(pool, inputs, chosen_attention(PLAIN, chosen), 64, layout)
    pages = program.pages(ROWS)
    for first, size in ((96, 32), (224, 32)):
        program.run(range(first, first + size), [Segment(first, size, pages)])
    found = program.run([255], [Segment(255, 1, pages)])
    keys, values = (part.astype(np.float64) for part in inputs[1:3])
    counted = is_chosen(inputs[3][255].astype(np.float64), replace(chosen, blocks=replace(BLOCKS, width=2)), 256)
    wanted = attend(inputs[0][255].astype(np.float64), keys[:256], values[:256], range(256), PLAIN, chosen=counted)
    assert relative_error(found[0], wanted) <= 2e-6


def test_wrong_choices_are_refused() -> None:
    tape = GraphBuilder([KVLayerShape(2, 24, 24), KVLayerShape(1, KEY_SIZE, 0)])
    queries, out, keys = tape.buffer("queries", 96), tape.buffer("out", 96), tape.buffer("keys", KEY_SIZE)
    lists = tape.buffer("lists", 12)
    with pytest.raises(ShapeError, match="lists is not for"):
        tape.attention(out, queries, 0, PLAIN, SparseSelection(lists, 4))
    with pytest.raises(ShapeError, match="lists of 5"):
        tape.attention(out, queries, 0, PLAIN, SparseSelection(lists, 5))
    with pytest.raises(ShapeError, match="cannot attend to chosen positions"):
        tape.attention(out, queries, 0, replace(PLAIN, window=2), SparseSelection(lists, 12))
    with pytest.raises(ShapeError, match="nothing does not hold layer 0's values"):
        tape.store_kv(0, tape.buffer("wide", 48), None)
    with pytest.raises(ShapeError, match="has other lists"):
        tape.choose_blocks(
            SparseSelection(lists, 6), tape.buffer("two", 2 * KEY_SIZE), 1, 2, KEY_SIZE, 64, weights=keys
        )
    with pytest.raises(ShapeError, match="too many to choose from"):
        tape.choose_blocks(SparseSelection(lists, 6), tape.buffer("two", 2 * KEY_SIZE), 1, 2, KEY_SIZE, 1 << 25)
    with pytest.raises(ShapeError, match="choosing wants"):
        tape.choose_blocks(SparseSelection(lists, 6), tape.buffer("four", 48), 0, 2, 24, 64)
