"""AWQ scale groups: where a model lets a scale per channel move through it unchanged, found by following its ops.

If what a matrix reads is divided by s, channel by channel, and its columns are multiplied by s, nothing changes but
rounding; that is the freedom AWQ (arXiv 2306.00978) and SmoothQuant (arXiv 2211.10438) use. The division costs nothing
where it can be done to what writes the channels: a norm's weight, or the rows of the matrix before. `find_scale_groups`
follows the values through the decoder's ops, so every architecture of the decoder is covered.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError
from localinfer.kernels import ops
from localinfer.kernels.ops import Activation, Buffer, LinearWeight
from localinfer.models.decoder.checked_weights import ShapeWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.quant.methods.awq import TensorFactors
from localinfer.types import FloatArray


@dataclass(frozen=True)
class ScaledPart:
    """Rows of a matrix or elements of a vector, `count` from `start`, that are divided by scale ** power."""

    tensor: str
    start: int
    count: int
    is_vector: bool
    power: float = 1.0


@dataclass(frozen=True)
class ScaleGroup:
    """Channels that some tensors write and some matrices read, and nothing else."""

    writers: tuple[ScaledPart, ...]
    readers: tuple[str, ...]
    """Matrices, or stacks of them, whose columns are multiplied by the scales."""
    num_channels: int
    """Number of scales to choose."""
    columns: NDArray[np.int64] | None = None
    """int64[columns of a reader], the channel of each column, where heads share one; None where column i, counted
    over all experts of a stack that has its own channels each, is channel i."""

    @property
    def name(self) -> str:
        """The tensor that writes the channels."""
        return self.writers[0].tensor


@dataclass(frozen=True)
class Unscalable:
    """Matrices whose input cannot be scaled for free, and why."""

    readers: tuple[str, ...]
    reason: str


def find_scale_groups(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[ScaleGroup], list[Unscalable]]:
    """Find every group of a model, in the order of the graph, and the matrices that have none.

    shapes: of every tensor, rows first.
    Raises: as `write_decoder`.
    """
    weights = ShapeWeights(shapes)
    graph = write_decoder(config, weights)
    follower = _Follower(weights)
    for op in graph.ops:
        FOLLOW[type(op)](follower, op)
    follower.forbid(graph.output, "logits are the result")
    groups, unscalable = [], []
    for channels in follower.read_channels:
        readers = tuple(dict.fromkeys(channels.readers))
        reason = channels.reason or _reason_of_uses(weights, channels, readers)
        if reason:
            unscalable.append(Unscalable(readers, reason))
        else:
            groups.append(ScaleGroup(tuple(channels.writers), readers, channels.count, channels.columns))
    return groups, unscalable


@dataclass
class _Channels:
    """A value: what wrote it, what reads it so far, and what rules a scale out."""

    count: int
    writers: list[ScaledPart] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    columns: NDArray[np.int64] | None = None
    reason: str = ""

    def forbid(self, reason: str) -> None:
        self.reason = self.reason or reason


def _reason_of_uses(weights: ShapeWeights, channels: _Channels, readers: tuple[str, ...]) -> str:
    """A tensor that the graph also uses elsewhere cannot follow one group's scales."""
    for name in readers:
        if weights.uses[name] != channels.readers.count(name):
            return f"{name} is used in a second place, as in models whose output is their embedding"
    for part in channels.writers:
        if part.is_vector and weights.uses[part.tensor] > 1:
            return f"{part.tensor} writes a second value"
    return ""


class _Follower:
    """The channels in every buffer, while ops are read in order."""

    def __init__(self, weights: ShapeWeights) -> None:
        self.weights = weights
        self.held: dict[int, _Channels] = {}
        self.cached: dict[int, _Channels] = {}
        self.read_channels: list[_Channels] = []

    def of(self, buffer: Buffer) -> _Channels:
        """The channels in a buffer."""
        return self.held[buffer.index]

    def forbid(self, buffer: Buffer, reason: str) -> None:
        """Rule out scales for what a buffer holds."""
        self.of(buffer).forbid(reason)

    def end(self, buffer: Buffer, reason: str) -> None:
        """End the channels that a buffer held, and put others into it that cannot be scaled."""
        if buffer.index in self.held:
            self.forbid(buffer, reason)
        self.held[buffer.index] = _Channels(buffer.width, reason=reason)

    def vector(self, values: FloatArray) -> ScaledPart:
        """Find the elements of a tensor that these are."""
        part = self.weights.part_of(values)
        assert part is not None, "every vector of the graph comes from these weights"
        return ScaledPart(*part, is_vector=True)

    def read(self, x: Buffer, name: str) -> None:
        """A matrix multiplies what a buffer holds."""
        channels = self.of(x)
        if not channels.readers:
            self.read_channels.append(channels)
        channels.readers.append(name)

    def write(self, out: Buffer, weight: LinearWeight, bias: FloatArray | None) -> None:
        """A matrix and its bias write a buffer."""
        writers = [ScaledPart(weight.name, weight.packed, weight.num_rows, is_vector=False)]
        if bias is not None:
            writers.append(replace(self.vector(bias), count=weight.num_rows))
        self.held[out.index] = _Channels(weight.num_experts * weight.num_rows, writers)


