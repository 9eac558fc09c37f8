"""Mixture of experts: choosing, multiplying and summing, against the NumPy oracle."""

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.layouts import Layout, is_float
from localinfer.kernels.ops import Buffer, Gating, Routing
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import Write, assert_same_bits, linear, random_rows, relative_error, run_rows
from tests.kernels.random_weights import decoded, quantized_activations, random_weights
from tests.support.oracle_formulas import route

ROWS, EXPERTS, SELECTED = 23, 12, 4
BIAS = np.linspace(-0.4, 0.4, EXPERTS).astype(np.float32)
ROUTINGS = {
    "softmax": Routing(EXPERTS, SELECTED, Gating.SOFTMAX),
    "softmax normalised": Routing(EXPERTS, SELECTED, Gating.SOFTMAX, normalise=True),
    "softmax selected": Routing(EXPERTS, SELECTED, Gating.SOFTMAX_SELECTED),
    "sigmoid": Routing(EXPERTS, SELECTED, Gating.SIGMOID, scale=2.5),
    "sigmoid biased": Routing(EXPERTS, SELECTED, Gating.SIGMOID, normalise=True, selection_bias=BIAS),
    "grouped": Routing(EXPERTS, SELECTED, Gating.SIGMOID, True, 2.5, BIAS, num_groups=4, num_selected_groups=2),
    "groups by their best": Routing(
        EXPERTS, SELECTED, Gating.SOFTMAX, num_groups=4, num_selected_groups=2, num_group_values=1
    ),
    "sparse mixer": Routing(EXPERTS, SELECTED, Gating.SPARSE_MIXER, margin=0.4),
    "groups of one": Routing(EXPERTS, SELECTED, Gating.SOFTMAX, num_groups=12, num_selected_groups=5),
    "all experts": Routing(EXPERTS, EXPERTS, Gating.SOFTMAX),
    "one expert": Routing(EXPERTS, 1, Gating.SIGMOID),
}
LAYOUTS = pytest.mark.parametrize(
    "layout", [Layout.F32, Layout.Q4_0, Layout.Q8_0, Layout.Q6_K], ids=lambda layout: layout.name
)


def routed(tape: GraphBuilder, logits: Buffer, routing: Routing) -> tuple[Buffer, Buffer]:
    """Buffers of expert ids and weights."""
    ids = tape.buffer("expert ids", routing.num_selected)
    weights = tape.buffer("expert weights", routing.num_selected)
    tape.route(ids, weights, logits, routing)
    return ids, weights


def route_rows(pool: ThreadPool, logits: FloatArray, routing: Routing, splits: list[int]) -> list[FloatArray]:
    """Expert ids and weights of every row."""

    def write_part(part: int) -> Write:
        return lambda tape, inputs: routed(tape, inputs[0], routing)[part]

    return [run_rows(pool, [logits], write_part(part), splits) for part in range(2)]


@pytest.mark.parametrize("name", ROUTINGS)
def test_route_picks_and_weighs_as_the_oracle(name: str, pool: ThreadPool, two_threads: ThreadPool) -> None:
    routing, logits = ROUTINGS[name], random_rows(ROWS, EXPERTS, 1)
    wanted = [route(row.astype(np.float64), routing) for row in logits]
    ids, weights = route_rows(pool, logits, routing, [ROWS])
    np.testing.assert_array_equal(ids, [ids for ids, _ in wanted])
    np.testing.assert_allclose(weights, [weights for _, weights in wanted], rtol=1e-6)
    for found, again in zip([ids, weights], route_rows(two_threads, logits, routing, [1, 15, 7]), strict=True):
        assert_same_bits(again, found)


def test_route_prefers_the_lower_of_equal_experts(pool: ThreadPool) -> None:
    logits = np.zeros((2, EXPERTS), np.float32)
    logits[1, [3, 8]] = 1
    ids, weights = route_rows(pool, logits, ROUTINGS["softmax normalised"], [2])
    assert ids.tolist() == [[0, 1, 2, 3], [3, 8, 0, 1]]
    np.testing.assert_allclose(weights[0], 0.25)


def test_route_of_grouped_equal_experts_keeps_the_lower_groups(pool: ThreadPool) -> None:
    routing = Routing(EXPERTS, SELECTED, Gating.SIGMOID, num_groups=4, num_selected_groups=2)
    ids, _ = route_rows(pool, np.zeros((1, EXPERTS), np.float32), routing, [1])
    assert ids.tolist() == [[0, 1, 2, 3]]


def expert_product(
    pool: ThreadPool,
    layout: Layout,
    shape: tuple[int, int, int],
    routing: Routing,
    bias: FloatArray | None,
    is_per_slot: bool,
) -> Write:
    weight = linear(pool, layout, random_weights(layout, shape, 2), shape)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        ids, _ = routed(tape, inputs[0], routing)
        out = tape.buffer("out", routing.num_selected * shape[1])
        tape.expert_matmul(out, inputs[1], weight, ids, bias, is_per_slot)
        return out

    return write


