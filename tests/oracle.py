"""The op set in plain NumPy, obvious and slow: what every device's tape and every model graph is compared with.

Values are float64 throughout, so an oracle's result differs from a device's by the device's rounding alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.kv_layout import parse_kv_type
from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    EmbeddingTable,
    FloatArray,
    LinearWeight,
    Pairing,
    Projection,
    RopeTable,
    Routing,
    Rows,
)
from localinfer.kernels.program import Batch, Program, Segment
from tests.oracle_formulas import Float64Array, activate, affine, attend, groups, route, sigmoid
from tests.oracle_kv import kept, kept_query


class NumpyWeights:
    """`WeightSource` over a GGUF file: every tensor dequantized to float64 when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        values = np.atleast_2d(self._values(name))
        if rows is not None:
            values = values[..., rows, :]
        num_experts = values.shape[0] if values.ndim == 3 else 1
        return LinearWeight(name, values.shape[-2], values.shape[-1], values, num_experts)

    def embedding(self, name: str) -> EmbeddingTable:
        values = self._values(name)
        return EmbeddingTable(name, values.shape[0], values.shape[1], values)

    def vector(self, name: str) -> FloatArray:
        return np.asarray(self._values(name), dtype=np.float32)

    def _values(self, name: str) -> Float64Array:
        tensor = self._tensors[name]
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float64).reshape(self.shape(name))


@dataclass
class _Run:
    """One batch on its way through the tape: the values of every buffer, and the position and sequence of each row."""

    batch: Batch
    values: dict[int, Float64Array]
    positions: NDArray[np.int64]
    cache: dict[tuple[int, int], "_LayerCache"]

    def __getitem__(self, buffer: Buffer) -> Float64Array:
        return self.values[buffer.index]

    def __setitem__(self, buffer: Buffer, values: Float64Array) -> None:
        assert values.shape == self.values[buffer.index].shape, f"{buffer.name}: {values.shape}"
        self.values[buffer.index] = values


@dataclass
class _LayerCache:
    """Keys and values of one layer of one sequence, by position."""

    keys: dict[int, Float64Array] = field(default_factory=dict)
    values: dict[int, Float64Array] = field(default_factory=dict)


class NumpyProgram:
    """Runs the ops a `NumpyTape` recorded. A sequence is known by the address of its first page."""

    def __init__(
        self,
        ops: Sequence[Callable[[_Run], None]],
        buffers: Sequence[Buffer],
        logits: Buffer,
        max_batch_rows: int,
        max_output_rows: int,
    ) -> None:
        self.max_batch_rows = max_batch_rows
        self.max_output_rows = max_output_rows
        self._ops = ops
        self._buffers = buffers
        self._logits = logits
        self._cache: dict[tuple[int, int], _LayerCache] = {}

    def run(self, batch: Batch) -> FloatArray:
        num_rows = {Rows.BATCH: len(batch.token_ids), Rows.OUTPUT: len(batch.output_rows)}
        values = {b.index: np.full((num_rows[b.rows], b.width), np.nan) for b in self._buffers}
        positions = [s.start_position + np.arange(s.num_rows, dtype=np.int64) for s in batch.segments]
        run = _Run(batch, values, np.concatenate(positions), self._cache)
        for op in self._ops:
            op(run)
        return run[self._logits].astype(np.float32)

    def close(self) -> None:
        self._cache.clear()