def _norm(follower: _Follower, op: ops.RmsNorm | ops.LayerNorm) -> None:
    follower.forbid(op.x, "a norm follows, which undoes scales")
    channels = _Channels(op.out.width)
    bias = op.bias if isinstance(op, ops.LayerNorm) else None
    for vector in [op.weight] if bias is None else [op.weight, bias]:
        if vector is None or vector.size != op.out.width or follower.weights.part_of(vector) is None:
            channels.forbid("its norm has no weight per channel")
        else:
            channels.writers.append(follower.vector(vector))
    follower.held[op.out.index] = channels


def _matmul(follower: _Follower, op: ops.Matmul) -> None:
    for projection in op.projections:
        follower.read(op.x, projection.weight.name)
    for projection in op.projections:
        if projection.residual is not None:
            follower.end(projection.residual, _SUM)
            follower.end(projection.out, _STREAM)
        else:
            follower.write(projection.out, projection.weight, projection.bias)


def _store_kv(follower: _Follower, op: ops.StoreKV) -> None:
    follower.forbid(op.keys, "keys are multiplied by queries")
    if op.values is not None:
        follower.cached[op.layer] = follower.of(op.values)


def _attention(follower: _Follower, op: ops.Attention) -> None:
    shape, values = op.shape, follower.cached[op.layer]
    follower.forbid(op.queries, "queries are multiplied by keys")
    follower.held[op.out.index] = values
    if shape.num_heads != shape.num_kv_heads:
        heads = np.arange(shape.num_heads) // (shape.num_heads // shape.num_kv_heads)
        values.columns = (heads[:, None] * shape.value_size + np.arange(shape.value_size)).reshape(-1)


def _choose_blocks(follower: _Follower, op: ops.ChooseBlocks) -> None:
    for buffer in (op.queries, op.weights):
        if buffer is not None:
            follower.forbid(buffer, "positions are chosen by it")
    follower.end(op.chosen.blocks, "it is a choice of positions")


def _activate(follower: _Follower, op: ops.Activate) -> None:
    channels = follower.of(op.x)
    if op.kind is Activation.RELU_SQUARED:
        # relu(x / sqrt(s))^2 = relu(x)^2 / s
        channels.writers = [replace(part, power=0.5 * part.power) for part in channels.writers]
    elif op.kind is not Activation.RELU:
        channels.forbid(f"{op.kind.value} lies between {_writer(channels)} and what reads it, and is not linear")
    follower.held[op.out.index] = channels


def _gated_activate(follower: _Follower, op: ops.GatedActivate) -> None:
    follower.forbid(op.gate, f"{op.kind.value} follows, and is not linear")
    channels = follower.of(op.up)
    if op.kind is Activation.SWIGLU_CLAMPED or op.limit:
        channels.forbid(f"{_writer(channels)} is clamped before it is read")
    follower.held[op.out.index] = channels


def _xielu(follower: _Follower, op: ops.Xielu) -> None:
    channels = follower.of(op.x)
    channels.forbid(f"xielu lies between {_writer(channels)} and what reads it, and is not linear")
    follower.held[op.out.index] = channels


def _multiply(follower: _Follower, op: ops.Multiply) -> None:
    if op.out == op.x and not isinstance(op.factor, Buffer):
        # A factor per column commutes with scales per column.
        return
    follower.forbid(op.x, "a factor weighs it")
    if isinstance(op.factor, Buffer):
        follower.forbid(op.factor, "it weighs another value")
    follower.end(op.out, "a factor weighs it")


def _copy_heads(follower: _Follower, op: ops.CopyHeads) -> None:
    follower.forbid(op.x, f"{_writer(follower.of(op.x))} writes keys and values at once")
    follower.end(op.out, _PUT_TOGETHER)


def _head_matmul(follower: _Follower, op: ops.HeadMatmul) -> None:
    follower.forbid(op.x, "each head's matrix reads a part of it")
    follower.read(op.x, op.weight.name)
    follower.write(op.out, op.weight, None)
    if op.weight.num_rows != op.out_head_size:
        follower.forbid(op.out, _PUT_TOGETHER)


def _expert_matmul(follower: _Follower, op: ops.ExpertMatmul) -> None:
    follower.read(op.x, op.weight.name)
    follower.write(op.out, op.weight, op.bias)


_STREAM = "the input is the residual stream, which every layer shares"
_SUM = "a sum is no single matrix's result"
_PUT_TOGETHER = "it is put together from several values"
_SIGMOID = "a sigmoid follows, and is not linear"


def _ending(out: str, written: str, read: Mapping[str, str]) -> Callable[[_Follower, Any], None]:
    """The rule of an op that ends channels: for the fields that it reads, and the one that it writes, why."""

    def follow(follower: _Follower, op: Any) -> None:
        for name, reason in read.items():
            buffer = getattr(op, name)
            if buffer is not None:
                follower.forbid(buffer, reason)
        for name in out.split():
            follower.end(getattr(op, name), written)

    return follow


