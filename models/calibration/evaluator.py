"""A NumPy evaluator of ops over a whole text, in two models at once.

Every buffer holds one array for the original model and, beside it, one for the model whose matrices so far are
quantized. Before a product is computed, a visitor gets its inputs in both models and returns what the second one
multiplies with. So evaluating the ops of one layer calibrates that layer, and nothing else is in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import ops
from localinfer.kernels.ops import Buffer, EmbeddingTable, LinearWeight, Op, Projection
from localinfer.models.calibration.formulas import (
    activate,
    activate_gated,
    attended,
    chosen_blocks,
    convolved,
    delta_rule,
    gaussian_top_k,
    magnitude,
    normed,
    rotated,
    routed,
    scanned,
    sigmoid,
    wkv,
    xielu,
)
from localinfer.models.calibration.weights import embedding_rows
from localinfer.quant.methods.imatrix import LinearProduct, MatrixPart, ProductVisitor
from localinfer.quant.methods.workers import Workers
from localinfer.types import FloatArray

_ROWS_AT_ONCE = 128

Streams = list[FloatArray]
"""One array per model, float32[tokens, width]: the original's, then the quantized one's where both are followed."""

RowFunction = Callable[..., FloatArray]
"""From rows of some buffers to rows of one."""


class Evaluator:
    """Computes ops one by one, over whole sequences.

    token_ids: int32[sequences, length], sequences that each start at position 0.
    visitor: called with every product.
    quantized_rows: what an embedding's rows are in the quantized model, by the table's name and the token ids; None
        follows the original model alone.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        workers: Workers,
        visitor: ProductVisitor,
        quantized_rows: Callable[[str, NDArray[np.int32]], FloatArray] | None = None,
    ) -> None:
        self.token_ids = token_ids.reshape(-1)
        self.length = token_ids.shape[1]
        self.workers = workers
        self.visitor = visitor
        self.values: dict[int, Streams] = {}
        self.cache: dict[int, tuple[Streams, Streams]] = {}
        self._quantized_rows = quantized_rows

    def run(self, graph_ops: Iterable[Op]) -> None:
        """Compute ops in order."""
        for op in graph_ops:
            EVALUATE[type(op)](self, op)

    def streams(self, buffer: Buffer) -> Streams:
        """The arrays in a buffer."""
        return self.values[buffer.index]

    def set_streams(self, buffer: Buffer, streams: Streams) -> None:
        """Put arrays in a buffer."""
        self.values[buffer.index] = streams

    def forget_all_but(self, *kept: Buffer) -> None:
        """Drop what every other buffer and the cache hold."""
        self.values = {buffer.index: self.values[buffer.index] for buffer in kept}
        self.cache.clear()

    def visit(self, x: Buffer, weights: Sequence[LinearWeight]) -> None:
        """Pass a product to the visitor without computing it."""
        inputs = self.streams(x)
        parts = tuple(_part(weight, 0, weight.packed.matrix()) for weight in weights)
        self.visitor.visit(LinearProduct(parts, inputs[0], inputs[-1]))

    def table_rows(self, table: EmbeddingTable, ids: NDArray[np.int32]) -> Streams:
        """Rows of a table in each model."""
        rows = [embedding_rows(table.packed, table.name, ids)]
        return rows if self._quantized_rows is None else [*rows, self._quantized_rows(table.name, ids)]

    def by_rows(self, out: Buffer, function: RowFunction, *inputs: Buffer) -> None:
        """out = function(rows of the inputs), some rows at a time: so many that they stay in a core's cache."""
        self.combine(out, function, [self.streams(one) for one in inputs], _ROWS_AT_ONCE)

    def by_sequence(self, out: Buffer, function: RowFunction, *inputs: Buffer) -> None:
        """out = function(rows of the inputs), one sequence at a time."""
        self.combine(out, function, [self.streams(one) for one in inputs], self.length)

    def combine(self, out: Buffer, function: RowFunction, inputs: Sequence[Streams], step: int) -> None:
        """out = function(rows of the inputs), `step` rows at a time, once where the models have the same inputs."""
        is_one = all(one[0] is one[-1] for one in inputs)
        self.set_each(out, lambda i: self.in_steps(function, [one[i] for one in inputs], step), is_one, len(inputs[0]))

    def set_each(self, out: Buffer, compute: Callable[[int], FloatArray], is_one: bool, count: int) -> None:
        """Compute a buffer in `count` models, or once for all of them where `is_one`."""
        results = [compute(index) for index in range(1 if is_one else count)]
        self.set_streams(out, results * count if is_one else results)

    def in_steps(
        self, function: RowFunction, inputs: Sequence[FloatArray], step: int, out: FloatArray | None = None
    ) -> FloatArray:
        """function(rows of the inputs), `step` rows at a time; out may be one of them."""
        num_rows = len(inputs[0])

        def part(index: int) -> FloatArray:
            rows = slice(index * step, (index + 1) * step)
            return function(*(x[rows] for x in inputs))

        # Parts go where they belong at once: many that are kept are many small pages, which cost more than the work.
        first = part(0)
        result = self.workers.memory.empty((num_rows, first.shape[1])) if out is None else out
        result[: len(first)] = first

        def one(index: int) -> None:
            found = part(index + 1)
            result[(index + 1) * step : (index + 1) * step + len(found)] = found

        self.workers.run(one, -(-num_rows // step) - 1)
        return result

    def ensure(self, out: Buffer, num_streams: int) -> None:
        """Give a buffer that is written in parts something to keep in the rest."""
        if out.index not in self.values:
            zeros = np.zeros((len(self.token_ids), out.width), np.float32)
            self.set_streams(out, [zeros] * num_streams)


def _embed_positions(run: Evaluator, op: ops.EmbedPositions) -> None:
    count = len(run.token_ids) // run.length
    tables = run.table_rows(op.table, np.arange(run.length, dtype=np.int32))
    streams = zip(run.streams(op.out), tables, strict=True)
    run.set_streams(op.out, [x + np.tile(rows, (count, 1)) for x, rows in streams])


def _matmul(run: Evaluator, op: ops.Matmul) -> None:
    inputs = run.streams(op.x)
    matrices = [projection.weight.packed.matrix() for projection in op.projections]
    # The original's results come first where the second model has to make up for an earlier difference.
    sums = [
        _projected(run, 0, inputs[0], values, projection) if _differs(run, projection) else None
        for projection, values in zip(op.projections, matrices, strict=True)
    ]
    parts = tuple(
        _part(projection.weight, 0, values, None if total is None else _wanted(run, projection, total))
        for projection, values, total in zip(op.projections, matrices, sums, strict=True)
    )
    changed = run.visitor.visit(LinearProduct(parts, inputs[0], inputs[-1]))
    del parts
    for projection, values, total, other in zip(op.projections, matrices, sums, changed, strict=True):
        outs = [_projected(run, 0, inputs[0], values, projection) if total is None else total]
        if len(inputs) > 1:
            is_same = total is None and other is None and inputs[0] is inputs[1]
            used = values if other is None else other
            outs.append(outs[0] if is_same else _projected(run, 1, inputs[1], used, projection))
        run.set_streams(projection.out, outs)


def _differs(run: Evaluator, projection: Projection) -> bool:
    """Return whether a product is added to something that is not the same in both models."""
    if projection.residual is None:
        return False
    residuals = run.streams(projection.residual)
    return residuals[0] is not residuals[-1]


def _wanted(run: Evaluator, projection: Projection, total: FloatArray) -> FloatArray:
    assert projection.residual is not None, "only what is added to something can make up for it"
    wanted = total - run.streams(projection.residual)[-1]
    if projection.scale != 1.0:
        wanted /= np.float32(projection.scale)
    return wanted if projection.bias is None else wanted - projection.bias


def _projected(run: Evaluator, model: int, x: FloatArray, weight: FloatArray, projection: Projection) -> FloatArray:
    """residual + scale * (x @ weight.T + bias), in one of the models."""
    residual = None if projection.residual is None else run.streams(projection.residual)[model]
    out = run.workers.product(x, weight)

    def finish(rows: slice) -> None:
        part = out[rows]
        if projection.bias is not None:
            part += projection.bias
        if projection.scale != 1.0:
            part *= np.float32(projection.scale)
        if residual is not None:
            part += residual[rows]

    run.workers.over_rows(finish, len(out))
    return out


def _attention(run: Evaluator, op: ops.Attention) -> None:
    # Later layers may read it too.
    inputs = [run.streams(op.queries), *run.cache[op.layer]]
    if op.chosen is not None:
        inputs.append(run.streams(op.chosen.blocks))
    run.combine(op.out, lambda q, k, v, *lists: attended(q, k, v, op.shape, op.chosen, *lists), inputs, run.length)
    del run.values[op.queries.index]


def _choose_blocks(run: Evaluator, op: ops.ChooseBlocks) -> None:
    inputs = [run.streams(op.queries), run.cache[op.layer][0]]
    if op.weights is not None:
        inputs.append(run.streams(op.weights))
    run.combine(op.chosen.blocks, lambda q, k, *weights: chosen_blocks(op, q, k, *weights), inputs, run.length)


def _gated_activate(run: Evaluator, op: ops.GatedActivate) -> None:
    gates, ups = run.streams(op.gate), run.streams(op.up)
    is_one_gate = gates[0] is gates[-1]
    is_one = is_one_gate and ups[0] is ups[-1]
    # These are the largest buffers there are: nothing reads a gate again, and its memory takes the result.
    del run.values[op.gate.index]

    def compute(index: int) -> FloatArray:
        place = gates[index] if is_one or not is_one_gate else None
        parts = (gates[index], ups[index])
        return run.in_steps(lambda g, u: activate_gated(g, u, op.kind, op.limit), parts, _ROWS_AT_ONCE, place)

    run.set_each(op.out, compute, is_one, len(gates))


def _scale_by_position(run: Evaluator, op: ops.ScaleByPosition) -> None:
    steps = np.floor((np.arange(run.length) + op.offset) / op.period)
    factor = (1.0 + op.slope * np.log1p(steps)).astype(np.float32)[:, None]
    run.by_sequence(op.x, lambda a: a * factor, op.x)


def _multiply(run: Evaluator, op: ops.Multiply) -> None:
    if isinstance(op.factor, Buffer):
        size = op.x.width // op.factor.width
        run.by_rows(op.out, lambda a, b: a * np.repeat(b, size, axis=1), op.x, op.factor)
    else:
        factor = op.factor
        run.by_rows(op.out, lambda a: a * factor, op.x)


def _mix_slots(run: Evaluator, op: ops.MixSlots) -> None:
    size = op.x.width // op.num_slots

    def compute(x: FloatArray, *others: FloatArray) -> FloatArray:
        shape = (len(x), op.out.width // size, op.num_slots)
        weights = np.ones(shape, np.float32) if op.weights is None else others[0].reshape(shape)
        weights[:, : op.first_slot] = 0.0
        mixed = (weights @ x.reshape(len(x), op.num_slots, size)).reshape(len(x), -1)
        return mixed if op.residual is None else others[-1] + mixed

    others = [buffer for buffer in (op.weights, op.residual) if buffer is not None]
    run.by_rows(op.out, compute, op.x, *others)


def _copy_heads(run: Evaluator, op: ops.CopyHeads) -> None:
    run.ensure(op.out, len(run.streams(op.x)))

    def compute(target: FloatArray, source: FloatArray) -> FloatArray:
        result = target.reshape(len(target), op.num_heads, op.out_head_size).copy()
        heads = source.reshape(len(source), -1, op.x_head_size or op.x.width)
        part = heads[:, :, op.x_offset : op.x_offset + op.width]
        result[:, :, op.out_offset : op.out_offset + op.width] = part
        return result.reshape(target.shape)

    run.by_rows(op.out, compute, op.out, op.x)


def _head_matmul(run: Evaluator, op: ops.HeadMatmul) -> None:
    weight, inputs = op.weight, run.streams(op.x)
    run.ensure(op.out, len(inputs))
    outs = [target.reshape(len(target), -1, op.out_head_size).copy() for target in run.streams(op.out)]
    columns = slice(op.x_offset, op.x_offset + weight.num_columns)
    for head in range(weight.num_experts):
        values = weight.packed.matrix(head)
        parts = [np.ascontiguousarray(one.reshape(len(one), -1, op.x_head_size)[:, head, columns]) for one in inputs]
        (other,) = run.visitor.visit(LinearProduct((_part(weight, head, values),), parts[0], parts[-1]))
        for i, part in enumerate(parts):
            used = values if other is None or i == 0 else other
            outs[i][:, head, op.out_offset : op.out_offset + weight.num_rows] = run.workers.product(part, used)
    run.set_streams(op.out, [one.reshape(len(one), -1) for one in outs])


def _route(run: Evaluator, op: ops.Route) -> None:
    chosen = [routed(one, op.routing) for one in run.streams(op.logits)]
    run.set_streams(op.expert_ids, [ids.astype(np.float32) for ids, _ in chosen])
    run.set_streams(op.expert_weights, [weights for _, weights in chosen])


def _expert_matmul(run: Evaluator, op: ops.ExpertMatmul) -> None:
    weight, bias = op.weight, op.bias
    all_ids = [ids.astype(np.int64) for ids in run.streams(op.expert_ids)]
    num_slots = op.expert_ids.width
    inputs = [one.reshape(len(one), -1, weight.num_columns) for one in run.streams(op.x)]
    outs = [np.empty((len(one), num_slots, weight.num_rows), np.float32) for one in inputs]
    for expert in range(weight.num_experts):
        values = weight.packed.matrix(expert)
        places = [np.nonzero(ids == expert) for ids in all_ids]
        parts = [
            one[rows, slots if op.input_per_slot else 0] for one, (rows, slots) in zip(inputs, places, strict=True)
        ]
        product = LinearProduct((_part(weight, expert, values),), parts[0], parts[-1], is_aligned=False)
        (other,) = run.visitor.visit(product)
        for i, (part, (rows, slots)) in enumerate(zip(parts, places, strict=True)):
            result = run.workers.product(part, values if other is None or i == 0 else other)
            outs[i][rows, slots] = result if bias is None else result + bias[expert]
    run.set_streams(op.out, [one.reshape(len(one), -1) for one in outs])


def _expert_sum(run: Evaluator, op: ops.ExpertSum) -> None:
    def compute(slots: FloatArray, weights: FloatArray, *rest: FloatArray) -> FloatArray:
        total: FloatArray = np.einsum("rs,rsw->rw", weights, slots.reshape(*weights.shape, -1))
        return total if not rest else rest[0] + total

    run.by_rows(op.out, compute, op.x, op.expert_weights, *([] if op.residual is None else [op.residual]))


def _expert_scale(run: Evaluator, op: ops.ExpertScale) -> None:
    def compute(slots: FloatArray, weights: FloatArray) -> FloatArray:
        return (slots.reshape(*weights.shape, -1) * weights[:, :, None]).reshape(slots.shape)

    run.by_rows(op.x, compute, op.x, op.expert_weights)


def _expert_factors(run: Evaluator, op: ops.ExpertFactors) -> None:
    def compute(slots: FloatArray, ids: FloatArray) -> FloatArray:
        return (slots.reshape(*ids.shape, -1) * op.factors[ids.astype(np.int64)][:, :, None]).reshape(slots.shape)

    run.by_rows(op.x, compute, op.x, op.expert_ids)


def _part(weight: LinearWeight, expert: int, values: FloatArray, wanted: FloatArray | None = None) -> MatrixPart:
    return MatrixPart(weight.name, expert, weight.packed.rows, values, wanted)


def _delta_rule(run: Evaluator, op: ops.GatedDeltaRule) -> None:
    inputs = (op.queries, op.keys, op.values, op.decay, op.beta)
    run.by_sequence(op.out, lambda q, k, v, g, b: delta_rule(q, k, v, g, b, op), *inputs)


def _selective_scan(run: Evaluator, op: ops.SelectiveScan) -> None:
    if op.dt is not None:
        run.by_sequence(op.out, lambda x, b, c, dt: scanned(x, dt, b, c, op), op.x, op.b, op.c, op.dt)
        return
    ones = np.ones((run.length, op.d.size), np.float32)
    run.by_sequence(op.out, lambda x, b, c: scanned(x, ones, b, c, op), op.x, op.b, op.c)


def _wkv(run: Evaluator, op: ops.Wkv) -> None:
    inputs = (op.receptance, op.decay, op.keys, op.values, op.rate)
    run.by_sequence(op.out, lambda r, w, k, v, a: wkv(r, w, k, v, a, op), *inputs)
    both = run.streams(op.out)
    for out, part in ((op.out, slice(0, op.out.width)), (op.bonus, slice(op.out.width, None))):
        run.set_streams(out, [np.ascontiguousarray(one[:, part]) for one in both])


def _norm(run: Evaluator, op: ops.RmsNorm | ops.LayerNorm) -> None:
    is_layer = isinstance(op, ops.LayerNorm)
    bias = op.bias if isinstance(op, ops.LayerNorm) else None
    run.by_rows(op.out, lambda a: normed(a, op.weight, bias, op.epsilon, op.group_size, centre=is_layer), op.x)


EVALUATE: dict[type, Callable[[Evaluator, Any], None]] = {
    ops.Embed: lambda run, op: run.set_streams(
        op.out, [np.float32(op.scale) * rows for rows in run.table_rows(op.table, run.token_ids)]
    ),
    ops.EmbedPositions: _embed_positions,
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.Matmul: _matmul,
    ops.Rope: lambda run, op: run.by_sequence(op.x, lambda a: rotated(a, op.table, op.head_size, op.offset), op.x),
    ops.StoreKV: lambda run, op: run.cache.update(
        {op.layer: (run.streams(op.keys), run.streams(op.values or op.keys))}
    ),
    ops.Attention: _attention,
    ops.ChooseBlocks: _choose_blocks,
    ops.Activate: lambda run, op: run.by_rows(op.out, lambda a: activate(a, op.kind), op.x),
    ops.GatedActivate: _gated_activate,
    ops.Xielu: lambda run, op: run.by_rows(
        op.out, lambda a: xielu(a, op.positive, op.negative, op.beta, op.epsilon), op.x
    ),
    ops.Add: lambda run, op: run.by_rows(op.out, lambda a, b: a + np.float32(op.scale) * b, op.a, op.b),
    ops.Multiply: _multiply,
    ops.Magnitude: lambda run, op: run.by_rows(op.out, magnitude, op.x),
    ops.MixSlots: _mix_slots,
    ops.GaussianTopK: lambda run, op: run.by_rows(op.out, lambda a: gaussian_top_k(a, op.num_deviations), op.x),
    ops.MultiplySigmoid: lambda run, op: run.by_rows(
        op.out, lambda a, g: a * np.repeat(sigmoid(g), op.x.width // op.gate.width, axis=1), op.x, op.gate
    ),
    ops.Scale: lambda run, op: run.by_rows(op.x, lambda a: np.float32(op.factor) * a, op.x),
    ops.Clamp: lambda run, op: run.by_rows(
        op.x, lambda a: np.clip(a, None if op.only_above else np.float32(-op.limit), np.float32(op.limit)), op.x
    ),
    ops.ScaleByPosition: _scale_by_position,
    ops.Softcap: lambda run, op: run.by_rows(
        op.x, lambda a: np.float32(op.cap) * np.tanh(a / np.float32(op.cap)), op.x
    ),
    ops.CopyHeads: _copy_heads,
    ops.HeadMatmul: _head_matmul,
    ops.SelectOutput: lambda run, op: run.set_streams(op.out, run.streams(op.x)),
    ops.Route: _route,
    ops.ExpertMatmul: _expert_matmul,
    ops.ExpertSum: _expert_sum,
    ops.ExpertScale: _expert_scale,
    ops.ExpertFactors: _expert_factors,
    ops.ShortConvolution: lambda run, op: run.by_sequence(op.out, lambda x: convolved(x, op), op.x),
    ops.CentredConvolution: lambda run, op: run.by_sequence(op.out, lambda x: convolved(x, op), op.x),
    ops.GatedDeltaRule: _delta_rule,
    ops.SelectiveScan: _selective_scan,
    ops.Wkv: _wkv,
}
