"""Ops that carry states: against the oracle, and bit for bit however rows are cut, repeated from a log, or settled."""

from collections.abc import Iterator

import numpy as np
import pytest

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import StateShape
from localinfer.kernels.program import StateStep
from tests.kernels.cpu.recurrent_runs import RecurrentProgram
from tests.kernels.cpu.tape_runs import assert_same_bits, relative_error
from tests.kernels.recurrent_cases import CASES
from tests.support.oracle_recurrent import States

NUM_ROWS = 21
EVERY = pytest.mark.parametrize("name", CASES)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def program_of(pool: ThreadPool, name: str, seed: int = 2) -> RecurrentProgram:
    return RecurrentProgram(pool, CASES[name], CASES[name].inputs(NUM_ROWS, seed), 2 * NUM_ROWS)


@EVERY
def test_a_recurrent_op_is_its_formula(name: str, pool: ThreadPool) -> None:
    case = CASES[name]
    inputs = case.inputs(NUM_ROWS, 2)
    rows = [{key: values[row].astype(np.float64) for key, values in inputs.items()} for row in range(NUM_ROWS)]
    wanted = np.stack(States().advance(case.op(), StateStep(0), rows))
    found, _ = program_of(pool, name).in_chunks([NUM_ROWS])
    assert relative_error(found, np.concatenate([wanted, wanted], axis=1)) <= 2e-6


@EVERY
def test_rows_and_states_have_the_same_bits_however_they_are_cut(name: str, pool: ThreadPool) -> None:
    program = program_of(pool, name)
    whole, end = program.in_chunks([NUM_ROWS])
    for sizes in ([1] * NUM_ROWS, [7, 1, 13], [2, 19]):
        found, target = program.in_chunks(sizes)
        assert_same_bits(found, whole)
        np.testing.assert_array_equal(program.states(target), program.states(end))


@EVERY
def test_states_are_written_after_any_row(name: str, pool: ThreadPool) -> None:
    program = program_of(pool, name)
    _, start = program.in_chunks([4])
    before = program.states(start).copy()
    places = {count: program.block() for count in (0, 1, 2, 9, NUM_ROWS - 4)}
    program.run((range(4, NUM_ROWS), StateStep(start, list(places.items()))))
    for count, place in places.items():
        _, wanted = program.in_chunks([4, count] if count else [4])
        np.testing.assert_array_equal(program.states(place), program.states(wanted))
    np.testing.assert_array_equal(program.states(start), before)


@EVERY
@pytest.mark.parametrize("start", [0, 1, 6])
def test_rows_of_a_rejected_draft_leave_no_trace(name: str, start: int, pool: ThreadPool) -> None:
    """Five rows are verified, and any number of them kept; the next step repeats those and goes on."""
    program = program_of(pool, name)
    whole, end = program.in_chunks([NUM_ROWS])
    source = program.in_chunks([start])[1] if start else 0
    log = program.log()
    (verified,) = program.run((range(start, start + 5), StateStep(source, new_log=log)))
    assert_same_bits(verified, whole[start : start + 5])
    for accepted in range(6):
        next_row = start + accepted
        target, repeated, settled = program.block(), program.block(), program.block()
        step = StateStep(source, [(0, repeated), (NUM_ROWS - next_row, target)], log=log, num_logged=accepted)
        (rest,) = program.run((range(next_row, NUM_ROWS), step))
        assert_same_bits(rest, whole[next_row:])
        np.testing.assert_array_equal(program.states(target), program.states(end))
        program.program.settle(StateStep(source, [(0, settled)], log=log, num_logged=accepted))
        np.testing.assert_array_equal(program.states(settled), program.states(repeated))
        if next_row:
            _, wanted = program.in_chunks([next_row])
            np.testing.assert_array_equal(program.states(settled), program.states(wanted))
        else:
            assert not program.states(settled).any()