class NumpyTape:
    """Records every op as a function of a run. `kv_type` says what the cache rounds; float64 by default."""

    def __init__(self, max_batch_rows: int = 4096, max_output_rows: int = 4096, *, kv_type: str | None = None) -> None:
        self._limits = (max_batch_rows, max_output_rows)
        self._kv_types = None if kv_type is None else parse_kv_type(kv_type)
        self._buffers: list[Buffer] = []
        self._ops: list[Callable[[_Run], None]] = []

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        self._buffers.append(Buffer(len(self._buffers), name, width, rows))
        return self._buffers[-1]

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        def op(run: _Run) -> None:
            run[out] = scale * table.packed[run.batch.token_ids]

        self._ops.append(op)

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        def op(run: _Run) -> None:
            run[out] = run[out] + table.packed[run.positions]

        self._ops.append(op)

    def rms_norm(self, out: Buffer, x: Buffer, weight: FloatArray | None, epsilon: float, group_size: int = 0) -> None:
        def op(run: _Run) -> None:
            grouped = groups(run[x], group_size)
            normed = grouped / np.sqrt(np.mean(grouped**2, axis=-1, keepdims=True) + epsilon)
            run[out] = affine(normed, weight, None).reshape(run[x].shape)

        self._ops.append(op)

    def layer_norm(
        self,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int = 0,
    ) -> None:
        def op(run: _Run) -> None:
            grouped = groups(run[x], group_size)
            centred = grouped - grouped.mean(axis=-1, keepdims=True)
            normed = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + epsilon)
            run[out] = affine(normed, weight, bias).reshape(run[x].shape)

        self._ops.append(op)

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        for projection in projections:
            assert projection.out.index != x.index, f"matmul writes its input {x.name}"
            assert projection.out.rows is x.rows, f"matmul from {x.name} to {projection.out.name} changes rows"
            assert projection.weight.packed.shape == (projection.out.width, x.width), projection.weight.name

        def op(run: _Run) -> None:
            for p in projections:
                product = run[x] @ p.weight.packed.T
                if p.bias is not None:
                    product = product + p.bias
                product = p.scale * product
                run[p.out] = product if p.residual is None else run[p.residual] + product

        self._ops.append(op)

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        num_pairs = len(table.inverse_frequencies)

        def op(run: _Run) -> None:
            angles = run.positions[:, None, None] * table.inverse_frequencies
            cosine, sine = table.magnitude * np.cos(angles), table.magnitude * np.sin(angles)
            heads = run[x].reshape(len(run.positions), -1, head_size).copy()
            part = heads[:, :, offset : offset + 2 * num_pairs]
            if table.pairing is Pairing.ADJACENT:
                first, second = part[:, :, 0::2].copy(), part[:, :, 1::2].copy()
                part[:, :, 0::2] = first * cosine - second * sine
                part[:, :, 1::2] = first * sine + second * cosine
            else:
                first, second = part[:, :, :num_pairs].copy(), part[:, :, num_pairs:].copy()
                part[:, :, :num_pairs] = first * cosine - second * sine
                part[:, :, num_pairs:] = first * sine + second * cosine
            run[x] = heads.reshape(run[x].shape)

        self._ops.append(op)

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        def op(run: _Run) -> None:
            for segment, rows in _segment_rows(run.batch):
                cache = run.cache.setdefault((int(segment.page_addresses[0]), layer), _LayerCache())
                for row in rows:
                    position = int(run.positions[row])
                    cache.keys[position] = run[keys][row].copy()
                    cache.values[position] = run[values][row].copy()

        self._ops.append(op)

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        def op(run: _Run) -> None:
            result = np.empty_like(run[out])
            for segment, rows in _segment_rows(run.batch):
                cache = run.cache[int(segment.page_addresses[0]), layer]
                for row in rows:
                    seen = _seen(int(run.positions[row]), shape)
                    keys = np.stack([cache.keys[position] for position in seen])
                    values = np.stack([cache.values[position] for position in seen])
                    query = run[queries][row]
                    if self._kv_types is not None:
                        query = kept_query(query, shape.key_size, self._kv_types[0])
                        keys = kept(keys, shape.key_size, self._kv_types[0])
                        values = kept(values, shape.value_size, self._kv_types[1])
                    result[row] = attend(query, keys, values, seen, shape)
            run[out] = result

        self._ops.append(op)

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        def op(run: _Run) -> None:
            run[out] = activate(run[x], kind)

        self._ops.append(op)

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        def op(run: _Run) -> None:
            if kind is Activation.SWIGLU_CLAMPED:
                clamped = np.minimum(run[gate], 7.0)
                run[out] = clamped * sigmoid(1.702 * clamped) * (np.clip(run[up], -7.0, 7.0) + 1.0)
            else:
                run[out] = activate(run[gate], kind) * run[up]

        self._ops.append(op)

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        def op(run: _Run) -> None:
            run[out] = run[a] + scale * run[b]

        self._ops.append(op)

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        def op(run: _Run) -> None:
            run[out] = run[x] * sigmoid(run[gate])

        self._ops.append(op)

    def scale(self, x: Buffer, factor: float) -> None:
        def op(run: _Run) -> None:
            run[x] = factor * run[x]

        self._ops.append(op)

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        def op(run: _Run) -> None:
            factor = 1.0 + slope * np.log1p(np.floor((run.positions + offset) / period))
            run[x] = run[x] * factor[:, None]

        self._ops.append(op)

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
        def op(run: _Run) -> None:
            target = run[out].reshape(-1, num_heads, out_head_size).copy()
            source = run[x].reshape(-1, num_heads, x_head_size)
            target[:, :, out_offset : out_offset + width] = source[:, :, x_offset : x_offset + width]
            run[out] = target.reshape(run[out].shape)

        self._ops.append(op)

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
        assert out.index != x.index, f"head_matmul writes its input {x.name}"
        stack = weight.packed.reshape(-1, weight.num_rows, weight.num_columns)

        def op(run: _Run) -> None:
            target = run[out].reshape(-1, len(stack), out_head_size).copy()
            source = run[x].reshape(-1, len(stack), x_head_size)[:, :, x_offset : x_offset + weight.num_columns]
            target[:, :, out_offset : out_offset + weight.num_rows] = np.einsum("hoi,rhi->rho", stack, source)
            run[out] = target.reshape(run[out].shape)

        self._ops.append(op)

    def softcap(self, x: Buffer, cap: float) -> None:
        def op(run: _Run) -> None:
            run[x] = cap * np.tanh(run[x] / cap)

        self._ops.append(op)

    def select_output(self, out: Buffer, x: Buffer) -> None:
        def op(run: _Run) -> None:
            run[out] = run[x][run.batch.output_rows]

        self._ops.append(op)

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        def op(run: _Run) -> None:
            chosen = [route(row, routing) for row in run[logits]]
            ids = np.array([ids for ids, _ in chosen], dtype=np.float64)
            run[expert_ids] = ids.reshape(run[expert_ids].shape)
            weights = np.array([weights for _, weights in chosen], dtype=np.float64)
            run[expert_weights] = weights.reshape(run[expert_weights].shape)

        self._ops.append(op)

    def expert_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        expert_ids: Buffer,
        bias: FloatArray | None = None,
        input_per_slot: bool = False,
    ) -> None:
        assert out.index != x.index, f"expert_matmul writes its input {x.name}"
        stack = weight.packed.reshape(-1, weight.num_rows, weight.num_columns)

        def op(run: _Run) -> None:
            ids = run[expert_ids].astype(np.int64)
            num_rows, num_slots = ids.shape
            inputs = run[x].reshape(num_rows, num_slots if input_per_slot else 1, weight.num_columns)
            inputs = np.broadcast_to(inputs, (num_rows, num_slots, weight.num_columns))
            result = np.empty((num_rows, num_slots, weight.num_rows))
            for row in range(num_rows):
                for slot in range(num_slots):
                    expert = ids[row, slot]
                    result[row, slot] = stack[expert] @ inputs[row, slot]
                    if bias is not None:
                        result[row, slot] += bias[expert]
            run[out] = result.reshape(run[out].shape)

        self._ops.append(op)

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        def op(run: _Run) -> None:
            weights = run[expert_weights]
            slots = run[x].reshape(*weights.shape, x.width // expert_weights.width)
            total = np.einsum("rs,rsw->rw", weights, slots)
            run[out] = total if residual is None else run[residual] + total

        self._ops.append(op)

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        def op(run: _Run) -> None:
            weights = run[expert_weights]
            slots = run[x].reshape(*weights.shape, x.width // expert_weights.width)
            run[x] = (slots * weights[:, :, None]).reshape(run[x].shape)

        self._ops.append(op)

    def finish(self, logits: Buffer) -> Program:
        return NumpyProgram(self._ops, self._buffers, logits, *self._limits)


def _segment_rows(batch: Batch) -> list[tuple[Segment, range]]:
    """Every segment with the rows of the batch that are its own."""
    first = 0
    result = []
    for segment in batch.segments:
        result.append((segment, range(first, first + segment.num_rows)))
        first += segment.num_rows
    return result


def _seen(position: int, shape: AttentionShape) -> range:
    """The positions that the row at `position` may look at."""
    first = 0
    if shape.window:
        first = max(first, position - shape.window + 1)
    if shape.chunk:
        first = max(first, position // shape.chunk * shape.chunk)
    return range(first, position + 1)
