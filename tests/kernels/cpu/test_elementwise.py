"""Norms, activations, sums, RoPE, embeddings and copies, against float64."""

from collections.abc import Callable
from dataclasses import replace

import numba
import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.compiled.elementwise import exp_of, sigmoid_of
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import RowTable
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES, Layout
from localinfer.kernels.ops import Activation, Buffer, EmbeddingTable, Pairing, RopeTable, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import NO_CACHE, assert_same_bits, random_rows, relative_error, run_rows, table
from tests.kernels.random_weights import random_weights
from tests.support.oracle_formulas import Float64Array, activate, affine, groups, sigmoid

ROWS = 11
WIDTHS = [1, 5, 16, 37, 1024, 1100]


@pytest.mark.parametrize("group_size", [0, 20, 37])
@pytest.mark.parametrize("weights", ["none", "per group", "per column"])
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norms_equal_the_formula(
    group_size: int, weights: str, centred: bool, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    width = 740
    x = random_rows(ROWS, width, 1) + np.float32(0.5)
    size = {"none": 0, "per group": group_size or width, "per column": width}[weights]
    weight, bias = (random_rows(1, size, seed)[0] if size else None for seed in (2, 3))

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        if centred:
            tape.layer_norm(inputs[0], inputs[0], weight, bias, 1e-5, group_size)
        else:
            tape.rms_norm(inputs[0], inputs[0], weight, 1e-5, group_size)
        return inputs[0]

    grouped = groups(x.astype(np.float64), group_size)
    if centred:
        grouped = grouped - grouped.mean(axis=-1, keepdims=True)
    normed = grouped / np.sqrt(np.mean(grouped**2, axis=-1, keepdims=True) + 1e-5)
    wanted = affine(normed, weight, bias if centred else None).reshape(ROWS, width)
    found = run_rows(pool, [x], write)
    assert relative_error(found, wanted) <= 3e-7
    assert_same_bits(run_rows(two_threads, [x], write, [1, 3, 7]), found)


def test_rms_norm_of_zeros_is_zero(pool: ThreadPool) -> None:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", 20)
        tape.rms_norm(out, inputs[0], None, 1e-6)
        return out

    assert not run_rows(pool, [np.zeros((2, 20), np.float32)], write).any()


@pytest.mark.parametrize("kind", [kind for kind in Activation if kind is not Activation.SWIGLU_CLAMPED])
def test_activations_equal_the_formula(kind: Activation, pool: ThreadPool, two_threads: ThreadPool) -> None:
    x = random_rows(ROWS, 1100, 4) * np.float32(4)
    x[0, :8] = [0, -0.0, 100, -100, 30, -30, 1e-20, -1e-3]
    up = random_rows(ROWS, 1100, 5)

    def plain(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.activation(inputs[0], inputs[0], kind)
        return inputs[0]

    def gated(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.gated_activation(inputs[1], inputs[0], inputs[1], kind)
        return inputs[1]

    wanted = activate(x.astype(np.float64), kind)
    found = run_rows(pool, [x], plain)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1.6e-6)
    assert_same_bits(run_rows(two_threads, [x], plain, [4, 7]), found)
    found = run_rows(pool, [x, up], gated)
    np.testing.assert_allclose(found, wanted * up, rtol=2e-6, atol=5e-6)
    assert_same_bits(run_rows(two_threads, [x, up], gated, [4, 7]), found)


def test_clamped_swiglu_equals_the_formula(pool: ThreadPool) -> None:
    gate, up = random_rows(ROWS, 50, 6) * np.float32(6), random_rows(ROWS, 50, 7) * np.float32(6)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.gated_activation(inputs[0], inputs[0], inputs[1], Activation.SWIGLU_CLAMPED)
        return inputs[0]

    clamped = np.minimum(gate.astype(np.float64), 7)
    wanted = clamped * sigmoid(1.702 * clamped) * (np.clip(up, -7, 7) + 1)
    np.testing.assert_allclose(run_rows(pool, [gate, up], write), wanted, rtol=2e-6, atol=1e-6)


@numba.njit(error_model="numpy")
def _each(x: FloatArray, exponentials: FloatArray, sigmoids: FloatArray) -> None:
    for index in range(x.size):
        exponentials[index] = exp_of(x[index])
        sigmoids[index] = sigmoid_of(x[index])


def test_exp_and_sigmoid_hold_their_stated_error() -> None:
    x = np.linspace(-87.2, 88, 200_001, dtype=np.float32)
    exponentials, sigmoids = np.empty_like(x), np.empty_like(x)
    _each(x, exponentials, sigmoids)
    wanted = np.exp(x.astype(np.float64))
    assert np.max(np.abs(exponentials - wanted) / wanted) <= 2.5e-7
    assert np.max(np.abs(sigmoids - wanted / (1 + wanted))) <= 2e-7


def test_exp_and_sigmoid_are_right_at_their_ends() -> None:
    x = np.array([-np.inf, -1e30, -100, -0.0, 0, 88, 1e30, np.inf, np.nan], np.float32)
    exponentials, sigmoids = np.empty_like(x), np.empty_like(x)
    _each(x, exponentials, sigmoids)
    assert exponentials[:5].tolist() == [0, 0, 0, 1, 1]
    assert (exponentials[5:8] >= np.float32(1.6e38)).all()
    assert np.isfinite(exponentials[5:8]).all()
    assert np.isnan(exponentials[8])
    assert sigmoids[2:5].tolist() == [pytest.approx(0, abs=1e-38), 0.5, 0.5]
    assert sigmoids[5:8].tolist() == [1, 1, 1]


XIELU = (0.75, 1.375, 0.5, -0.0009765625)


def factors(width: int) -> FloatArray:
    return np.linspace(0.5, 3.0, width, dtype=np.float32)


def _xielu_of(x: Float64Array, positive: float, negative: float, beta: float, epsilon: float) -> Float64Array:
    below = (np.expm1(np.minimum(x, epsilon)) - x) * negative
    return np.asarray(np.where(x > 0, positive * x * x, below) + beta * x)


def _add(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.add(a, a, b, 0.375)


def _multiply_sigmoid(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.multiply_sigmoid(a, a, b)


def _scale(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.scale(a, 0.3)


def _softcap(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.softcap(a, 1.5)


def _scale_columns(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.multiply(a, a, factors(a.width))


def _clamp(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.clamp(a, 0.5)
    tape.clamp(a, 0.25, only_above=True)


def _bound(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.bound(a, b, -0.75, 0.25)


def _limited_gate(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.gated_activation(a, a, b, Activation.SILU, 0.25)


def _xielu(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.xielu(a, b, *XIELU)


def _scale_by_position(tape: GraphBuilder, a: Buffer, b: Buffer) -> None:
    tape.scale_by_position(a, 3, 0.1, offset=1)


FORMULAS: dict[Callable[[GraphBuilder, Buffer, Buffer], None], Callable[[Float64Array, Float64Array], Float64Array]] = {
    _add: lambda a, b: a + 0.375 * b,
    _multiply_sigmoid: lambda a, b: a * sigmoid(b),
    _scale: lambda a, b: a * float(np.float32(0.3)),
    _softcap: lambda a, b: 1.5 * np.tanh(a / 1.5),
    _scale_columns: lambda a, b: a * factors(a.shape[1]),
    _clamp: lambda a, b: np.clip(a, -0.5, 0.25),
    _bound: lambda a, b: np.clip(b, -0.75, 0.25),
    _limited_gate: lambda a, b: np.minimum(a * sigmoid(a), 0.25) * np.clip(b, -0.25, 0.25),
    _xielu: lambda a, b: _xielu_of(b, *XIELU),
    _scale_by_position: lambda a, b: a * (1 + 0.1 * np.log1p((np.arange(len(a)) + 1) // 3))[:, None],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", FORMULAS, ids=lambda op: op.__name__.strip("_"))
def test_sums_and_products_equal_the_formula(
    op: Callable[[GraphBuilder, Buffer, Buffer], None], width: int, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    a, b = random_rows(ROWS, width, 8), random_rows(ROWS, width, 9)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        op(tape, *inputs)
        return inputs[0]

    found = run_rows(pool, [a, b], write)
    np.testing.assert_allclose(found, FORMULAS[op](a.astype(np.float64), b.astype(np.float64)), rtol=1e-6, atol=3e-7)
    assert_same_bits(run_rows(two_threads, [a, b], write, [6, 5]), found)


@pytest.mark.parametrize("has_sigmoid", [True, False])
@pytest.mark.parametrize(("parts", "size"), [(1, 37), (3, 20), (5, 16), (7, 3)])
def test_products_take_one_gate_per_part_of_a_row(
    parts: int, size: int, has_sigmoid: bool, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    x, gate = random_rows(ROWS, parts * size, 10), random_rows(ROWS, parts, 11)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        (tape.multiply_sigmoid if has_sigmoid else tape.multiply)(inputs[0], *inputs)
        return inputs[0]

    gates = gate.astype(np.float64)
    wanted = x * np.repeat(sigmoid(gates) if has_sigmoid else gates, size, axis=1)
    found = run_rows(pool, [x, gate], write)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert_same_bits(run_rows(two_threads, [x, gate], write, [6, 5]), found)


def test_xielu_is_exact_near_zero_and_far_from_it(pool: ThreadPool) -> None:
    x = np.array([[-1e-7, -1e-4, -0.01, -0.499, -0.5, -0.501, -20.0, -1000.0, 0.0, 1e-4, 30.0]], np.float32)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.xielu(inputs[0], inputs[0], 0.75, 1.375, 0.5, -1e-6)
        return inputs[0]

    wanted = _xielu_of(x.astype(np.float64), 0.75, 1.375, 0.5, float(np.float32(-1e-6)))
    np.testing.assert_allclose(run_rows(pool, [x], write), wanted, rtol=5e-7, atol=1e-12)


@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize(("head_size", "pairs", "offset"), [(16, 8, 0), (40, 10, 0), (24, 5, 9), (2, 1, 0)])
def test_rope_rotates_each_head_by_its_position(
    head_size: int, pairs: int, offset: int, pairing: Pairing, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    heads, magnitude = 3, 1.25
    x = random_rows(ROWS, heads * head_size, 12)
    frequencies = 1.0 / 10000 ** (np.arange(pairs) / pairs)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.rope(inputs[0], RopeTable(frequencies, pairing, magnitude), head_size, offset)
        return inputs[0]

    wanted = x.astype(np.float64).reshape(ROWS, heads, head_size).copy()
    part = wanted[:, :, offset : offset + 2 * pairs]
    first = np.arange(pairs) * 2 if pairing is Pairing.ADJACENT else np.arange(pairs)
    second = first + (1 if pairing is Pairing.ADJACENT else pairs)
    rotated = (part[:, :, first] + 1j * part[:, :, second]) * magnitude
    rotated = rotated * np.exp(1j * np.arange(ROWS)[:, None, None] * frequencies)
    part[:, :, first], part[:, :, second] = rotated.real, rotated.imag
    found = run_rows(pool, [x], write)
    np.testing.assert_allclose(found, wanted.reshape(ROWS, -1), rtol=1e-6, atol=1e-6)
    assert_same_bits(run_rows(two_threads, [x], write, [1, 10]), found)


@pytest.mark.parametrize("pairing", Pairing)
def test_rotation_by_given_angles_equals_that_by_position(
    pairing: Pairing, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    head_size, pairs, offset = 24, 5, 9
    x, frequencies = random_rows(ROWS, 3 * head_size, 12), 1.0 / 10000 ** (np.arange(pairs) / pairs)
    turns = np.arange(ROWS)[:, None] * frequencies
    angles = np.concatenate([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)

    def by_position(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.rope(inputs[0], RopeTable(frequencies, pairing), head_size, offset)
        return inputs[0]

    def by_row(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.rotate_by_row(inputs[0], inputs[1], head_size, pairing, offset)
        return inputs[0]

    wanted = run_rows(pool, [x], by_position)
    for threads in (pool, two_threads):
        assert_same_bits(run_rows(threads, [x, angles], by_row), wanted)

    def beyond(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.rotate_by_row(inputs[0], inputs[1], head_size, pairing, 15)
        return inputs[0]

    with pytest.raises(ShapeError, match="10 rotated columns exceed 24"):
        run_rows(pool, [x, angles], beyond)


def test_rope_keeps_its_precision_at_far_positions(pool: ThreadPool) -> None:
    position, frequencies = 1_000_003, np.array([1.0, 0.7310585])
    tape = GraphBuilder()
    x, out = tape.buffer("x", 4), tape.buffer("out", 4, Rows.OUTPUT)
    tape.embed(x, table(np.array([[1, 1, 0, 0]], np.float32)))
    tape.rope(x, RopeTable(frequencies, Pairing.HALVES), 4)
    tape.select_output(out, x)
    pages = np.zeros(position // 32 + 1, np.int64)
    program = lower_to_cpu(tape.finish(out), pool, NO_CACHE, max_batch_rows=1)
    found = program.run(Batch(np.zeros(1, np.int32), [Segment(position, 1, pages)], np.zeros(1, np.int32)))
    angles = position * frequencies
    np.testing.assert_allclose(found[0], [*np.cos(angles), *np.sin(angles)], atol=1e-7)


@pytest.mark.parametrize("layout", GGUF_LAYOUTS, ids=lambda layout: layout.name)
def test_embed_equals_the_reference_exactly(layout: Layout, pool: ThreadPool, two_threads: ThreadPool) -> None:
    shape = (29, 3 * SIZES[layout].unit if SIZES[layout].unit > 1 else 37)
    data = random_weights(layout, shape, 13).reshape(-1)
    embedding = EmbeddingTable("table", *shape, RowTable(layout, *shape, data))
    ids = np.random.default_rng(14).integers(0, shape[0], 17).astype(np.int32)
    wanted = dequantize(data, TensorType[layout.name], shape)[ids] * np.float32(0.75)
    for threads in (pool, two_threads):
        tape = GraphBuilder()
        x, out = tape.buffer("x", shape[1]), tape.buffer("out", shape[1], Rows.OUTPUT)
        tape.embed(x, embedding, 0.75)
        tape.select_output(out, x)
        batch = Batch(ids, [Segment(0, 17, np.zeros(1, np.int64))], np.arange(17, dtype=np.int32))
        program = lower_to_cpu(tape.finish(out), threads, NO_CACHE, max_batch_rows=17)
        assert_same_bits(program.run(batch).copy(), wanted)


def test_embed_positions_adds_the_row_of_the_position(pool: ThreadPool) -> None:
    x, positions = random_rows(ROWS, 37, 15), random_rows(ROWS, 37, 16)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.embed_positions(inputs[0], table(positions))
        return inputs[0]

    assert_same_bits(run_rows(pool, [x], write, [5, 6]), x + positions)


def test_embed_types_adds_the_row_of_the_type_and_the_first_where_none_is_given(
    pool: ThreadPool, two_threads: ThreadPool
) -> None:
    x, rows = random_rows(ROWS, 37, 15), random_rows(3, 37, 16)
    types = np.random.default_rng(1).integers(0, 3, ROWS).astype(np.int32)
    for threads in (pool, two_threads):
        tape = GraphBuilder()
        buffer, out = tape.buffer("x", 37), tape.buffer("out", 37, Rows.OUTPUT)
        tape.embed(buffer, table(x))
        tape.embed_types(buffer, table(rows))
        tape.select_output(out, buffer)
        program = lower_to_cpu(tape.finish(out), threads, NO_CACHE, max_batch_rows=ROWS)
        ids = np.arange(ROWS, dtype=np.int32)
        batch = Batch(ids, [Segment(0, ROWS, np.zeros(1, np.int64))], ids, types)
        assert_same_bits(program.run(batch).copy(), x + rows[types])
        assert_same_bits(program.run(replace(batch, token_types=None)).copy(), x + rows[0])
        tape.embed_types(buffer, table(rows), adds=False)
        tape.select_output(out, buffer)
        program = lower_to_cpu(tape.finish(out), threads, NO_CACHE, max_batch_rows=ROWS)
        assert_same_bits(program.run(batch).copy(), rows[types])


def test_select_output_copies_the_rows_asked_for_in_their_order(pool: ThreadPool, two_threads: ThreadPool) -> None:
    x, chosen = random_rows(ROWS, 37, 17), np.array([9, 0, 9, 4], np.int32)
    for threads in (pool, two_threads):
        tape = GraphBuilder()
        rows, out = tape.buffer("x", 37), tape.buffer("out", 37, Rows.OUTPUT)
        tape.embed(rows, table(x))
        tape.select_output(out, rows)
        tape.scale(out, 2.0)
        segment = Segment(0, ROWS, np.zeros(1, np.int64))
        program = lower_to_cpu(tape.finish(out), threads, NO_CACHE, max_batch_rows=ROWS)
        found = program.run(Batch(np.arange(ROWS, dtype=np.int32), [segment], chosen)).copy()
        assert_same_bits(found, x[chosen] * 2)
        assert program.run(Batch(np.arange(ROWS, dtype=np.int32), [segment], chosen[:0])).shape == (0, 37)


def test_copy_heads_copies_part_of_each_head_and_leaves_the_rest(pool: ThreadPool, two_threads: ThreadPool) -> None:
    out, x = random_rows(ROWS, 3 * 20, 18), random_rows(ROWS, 3 * 12, 19)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.copy_heads(inputs[0], inputs[1], 3, 7, 20, 12, out_offset=11, x_offset=5)
        return inputs[0]

    wanted = out.reshape(ROWS, 3, 20).copy()
    wanted[:, :, 11:18] = x.reshape(ROWS, 3, 12)[:, :, 5:]
    for threads, splits in ((pool, [ROWS]), (two_threads, [2, 9])):
        assert_same_bits(run_rows(threads, [out, x], write, splits), wanted.reshape(ROWS, -1))