@EVERY
def test_a_log_follows_another(name: str, pool: ThreadPool) -> None:
    program = program_of(pool, name)
    whole, end = program.in_chunks([NUM_ROWS])
    first, second, target = program.log(), program.log(), program.block()
    program.run((range(3), StateStep(0, new_log=first)))
    middle = program.block()
    program.run((range(2, 8), StateStep(0, [(0, middle)], log=first, num_logged=2, new_log=second)))
    step = StateStep(middle, [(NUM_ROWS - 6, target)], log=second, num_logged=4)
    (rest,) = program.run((range(6, NUM_ROWS), step))
    assert_same_bits(rest, whole[6:])
    np.testing.assert_array_equal(program.states(target), program.states(end))


@EVERY
def test_sequences_of_one_batch_do_not_touch_each_other(name: str, pool: ThreadPool) -> None:
    program = program_of(pool, name)
    whole, end = program.in_chunks([NUM_ROWS])
    _, middle = program.in_chunks([8])
    one, other, short = program.block(), program.block(), program.block()
    found = program.run(
        (range(8, NUM_ROWS), StateStep(middle, [(NUM_ROWS - 8, one)])),
        (range(3), StateStep(0, [(3, short)])),
        (range(8, NUM_ROWS), StateStep(middle, [(NUM_ROWS - 8, other)])),
    )
    for rows, wanted in zip(found, (whole[8:], whole[:3], whole[8:]), strict=True):
        assert_same_bits(rows, wanted)
    for place in (one, other):
        np.testing.assert_array_equal(program.states(place), program.states(end))
    _, wanted_short = program.in_chunks([3])
    np.testing.assert_array_equal(program.states(short), program.states(wanted_short))


def test_steps_that_kernels_must_not_get_are_refused() -> None:
    pool = ThreadPool(1)
    program = program_of(pool, "convolution")
    one, other, log = program.block(), program.block(), program.log()
    rows = range(3)
    for step in (
        None,
        StateStep(one, [(3, one)]),
        StateStep(0, [(3, one + 32)]),
        StateStep(0, [(3, 0)]),
        StateStep(0, [(4, one)]),
        StateStep(0, [(2, one), (2, other)]),
        StateStep(0, [(3, one)], num_logged=1),
        StateStep(0, [(3, one)], log=log, num_logged=17),
        StateStep(0, [(3, one)], log=log, num_logged=1, new_log=log),
    ):
        with pytest.raises(RequestError):
            program.run((rows, step))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="without the states"):
        program.run((range(2, 4), StateStep(0, [(2, one)])))
    with pytest.raises(RequestError, match="fit"):
        program.run((range(20), StateStep(0, new_log=log)))
    with pytest.raises(RequestError, match="another"):
        program.run((rows, StateStep(0, [(3, one)])), (range(3, 5), StateStep(one, [(2, other)])))
    for step in (StateStep(0, [(1, one)]), StateStep(0, [(0, one)], new_log=log)):
        with pytest.raises(RequestError):
            program.program.settle(step)
    pool.close()


def test_states_belong_to_one_op_of_their_shape() -> None:
    tape = GraphBuilder()
    x, out = tape.buffer("x", 20), tape.buffer("out", 20)
    weight = np.ones((20, 3), np.float32)
    with pytest.raises(ShapeError, match="there is no state 0"):
        tape.short_convolution(0, out, x, weight)
    tape.add_state(StateShape(20, 20))
    with pytest.raises(ShapeError, match="keeps"):
        tape.short_convolution(0, out, x, weight)
    tape.state(64, 32)
    tape.short_convolution(1, out, x, weight)
    with pytest.raises(ShapeError, match="already"):
        tape.short_convolution(1, out, x, weight)
    with pytest.raises(ShapeError, match="weights"):
        tape.short_convolution(1, out, x, weight[:19])
    with pytest.raises(ShapeError, match="itself|cannot take"):
        tape.short_convolution(1, x, x, weight)
