"""Where a model lets a scale per channel move through it unchanged, found by following its own graph.

If what a matrix reads is divided by s, channel by channel, and its columns are multiplied by s, nothing changes but
rounding; that is the freedom AWQ (arXiv 2306.00978) and SmoothQuant (arXiv 2211.10438) use. The division costs nothing
where it can be done to what writes the channels: a norm's weight, or the rows of the matrix before. `find_scale_sites`
writes the decoder on a tape that only follows values, so every architecture the decoder knows is covered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    EmbeddingTable,
    FloatArray,
    LinearWeight,
    Projection,
    RopeTable,
    Routing,
    Rows,
)
from localinfer.kernels.program import Batch, Program
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder


@dataclass(frozen=True)
class ScaledPart:
    """What is divided: rows of a matrix, or elements of a vector, `count` of them from `start`, by scale ** power."""

    tensor: str
    start: int
    count: int
    is_vector: bool
    power: float = 1.0


@dataclass(frozen=True)
class ScaleGroup:
    """Channels that some tensors write and some matrices read, and nothing else.

    readers: matrices, or stacks of them, whose columns are multiplied by the scales. num_channels: how many scales
        there are to choose. columns: int64[columns of a reader], the channel of each column, where heads share one;
        None where column i, counted over all experts of a stack that has its own channels each, is channel i.
    """

    writers: tuple[ScaledPart, ...]
    readers: tuple[str, ...]
    num_channels: int
    columns: NDArray[np.int64] | None = None

    @property
    def name(self) -> str:
        """The tensor that writes the channels."""
        return self.writers[0].tensor


@dataclass(frozen=True)
class Unscalable:
    """Matrices whose input cannot be scaled for free, and why."""

    readers: tuple[str, ...]
    reason: str


def find_scale_sites(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[ScaleGroup], list[Unscalable]]:
    """Find every site of a model, in the order the graph meets them, and the matrices that have none.

    shapes: of every tensor, rows first.
    Raises: as `write_decoder`.
    """
    weights = _NamedWeights(shapes)
    tape = _FollowingTape(weights)
    write_decoder(config, weights, tape)
    sites, unscalable = [], []
    for channels in tape.read_channels:
        readers = tuple(dict.fromkeys(channels.readers))
        reason = channels.reason or _reason_of_uses(weights, channels, readers)
        if reason:
            unscalable.append(Unscalable(readers, reason))
        else:
            sites.append(ScaleGroup(tuple(channels.writers), readers, channels.count, channels.columns))
    return sites, unscalable


@dataclass
class _Channels:
    """A value on its way: who wrote it, who reads it so far, and what rules a scale out."""

    count: int
    writers: list[ScaledPart] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    columns: NDArray[np.int64] | None = None
    reason: str = ""

    def forbid(self, reason: str) -> None:
        self.reason = self.reason or reason


def _reason_of_uses(weights: "_NamedWeights", channels: _Channels, readers: tuple[str, ...]) -> str:
    """A tensor that the graph also uses elsewhere cannot follow one site's scales."""
    for name in readers:
        if weights.uses[name] != channels.readers.count(name):
            return f"{name} is used in a second place, as in models whose output is their embedding"
    for part in channels.writers:
        if part.is_vector and weights.uses[part.tensor] > 1:
            return f"{part.tensor} writes a second value"
    return ""