def _all(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


FOLLOW: dict[type, Callable[[_Follower, Any], None]] = {
    ops.Embed: lambda follower, op: follower.end(op.out, _STREAM),
    ops.EmbedPositions: lambda follower, op: follower.end(op.out, _STREAM),
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.Matmul: _matmul,
    ops.Rope: lambda follower, op: follower.forbid(op.x, "a rotation mixes the channels"),
    ops.StoreKV: _store_kv,
    ops.Attention: _attention,
    ops.ChooseBlocks: _choose_blocks,
    ops.Activate: _activate,
    ops.GatedActivate: _gated_activate,
    ops.Xielu: _xielu,
    ops.Add: _ending("out", _STREAM, _all("a b", _SUM)),
    ops.Multiply: _multiply,
    ops.Magnitude: _ending("out", "it is a magnitude", {"x": "its magnitude is taken"}),
    ops.MixSlots: _ending("out", _SUM, _all("x weights residual", _SUM)),
    ops.GaussianTopK: _ending(
        "out", "it is what exceeds a row's own threshold", {"x": "its mean and its deviation are taken"}
    ),
    ops.MultiplySigmoid: _ending("out", "a gate weighs it", {"gate": _SIGMOID, "x": "a gate weighs it"}),
    ops.Scale: lambda follower, op: None,
    ops.Clamp: lambda follower, op: follower.forbid(op.x, "a clamp follows, and is not linear"),
    ops.ScaleByPosition: lambda follower, op: None,
    ops.Softcap: lambda follower, op: follower.forbid(op.x, "a soft cap follows, and is not linear"),
    ops.CopyHeads: _copy_heads,
    ops.HeadMatmul: _head_matmul,
    ops.SelectOutput: lambda follower, op: follower.held.update({op.out.index: follower.of(op.x)}),
    ops.Route: lambda follower, op: follower.forbid(op.logits, "routing is not linear"),
    ops.ExpertMatmul: _expert_matmul,
    ops.ExpertSum: _ending("out", _STREAM, {"x": _SUM}),
    ops.ExpertScale: lambda follower, op: None,
    ops.ExpertFactors: lambda follower, op: None,
    ops.ShortConvolution: _ending("out", "a convolution writes it", {"x": "a convolution follows"}),
    ops.CentredConvolution: _ending("out", "a convolution writes it", {"x": "a convolution follows"}),
    ops.GatedDeltaRule: _ending(
        "out", "the delta rule writes it", _all("queries keys values decay beta", "the delta rule follows")
    ),
    ops.SelectiveScan: _ending("out", "a scan writes it", _all("x dt b c", "a scan follows")),
    ops.Wkv: _ending(
        "out bonus", "a recurrence writes it", _all("receptance decay keys values rate", "a recurrence follows")
    ),
}


def _writer(channels: _Channels) -> str:
    return channels.writers[0].tensor if channels.writers else "what writes it"


def fold_scales(
    scales: Iterable[tuple[ScaleGroup, NDArray[np.float32]]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorFactors]:
    """Return what every tensor is multiplied by when groups' channels are divided by scales and their readers' columns
    multiplied.

    Shapes: scales float32[num_channels] of their group, positive; shapes those of the model's tensors, rows first.
    Raises: ShapeError if scales are not positive finite numbers, one per channel.
    """
    factors: dict[str, TensorFactors] = {}

    def multiply(name: str, more: TensorFactors) -> None:
        factors[name] = factors[name] * more if name in factors else more

    for group, values in scales:
        exact = values.astype(np.float64)
        if values.shape != (group.num_channels,) or not (np.isfinite(exact).all() and (exact > 0).all()):
            raise ShapeError(
                f"got scales {list(values.shape)} for {group.name}; wanted {group.num_channels} positive finite numbers"
            )
        for part in group.writers:
            multiply(part.tensor, _divisors(part, exact, shapes[part.tensor]))
        for reader in group.readers:
            multiply(reader, TensorFactors(columns=reader_scales(group, exact, shapes[reader])))
    return factors


def reader_scales(group: ScaleGroup, values: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Scales of a reader's columns: float64[columns], or float64[matrices, columns] where each matrix has its own."""
    spread = values if group.columns is None else values[group.columns]
    return spread if spread.size == shape[-1] else spread.reshape(-1, shape[-1])


def _divisors(part: ScaledPart, values: NDArray[np.float64], shape: tuple[int, ...]) -> TensorFactors:
    """1 / scale on the part, 1 elsewhere."""
    if part.is_vector and part.count > shape[-1]:
        # A norm's weights, a row for each group of channels.
        return TensorFactors(columns=(values**-part.power).reshape(shape))
    length = shape[-1] if part.is_vector else shape[-2]
    per_matrix = values.reshape(-1, part.count)
    divisors = np.ones((len(per_matrix), length))
    divisors[:, part.start : part.start + part.count] = per_matrix**-part.power
    whole = divisors[0] if len(divisors) == 1 else divisors
    if not part.is_vector:
        return TensorFactors(rows=whole)
    return TensorFactors(columns=whole)
