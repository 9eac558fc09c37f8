"""A tape that computes each op as it is written, over a whole text, in two models at once.

Every buffer holds one array for the original model and, beside it, one for the model whose matrices so far are
quantized. Before a product is computed, a visitor sees its inputs in both models and says what the second one
multiplies with. So writing one layer of a decoder on this tape calibrates that layer, and nothing else is in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    EmbeddingTable,
    LinearWeight,
    Projection,
    RopeTable,
    Routing,
    Rows,
)
from localinfer.kernels.program import Program
from localinfer.models.calibration.formulas import activate, activate_gated, attended, normed, rotated, routed, sigmoid
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.encoding import as_float32, source_rows
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import row_bytes
from localinfer.quant.methods.hooks import LinearProduct, MatrixPart, ProductVisitor
from localinfer.quant.methods.workers import Workers

_ROWS_AT_ONCE = 128

FloatArray = NDArray[np.float32]
Streams = list[FloatArray]
"""One array per model, float32[tokens, width]: the original's, then the quantized one's where both are followed."""


@dataclass(frozen=True)
class StoredMatrices:
    """Rows of a tensor's matrices in a file, read when they are needed. `rows`: of each matrix of the stack."""

    file: ModelFile
    name: str
    rows: slice

    def matrix(self, expert: int = 0) -> FloatArray:
        """One matrix as float32[rows, columns]."""
        record = self.file.tensor(self.name)
        num_rows = record.shape[-2] if len(record.shape) > 1 else 1
        stride = row_bytes(record.type, record.shape[-1])
        first = expert * num_rows + self.rows.start
        start, end = first * stride, (first + self.rows.stop - self.rows.start) * stride
        data = read_stretch(self.file, self.name, start, end)
        values = np.array(as_float32(source_rows(data, record.type, record.shape[-1])), np.float32, order="C")
        self.file.forget(self.name, start, end)
        return values


