"""Sequences that lack pages, and how much attention each page gets, against the NumPy oracle."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.kv_layout import PAGE_TOKENS, parse_kv_type
from localinfer.kernels.ops import AttentionShape
from localinfer.kernels.program import Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import ERROR_BUDGETS, PLAIN, SHAPES, attention_of, cache_of, inputs_of
from tests.kernels.cpu.tape_runs import RowProgram, relative_error
from tests.support.oracle_formulas import Float64Array, attend
from tests.support.oracle_kv import kept, kept_query

ROWS = 300
MEASURED_ROWS = 8


def shares(inputs: list[FloatArray], shape: AttentionShape, kv_type: str, last: range) -> Float64Array:
    """Softmax of some rows over all they see, summed by page: float64[KV heads, pages]."""
    num_pages, (key_type, _) = -(-ROWS // PAGE_TOKENS), parse_kv_type(kv_type)
    queries = kept_query(inputs[0].astype(np.float64), shape.key_size, key_type)
    keys = kept(inputs[1].astype(np.float64), shape.key_size, key_type)
    # Values that say which page they are of make a result that says how much of each there is.
    where = np.repeat(np.eye(num_pages), PAGE_TOKENS, axis=0)[:ROWS]
    values = np.tile(where, (1, shape.num_kv_heads))
    counting = replace(shape, value_size=num_pages, sinks=None)
    total = np.zeros((shape.num_heads, num_pages))
    for position in last:
        low = max(0, position - shape.window + 1) if shape.window else 0
        seen = range(low, position + 1)
        total += attend(
            queries[position], keys[low : position + 1], values[low : position + 1], seen, counting
        ).reshape(shape.num_heads, num_pages)
    return total.reshape(shape.num_kv_heads, -1, num_pages).sum(axis=1)


@pytest.mark.parametrize("name", ["plain", "eleven queries per key", "window", "softcap", "sinks", "alibi"])
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0/q4_0", "q4_0"])
@pytest.mark.parametrize("rows", [3, 150])
def test_mass_of_pages_is_their_share_of_the_softmax_of_the_last_rows(
    name: str, kv_type: str, rows: int, two_threads: ThreadPool
) -> None:
    shape = SHAPES[name]
    inputs = inputs_of(shape, ROWS, seed=3)
    program = RowProgram(two_threads, inputs, attention_of(shape), ROWS, cache_of(shape, kv_type), 320)
    pages, start = program.pages(ROWS), ROWS - rows
    program.run(range(start), [Segment(0, start, pages)])
    mass = np.ones(len(pages), np.float32)
    other = np.zeros(1, np.float32)
    batch = [Segment(0, 1, program.pages(1), attention_sums=other), Segment(start, rows, pages, attention_sums=mass)]
    program.run([0, *range(start, ROWS)], batch)
    wanted = shares(inputs, shape, kv_type, range(max(start, ROWS - MEASURED_ROWS), ROWS)).sum(axis=0)
    assert np.abs(mass - 1 - wanted).max() <= 1e-3 * wanted.sum()
    np.testing.assert_allclose(other, shape.num_heads, rtol=1e-6)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_rows_see_what_is_left_when_pages_are_dropped(kv_type: str, pool: ThreadPool) -> None:
    inputs = inputs_of(PLAIN, ROWS, seed=4)
    program = RowProgram(pool, inputs, attention_of(PLAIN), ROWS, cache_of(PLAIN, kv_type))
    pages = program.pages(ROWS)
    program.run(range(200), [Segment(0, 200, pages)])
    left = np.delete(pages, [1, 2, 4])
    dropped = 3 * PAGE_TOKENS
    found = [program.run(range(200, 233), [Segment(200, 33, left, dropped)])]
    found += [program.run([row], [Segment(row, 1, left, dropped)]) for row in range(233, 240)]
    positions = np.arange(ROWS)
    is_left = ~np.isin(positions // PAGE_TOKENS, [1, 2, 4])
    key_type, value_type = parse_kv_type(kv_type)
    queries = kept_query(inputs[0].astype(np.float64), PLAIN.key_size, key_type)
    keys, values = (
        kept(part.astype(np.float64), 24, name) for part, name in zip(inputs[1:], (key_type, value_type), strict=True)
    )
    wanted = []
    for row in range(200, 240):
        seen: NDArray[np.int64] = positions[is_left & (positions <= row)]
        wanted.append(attend(queries[row], keys[seen], values[seen], range(len(seen)), PLAIN))
    assert relative_error(np.concatenate(found), np.stack(wanted)) <= ERROR_BUDGETS[kv_type]


@pytest.mark.parametrize("dropped", [-PAGE_TOKENS, 5, 4 * PAGE_TOKENS])
def test_positions_that_cannot_be_missing_are_refused(dropped: int, pool: ThreadPool) -> None:
    program = RowProgram(pool, inputs_of(PLAIN, 100, seed=5), attention_of(PLAIN), 100, cache_of(PLAIN, "f16"))
    with pytest.raises(RequestError, match="not whole pages"):
        program.run([0], [Segment(100, 1, program.pages(128), dropped)])


def test_more_pages_than_the_tape_can_weigh_are_refused(pool: ThreadPool) -> None:
    inputs = inputs_of(PLAIN, 100, seed=5)
    program = RowProgram(pool, inputs, attention_of(PLAIN), 100, cache_of(PLAIN, "f16"), 64)
    with pytest.raises(RequestError, match="attention is summed for 2"):
        program.run(range(65), [Segment(0, 65, program.pages(65))])
