"""The CUDA tape on the emulator against the NumPy oracle: what is joined, what is quantized, few rows and many."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import ContextLengthError, RequestError, ShapeError, UnsupportedFormatError
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    EmbeddingTable,
    Gating,
    KVLayerShape,
    LinearWeight,
    OpGraph,
    Pairing,
    Projection,
    Relative,
    RopeTable,
    Routing,
    Rows,
)
from localinfer.kernels.program import Batch, Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import random_rows
from tests.kernels.random_weights import decoded, quantized_activations, random_weights
from tests.support.oracle import NumpyProgram

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.weights import upload
from tests.kernels.cuda.device import EmulatedDevice

WIDTH = 64
LAYERS = [KVLayerShape(1, 32, 32)]
Linear = Callable[[Layout, tuple[int, ...], int], LinearWeight]
Write = Callable[[GraphBuilder, Buffer, Linear], Buffer]


class Weights:
    """The same random weights for the device and for the oracle."""

    def __init__(self, device: EmulatedDevice | None) -> None:
        self._device = device

    def linear(self, layout: Layout, shape: tuple[int, ...], seed: int) -> LinearWeight:
        data = random_weights(layout, shape, seed)
        experts = shape[0] if len(shape) == 3 else 1
        if self._device is None:
            packed: object = decoded(layout, data, shape)
        else:
            packed = upload(self._device, layout, data, experts, shape[-2], shape[-1])
        return LinearWeight(f"weight {seed}", shape[-2], shape[-1], packed, experts)

    def table(self, values: FloatArray) -> EmbeddingTable:
        if self._device is None:
            packed: object = values.astype(np.float64)
        else:
            packed = upload(self._device, Layout.F32, values.reshape(-1).view(np.uint8), 1, *values.shape)
        return EmbeddingTable("table", *values.shape, packed)


def graph_of(values: FloatArray, write: Write, weights: Weights) -> OpGraph:
    tape = GraphBuilder(LAYERS)
    x = tape.buffer("x", values.shape[1])
    tape.embed(x, weights.table(values))
    result = write(tape, x, weights.linear)
    if result.rows is Rows.BATCH:
        selected = tape.buffer("selected", result.width, Rows.OUTPUT)
        tape.select_output(selected, result)
        result = selected
    return tape.finish(result)


def device_program(
    values: FloatArray, write: Write, max_rows: int = 32, kv_type: str = "f32"
) -> tuple[EmulatedDevice, CudaProgram, NDArray[np.int64]]:
    device = EmulatedDevice()
    layout = KVLayout(kv_type, LAYERS)
    graph = graph_of(values, write, Weights(device))
    program = lower_to_cuda(graph, device, layout, max_batch_rows=max_rows, max_output_rows=max_rows)
    pages = device.allocate(8 * layout.page_bytes) + np.arange(8, dtype=np.int64) * layout.page_bytes
    return device, program, pages


def both(
    values: FloatArray, write: Write, kv_type: str = "f32", step: int = 0
) -> tuple[FloatArray, FloatArray, list[str]]:
    """What the device and the oracle make of the rows of `values`, and the kernels launched."""
    device, program, pages = device_program(values, write, kv_type=kv_type)
    oracle = NumpyProgram(graph_of(values, write, Weights(None)), 32, kv_type=kv_type)
    parts, step = [], step or len(values)
    for start in range(0, len(values), step):
        ids = np.arange(start, min(start + step, len(values)), dtype=np.int32)
        batch = Batch(ids, [Segment(start, ids.size, pages)], np.arange(ids.size, dtype=np.int32))
        parts.append(program.run(batch).copy())
    ids = np.arange(len(values), dtype=np.int32)
    wanted = oracle.run(Batch(ids, [Segment(0, ids.size, pages)], ids))
    return np.concatenate(parts), np.asarray(wanted, np.float32), device.kernels


def assert_near(found: FloatArray, wanted: FloatArray, tolerance: float) -> None:
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def block(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
    """Attention and a gated feed-forward block, as a decoder writes them, with quantized weights."""
    normed = tape.buffer("normed", WIDTH)
    weight = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    tape.rms_norm(normed, x, weight, 1e-5)
    queries, keys, values = (tape.buffer(name, width) for name, width in (("q", 64), ("k", 32), ("v", 32)))
    bias = np.linspace(-1, 1, 64, dtype=np.float32)
    projections = [Projection(linear(Layout.Q4_0, (64, WIDTH), 1), queries, bias)]
    projections += [Projection(linear(Layout.Q4_0, (32, WIDTH), 2), keys)]
    projections += [Projection(linear(Layout.Q8_0, (32, WIDTH), 3), values)]
    tape.matmul(normed, projections)
    table = RopeTable(1.0 / 100.0 ** (np.arange(12) / 12), Pairing.HALVES, 1.1)
    tape.rope(queries, table, 32, 4)
    tape.rope(keys, table, 32, 4)
    tape.store_kv(0, keys, values)
    attended = tape.buffer("attended", 64)
    tape.attention(attended, queries, 0, AttentionShape(2, 1, 32, 32, 0.2, softcap=5.0, window=4))
    tape.matmul(attended, [Projection(linear(Layout.Q5_0, (WIDTH, 64), 4), x, residual=x, scale=0.5)])
    tape.layer_norm(normed, x, weight, weight - 1, 1e-5)
    gate, up = tape.buffer("gate", 96), tape.buffer("up", 96)
    tape.matmul(
        normed,
        [
            Projection(linear(Layout.INT4_32, (96, WIDTH), 5), gate),
            Projection(linear(Layout.INT4_32, (96, WIDTH), 6), up),
        ],
    )
    tape.gated_activation(up, gate, up, Activation.SILU)
    tape.matmul(up, [Projection(linear(Layout.Q4_1, (WIDTH, 96), 7), x, residual=x)])
    return x


@pytest.mark.parametrize(("kv_type", "step"), [("f32", 5), ("q8_0", 5), ("f16", 1), ("f32", 0), ("q8_0", 0)])
def test_a_block_of_a_decoder_is_the_oracles_in_few_launches(kv_type: str, step: int) -> None:
    values = random_rows(18 if step == 0 else 5, WIDTH, 1)
    found, wanted, kernels = both(values, block, kv_type, step)
    # The oracle multiplies what was not rounded to int8 (few rows) or bfloat16 (many).
    assert_near(found, wanted, 0.03)
    if step == 1:
        per_token = len(kernels) / 5
        assert per_token == 11, "look-up, angles, eight of the block (two layouts of q, k, v), selection"
        assert "rows.rope" not in kernels and "rows.elementwise" not in kernels


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_few_rows_give_the_same_bits_in_any_batch(kv_type: str) -> None:
    values = random_rows(3, WIDTH, 2)
    together, _, kernels = both(values, block, kv_type, 3)
    alone, _, own_kernels = both(values, block, kv_type, 1)
    stores = [any(kernel.startswith("kv_store.") for kernel in launched) for launched in (kernels, own_kernels)]
    assert stores == [True, False], "a row of its own is stored by its attention"
    np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))


def test_a_row_is_stored_on_time_where_its_attention_does_not_follow() -> None:
    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        keys, out = tape.buffer("keys", 32), tape.buffer("out", WIDTH)
        tape.copy_heads(keys, x, 1, 32, 32, WIDTH)
        tape.store_kv(0, keys, keys)
        tape.scale(keys, 0.0)
        tape.attention(out, x, 0, AttentionShape(2, 1, 32, 32, 0.2))
        return out

    found, wanted, kernels = both(random_rows(3, WIDTH, 4), write, step=1)
    assert_near(found, wanted, 1e-5)
    assert kernels.count("kv_store.store_rows") == 3


def test_a_product_meets_activations_rounded_as_the_cpu_rounds_them() -> None:
    values = random_rows(3, WIDTH, 3)

    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        out = tape.buffer("out", 7)
        tape.matmul(x, [Projection(linear(Layout.Q4_0, (7, WIDTH), 1), out)])
        return out

    found, _, _ = both(values, write)
    weights = decoded(Layout.Q4_0, random_weights(Layout.Q4_0, (7, WIDTH), 1), (7, WIDTH))
    assert_near(found, (quantized_activations(values) @ weights.T).astype(np.float32), 1e-6)


def elementwise(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
    y, row = tape.buffer("y", x.width), tape.buffer("row", 1)
    tape.layer_norm(y, x, None, None, 1e-5, 20)
    for kind in (Activation.GELU_ERF, Activation.GELU_TANH, Activation.GELU_QUICK):
        tape.activation(y, y, kind)
        tape.add(y, y, x, 0.7)
    tape.gated_activation(y, x, y, Activation.SWIGLU_CLAMPED)
    tape.multiply_sigmoid(y, y, x)
    tape.matmul(x, [Projection(linear(Layout.F16, (1, x.width), 1), row)])
    tape.multiply_sigmoid(y, y, row)
    parts = tape.buffer("parts", x.width // 20)
    tape.matmul(x, [Projection(linear(Layout.F16, (parts.width, x.width), 4), parts)])
    tape.multiply_sigmoid(y, y, parts)
    tape.activation(parts, parts, Activation.SOFTPLUS)
    tape.multiply(y, y, parts)
    tape.gated_activation(y, y, x, Activation.SILU, 0.5)
    tape.xielu(y, y, 1.25, 0.75, 0.5, -1e-6)
    tape.clamp(y, 1.5)
    tape.clamp(y, 1.25, only_above=True)
    tape.multiply(y, y, np.linspace(0.5, 2.0, y.width, dtype=np.float32))
    tape.copy_heads(y, row, y.width // 20, 1, 20, 0, 3)
    tape.scale_by_position(y, 3, 0.5, 1)
    tape.rope(y, RopeTable(np.array([1.0, 0.3, 0.01]), Pairing.ADJACENT), 20, 2)
    tape.scale(y, 1.5)
    tape.softcap(y, 2.0)
    out = tape.buffer("out", 3 * 8)
    tape.matmul(x, [Projection(linear(Layout.BF16, (24, x.width), 3), out)])
    tape.copy_heads(out, y, 3, 5, 8, 20, 2, 10)
    tape.head_matmul(out, y, linear(Layout.F32, (3, 3, 15), 2), 8, 20, 5, 4)
    return out


def slots(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
    """Mixtures of three slots of 20, by weights of the row and without."""
    y, weights, row = tape.buffer("y", x.width), tape.buffer("weights", 9), tape.buffer("row", 1)
    tape.matmul(x, [Projection(linear(Layout.F32, (9, x.width), 1), weights)])
    tape.activation(weights, weights, Activation.TANH)
    tape.mix_slots(y, x, 3, weights, x)
    tape.gaussian_top_k(x, y, 0.3)
    tape.magnitude(row, x)
    tape.multiply(y, y, row)
    tape.multiply(y, y, np.linspace(-1, 1, x.width, dtype=np.float32))
    tape.multiply(y, y, x)
    first = tape.buffer("first", 20)
    tape.mix_slots(first, y, 3)
    tape.mix_slots(x, first, 1, residual=x, first_slot=1)
    return x


@pytest.mark.parametrize("rows", [3, 17])
def test_slots_and_factors_are_the_oracles(rows: int) -> None:
    found, wanted, _ = both(random_rows(rows, 60, 6), slots)
    assert_near(found, wanted, 1e-5)


@pytest.mark.parametrize("rows", [1, 17])
def test_norms_of_wide_rows_are_the_oracles(rows: int) -> None:
    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        weight = np.linspace(0.5, 1.5, x.width, dtype=np.float32)
        normed, y = tape.buffer("normed", x.width), tape.buffer("y", x.width)
        tape.layer_norm(y, x, weight, weight - 1, 1e-5)
        tape.rms_norm(normed, y, weight, 1e-5)
        tape.rms_norm(y, y, None, 1e-5)
        tape.rms_norm(y, y, weight[:160], 1e-5, 160)
        out = tape.buffer("out", 4)
        tape.matmul(normed, [Projection(linear(Layout.Q8_0, (4, x.width), 1), out)])
        tape.copy_heads(y, out, 1, 4, x.width, 4)
        return y

    values = random_rows(rows, 1120, 3) + np.float32(1)
    found, wanted, _ = both(values, write)
    np.testing.assert_allclose(found[:, 4:], wanted[:, 4:], rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert_near(found[:, :4], wanted[:, :4], 0.02)


@pytest.mark.parametrize("rows", [3, 17])
def test_every_other_op_is_the_oracles(rows: int) -> None:
    found, wanted, _ = both(random_rows(rows, 60, 4), elementwise)
    assert_near(found, wanted, 0.01 if rows > 16 else 2e-5)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(
            40, 3, Gating.SOFTMAX, normalise=True, scale=1.5, output_scales=np.linspace(0.5, 2, 40, dtype=np.float32)
        ),
        Routing(8, 2, Gating.SIGMOID, selection_bias=np.linspace(-1, 1, 8, dtype=np.float32)),
        Routing(12, 3, Gating.SOFTMAX_SELECTED, num_groups=4, num_selected_groups=2),
        Routing(12, 3, Gating.SOFTMAX, num_groups=4, num_selected_groups=2, num_group_values=1),
        Routing(12, 3, Gating.SPARSE_MIXER, margin=0.4),
    ],
)
def test_experts_are_the_oracles(routing: Routing) -> None:
    count, selected = routing.num_experts, routing.num_selected

    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        logits, ids, weights = (
            tape.buffer(name, width) for name, width in (("l", count), ("i", selected), ("w", selected))
        )
        tape.matmul(x, [Projection(linear(Layout.F32, (count, 32), 1), logits)])
        tape.route(ids, weights, logits, routing)
        inner, down, out = (
            tape.buffer(name, width) for name, width in (("n", selected * 6), ("d", selected * 5), ("o", 5))
        )
        bias = random_rows(count, 6, 9)
        tape.expert_matmul(inner, x, linear(Layout.BF16, (count, 6, 32), 2), ids, bias)
        tape.expert_scale(inner, weights)
        tape.expert_factors(inner, ids, np.linspace(0.5, 2.0, count, dtype=np.float32))
        tape.expert_matmul(down, inner, linear(Layout.F32, (count, 5, 6), 3), ids, input_per_slot=True)
        tape.matmul(x, [Projection(linear(Layout.F32, (5, 32), 4), out)])
        tape.expert_sum(out, down, weights, out)
        return out

    found, wanted, _ = both(random_rows(3, 32, 8), write)
    assert_near(found, wanted, 1e-5)


def test_means_are_of_the_text_of_each_output_row() -> None:
    for sizes in ([3, 1, 7], [16, 5, 2]):
        values = random_rows(sum(sizes), 37, 9)

        def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
            out = tape.buffer("mean", 37, Rows.OUTPUT)
            tape.add_vector(x, np.linspace(-1, 1, 37, dtype=np.float32))
            tape.mean_rows(out, x)
            return out

        _, program, pages = device_program(values, write)
        segments = [Segment(0, size, pages[index : index + 1]) for index, size in enumerate(sizes)]
        ids = np.arange(sum(sizes), dtype=np.int32)
        rows = np.array([sizes[0], 1, len(ids) - 1], np.int32)
        found = program.run(Batch(ids, segments, rows))
        parts = np.split(values + np.linspace(-1, 1, 37, dtype=np.float32), np.cumsum(sizes)[:-1])
        # Row by row, as on the CPU.
        sums = [
            np.add.accumulate(part, dtype=np.float32)[-1] * (np.float32(1) / np.float32(len(part))) for part in parts
        ]
        np.testing.assert_array_equal(found, np.stack([sums[1], sums[0], sums[2]]))


def test_the_likeliest_token_is_found_on_the_device() -> None:
    values = random_rows(5, 200, 5)
    values[1, 30] = values[1, 120] = 9.0
    values[2, 7] = np.nan
    values[3] = -np.inf
    values[4, 199] = np.inf
    _, program, pages = device_program(values, lambda tape, x, linear: x)
    ids = np.arange(5, dtype=np.int32)
    chosen = program.run_greedy(Batch(ids, [Segment(0, 5, pages)], ids))
    assert chosen.tolist() == [int(values[0].argmax()), 30, -1, -2, -1]


def test_rows_without_logits_and_wrong_batches() -> None:
    _, program, pages = device_program(random_rows(4, 32, 6), lambda tape, x, linear: x)
    ids = np.arange(3, dtype=np.int32)
    assert program.run(Batch(ids, [Segment(0, 3, pages)], ids[:0])).shape == (0, 32)
    for error, batch in (
        (RequestError, Batch(ids + 2, [Segment(0, 3, pages)], ids)),
        (RequestError, Batch(ids, [Segment(0, 2, pages)], ids)),
        (RequestError, Batch(ids, [Segment(254, 3, pages)], ids)),
        (RequestError, Batch(ids, [Segment(0, 3, pages)], ids + 1)),
        (RequestError, Batch(ids, [Segment(0, 3, pages, dropped_tokens=32)], ids)),
    ):
        with pytest.raises(error):
            program.run(batch)


def test_what_a_gpu_does_not_do_is_refused_by_name() -> None:
    device = EmulatedDevice()
    tape = GraphBuilder(LAYERS)
    x = tape.buffer("x", 8)
    with pytest.raises(ShapeError, match="8 of 2 experts"):
        tape.route(x, x, x, Routing(2, 8, Gating.SOFTMAX))
    with pytest.raises(ShapeError, match="columns"):
        tape.matmul(x, [Projection(Weights(device).linear(Layout.F32, (4, 5), 1), tape.buffer("out", 4))])


def test_types_of_tokens_are_looked_up_and_biases_by_distance_are_refused_by_name() -> None:
    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        tape.embed_types(x, Weights(device).table(random_rows(2, 32, 1)))
        return x

    device = EmulatedDevice()
    values, types = random_rows(4, 32, 6), np.array([0, 1, 1, 0], np.int32)
    program = lower_to_cuda(graph_of(values, write, Weights(device)), device, KVLayout("f32", LAYERS), max_batch_rows=4)
    pages = np.array([device.allocate(KVLayout("f32", LAYERS).page_bytes)], np.int64)
    ids = np.arange(4, dtype=np.int32)
    batch = Batch(ids, [Segment(0, 4, pages)], ids, types)
    rows = random_rows(2, 32, 1)
    np.testing.assert_array_equal(program.run(batch), values + rows[types])
    np.testing.assert_array_equal(program.run(replace(batch, token_types=None)), values + rows[0])
    with pytest.raises(RequestError, match="token type 2"):
        program.run(replace(batch, token_types=2 * types))

    def multiplied(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        factors = tape.buffer("factors", 1)
        tape.embed_types(factors, Weights(device).table(np.array([[0], [1]], np.float32)), adds=False)
        tape.multiply(x, x, factors)
        return x

    graph = graph_of(values, multiplied, Weights(device))
    program = lower_to_cuda(graph, device, KVLayout("f32", LAYERS), max_batch_rows=4)
    np.testing.assert_array_equal(program.run(batch), values * types[:, None])
    assert not program.run(replace(batch, token_types=None)).any()
    # Of ops that batches of type 0 may leave out: the factors and their product.
    program = lower_to_cuda(
        replace(graph, typed_ops=frozenset((1, 2))), device, KVLayout("f32", LAYERS), max_batch_rows=4
    )
    np.testing.assert_array_equal(program.run(batch), values * types[:, None])
    np.testing.assert_array_equal(program.run(replace(batch, token_types=None)), values)

    def biased(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        shape = AttentionShape(1, 1, 32, 32, 0.25, bidirectional=True)
        out = tape.buffer("out", 32)
        tape.attention(out, x, 0, shape, None, Relative(np.zeros(1, np.int64), 1, np.ones((1, 1), np.float32)))
        return out

    with pytest.raises(ShapeError, match="biases by distance are computed on the CPU only"):
        lower_to_cuda(graph_of(values, biased, Weights(device)), device, KVLayout("f32", LAYERS), max_batch_rows=4)


def test_positions_beyond_a_table_are_refused() -> None:
    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        tape.embed_positions(x, Weights(device).table(random_rows(2, 32, 1)))
        return x

    device = EmulatedDevice()
    graph = graph_of(random_rows(4, 32, 6), write, Weights(device))
    program = lower_to_cuda(graph, device, KVLayout("f32", LAYERS), max_batch_rows=4)
    pages = np.array([device.allocate(KVLayout("f32", LAYERS).page_bytes)], np.int64)
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ContextLengthError, match="position 2"):
        program.run(Batch(ids, [Segment(0, 3, pages)], ids))


def test_an_op_of_the_cpu_alone_is_refused_by_name() -> None:
    def write(tape: GraphBuilder, x: Buffer, linear: Linear) -> Buffer:
        tape.bound(x, x, -1.0, 2.0)
        return x

    device = EmulatedDevice()
    graph = graph_of(random_rows(4, 32, 6), write, Weights(device))
    with pytest.raises(UnsupportedFormatError, match="has Bound, which device 'cuda' does not run"):
        lower_to_cuda(graph, device, KVLayout("f32", LAYERS), max_batch_rows=4)
