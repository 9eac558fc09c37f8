"""The tape is where shapes are proven: what does not fit must not reach a kernel."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from localinfer.errors import ContextLengthError, RequestError, ShapeError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cpu.weights import RowTable
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
    Pairing,
    Projection,
    RopeTable,
    Routing,
    Rows,
)
from localinfer.kernels.program import Batch, Segment
from tests.kernels.cpu.tape_runs import linear, random_rows, table
from tests.kernels.random_weights import random_weights

LAYER = KVLayerShape(num_kv_heads=2, key_size=16, value_size=24)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, key_size=16, value_size=24, scale=1.0)
ROUTING = Routing(num_experts=8, num_selected=2, gating=Gating.SOFTMAX)
ROPE = RopeTable(np.ones(8), Pairing.HALVES)
ONES = np.ones(64, np.float32)


@dataclass
class Parts:
    """A tape and things to put on it; `wide` and `thin` are 64 and 32 columns, `last` is 64 columns of output rows."""

    pool: ThreadPool
    tape: GraphBuilder
    wide: Buffer
    other: Buffer
    thin: Buffer
    last: Buffer
    matrix: LinearWeight
    stack: LinearWeight

    def lower(self) -> CpuProgram:
        """The program of what is on the tape."""
        layout = KVLayout("f32", [LAYER])
        return lower_to_cpu(self.tape.finish(self.last), self.pool, layout, max_batch_rows=4, max_output_rows=2)

    def buffer(self, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        return self.tape.buffer("another", width, rows)

    def routed(self) -> Buffer:
        """Routed ids of two experts."""
        ids = self.buffer(2)
        self.tape.route(ids, self.buffer(2), self.buffer(8), ROUTING)
        return ids


@pytest.fixture
def parts(pool: ThreadPool) -> Parts:
    tape = GraphBuilder([LAYER])
    return Parts(
        pool,
        tape,
        tape.buffer("wide", 64),
        tape.buffer("other", 64),
        tape.buffer("thin", 32),
        tape.buffer("last", 64, Rows.OUTPUT),
        linear(pool, Layout.Q8_0, random_weights(Layout.Q8_0, (64, 64), 1), (64, 64)),
        linear(pool, Layout.F32, random_weights(Layout.F32, (8, 32, 64), 2), (8, 32, 64)),
    )


def _project(p: Parts, x: Buffer, projection: Projection) -> None:
    p.tape.matmul(x, [projection])


def _expert(
    p: Parts, out: int, x: Buffer, ids: Buffer, bias: tuple[int, int] | None = None, is_per_slot: bool = False
) -> None:
    values = None if bias is None else np.zeros(bias, np.float32)
    p.tape.expert_matmul(p.buffer(out, ids.rows), x, p.stack, ids, values, is_per_slot)


def _heads(p: Parts, out: Buffer, x: Buffer, sizes: tuple[int, int], offsets: tuple[int, int] = (0, 0)) -> None:
    p.tape.head_matmul(out, x, p.stack, *sizes, *offsets)


def _route(p: Parts, ids: int, weights: int, logits: int, routing: Routing) -> None:
    p.tape.route(p.buffer(ids), p.buffer(weights), p.buffer(logits), routing)


def _attend(p: Parts, shape: AttentionShape, out: int = 96, queries: int = 64) -> None:
    p.tape.attention(p.buffer(out), p.buffer(queries), 0, shape)


def _table_of(num_rows: int) -> EmbeddingTable:
    return table(random_rows(num_rows, 64, 3))


def _short_table() -> EmbeddingTable:
    whole = _table_of(3)
    packed: RowTable = whole.packed
    return replace(whole, packed=replace(packed, data=packed.data[:-4]))


WRONG: dict[str, Callable[[Parts], object]] = {
    "buffer of no columns": lambda p: p.buffer(0),
    "embed into another width": lambda p: p.tape.embed(p.thin, _table_of(3)),
    "embed into output rows": lambda p: p.tape.embed(p.last, _table_of(3)),
    "embed from too few bytes": lambda p: p.tape.embed(p.wide, _short_table()),
    "embed from fewer rows than it says": lambda p: p.tape.embed(p.wide, replace(_table_of(3), num_rows=4)),
    "norm into another width": lambda p: p.tape.rms_norm(p.thin, p.wide, None, 1e-5),
    "norm into other rows": lambda p: p.tape.rms_norm(p.last, p.wide, None, 1e-5),
    "norm of broken groups": lambda p: p.tape.rms_norm(p.wide, p.wide, None, 1e-5, 24),
    "norm with a short weight": lambda p: p.tape.rms_norm(p.wide, p.wide, ONES[:63], 1e-5),
    "norm of groups with a wrong weight": lambda p: p.tape.rms_norm(p.wide, p.wide, ONES[:32], 1e-5, 16),
    "layer norm with a short bias": lambda p: p.tape.layer_norm(p.wide, p.wide, ONES, ONES[:1], 1e-5),
    "matmul of another width": lambda p: _project(p, p.thin, Projection(p.matrix, p.wide)),
    "matmul into another width": lambda p: _project(p, p.wide, Projection(p.matrix, p.thin)),
    "matmul into its input": lambda p: _project(p, p.wide, Projection(p.matrix, p.wide)),
    "matmul into other rows": lambda p: _project(p, p.wide, Projection(p.matrix, p.last)),
    "matmul by a stack": lambda p: _project(p, p.wide, Projection(p.stack, p.thin)),
    "matmul with a short bias": lambda p: _project(p, p.wide, Projection(p.matrix, p.other, ONES[:63])),
    "matmul with another residual": lambda p: _project(p, p.wide, Projection(p.matrix, p.other, residual=p.thin)),
    "rope of broken heads": lambda p: p.tape.rope(p.wide, ROPE, 24),
    "rope beyond the head": lambda p: p.tape.rope(p.wide, ROPE, 16, 1),
    "rope before the head": lambda p: p.tape.rope(p.wide, ROPE, 32, -1),
    "rope of output rows": lambda p: p.tape.rope(p.last, ROPE, 16),
    "store keys of another width": lambda p: p.tape.store_kv(0, p.wide, p.buffer(48)),
    "store values of another width": lambda p: p.tape.store_kv(0, p.thin, p.thin),
    "store output rows": lambda p: p.tape.store_kv(0, p.buffer(32, Rows.OUTPUT), p.buffer(48)),
    "attention unlike its cache": lambda p: _attend(p, replace(SHAPE, value_size=16), out=64),
    "attention of broken groups": lambda p: _attend(p, replace(SHAPE, num_heads=5), out=120, queries=80),
    "attention of other queries": lambda p: _attend(p, SHAPE, queries=32),
    "attention into another width": lambda p: _attend(p, SHAPE, out=64),
    "attention with few sinks": lambda p: _attend(p, replace(SHAPE, sinks=ONES[:3])),
    "attention with few slopes": lambda p: _attend(p, replace(SHAPE, alibi_slopes=ONES[:3])),
    "attention of output rows": lambda p: p.tape.attention(p.buffer(96, Rows.OUTPUT), p.wide, 0, SHAPE),
    "activation into another width": lambda p: p.tape.activation(p.thin, p.wide, Activation.SILU),
    "activation that needs a gate": lambda p: p.tape.activation(p.wide, p.wide, Activation.SWIGLU_CLAMPED),
    "gate of another width": lambda p: p.tape.gated_activation(p.wide, p.thin, p.wide, Activation.SILU),
    "sum of other rows": lambda p: p.tape.add(p.wide, p.wide, p.last),
    "sigmoid of another width": lambda p: p.tape.multiply_sigmoid(p.wide, p.wide, p.buffer(5)),
    "limit of another activation": lambda p: p.tape.gated_activation(p.wide, p.wide, p.wide, Activation.RELU, 1.0),
    "xielu into another width": lambda p: p.tape.xielu(p.thin, p.wide, 1.0, 1.0, 0.5, 0.0),
    "factors of another width": lambda p: p.tape.multiply(p.wide, p.wide, ONES[:3]),
    "clamp to nothing": lambda p: p.tape.clamp(p.wide, 0.0),
    "copy one head into another width": lambda p: p.tape.copy_heads(p.wide, p.thin, 3, 9, 16, 0),
    "copy from beyond the one head": lambda p: p.tape.copy_heads(p.wide, p.thin, 4, 9, 16, 0, x_offset=30),
    "sigmoid per row of other rows": lambda p: p.tape.multiply_sigmoid(p.wide, p.wide, p.buffer(1, Rows.OUTPUT)),
    "scale by position of output rows": lambda p: p.tape.scale_by_position(p.last, 8, 0.1),
    "scale by position of no period": lambda p: p.tape.scale_by_position(p.wide, 0, 0.1),
    "select into batch rows": lambda p: p.tape.select_output(p.other, p.wide),
    "select from output rows": lambda p: p.tape.select_output(p.last, p.last),
    "select another width": lambda p: p.tape.select_output(p.last, p.thin),
    "copy beyond the head": lambda p: p.tape.copy_heads(p.wide, p.other, 4, 9, 16, 16, out_offset=8),
    "copy from beyond the head": lambda p: p.tape.copy_heads(p.wide, p.other, 4, 9, 16, 16, x_offset=8),
    "copy of broken heads": lambda p: p.tape.copy_heads(p.wide, p.other, 3, 9, 16, 16),
    "copy of other rows": lambda p: p.tape.copy_heads(p.last, p.other, 4, 9, 16, 16),
    "heads of another number": lambda p: _heads(p, p.buffer(7 * 32), p.buffer(7 * 64), (32, 64)),
    "heads beyond their input": lambda p: _heads(p, p.buffer(8 * 32), p.buffer(8 * 64), (32, 64), (0, 1)),
    "heads beyond their output": lambda p: _heads(p, p.buffer(8 * 32), p.buffer(8 * 64), (32, 64), (1, 0)),
    "heads of other rows": lambda p: _heads(p, p.buffer(8 * 32, Rows.OUTPUT), p.buffer(8 * 64), (32, 64)),
    "route more than there are": lambda p: _route(p, 9, 9, 8, replace(ROUTING, num_selected=9)),
    "route none": lambda p: _route(p, 1, 1, 8, replace(ROUTING, num_selected=0)),
    "route other logits": lambda p: _route(p, 2, 2, 7, ROUTING),
    "route into another width": lambda p: _route(p, 2, 3, 8, ROUTING),
    "route broken groups": lambda p: _route(p, 2, 2, 8, replace(ROUTING, num_groups=3)),
    "route with a short bias": lambda p: _route(p, 2, 2, 8, replace(ROUTING, selection_bias=ONES[:7])),
    "experts without routing": lambda p: _expert(p, 64, p.wide, p.buffer(2)),
    "experts of another input": lambda p: _expert(p, 64, p.thin, p.routed()),
    "experts of one input for slots": lambda p: _expert(p, 64, p.wide, p.routed(), is_per_slot=True),
    "experts into another width": lambda p: _expert(p, 32, p.wide, p.routed()),
    "experts of output rows": lambda p: _expert(p, 64, p.last, p.routed()),
    "experts with a short bias": lambda p: _expert(p, 64, p.wide, p.routed(), (8, 31)),
    "expert sum of another width": lambda p: p.tape.expert_sum(p.thin, p.wide, p.buffer(3)),
    "expert sum of other rows": lambda p: p.tape.expert_sum(p.thin, p.wide, p.buffer(2, Rows.OUTPUT)),
    "expert sum with another residual": lambda p: p.tape.expert_sum(p.thin, p.wide, p.buffer(2), p.wide),
    "expert scale of partial vectors": lambda p: p.tape.expert_scale(p.buffer(40), p.buffer(2)),
    "expert scale of other rows": lambda p: p.tape.expert_scale(p.wide, p.buffer(2, Rows.OUTPUT)),
    "logits of batch rows": lambda p: p.tape.finish(p.wide),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_tape_refuses_what_does_not_fit(name: str, parts: Parts) -> None:
    with pytest.raises(ShapeError) as caught:
        WRONG[name](parts)
        parts.lower()
    assert len(str(caught.value)) > 10


@pytest.fixture
def program(pool: ThreadPool) -> CpuProgram:
    """Embeddings of ten tokens, of six positions and of two types; four rows, two of them outputs."""
    tape = GraphBuilder()
    x, out = tape.buffer("x", 5), tape.buffer("out", 5, Rows.OUTPUT)
    tape.embed(x, table(random_rows(10, 5, 4)))
    tape.embed_positions(x, table(random_rows(6, 5, 5)))
    tape.embed_types(x, table(random_rows(2, 5, 6)))
    tape.select_output(out, x)
    return lower_to_cpu(tape.finish(out), pool, KVLayout("f32", []), max_batch_rows=4, max_output_rows=2)


PAGE = np.zeros(1, np.int64)
RIGHT = Batch(np.array([1, 9], np.int32), [Segment(3, 2, PAGE)], np.array([1], np.int32))


def _batch(ids: list[int], segments: list[Segment], outputs: list[int], types: list[int] | None = None) -> Batch:
    given = None if types is None else np.array(types, np.int32)
    return Batch(np.array(ids, np.int32), segments, np.array(outputs, np.int32), given)


WRONG_BATCHES: dict[str, tuple[Batch, str]] = {
    "no rows": (_batch([], [], []), "0 rows"),
    "too many rows": (_batch([1] * 5, [Segment(0, 5, PAGE)], []), "5 rows .* at most 4"),
    "too many outputs": (_batch([1] * 3, [Segment(0, 3, PAGE)], [0, 1, 2]), "3 outputs"),
    "token below the vocabulary": (_batch([1, -1], [Segment(0, 2, PAGE)], []), "token id -1 .* 10 entries"),
    "token beyond the vocabulary": (_batch([1, 10], [Segment(0, 2, PAGE)], []), "token id 10 .* 10 entries"),
    "output row below 0": (_batch([1, 2], [Segment(0, 2, PAGE)], [-1]), "0..1"),
    "output row beyond the rows": (_batch([1, 2], [Segment(0, 2, PAGE)], [2]), "0..1"),
    "segments shorter than the rows": (_batch([1, 2], [Segment(0, 1, PAGE)], []), "hold 1 rows, the batch 2"),
    "segments longer than the rows": (_batch([1], [Segment(0, 2, PAGE)], []), "more than the batch's 1"),
    "segment of no rows": (_batch([1], [Segment(0, 0, PAGE), Segment(0, 1, PAGE)], []), "segment 0 of 0 rows"),
    "segment before position 0": (_batch([1], [Segment(-1, 1, PAGE)], []), "from position -1"),
    "segment beyond its pages": (_batch([1, 2], [Segment(31, 2, PAGE)], []), "ends at position 33, but 1 pages"),
    "fewer types than rows": (_batch([1, 2], [Segment(0, 2, PAGE)], [], [1]), "1 token types were given for 2"),
    "type below 0": (_batch([1, 2], [Segment(0, 2, PAGE)], [], [1, -1]), "token type -1 is not among the 2"),
    "type beyond the table": (_batch([1, 2], [Segment(0, 2, PAGE)], [], [2, 0]), "token type 2 is not among the 2"),
    "pages of another type": (_batch([1], [Segment(0, 1, PAGE.astype(np.int32))], []), "segment 0"),
    "pages with gaps": (_batch([1], [Segment(0, 1, np.zeros(4, np.int64)[::2])], []), "segment 0"),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_run_refuses_a_batch_that_does_not_fit_and_stays_usable(name: str, program: CpuProgram) -> None:
    wanted = program.run(RIGHT).copy()
    batch, message = WRONG_BATCHES[name]
    with pytest.raises(RequestError, match=message):
        program.run(batch)
    np.testing.assert_array_equal(program.run(RIGHT), wanted)


def test_run_refuses_positions_beyond_what_the_model_has_learned(program: CpuProgram) -> None:
    with pytest.raises(ContextLengthError, match="position 6 is beyond the 6"):
        program.run(_batch([1, 1], [Segment(5, 2, PAGE)], []))


def test_run_answers_for_no_output_rows(program: CpuProgram) -> None:
    assert program.run(_batch([1], [Segment(0, 1, PAGE)], [])).shape == (0, 5)
