"""Factors, magnitudes, shares, mixtures of slots and the Gaussian top-k, against float64."""

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, Gating, Routing
from tests.kernels.cpu.tape_runs import Write, assert_same_bits, random_rows, run_rows
from tests.support.oracle_formulas import Float64Array

ROWS = 9


def check(
    inputs: list[np.ndarray], write: Write, wanted: Float64Array, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    """The formula, and the same bits in other batches on two threads."""
    found = run_rows(pool, inputs, write)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert_same_bits(run_rows(two_threads, inputs, write, [1, 5, 3]), found)


@pytest.mark.parametrize("width", [1, 5, 37, 1100])
@pytest.mark.parametrize("kind", ["buffer", "row", "constant"])
def test_multiply_takes_factors_of_three_shapes(
    kind: str, width: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    x, factor = random_rows(ROWS, width, 1), random_rows(ROWS, 1 if kind == "row" else width, 2)
    constant = random_rows(1, width, 3)[0]

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.multiply(inputs[0], inputs[0], constant if kind == "constant" else inputs[1])
        return inputs[0]

    wanted = x.astype(np.float64) * (constant if kind == "constant" else factor)
    check([x, factor], write, wanted, pool, two_threads)


@pytest.mark.parametrize("width", [1, 5, 37, 1100])
def test_magnitude_is_the_root_mean_square(width: int, pool: ThreadPool, two_threads: ThreadPool) -> None:
    x = random_rows(ROWS, width, 4)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", 1)
        tape.magnitude(out, inputs[0])
        return out

    check([x], write, np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)), pool, two_threads)


@pytest.mark.parametrize("width", [2, 37, 1100])
def test_gaussian_top_k_keeps_what_exceeds_the_deviations(
    width: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    x = random_rows(ROWS, width, 5)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.gaussian_top_k(inputs[0], inputs[0], 0.5)
        return inputs[0]

    exact = x.astype(np.float64)
    least = exact.mean(axis=1, keepdims=True) + 0.5 * exact.std(axis=1, ddof=1, keepdims=True)
    wanted = np.maximum(exact - least, 0.0)
    assert 0 < np.count_nonzero(wanted) < wanted.size
    check([x], write, wanted, pool, two_threads)


@pytest.mark.parametrize("width", [1, 5, 37, 1100])
def test_softmax_shares_a_row(width: int, pool: ThreadPool, two_threads: ThreadPool) -> None:
    x = random_rows(ROWS, width, 5) * np.float32(9)
    x[0, 0] = 1e30
    x[1] = -3e38

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.softmax(inputs[0], inputs[0])
        return inputs[0]

    exact = x.astype(np.float64)
    wanted = np.exp(exact - exact.max(axis=1, keepdims=True))
    check([x], write, wanted / wanted.sum(axis=1, keepdims=True), pool, two_threads)


@pytest.mark.parametrize(("num_in", "num_out", "size"), [(4, 4, 32), (1, 4, 16), (3, 1, 48), (1, 1, 5)])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_slots_mix_by_weights(
    num_in: int, num_out: int, size: int, has_residual: bool, has_weights: bool, pool: ThreadPool,
    two_threads: ThreadPool,
) -> None:  # fmt: skip
    x, residual = random_rows(ROWS, num_in * size, 6), random_rows(ROWS, num_out * size, 7)
    weights = random_rows(ROWS, num_in * num_out, 8)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", num_out * size)
        tape.mix_slots(out, inputs[0], num_in, inputs[2] if has_weights else None, inputs[1] if has_residual else None)
        return out

    factors = weights.astype(np.float64) if has_weights else np.ones(weights.shape)
    slots = x.astype(np.float64).reshape(ROWS, num_in, size)
    wanted = np.einsum("rba,rai->rbi", factors.reshape(ROWS, num_out, num_in), slots).reshape(ROWS, -1)
    check([x, residual, weights], write, wanted + (residual if has_residual else 0), pool, two_threads)


def test_first_slots_may_stay_the_residuals(pool: ThreadPool, two_threads: ThreadPool) -> None:
    x, residual = random_rows(ROWS, 16, 9), random_rows(ROWS, 64, 10)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.mix_slots(inputs[1], inputs[0], 1, residual=inputs[1], first_slot=1)
        return inputs[1]

    wanted = residual.astype(np.float64)
    wanted[:, 16:] += np.tile(x, (1, 3))
    check([x, residual], write, wanted, pool, two_threads)


def test_wrong_shapes_are_refused() -> None:
    tape = GraphBuilder()
    wide, narrow, one = tape.buffer("wide", 64), tape.buffer("narrow", 16), tape.buffer("one", 1)
    with pytest.raises(ShapeError, match="wide is 64 wide, uneven 24: not equal parts"):
        tape.multiply(wide, wide, tape.buffer("uneven", 24))
    with pytest.raises(ShapeError, match="factor of wide has 3 values"):
        tape.multiply(wide, wide, np.ones(3, np.float32))
    with pytest.raises(ShapeError, match="one value"):
        tape.magnitude(narrow, wide)
    with pytest.raises(ShapeError, match="3 slots"):
        tape.mix_slots(wide, narrow, 3)
    with pytest.raises(ShapeError, match="16 weights"):
        tape.mix_slots(wide, tape.buffer("four", 64), 4, tape.buffer("few", 4))
    with pytest.raises(ShapeError, match="from 1 on"):
        tape.mix_slots(wide, narrow, 1, first_slot=1)
    with pytest.raises(ShapeError, match="itself"):
        tape.mix_slots(wide, wide, 4)
    tape.multiply(wide, wide, one)


def test_routes_scale_each_expert_by_its_own_number(pool: ThreadPool) -> None:
    logits, scales = random_rows(ROWS, 8, 11), np.linspace(0.5, 1.5, 8, dtype=np.float32)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        ids, weights = tape.buffer("ids", 3), tape.buffer("weights", 3)
        routing = Routing(8, 3, Gating.SOFTMAX, normalise=True, output_scales=scales)
        tape.route(ids, weights, inputs[0], routing)
        return weights

    shares = np.exp(logits.astype(np.float64))
    best = np.argsort(-shares, axis=1)[:, :3]
    chosen = np.take_along_axis(shares, best, axis=1)
    wanted = chosen / chosen.sum(axis=1, keepdims=True) * scales[best]
    np.testing.assert_allclose(run_rows(pool, [logits], write), wanted, rtol=2e-6)
