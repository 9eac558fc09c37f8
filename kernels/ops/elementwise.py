"""Ops that look rows up, normalise them, apply formulas to their elements, or copy them."""

from enum import Enum

from localinfer.kernels.ops.records import Buffer, EmbeddingTable, OpRecord
from localinfer.types import FloatArray


class Activation(Enum):
    """Elementwise functions between the two feed-forward matrices."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    GELU_QUICK = "gelu_quick"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    SWIGLU_CLAMPED = "swiglu_clamped"
    """gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7), g * sigmoid(1.702 g) * (u + 1). Gated only."""
    SOFTPLUS = "softplus"
    SIGMOID = "sigmoid"
    TANH = "tanh"


class Embed(OpRecord):
    """out[r] = scale * table[token_ids[r]]."""

    out: Buffer
    table: EmbeddingTable
    scale: float = 1.0


class EmbedPositions(OpRecord):
    """out[r] += table[position of r] (learned absolute positions)."""

    out: Buffer
    table: EmbeddingTable


class EmbedTypes(OpRecord):
    """out[r] += table[token type of r], or out[r] = it: the text of a pair that a row is of (BERT, arXiv 1810.04805,
    section 3), or whether an adapter changes the row."""

    out: Buffer
    table: EmbeddingTable
    adds: bool = True


class EmbedMedia(OpRecord):
    """x[r] = part `part` of the embedding that the batch gives for row r, or x[r] += it; rows of words stay.

    An embedding (`program.MediaRows`) is one or more parts as wide as x: what enters the first layer, then what is
    added after deeper ones (Qwen 3 VL's deepstack, arXiv 2511.21631).
    """

    x: Buffer
    part: int = 0
    adds: bool = False


class RmsNorm(OpRecord):
    """Root-mean-square norm (arXiv 1910.07467) over each row, or over each `group_size` elements of it.

    weight: float32[group_size] shared by all groups, or float32[width], or None for 1.
    """

    out: Buffer
    x: Buffer
    weight: FloatArray | None
    epsilon: float
    group_size: int = 0


class LayerNorm(OpRecord):
    """Layer norm (arXiv 1607.06450), shapes as in `RmsNorm`."""

    out: Buffer
    x: Buffer
    weight: FloatArray | None
    bias: FloatArray | None
    epsilon: float
    group_size: int = 0


class Activate(OpRecord):
    """out = kind(x)."""

    out: Buffer
    x: Buffer
    kind: Activation


class GatedActivate(OpRecord):
    """out = kind(gate) * up; gate and up may be two halves of one width only if given as separate buffers.

    limit > 0, of SILU only: out = min(silu(gate), limit) * clamp(up, -limit, limit) (Step 3.5).
    """

    out: Buffer
    gate: Buffer
    up: Buffer
    kind: Activation
    limit: float = 0.0


class Xielu(OpRecord):
    """out = beta * x + (positive * x^2 if x > 0 else negative * (expm1(min(x, epsilon)) - x)): arXiv 2411.13010."""

    out: Buffer
    x: Buffer
    positive: float
    negative: float
    beta: float
    epsilon: float


class GaussianTopK(OpRecord):
    """out = max(0, x - (mean(x) + num_deviations * std(x))) over each row, with the standard deviation of a sample.

    It keeps the share of a normal distribution above so many deviations (Spark Transformer, arXiv 2506.06644,
    section 3.1).
    """

    out: Buffer
    x: Buffer
    num_deviations: float


class Softmax(OpRecord):
    """out = exp(x - max(x)) over its sum, of each row."""

    out: Buffer
    x: Buffer


class Softcap(OpRecord):
    """x = cap * tanh(x / cap), in place."""

    x: Buffer
    cap: float


class Clamp(OpRecord):
    """x = min(max(x, -limit), limit), in place; only_above: x = min(x, limit)."""

    x: Buffer
    limit: float
    only_above: bool = False


class Bound(OpRecord):
    """out = min(max(x, lowest), highest)."""

    out: Buffer
    x: Buffer
    lowest: float
    highest: float


class Add(OpRecord):
    """out = a + scale * b."""

    out: Buffer
    a: Buffer
    b: Buffer
    scale: float = 1.0


class AddVector(OpRecord):
    """x += vector, in place."""

    x: Buffer
    vector: FloatArray
    """float32[width]."""


class Scale(OpRecord):
    """x *= factor, in place."""

    x: Buffer
    factor: float


class ScaleByPosition(OpRecord):
    """x *= 1 + slope * ln(1 + floor((position of the row + offset) / period)), in place (Llama 4, Ministral 3)."""

    x: Buffer
    period: int
    slope: float
    offset: int = 0


class Multiply(OpRecord):
    """out = x * factor: a buffer as wide as x, one value per row or for each of equal parts of it (heads), or
    float32[width] for every row."""

    out: Buffer
    x: Buffer
    factor: Buffer | FloatArray

    @property
    def is_by_row(self) -> bool:
        """True if the factor is one value per row."""
        return isinstance(self.factor, Buffer) and self.factor.width == 1 and self.x.width != 1

    @property
    def is_by_part(self) -> bool:
        """True if the factor is one value for several columns, but not for all."""
        return isinstance(self.factor, Buffer) and 1 < self.factor.width != self.x.width


class MultiplySigmoid(OpRecord):
    """out = x * sigmoid(gate); gate is as wide as x, or one value for each of equal parts of a row (heads)."""

    out: Buffer
    x: Buffer
    gate: Buffer

    @property
    def is_by_part(self) -> bool:
        """True if the gate has one value for several columns."""
        return self.gate.width != self.x.width


class Magnitude(OpRecord):
    """out = sqrt(mean(x * x)) of each row, one value."""

    out: Buffer
    x: Buffer


class MixSlots(OpRecord):
    """out[b] = residual[b] + sum over slots a, in order, of weights[b * num_slots + a] * x[a].

    x holds num_slots slots of one size, out and residual any number of them. Without weights all are 1; the first
    `first_slot` slots of out are then the residual's.
    """

    out: Buffer
    x: Buffer
    num_slots: int
    weights: Buffer | None = None
    residual: Buffer | None = None
    first_slot: int = 0


class CopyHeads(OpRecord):
    """Copy `width` elements of every head of x, from x_offset in it to out_offset in out's head; the rest stays.

    x_head_size 0: x is one head, which every head of out gets.
    """

    out: Buffer
    x: Buffer
    num_heads: int
    width: int
    out_head_size: int
    x_head_size: int
    out_offset: int = 0
    x_offset: int = 0


class SelectOutput(OpRecord):
    """Copy the rows that want logits; `out` has Rows.OUTPUT."""

    out: Buffer
    x: Buffer


class MeanRows(OpRecord):
    """out[r] = mean over the rows of the segment that output row r lies in; `out` has Rows.OUTPUT.

    The rows are summed one by one, from the first to the last.
    """

    out: Buffer
    x: Buffer
