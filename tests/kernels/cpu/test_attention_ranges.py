"""Rows that see ranges of positions which the batch gives: against the NumPy oracle, and their bits in any batch."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import parse_kv_type
from localinfer.kernels.ops import AttentionShape, Buffer
from localinfer.kernels.program import Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import ERROR_BUDGETS, PLAIN, attention_of, cache_of, inputs_of
from tests.kernels.cpu.tape_runs import RowProgram, Write, assert_same_bits, relative_error, run_rows
from tests.support.oracle_formulas import Float64Array, attend
from tests.support.oracle_kv import kept, kept_query

Ranges = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Of each row the first position that it sees, the one after the last, and from which on no window bounds it."""
ROWS = 300
SHAPES = {
    "plain": PLAIN,
    "one query per key": replace(PLAIN, num_heads=2),
    "both ways": replace(PLAIN, num_heads=2, key_size=20, value_size=37, bidirectional=True),
    "window": replace(PLAIN, window=40),
    "local chunks": replace(PLAIN, chunk=48),
    "softcap, sinks and alibi": replace(
        PLAIN, softcap=3.0, sinks=np.ones(4, np.float32), alibi_slopes=np.full(4, 0.1, np.float32)
    ),
}


def ranged_attention(shape: AttentionShape) -> Write:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", shape.num_heads * shape.value_size)
        tape.store_kv(1, inputs[1], inputs[2])
        tape.attention(out, inputs[0], 1, shape, takes_ranges=True)
        return out

    return write


def picture_ranges() -> Ranges:
    """Text, a prompt whose rows see each other whatever their window is, text, blocks that see only themselves, one of
    them from its middle on where a window ends, and the last rows alone."""
    own = np.arange(ROWS)
    starts, ends, windows = np.zeros(ROWS, np.int64), own + 1, own.copy()
    ends[20:150], windows[20:150] = 150, 20
    windows[250:270] = 240
    for first in range(160, 290, 37):
        starts[first : first + 37], ends[first : first + 37] = first, min(first + 37, 297)
    starts[297:], ends[297:] = own[297:], own[297:] + 1
    return starts, ends, windows