class StreamedWeights:
    """A `WeightSource` over a model file that keeps nothing in memory."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._file.tensor(name).shape

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A handle of a matrix, of a stack of them, or of some rows of either."""
        shape = self._file.tensor(name).shape
        experts, num_rows, num_columns = (1,) * (3 - len(shape)) + tuple(shape)
        part = slice(*(rows or slice(None)).indices(num_rows)[:2])
        return LinearWeight(name, part.stop - part.start, num_columns, StoredMatrices(self._file, name, part), experts)

    def embedding(self, name: str) -> EmbeddingTable:
        """A handle of a table."""
        num_rows, width = self._file.tensor(name).shape
        return EmbeddingTable(name, num_rows, width, self._file)

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, in its own shape."""
        info = self._file.tensor(name)
        return dequantize(self._file.tensor_bytes(name), info.type, info.shape)


class CalibrationTape:
    """Implements `kernels.ops.Tape`, each call computing at once.

    token_ids: int32[sequences, length], sequences that each start at position 0.
    visitor: sees every product; None follows the original model alone.
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
        self._token_ids = token_ids.reshape(-1)
        self._length = token_ids.shape[1]
        self._workers = workers
        self._visitor = visitor
        self._quantized_rows = quantized_rows
        self._values: dict[int, Streams] = {}
        self._buffers: list[Buffer] = []
        self._cache: dict[int, tuple[Streams, Streams]] = {}

    def streams(self, buffer: Buffer) -> Streams:
        """What a buffer holds now."""
        return self._values[buffer.index]

    def set_streams(self, buffer: Buffer, streams: Streams) -> None:
        """Put arrays in a buffer."""
        self._values[buffer.index] = streams

    def forget_all_but(self, *kept: Buffer) -> None:
        """Drop what every other buffer and the cache hold."""
        self._values = {buffer.index: self._values[buffer.index] for buffer in kept}
        self._cache.clear()

    def visit(self, x: Buffer, weights: Sequence[LinearWeight]) -> None:
        """Show the visitor a product without computing it."""
        inputs = self.streams(x)
        parts = tuple(_part(weight, 0, weight.packed.matrix()) for weight in weights)
        self._visitor.visit(LinearProduct(parts, inputs[0], inputs[-1]))

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        self._buffers.append(Buffer(len(self._buffers), name, width, rows))
        return self._buffers[-1]

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        rows = [np.float32(scale) * _table_rows(table, self._token_ids)]
        if self._quantized_rows is not None:
            rows.append(np.float32(scale) * self._quantized_rows(table.name, self._token_ids))
        self.set_streams(out, rows)

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        positions = np.arange(self._length, dtype=np.int32)
        tables = [_table_rows(table, positions)]
        if self._quantized_rows is not None:
            tables.append(self._quantized_rows(table.name, positions))
        count = len(self._token_ids) // self._length
        self.set_streams(
            out, [x + np.tile(rows, (count, 1)) for x, rows in zip(self.streams(out), tables, strict=True)]
        )

    def rms_norm(self, out: Buffer, x: Buffer, weight: FloatArray | None, epsilon: float, group_size: int = 0) -> None:
        self._rowwise(out, lambda a: normed(a, weight, None, epsilon, group_size, centre=False), x)

    def layer_norm(
        self,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int = 0,
    ) -> None:
        self._rowwise(out, lambda a: normed(a, weight, bias, epsilon, group_size, centre=True), x)

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        inputs = self.streams(x)
        matrices = [projection.weight.packed.matrix() for projection in projections]
        # The original's answers come first where the other model is to be told what it must add.
        sums = [
            self._projected(0, inputs[0], values, projection) if self._differs(projection) else None
            for projection, values in zip(projections, matrices, strict=True)
        ]
        parts = tuple(
            _part(projection.weight, 0, values, None if total is None else self._wanted(projection, total))
            for projection, values, total in zip(projections, matrices, sums, strict=True)
        )
        changed = self._visitor.visit(LinearProduct(parts, inputs[0], inputs[-1]))
        del parts
        for projection, values, total, other in zip(projections, matrices, sums, changed, strict=True):
            outs = [self._projected(0, inputs[0], values, projection) if total is None else total]
            if len(inputs) > 1:
                is_same = total is None and other is None and inputs[0] is inputs[1]
                used = values if other is None else other
                outs.append(outs[0] if is_same else self._projected(1, inputs[1], used, projection))
            self.set_streams(projection.out, outs)

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        self._by_sequence(x, lambda a: rotated(a, table, head_size, offset), x)

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        self._cache[layer] = (self.streams(keys), self.streams(values))

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        keys, values = self._cache.pop(layer)

        def compute(index: int) -> FloatArray:
            q, k, v = self.streams(queries)[index], keys[index], values[index]
            return self._pieces(lambda *parts: attended(parts[0], parts[1], parts[2], shape), (q, k, v), self._length)

        is_one = all(one[0] is one[-1] for one in (self.streams(queries), keys, values))
        self._set_each(out, compute, is_one, len(keys))
        del self._values[queries.index]

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        self._rowwise(out, lambda a: activate(a, kind), x)

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        gates, ups = self.streams(gate), self.streams(up)
        is_one_gate = gates[0] is gates[-1]
        is_one = is_one_gate and ups[0] is ups[-1]
        # These are the largest buffers there are: nothing reads a gate again, and its memory takes the result.
        del self._values[gate.index]

        def compute(index: int) -> FloatArray:
            place = gates[index] if is_one or not is_one_gate else None
            parts = (gates[index], ups[index])
            return self._pieces(lambda g, u: activate_gated(g, u, kind), parts, _ROWS_AT_ONCE, place)

        self._set_each(out, compute, is_one, len(gates))

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        self._rowwise(out, lambda first, second: first + np.float32(scale) * second, a, b)

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        self._rowwise(out, lambda a, g: a * sigmoid(g), x, gate)

    def scale(self, x: Buffer, factor: float) -> None:
        self._rowwise(x, lambda a: np.float32(factor) * a, x)

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        steps = np.floor((np.arange(self._length) + offset) / period)
        factor = (1.0 + slope * np.log1p(steps)).astype(np.float32)[:, None]
        self._by_sequence(x, lambda a: a * factor, x)

    def softcap(self, x: Buffer, cap: float) -> None:
        self._rowwise(x, lambda a: np.float32(cap) * np.tanh(a / np.float32(cap)), x)

    def copy_heads(
        self,
        out: Buffer,
        x: Buffer,
        num_heads: int,
        width: int,
        out_head_size: int,
        x_head_size: int,
        out_offset: int = 0,
        x_offset: int = 0,
    ) -> None:
        self._ensure(out, len(self.streams(x)))

        def compute(target: FloatArray, source: FloatArray) -> FloatArray:
            result = target.reshape(len(target), num_heads, out_head_size).copy()
            heads = source.reshape(len(source), num_heads, x_head_size)
            result[:, :, out_offset : out_offset + width] = heads[:, :, x_offset : x_offset + width]
            return result.reshape(target.shape)

        self._rowwise(out, compute, out, x)

    def head_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        out_head_size: int,
        x_head_size: int,
        out_offset: int = 0,
        x_offset: int = 0,
    ) -> None:
        inputs = self.streams(x)
        self._ensure(out, len(inputs))
        outs = [target.reshape(len(target), -1, out_head_size).copy() for target in self.streams(out)]
        columns = slice(x_offset, x_offset + weight.num_columns)
        for head in range(weight.num_experts):
            values = weight.packed.matrix(head)
            parts = [np.ascontiguousarray(one.reshape(len(one), -1, x_head_size)[:, head, columns]) for one in inputs]
            (other,) = self._visitor.visit(LinearProduct((_part(weight, head, values),), parts[0], parts[-1]))
            for i, part in enumerate(parts):
                used = values if other is None or i == 0 else other
                outs[i][:, head, out_offset : out_offset + weight.num_rows] = self._workers.product(part, used)
        self.set_streams(out, [one.reshape(len(one), -1) for one in outs])

    def select_output(self, out: Buffer, x: Buffer) -> None:
        self.set_streams(out, self.streams(x))

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        chosen = [routed(one, routing) for one in self.streams(logits)]
        self.set_streams(expert_ids, [ids.astype(np.float32) for ids, _ in chosen])
        self.set_streams(expert_weights, [weights for _, weights in chosen])

    def expert_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        expert_ids: Buffer,
        bias: FloatArray | None = None,
        input_per_slot: bool = False,
    ) -> None:
        all_ids = [ids.astype(np.int64) for ids in self.streams(expert_ids)]
        num_slots = expert_ids.width
        inputs = [one.reshape(len(one), -1, weight.num_columns) for one in self.streams(x)]
        outs = [np.empty((len(one), num_slots, weight.num_rows), np.float32) for one in inputs]
        for expert in range(weight.num_experts):
            values = weight.packed.matrix(expert)
            places = [np.nonzero(ids == expert) for ids in all_ids]
            parts = [
                one[rows, slots if input_per_slot else 0] for one, (rows, slots) in zip(inputs, places, strict=True)
            ]
            product = LinearProduct((_part(weight, expert, values),), parts[0], parts[-1], is_aligned=False)
            (other,) = self._visitor.visit(product)
            for i, (part, (rows, slots)) in enumerate(zip(parts, places, strict=True)):
                result = self._workers.product(part, values if other is None or i == 0 else other)
                outs[i][rows, slots] = result if bias is None else result + bias[expert]
        self.set_streams(out, [one.reshape(len(one), -1) for one in outs])

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        def compute(slots: FloatArray, weights: FloatArray, *rest: FloatArray) -> FloatArray:
            total: FloatArray = np.einsum("rs,rsw->rw", weights, slots.reshape(*weights.shape, -1))
            return total if not rest else rest[0] + total

        self._rowwise(out, compute, x, expert_weights, *([] if residual is None else [residual]))

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        def compute(slots: FloatArray, weights: FloatArray) -> FloatArray:
            return (slots.reshape(*weights.shape, -1) * weights[:, :, None]).reshape(slots.shape)

        self._rowwise(x, compute, x, expert_weights)

    def finish(self, logits: Buffer) -> Program:
        raise AssertionError("a calibration tape has computed everything when it is written; there is no program")

    def _differs(self, projection: Projection) -> bool:
        """Whether a product is added to something that is not the same in both models."""
        if projection.residual is None:
            return False
        residuals = self.streams(projection.residual)
        return residuals[0] is not residuals[-1]

    def _wanted(self, projection: Projection, total: FloatArray) -> FloatArray:
        assert projection.residual is not None, "only what is added to something can make up for it"
        wanted = total - self.streams(projection.residual)[-1]
        if projection.scale != 1.0:
            wanted /= np.float32(projection.scale)
        return wanted if projection.bias is None else wanted - projection.bias

    def _projected(self, model: int, x: FloatArray, weight: FloatArray, projection: Projection) -> FloatArray:
        """residual + scale * (x @ weight.T + bias), in one of the models."""
        residual = None if projection.residual is None else self.streams(projection.residual)[model]
        out = self._workers.product(x, weight)

        def finish(rows: slice) -> None:
            part = out[rows]
            if projection.bias is not None:
                part += projection.bias
            if projection.scale != 1.0:
                part *= np.float32(projection.scale)
            if residual is not None:
                part += residual[rows]

        self._workers.over_rows(finish, len(out))
        return out

    def _ensure(self, out: Buffer, num_streams: int) -> None:
        """Give a buffer that is written in parts something to keep in the rest."""
        if out.index not in self._values:
            zeros = np.zeros((len(self._token_ids), out.width), np.float32)
            self.set_streams(out, [zeros] * num_streams)

    def _rowwise(self, out: Buffer, function: Callable[..., FloatArray], *inputs: Buffer) -> None:
        """out = function(rows of the inputs), some rows at a time: so many that they stay in a core's cache."""
        self._each(out, function, inputs, _ROWS_AT_ONCE)

    def _by_sequence(self, out: Buffer, function: Callable[..., FloatArray], *inputs: Buffer) -> None:
        """out = function(rows of the inputs), one sequence at a time."""
        self._each(out, function, inputs, self._length)

    def _each(self, out: Buffer, function: Callable[..., FloatArray], inputs: Sequence[Buffer], step: int) -> None:
        streams = [self.streams(one) for one in inputs]
        is_one = all(one[0] is one[-1] for one in streams)
        self._set_each(
            out, lambda i: self._pieces(function, [one[i] for one in streams], step), is_one, len(streams[0])
        )

    def _set_each(self, out: Buffer, compute: Callable[[int], FloatArray], is_one: bool, count: int) -> None:
        results = [compute(index) for index in range(1 if is_one else count)]
        self.set_streams(out, results * count if is_one else results)

    def _pieces(
        self,
        function: Callable[..., FloatArray],
        inputs: Sequence[FloatArray],
        step: int,
        out: FloatArray | None = None,
    ) -> FloatArray:
        """function(rows of the inputs), `step` rows at a time; out may be one of them."""
        num_rows = len(inputs[0])

        def piece(index: int) -> FloatArray:
            rows = slice(index * step, (index + 1) * step)
            return function(*(x[rows] for x in inputs))

        # Pieces go where they belong at once: many that are kept are many small pages, which cost more than the work.
        first = piece(0)
        result = self._workers.memory.empty((num_rows, first.shape[1])) if out is None else out
        result[: len(first)] = first

        def one(index: int) -> None:
            found = piece(index + 1)
            result[(index + 1) * step : (index + 1) * step + len(found)] = found

        self._workers.run(one, -(-num_rows // step) - 1)
        return result


def _part(weight: LinearWeight, expert: int, values: FloatArray, wanted: FloatArray | None = None) -> MatrixPart:
    return MatrixPart(weight.name, expert, weight.packed.rows, values, wanted)


def _table_rows(table: EmbeddingTable, token_ids: NDArray[np.int32]) -> FloatArray:
    return embedding_rows(table.packed, table.name, token_ids)


def embedding_rows(file: ModelFile, name: str, token_ids: NDArray[np.int32]) -> FloatArray:
    """Rows of a table, float32[token_ids, width]."""
    record = file.tensor(name)
    data = file.tensor_bytes(name).reshape(record.shape[0], -1)[token_ids]
    return as_float32(source_rows(np.ascontiguousarray(data), record.type, record.shape[-1])).copy()