@pytest.mark.parametrize("is_per_slot", [False, True], ids=["one input", "input per slot"])
@LAYOUTS
def test_expert_matmul_equals_the_oracle_in_any_batch(
    layout: Layout, is_per_slot: bool, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    routing, shape = ROUTINGS["softmax"], (EXPERTS, 37, 256)
    logits, bias = random_rows(ROWS, EXPERTS, 3), random_rows(EXPERTS, 37, 4)
    slots = SELECTED if is_per_slot else 1
    x = random_rows(ROWS, slots * 256, 5)
    write = expert_product(pool, layout, shape, routing, bias, is_per_slot)
    found = run_rows(pool, [logits, x], write)
    weights = decoded(layout, random_weights(layout, shape, 2), shape)
    rounded = x.astype(np.float64) if is_float(layout) else quantized_activations(x)
    taken = np.broadcast_to(rounded.reshape(ROWS, slots, 256), (ROWS, SELECTED, 256))
    ids = np.array([route(row.astype(np.float64), routing)[0] for row in logits])
    wanted = np.einsum("rsoi,rsi->rso", weights[ids], taken) + bias[ids]
    assert relative_error(found, wanted.reshape(ROWS, -1)) <= 1e-6
    for threads, splits in ((pool, [1] * ROWS), (pool, [7, 7, 7, 2]), (two_threads, [ROWS]), (two_threads, [4, 19])):
        assert_same_bits(run_rows(threads, [logits, x], write, splits), found)


def test_expert_matmul_takes_rows_that_all_chose_the_same_experts(pool: ThreadPool, two_threads: ThreadPool) -> None:
    routing, shape = ROUTINGS["softmax"], (EXPERTS, 16, 32)
    logits = np.tile(random_rows(1, EXPERTS, 6), (ROWS, 1))
    x = random_rows(ROWS, 32, 7)
    write = expert_product(pool, Layout.Q4_0, shape, routing, None, False)
    found = run_rows(pool, [logits, x], write)
    for threads, splits in ((pool, [1] * ROWS), (two_threads, [ROWS])):
        assert_same_bits(run_rows(threads, [logits, x], write, splits), found)


def test_expert_matmul_refuses_experts_that_were_not_routed(pool: ThreadPool) -> None:
    weight = linear(pool, Layout.F32, random_weights(Layout.F32, (EXPERTS, 3, 5), 8), (EXPERTS, 3, 5))

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", SELECTED * 3)
        tape.expert_matmul(out, inputs[0], weight, inputs[1])
        return out

    with pytest.raises(ShapeError, match="was not routed"):
        run_rows(pool, [random_rows(2, 5, 9), random_rows(2, SELECTED, 10)], write)


@pytest.mark.parametrize("has_residual", [False, True])
def test_expert_sum_adds_slots_in_their_order(has_residual: bool, pool: ThreadPool, two_threads: ThreadPool) -> None:
    x, weights, residual = random_rows(ROWS, 3 * 37, 11), random_rows(ROWS, 3, 12), random_rows(ROWS, 37, 13)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.expert_sum(inputs[2], inputs[0], inputs[1], inputs[2] if has_residual else None)
        return inputs[2]

    wanted = np.zeros((ROWS, 37)) + (residual if has_residual else 0)
    wanted = wanted + np.einsum("rsw,rs->rw", x.reshape(ROWS, 3, 37).astype(np.float64), weights)
    found = run_rows(pool, [x, weights, residual], write)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert_same_bits(run_rows(two_threads, [x, weights, residual], write, [9, 14]), found)


def test_expert_scale_multiplies_each_slot(pool: ThreadPool, two_threads: ThreadPool) -> None:
    x, weights = random_rows(ROWS, 3 * 32, 14), random_rows(ROWS, 3, 15)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.expert_scale(*inputs)
        return inputs[0]

    wanted = (x.reshape(ROWS, 3, 32) * weights[:, :, None]).reshape(ROWS, -1)
    for threads, splits in ((pool, [ROWS]), (two_threads, [9, 14])):
        assert_same_bits(run_rows(threads, [x, weights], write, splits), wanted)


@pytest.mark.parametrize("selected", [1, 4])
def test_expert_factors_multiply_each_slot_by_its_experts_number(
    selected: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    x, logits = random_rows(ROWS, selected * 32, 16), random_rows(ROWS, EXPERTS, 17)
    factors = np.linspace(0.25, 3.0, EXPERTS, dtype=np.float32)
    routing = Routing(EXPERTS, selected, Gating.SOFTMAX)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        ids, _ = routed(tape, inputs[1], routing)
        tape.expert_factors(inputs[0], ids, factors)
        return inputs[0]

    ids = np.argsort(-logits, axis=1, kind="stable")[:, :selected]
    wanted = (x.reshape(ROWS, selected, 32) * factors[ids][:, :, None]).reshape(ROWS, -1)
    for threads, splits in ((pool, [ROWS]), (two_threads, [9, 14])):
        assert_same_bits(run_rows(threads, [x, logits], write, splits), wanted)


def test_factors_of_other_experts_than_were_chosen_are_refused(pool: ThreadPool) -> None:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        ids, _ = routed(tape, inputs[1], Routing(EXPERTS, 2, Gating.SOFTMAX))
        tape.expert_factors(inputs[0], ids, np.ones(EXPERTS - 1, np.float32))
        return inputs[0]

    with pytest.raises(ShapeError, match="11 factors for 12 experts"):
        run_rows(pool, [random_rows(ROWS, 64, 18), random_rows(ROWS, EXPERTS, 19)], write)