def ranged_oracle(
    inputs: list[FloatArray], shape: AttentionShape, kv_type: str, ranges: Ranges, *, exact_queries: bool = False
) -> Float64Array:
    key_type, value_type = parse_kv_type(kv_type)
    queries, keys, values = (part.astype(np.float64) for part in inputs)
    if not exact_queries:
        queries = kept_query(queries, shape.key_size, key_type)
    keys, values = kept(keys, shape.key_size, key_type), kept(values, shape.value_size, value_type)
    rows = []
    for position, (query, first, end, unbounded) in enumerate(zip(queries, *ranges, strict=True)):
        low = max(0, position - shape.window + 1) if shape.window else 0
        low = max(first, min(unbounded, max(low, position // shape.chunk * shape.chunk if shape.chunk else 0)))
        rows.append(attend(query, keys[low:end], values[low:end], range(low, end), shape, position))
    return np.stack(rows)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0/q4_0"])
@pytest.mark.parametrize("name", SHAPES)
def test_ranges_equal_the_oracle_on_any_number_of_threads(
    name: str, kv_type: str, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape, ranges = SHAPES[name], picture_ranges()
    inputs, layout = inputs_of(shape, ROWS, seed=3), cache_of(shape, kv_type)
    results = []
    for threads in (pool, two_threads):
        program = RowProgram(threads, inputs, ranged_attention(shape), ROWS, layout)
        starts, ends, windows = ranges
        pages = program.pages(ROWS)
        segment = Segment(0, ROWS, pages, key_starts=starts, key_ends=ends, window_starts=windows)
        results.append(program.run(range(ROWS), [segment]))
    assert relative_error(results[0], ranged_oracle(inputs, shape, kv_type, ranges)) <= ERROR_BUDGETS[kv_type]
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.bidirectional])
def test_ranges_up_to_the_own_position_give_the_bits_of_no_ranges(name: str, two_threads: ThreadPool) -> None:
    shape = SHAPES[name]
    inputs, layout = inputs_of(shape, ROWS, seed=3), cache_of(shape, "f16")
    wanted = run_rows(two_threads, inputs, attention_of(shape), kv_layout=layout)
    program = RowProgram(two_threads, inputs, ranged_attention(shape), ROWS, layout)
    assert_same_bits(program.run(range(ROWS), [Segment(0, ROWS, program.pages(ROWS))]), wanted)
    segment = Segment(0, ROWS, program.pages(ROWS), key_ends=np.arange(1, ROWS + 1))
    assert_same_bits(program.run(range(ROWS), [segment]), wanted)
    pages = program.pages(ROWS)
    # One segment with ranges beside one without.
    both = [Segment(0, 150, pages, key_ends=np.arange(1, 151)), Segment(0, 150, program.pages(150))]
    found = program.run([*range(150), *range(150)], both)
    assert_same_bits(found, np.concatenate([wanted[:150], wanted[:150]]))


def test_windows_of_a_picture_give_the_bits_of_pictures_of_their_own(pool: ThreadPool, two_threads: ThreadPool) -> None:
    """As long as a window begins where a chunk of positions does."""
    shape, size = SHAPES["both ways"], 128
    inputs, layout = inputs_of(shape, 2 * size, seed=6), cache_of(shape, "f32")
    wanted = np.concatenate(
        [
            run_rows(pool, [part[first : first + size] for part in inputs], attention_of(shape), kv_layout=layout)
            for first in (0, size)
        ]
    )
    starts = np.repeat([0, size], size)
    for threads in (pool, two_threads):
        program = RowProgram(threads, inputs, ranged_attention(shape), 2 * size, layout)
        segment = Segment(0, 2 * size, program.pages(2 * size), key_starts=starts, key_ends=starts + size)
        assert_same_bits(program.run(range(2 * size), [segment]), wanted)


def test_a_picture_gives_the_same_bits_beside_other_texts_and_after_dropped_pages(
    pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape, size = replace(PLAIN, window=50), 90
    inputs, layout = inputs_of(shape, ROWS, seed=5), cache_of(shape, "f32")
    program = RowProgram(two_threads, inputs, ranged_attention(shape), ROWS, layout)
    pages = program.pages(ROWS)
    program.run(range(96), [Segment(0, 96, pages)])
    ends = np.full(size, 96 + size)
    wanted = program.run(range(96, 96 + size), [Segment(96, size, pages, key_ends=ends)])
    other = Segment(0, 40, program.pages(40))
    found = program.run([*range(40), *range(96, 96 + size)], [other, Segment(96, size, pages, key_ends=ends)])
    assert_same_bits(found[40:], wanted)
    # What lies before the window is not looked at.
    segment = Segment(96, size, pages[1:], dropped_tokens=32, key_ends=ends)
    assert relative_error(program.run(range(96, 96 + size), [segment]), wanted) <= 1e-6
    # Nor is it where the picture's rows see each other beyond the window.
    starts, everything = np.full(size, 96), Segment(96, size, pages, key_ends=ends)
    wanted = program.run(range(96, 96 + size), [replace(everything, window_starts=starts)])
    found = program.run(range(96, 96 + size), [replace(segment, window_starts=starts)])
    assert relative_error(found, wanted) <= 1e-6 < relative_error(program.run(range(96, 96 + size), [segment]), wanted)


def test_ranges_that_leave_the_segment_or_the_row_out_are_refused(pool: ThreadPool) -> None:
    inputs, layout = inputs_of(PLAIN, 40, seed=1), cache_of(PLAIN, "f32")
    program = RowProgram(pool, inputs, ranged_attention(PLAIN), 40, layout)
    pages, own = program.pages(40), np.arange(40)
    for starts, ends in (
        (None, own),
        (None, np.full(40, 41)),
        (None, own[1:] + 1),
        (None, (own + 1).astype(np.float64)),
        (own + 1, own + 1),
        (own - 1, own + 1),
    ):
        with pytest.raises(RequestError, match="of positions from 0 to 40 that holds its own"):
            program.run(range(40), [Segment(0, 40, pages, key_starts=starts, key_ends=ends)])
    for windows in (own + 1, own - 1):
        with pytest.raises(RequestError, match="beyond their window from position"):
            program.run(range(40), [Segment(0, 40, pages, window_starts=windows)])
    later = Segment(20, 20, pages, window_starts=np.full(20, 19))
    with pytest.raises(RequestError, match="from position 19 on; wanted positions of the segment"):
        program.run(range(20, 40), [later])
    plain = RowProgram(pool, inputs, attention_of(PLAIN), 40, layout)
    with pytest.raises(RequestError, match="which this program does not take"):
        plain.run(range(40), [Segment(0, 40, plain.pages(40), key_ends=own + 1)])


def test_rows_without_their_own_position_have_no_ranges(pool: ThreadPool) -> None:
    shape = replace(PLAIN, excludes_own=True)
    with pytest.raises(ShapeError, match="their own among"):
        RowProgram(pool, inputs_of(shape, 1, 0), ranged_attention(shape), 1, cache_of(shape, "f32"))
