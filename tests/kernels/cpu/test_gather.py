"""Weights whose columns are in another order: their input is gathered alike, once for all that agree."""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import Buffer, LinearWeight, Projection
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import RowProgram, assert_same_bits, linear, random_rows, run_rows
from tests.kernels.random_weights import random_weights

COLUMNS = 2176  # more than two units of columns, and not a multiple of one


def ordered(weight: LinearWeight, columns: FloatArray | np.ndarray) -> LinearWeight:
    return replace(weight, packed=replace(weight.packed, columns=np.asarray(columns, np.int32)))


@pytest.mark.parametrize("layout", [Layout.INT4_128, Layout.Q4_0, Layout.F32], ids=lambda layout: layout.name)
def test_product_with_ordered_columns_equals_that_with_an_ordered_input(
    layout: Layout, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape = (37, COLUMNS)
    weight = linear(pool, layout, random_weights(layout, shape, 1), shape)
    columns = np.random.default_rng(2).permutation(COLUMNS)
    x = random_rows(11, COLUMNS, 3)

    def write(weight: LinearWeight):
        def product(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
            out = tape.buffer("out", shape[0])
            tape.matmul(inputs[0], [Projection(weight, out)])
            return out

        return product

    wanted = run_rows(pool, [np.ascontiguousarray(x[:, columns])], write(weight))
    for threads in (pool, two_threads):
        assert_same_bits(run_rows(threads, [x], write(ordered(weight, columns))), wanted)
        assert_same_bits(run_rows(threads, [x], write(ordered(weight, columns)), [1, 8, 2]), wanted)


def test_weights_that_agree_share_one_gather_until_their_input_changes(pool: ThreadPool) -> None:
    shape = (16, 64)
    plain = linear(pool, Layout.Q4_0, random_weights(Layout.Q4_0, shape, 4), shape)
    other = linear(pool, Layout.INT4_32, random_weights(Layout.INT4_32, shape, 5), shape)
    generator = np.random.default_rng(6)
    first, second = generator.permutation(64), generator.permutation(64)
    weights = [ordered(plain, first), plain, ordered(other, first), ordered(other, second)]
    orders = [first, np.arange(64), first, second]
    x = random_rows(5, 64, 7)

    def write(chosen: int):
        def products(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
            outs = [tape.buffer(f"out {index}", 16) for index in range(8)]
            tape.matmul(inputs[0], [Projection(weight, out) for weight, out in zip(weights, outs[:4], strict=True)])
            tape.scale(inputs[0], 0.5)
            tape.matmul(inputs[0], [Projection(weight, out) for weight, out in zip(weights, outs[4:], strict=True)])
            return outs[chosen]

        return products

    def alone(index: int, scale: float) -> FloatArray:
        def product(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
            out = tape.buffer("out", 16)
            tape.matmul(inputs[0], [Projection((plain, plain, other, other)[index], out)])
            return out

        return run_rows(pool, [np.ascontiguousarray(np.float32(scale) * x[:, orders[index]])], product)

    for chosen in range(8):
        assert_same_bits(run_rows(pool, [x], write(chosen)), alone(chosen % 4, 1.0 if chosen < 4 else 0.5))
    program = RowProgram(pool, [x], write(0), len(x)).program
    kernels = [operation.kernel for operation in program.operations()]
    assert kernels.count("elementwise.gather_columns") == 4


def test_order_that_leaves_the_columns_is_refused(pool: ThreadPool) -> None:
    shape = (16, 64)
    weight = linear(pool, Layout.Q4_0, random_weights(Layout.Q4_0, shape, 8), shape)
    for columns in (np.arange(63), np.arange(1, 65), np.arange(-1, 63)):

        def write(tape: GraphBuilder, inputs: list[Buffer], columns: np.ndarray = columns) -> Buffer:
            tape.matmul(inputs[0], [Projection(ordered(weight, columns), tape.buffer("out", 16))])
            return inputs[0]

        with pytest.raises(ShapeError, match="order"):
            RowProgram(pool, [random_rows(1, 64, 9)], write, 1)