class _NamedWeights:
    """A `WeightSource` without weights: vectors of ones, known again by their address."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._vectors: list[tuple[int, str, FloatArray]] = []
        self.uses: dict[str, int] = {}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        self._count(name)
        *stacked, num_rows, num_columns = (1, *self._shapes[name])
        first, end, _ = (rows or slice(None)).indices(num_rows)
        return LinearWeight(name, end - first, num_columns, first, prod(stacked))

    def embedding(self, name: str) -> EmbeddingTable:
        self._count(name)
        num_rows, width = self._shapes[name]
        return EmbeddingTable(name, num_rows, width, None)

    def vector(self, name: str) -> FloatArray:
        self._count(name)
        values = np.ones(self._shapes[name], np.float32)
        self._vectors.append((values.ctypes.data, name, values))
        return values

    def part_of(self, values: FloatArray) -> ScaledPart:
        """Which elements of which tensor these are."""
        address = values.ctypes.data
        for first, name, whole in self._vectors:
            if first <= address < first + whole.nbytes:
                return ScaledPart(name, (address - first) // 4, values.size, is_vector=True)
        raise AssertionError("every vector on the tape comes from here")

    def _count(self, name: str) -> None:
        self.uses[name] = self.uses.get(name, 0) + 1


class _FollowingTape:
    """A `Tape` that computes nothing: for every buffer it knows whose channels are in it."""

    def __init__(self, weights: _NamedWeights) -> None:
        self._weights = weights
        self._buffers: list[Buffer] = []
        self._held: dict[int, _Channels] = {}
        self._cached: dict[int, _Channels] = {}
        self.read_channels: list[_Channels] = []

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        self._buffers.append(Buffer(len(self._buffers), name, width, rows))
        return self._buffers[-1]

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        self._end(out, "the input is the residual stream, which every layer shares")

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        self._end(out, "the input is the residual stream, which every layer shares")

    def rms_norm(self, out: Buffer, x: Buffer, weight: FloatArray | None, epsilon: float, group_size: int = 0) -> None:
        self._norm(out, x, [weight])

    def layer_norm(
        self,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int = 0,
    ) -> None:
        self._norm(out, x, [weight] if bias is None else [weight, bias])

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        for projection in projections:
            self._read(x, projection.weight.name)
        for projection in projections:
            if projection.residual is not None:
                self._end(projection.residual, "a sum is no single matrix's result")
                self._end(projection.out, "the input is the residual stream, which every layer shares")
            else:
                self._write(projection.out, projection.weight, projection.bias)

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        self._of(x).forbid("a rotation mixes the channels")

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        self._of(keys).forbid("keys meet queries")
        self._cached[layer] = self._of(values)

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        self._of(queries).forbid("queries meet keys")
        values = self._cached[layer]
        self._held[out.index] = values
        if shape.num_heads != shape.num_kv_heads:
            heads = np.arange(shape.num_heads) // (shape.num_heads // shape.num_kv_heads)
            values.columns = (heads[:, None] * shape.value_size + np.arange(shape.value_size)).reshape(-1)

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        channels = self._of(x)
        if kind is Activation.RELU_SQUARED:
            # relu(x / sqrt(s))^2 = relu(x)^2 / s
            channels.writers = [replace(part, power=0.5 * part.power) for part in channels.writers]
        elif kind is not Activation.RELU:
            channels.forbid(f"{kind.value} lies between {_writer(channels)} and what reads it, and is not linear")
        self._held[out.index] = channels

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        self._of(gate).forbid(f"{kind.value} follows, and is not linear")
        channels = self._of(up)
        if kind is Activation.SWIGLU_CLAMPED:
            channels.forbid(f"{_writer(channels)} is clamped before it is read")
        self._held[out.index] = channels

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        for summand in (a, b):
            self._of(summand).forbid("a sum is no single matrix's result")
        self._end(out, "the input is the residual stream, which every layer shares")

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        self._of(gate).forbid("a sigmoid follows, and is not linear")
        self._of(x).forbid("a gate weighs it")
        self._end(out, "a gate weighs it")

    def scale(self, x: Buffer, factor: float) -> None:
        pass

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        pass

    def softcap(self, x: Buffer, cap: float) -> None:
        self._of(x).forbid("a soft cap follows, and is not linear")

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
        self._of(x).forbid(f"{_writer(self._of(x))} writes keys and values at once")
        self._end(out, "it is put together from several values")

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
        self._of(x).forbid("each head's matrix reads a part of it")
        self._read(x, weight.name)
        self._write(out, weight, None)
        if weight.num_rows != out_head_size:
            self._of(out).forbid("it is put together from several values")

    def select_output(self, out: Buffer, x: Buffer) -> None:
        self._held[out.index] = self._of(x)

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        self._of(logits).forbid("routing is not linear")

    def expert_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        expert_ids: Buffer,
        bias: FloatArray | None = None,
        input_per_slot: bool = False,
    ) -> None:
        self._read(x, weight.name)
        self._write(out, weight, bias)

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        self._of(x).forbid("a sum is no single matrix's result")
        self._end(out, "the input is the residual stream, which every layer shares")

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        pass

    def finish(self, logits: Buffer) -> Program:
        self._of(logits).forbid("logits are the result")
        return _NoProgram()

    def _of(self, buffer: Buffer) -> _Channels:
        return self._held[buffer.index]

    def _end(self, buffer: Buffer, reason: str) -> None:
        """What the buffer held is used up, and what it holds now is nobody's to scale."""
        if buffer.index in self._held:
            self._of(buffer).forbid(reason)
        self._held[buffer.index] = _Channels(buffer.width, reason=reason)

    def _norm(self, out: Buffer, x: Buffer, vectors: list[FloatArray | None]) -> None:
        self._of(x).forbid("a norm follows, which undoes scales")
        channels = _Channels(out.width)
        for vector in vectors:
            if vector is None or vector.size != out.width:
                channels.forbid("its norm has no weight per channel")
            else:
                channels.writers.append(self._weights.part_of(vector))
        self._held[out.index] = channels

    def _read(self, x: Buffer, name: str) -> None:
        channels = self._of(x)
        if not channels.readers:
            self.read_channels.append(channels)
        channels.readers.append(name)

    def _write(self, out: Buffer, weight: LinearWeight, bias: FloatArray | None) -> None:
        writers = [ScaledPart(weight.name, weight.packed, weight.num_rows, is_vector=False)]
        if bias is not None:
            part = self._weights.part_of(bias)
            writers.append(replace(part, count=weight.num_rows))
        self._held[out.index] = _Channels(weight.num_experts * weight.num_rows, writers)


def _writer(channels: _Channels) -> str:
    return channels.writers[0].tensor if channels.writers else "what writes it"


class _NoProgram:
    """What a followed tape makes: nothing runs."""

    max_batch_rows = 0
    max_output_rows = 0

    def run(self, batch: Batch) -> FloatArray:
        raise AssertionError("a followed tape has no kernels")

    def close(self) -> None:
        pass
