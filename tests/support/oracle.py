"""The op set in plain NumPy, obvious and slow: what every device's program and every model graph is compared with.

Values are float64 throughout, so an oracle's result differs from a device's by the device's rounding alone.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import ops
from localinfer.kernels.kv_layout import parse_kv_type
from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    EmbeddingTable,
    LinearWeight,
    OpGraph,
    Pairing,
    Rows,
)
from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.types import FloatArray
from tests.support.oracle_formulas import (
    Float64Array,
    activate,
    affine,
    attend_rows,
    choose,
    groups,
    is_chosen,
    route,
    sigmoid,
)
from tests.support.oracle_kv import kept, kept_query
from tests.support.oracle_recurrent import RECURRENCES, States, input_buffers, output_buffers


class NumpyWeights:
    """`WeightSource` over a GGUF file: every tensor dequantized to float64 when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

    def has(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

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
    """One batch on its way through the ops: the values of every buffer, and the position and sequence of each row."""

    batch: Batch
    values: dict[int, Float64Array]
    positions: NDArray[np.int64]
    cache: dict[tuple[int, int], "_LayerCache"]
    kv_types: tuple[str, str] | None
    states: States

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
    """Runs a graph's ops, each by its formula. A sequence is known by the address of its first page.

    kv_type: what the cache rounds; float64 by default.
    """

    def __init__(
        self, graph: OpGraph, max_batch_rows: int = 4096, max_output_rows: int = 4096, *, kv_type: str | None = None
    ) -> None:
        self.max_batch_rows = max_batch_rows
        self.max_output_rows = max_output_rows
        self._graph = graph
        self._kv_types = None if kv_type is None else parse_kv_type(kv_type)
        self._cache: dict[tuple[int, int], _LayerCache] = {}
        self._states = States()
        self.hidden: FloatArray | None = None

    def share_cache(self, other: "NumpyProgram") -> None:
        """Read what another program stores."""
        self._cache = other._cache

    def run(self, batch: Batch) -> FloatArray:
        num_rows = {Rows.BATCH: len(batch.token_ids), Rows.OUTPUT: len(batch.output_rows)}
        values = {b.index: np.full((num_rows[b.rows], b.width), np.nan) for b in self._graph.buffers}
        positions = [s.start_position + np.arange(s.num_rows, dtype=np.int64) for s in batch.segments]
        run = _Run(batch, values, np.concatenate(positions), self._cache, self._kv_types, self._states)
        for op in self._graph.ops:
            _FORMULAS[type(op)](run, op)
        if self._graph.hidden is not None:
            self.hidden = run[self._graph.hidden].astype(np.float32)
        return run[self._graph.output].astype(np.float32)

    def settle(self, step: StateStep) -> None:
        for op in self._graph.ops:
            if isinstance(op, ops.RecurrentOp):
                self._states.advance(op, step, [])

    def close(self) -> None:
        self._cache.clear()


Formula = Callable[[_Run, Any], None]
_FORMULAS: dict[type, Formula] = {}


def _formula(op: type) -> Callable[[Formula], Formula]:
    """Mark the function that computes an op."""
    return lambda function: _FORMULAS.setdefault(op, function)


@_formula(ops.Embed)
def _embed(run: _Run, op: ops.Embed) -> None:
    run[op.out] = op.scale * op.table.packed[np.maximum(run.batch.token_ids, 0)]


@_formula(ops.EmbedMedia)
def _embed_media(run: _Run, op: ops.EmbedMedia) -> None:
    found = np.zeros((len(run.positions), op.x.width))
    has_one = np.zeros(len(found), np.bool_)
    for segment, rows in _segment_rows(run.batch):
        for first, embeddings in () if segment.media is None else segment.media.embeddings:
            these = rows[first : first + len(embeddings)]
            found[these] = embeddings[:, op.part * op.x.width : (op.part + 1) * op.x.width]
            has_one[these] = True
    if op.x.is_output:
        found, has_one = found[run.batch.output_rows], has_one[run.batch.output_rows]
    run[op.x] = np.where(has_one[:, None], found + (run[op.x] if op.adds else 0.0), run[op.x])


@_formula(ops.PreviousRow)
def _previous_row(run: _Run, op: ops.PreviousRow) -> None:
    found, width = np.empty_like(run[op.out]), op.out.width
    for segment, rows in _segment_rows(run.batch):
        carried, following = segment.carried
        found[rows[0]] = np.ctypeslib.as_array((ctypes.c_float * width).from_address(carried)) if carried else 0.0
        if op.x is not None:
            found[rows[1:]] = run[op.x][rows[:-1]]
            if following:
                np.ctypeslib.as_array((ctypes.c_float * width).from_address(following))[:] = run[op.x][rows[-1]]
    run[op.out] = found


@_formula(ops.CentredConvolution)
def _centred_convolution(run: _Run, op: ops.CentredConvolution) -> None:
    found, taps = np.zeros_like(run[op.x]), op.weight.shape[1]
    for _, rows in _segment_rows(run.batch):
        padded = np.pad(run[op.x][rows.start : rows.stop], ((taps // 2, taps // 2), (0, 0)))
        for tap in range(taps):
            found[rows.start : rows.stop] += op.weight[:, tap] * padded[tap : tap + len(rows)]
    run[op.out] = found


@_formula(ops.EmbedPositions)
def _embed_positions(run: _Run, op: ops.EmbedPositions) -> None:
    run[op.out] = run[op.out] + op.table.packed[run.positions]


@_formula(ops.EmbedTypes)
def _embed_types(run: _Run, op: ops.EmbedTypes) -> None:
    types = np.zeros(len(run.positions), np.int32) if run.batch.token_types is None else run.batch.token_types
    found = op.table.packed[types]
    run[op.out] = run[op.out] + found if op.adds else found


@_formula(ops.RmsNorm)
def _rms_norm(run: _Run, op: ops.RmsNorm) -> None:
    grouped = groups(run[op.x], op.group_size)
    normed = grouped / np.sqrt(np.mean(grouped**2, axis=-1, keepdims=True) + op.epsilon)
    run[op.out] = affine(normed, op.weight, None).reshape(run[op.x].shape)


@_formula(ops.LayerNorm)
def _layer_norm(run: _Run, op: ops.LayerNorm) -> None:
    grouped = groups(run[op.x], op.group_size)
    centred = grouped - grouped.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + op.epsilon)
    run[op.out] = affine(normed, op.weight, op.bias).reshape(run[op.x].shape)


@_formula(ops.Matmul)
def _matmul(run: _Run, op: ops.Matmul) -> None:
    for p in op.projections:
        assert p.weight.packed.shape == (p.out.width, op.x.width), p.weight.name
        product = run[op.x] @ p.weight.packed.T
        if p.bias is not None:
            product = product + p.bias
        product = p.scale * product
        run[p.out] = product if p.residual is None else run[p.residual] + product


@_formula(ops.Rope)
def _rope(run: _Run, op: ops.Rope) -> None:
    table = op.table
    num_pairs = len(table.inverse_frequencies)
    positions = np.repeat(run.positions[:, None], num_pairs, axis=1)
    if table.axes is not None:
        for segment, rows in _segment_rows(run.batch):
            if segment.media is not None and segment.media.positions is not None:
                positions[rows] = segment.media.positions[:, table.axes]
    angles = positions[:, None, :] * table.inverse_frequencies
    _rotate(run, op, table.pairing, table.magnitude * np.cos(angles), table.magnitude * np.sin(angles))


@_formula(ops.RotateByRow)
def _rotate_by_row(run: _Run, op: ops.RotateByRow) -> None:
    cosine, sine = np.split(run[op.angles][:, None], 2, axis=-1)
    _rotate(run, op, op.pairing, cosine, sine)


def _rotate(
    run: _Run, op: ops.Rope | ops.RotateByRow, pairing: Pairing, cosine: Float64Array, sine: Float64Array
) -> None:
    x, num_pairs = op.x, cosine.shape[-1]
    heads = run[x].reshape(len(run.positions), -1, op.head_size).copy()
    part = heads[:, :, op.offset : op.offset + 2 * num_pairs]
    if pairing is Pairing.ADJACENT:
        first, second = part[:, :, 0::2].copy(), part[:, :, 1::2].copy()
        part[:, :, 0::2] = first * cosine - second * sine
        part[:, :, 1::2] = first * sine + second * cosine
    else:
        first, second = part[:, :, :num_pairs].copy(), part[:, :, num_pairs:].copy()
        part[:, :, :num_pairs] = first * cosine - second * sine
        part[:, :, num_pairs:] = first * sine + second * cosine
    run[x] = heads.reshape(run[x].shape)


@_formula(ops.StoreKV)
def _store_kv(run: _Run, op: ops.StoreKV) -> None:
    for segment, rows in _segment_rows(run.batch):
        cache = run.cache.setdefault((int(segment.page_addresses[0]), op.layer), _LayerCache())
        for row in rows:
            position = int(run.positions[row])
            cache.keys[position] = run[op.keys][row].copy()
            if op.values is not None:
                cache.values[position] = run[op.values][row].copy()


@_formula(ops.Attention)
def _attention(run: _Run, op: ops.Attention) -> None:
    shape, result = op.shape, np.empty_like(run[op.out])
    for segment, rows in _segment_rows(run.batch):
        cache = run.cache[int(segment.page_addresses[0]), op.layer]
        own = run.positions[rows.start : rows.stop]
        seen = [_seen(int(position), shape, segment.start_position + segment.num_rows) for position in own]
        others = np.arange(min(one.start for one in seen), max(one.stop for one in seen))
        counted = np.array([(others >= one.start) & (others < one.stop) for one in seen])[:, None]
        keys = np.stack([cache.keys[int(other)] for other in others])
        values = np.stack([cache.values[int(other)] for other in others])
        queries = run[op.queries][rows.start : rows.stop]
        if run.kv_types is not None:
            queries = kept_query(queries, shape.key_size, run.kv_types[0])
            keys = kept(keys, shape.key_size, run.kv_types[0])
            values = kept(values, shape.value_size, run.kv_types[1])
        if op.chosen is not None:
            lists = run[op.chosen.blocks][rows.start : rows.stop]
            counted = counted & np.stack([is_chosen(one, op.chosen, len(others)) for one in lists])
        biases = None
        if op.relative is not None:
            of_keys = [rows[int(other) - segment.start_position] for other in others]
            found = [_relative(run, op.relative, row, of_keys) for row in rows]
            biases = np.stack([scaled for scaled, _ in found]), np.stack([plain for _, plain in found])
        result[rows.start : rows.stop] = attend_rows(queries, keys, values, others, shape, own, counted, biases)
    run[op.out] = result


def _relative(run: _Run, relative: ops.Relative, row: int, others: list[int]) -> tuple[Float64Array, Float64Array]:
    """What each of the other rows gets as a key by its distance, [num_heads, keys]: scaled as scores are, and plain."""
    reach = len(relative.buckets) // 2
    distances = run.positions[others] - run.positions[row]
    buckets = relative.buckets[reach + np.clip(distances, -reach, reach)]
    scaled = np.zeros((1, len(others)))
    if relative.by_row is not None:
        scaled = scaled + run[relative.by_row][row].reshape(-1, relative.num_buckets)[:, buckets]
    if relative.by_key is not None:
        of_keys = run[relative.by_key][others].reshape(len(others), -1, relative.num_buckets)
        scaled = scaled + of_keys[np.arange(len(others)), :, buckets].T
    plain = np.zeros((1, len(others))) if relative.table is None else relative.table.astype(np.float64)[:, buckets]
    return scaled, plain


@_formula(ops.ChooseBlocks)
def _choose_blocks(run: _Run, op: ops.ChooseBlocks) -> None:
    result = np.empty_like(run[op.chosen.blocks])
    for segment, rows in _segment_rows(run.batch):
        cache = run.cache[int(segment.page_addresses[0]), op.layer]
        for row in rows:
            keys = np.stack([cache.keys[position] for position in range(int(run.positions[row]) + 1)])
            query = run[op.queries][row]
            if run.kv_types is not None:
                query = kept_query(query, op.key_size, run.kv_types[0])
                keys = kept(keys, op.key_size, run.kv_types[0])
            weights = None if op.weights is None else run[op.weights][row]
            result[row] = choose(op, query.reshape(op.num_heads, -1), keys, weights)
    run[op.chosen.blocks] = result


@_formula(ops.Activate)
def _activate(run: _Run, op: ops.Activate) -> None:
    run[op.out] = activate(run[op.x], op.kind)


@_formula(ops.GatedActivate)
def _gated_activate(run: _Run, op: ops.GatedActivate) -> None:
    if op.kind is Activation.SWIGLU_CLAMPED:
        clamped = np.minimum(run[op.gate], 7.0)
        run[op.out] = clamped * sigmoid(1.702 * clamped) * (np.clip(run[op.up], -7.0, 7.0) + 1.0)
    elif op.limit:
        gate = np.minimum(activate(run[op.gate], op.kind), op.limit)
        run[op.out] = gate * np.clip(run[op.up], -op.limit, op.limit)
    else:
        run[op.out] = activate(run[op.gate], op.kind) * run[op.up]


@_formula(ops.Xielu)
def _xielu(run: _Run, op: ops.Xielu) -> None:
    x = run[op.x]
    below = (np.expm1(np.minimum(x, op.epsilon)) - x) * op.negative
    run[op.out] = np.where(x > 0.0, op.positive * x * x, below) + op.beta * x


@_formula(ops.Add)
def _add(run: _Run, op: ops.Add) -> None:
    run[op.out] = run[op.a] + op.scale * run[op.b]


@_formula(ops.Multiply)
def _multiply(run: _Run, op: ops.Multiply) -> None:
    if not isinstance(op.factor, Buffer):
        run[op.out] = run[op.x] * op.factor.astype(np.float64)
        return
    run[op.out] = run[op.x] * np.repeat(run[op.factor], op.x.width // op.factor.width, axis=1)


@_formula(ops.Magnitude)
def _magnitude(run: _Run, op: ops.Magnitude) -> None:
    run[op.out] = np.sqrt(np.mean(run[op.x] ** 2, axis=1, keepdims=True))


@_formula(ops.MixSlots)
def _mix_slots(run: _Run, op: ops.MixSlots) -> None:
    x = run[op.x]
    slots = x.reshape(len(x), op.num_slots, -1)
    num_out = op.out.width // slots.shape[2]
    weights = np.ones((len(x), num_out, op.num_slots))
    if op.weights is not None:
        weights = run[op.weights].reshape(weights.shape)
    weights[:, : op.first_slot] = 0.0
    mixed = np.einsum("rba,rai->rbi", weights, slots).reshape(len(x), -1)
    run[op.out] = mixed if op.residual is None else run[op.residual] + mixed


@_formula(ops.GaussianTopK)
def _gaussian_top_k(run: _Run, op: ops.GaussianTopK) -> None:
    x = run[op.x]
    least = x.mean(axis=1, keepdims=True) + op.num_deviations * x.std(axis=1, ddof=1, keepdims=True)
    run[op.out] = np.maximum(x - least, 0.0)


@_formula(ops.Softmax)
def _softmax(run: _Run, op: ops.Softmax) -> None:
    shares = np.exp(run[op.x] - run[op.x].max(axis=1, keepdims=True))
    run[op.out] = shares / shares.sum(axis=1, keepdims=True)


@_formula(ops.AddVector)
def _add_vector(run: _Run, op: ops.AddVector) -> None:
    run[op.x] = run[op.x] + op.vector


@_formula(ops.MultiplySigmoid)
def _multiply_sigmoid(run: _Run, op: ops.MultiplySigmoid) -> None:
    gates = np.repeat(sigmoid(run[op.gate]), op.x.width // op.gate.width, axis=1)
    run[op.out] = run[op.x] * gates


@_formula(ops.Scale)
def _scale(run: _Run, op: ops.Scale) -> None:
    run[op.x] = op.factor * run[op.x]


@_formula(ops.Bound)
def _bound(run: _Run, op: ops.Bound) -> None:
    run[op.out] = np.clip(run[op.x], op.lowest, op.highest)


@_formula(ops.Clamp)
def _clamp(run: _Run, op: ops.Clamp) -> None:
    run[op.x] = np.clip(run[op.x], None if op.only_above else -op.limit, op.limit)


@_formula(ops.ScaleByPosition)
def _scale_by_position(run: _Run, op: ops.ScaleByPosition) -> None:
    factor = 1.0 + op.slope * np.log1p(np.floor((run.positions + op.offset) / op.period))
    run[op.x] = run[op.x] * factor[:, None]


@_formula(ops.Softcap)
def _softcap(run: _Run, op: ops.Softcap) -> None:
    run[op.x] = op.cap * np.tanh(run[op.x] / op.cap)


@_formula(ops.CopyHeads)
def _copy_heads(run: _Run, op: ops.CopyHeads) -> None:
    target = run[op.out].reshape(-1, op.num_heads, op.out_head_size).copy()
    heads = run[op.x].reshape(len(target), -1, op.x_head_size or op.x.width)
    target[:, :, op.out_offset : op.out_offset + op.width] = heads[:, :, op.x_offset : op.x_offset + op.width]
    run[op.out] = target.reshape(run[op.out].shape)


@_formula(ops.HeadMatmul)
def _head_matmul(run: _Run, op: ops.HeadMatmul) -> None:
    stack = op.weight.packed.reshape(-1, op.weight.num_rows, op.weight.num_columns)
    target = run[op.out].reshape(-1, len(stack), op.out_head_size).copy()
    source = run[op.x].reshape(-1, len(stack), op.x_head_size)[:, :, op.x_offset : op.x_offset + stack.shape[2]]
    target[:, :, op.out_offset : op.out_offset + stack.shape[1]] = np.einsum("hoi,rhi->rho", stack, source)
    run[op.out] = target.reshape(run[op.out].shape)


@_formula(ops.SelectOutput)
def _select_output(run: _Run, op: ops.SelectOutput) -> None:
    run[op.out] = run[op.x][run.batch.output_rows]


@_formula(ops.MeanRows)
def _mean_rows(run: _Run, op: ops.MeanRows) -> None:
    means = {
        row: run[op.x][rows.start : rows.stop].mean(axis=0) for _, rows in _segment_rows(run.batch) for row in rows
    }
    run[op.out] = np.stack([means[int(row)] for row in run.batch.output_rows])


@_formula(ops.Route)
def _route(run: _Run, op: ops.Route) -> None:
    chosen = [route(row, op.routing) for row in run[op.logits]]
    ids = np.array([ids for ids, _ in chosen], dtype=np.float64)
    run[op.expert_ids] = ids.reshape(run[op.expert_ids].shape)
    weights = np.array([weights for _, weights in chosen], dtype=np.float64)
    run[op.expert_weights] = weights.reshape(run[op.expert_weights].shape)


@_formula(ops.ExpertMatmul)
def _expert_matmul(run: _Run, op: ops.ExpertMatmul) -> None:
    stack = op.weight.packed.reshape(-1, op.weight.num_rows, op.weight.num_columns)
    ids = run[op.expert_ids].astype(np.int64)
    num_rows, num_slots = ids.shape
    inputs = run[op.x].reshape(num_rows, num_slots if op.input_per_slot else 1, stack.shape[2])
    inputs = np.broadcast_to(inputs, (num_rows, num_slots, stack.shape[2]))
    result = np.empty((num_rows, num_slots, stack.shape[1]))
    for expert in np.unique(ids):
        chosen = ids == expert
        result[chosen] = inputs[chosen] @ stack[expert].T
        if op.bias is not None:
            result[chosen] += op.bias[expert]
    run[op.out] = result.reshape(run[op.out].shape)


def _slots(run: _Run, x: Buffer, expert_weights: Buffer) -> Float64Array:
    return run[x].reshape(*run[expert_weights].shape, x.width // expert_weights.width)


@_formula(ops.ExpertSum)
def _expert_sum(run: _Run, op: ops.ExpertSum) -> None:
    total = np.einsum("rs,rsw->rw", run[op.expert_weights], _slots(run, op.x, op.expert_weights))
    run[op.out] = total if op.residual is None else run[op.residual] + total


@_formula(ops.ExpertScale)
def _expert_scale(run: _Run, op: ops.ExpertScale) -> None:
    weighed = _slots(run, op.x, op.expert_weights) * run[op.expert_weights][:, :, None]
    run[op.x] = weighed.reshape(run[op.x].shape)


@_formula(ops.ExpertFactors)
def _expert_factors(run: _Run, op: ops.ExpertFactors) -> None:
    factors = op.factors.astype(np.float64)[run[op.expert_ids].astype(np.int64)]
    run[op.x] = (_slots(run, op.x, op.expert_ids) * factors[:, :, None]).reshape(run[op.x].shape)


def _recurrent(run: _Run, op: Any) -> None:
    inputs = {name: run[buffer] for name, buffer in input_buffers(op).items()}
    outs = output_buffers(op)
    result = np.empty((len(run.positions), sum(out.width for out in outs)))
    for segment, rows in _segment_rows(run.batch):
        assert segment.state is not None, "a recurrent op needs the states before a segment"
        by_row = [{name: values[row].copy() for name, values in inputs.items()} for row in rows]
        result[rows] = run.states.advance(op, segment.state, by_row)
    for out, values in zip(outs, np.split(result, len(outs), axis=1), strict=True):
        run[out] = values


_FORMULAS |= dict.fromkeys(RECURRENCES, _recurrent)


def _segment_rows(batch: Batch) -> list[tuple[Segment, range]]:
    """Every segment with the rows of the batch that are its own."""
    first = 0
    result = []
    for segment in batch.segments:
        result.append((segment, range(first, first + segment.num_rows)))
        first += segment.num_rows
    return result


def _seen(position: int, shape: AttentionShape, end: int) -> range:
    """The positions that the row at `position` may look at; those of its segment lie before `end`."""
    first = 0
    if shape.bidirectional:
        reach = shape.window // 2 if shape.window else end
        return range(max(0, position - reach), min(end, position + reach + 1))
    if shape.window:
        first = max(first, position - shape.window + 1)
    if shape.chunk:
        first = max(first, position // shape.chunk * shape.chunk)
    return range(first, position + (0 if shape.excludes_own else 1))
