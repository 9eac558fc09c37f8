"""Further ops: those that single families of models have, row by row like all others."""

from localinfer.kernels.ops import Buffer, Chosen, FurtherOp
from localinfer.types import FloatArray


class Multiply(FurtherOp):
    """out = x * factor: a buffer as wide as x, one value per row or for each of equal parts of it (heads), or
    float32[width] for every row."""

    out: Buffer
    x: Buffer
    factor: Buffer | FloatArray

    @property
    def is_by_row(self) -> bool:
        """Whether the factor is one value per row."""
        return isinstance(self.factor, Buffer) and self.factor.width == 1 and self.x.width != 1

    @property
    def is_by_part(self) -> bool:
        """Whether the factor is one value for several columns, but not for all."""
        return isinstance(self.factor, Buffer) and 1 < self.factor.width != self.x.width


class Magnitude(FurtherOp):
    """out = sqrt(mean(x * x)) of each row, one value."""

    out: Buffer
    x: Buffer


class MixSlots(FurtherOp):
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


class GaussianTopK(FurtherOp):
    """out = max(0, x - (mean(x) + num_deviations * std(x))) over each row, with the standard deviation of a sample.

    It keeps the share of a normal distribution above so many deviations (Spark Transformer, arXiv 2506.06644,
    section 3.1).
    """

    out: Buffer
    x: Buffer
    num_deviations: float


class ChooseBlocks(FurtherOp):
    """Choose the best blocks of a row's positions by the keys of a layer of the cache that keeps keys alone.

    The score of a position is scale times query . key, or with weights [num_heads] the sum over heads of weight *
    max(0, scale * query . key); of a block, the largest of its positions up to the row's. A row's own block and the
    num_local - 1 before it come first; of equal scores the lower block wins. Rows of no more than `chosen.count` blocks
    choose all of them.

    With weights there is one list, else each head has one. max_positions: of a sequence.
    """

    chosen: Chosen
    queries: Buffer
    layer: int
    num_heads: int
    key_size: int
    max_positions: int
    scale: float = 1.0
    weights: Buffer | None = None
    num_local: int = 0

    @property
    def num_positions(self) -> int:  # type: ignore[override]
        """Positions that scores have room for."""
        return self.max_positions


class Xielu(FurtherOp):
    """out = beta * x + (positive * x^2 if x > 0 else negative * (expm1(min(x, epsilon)) - x)): arXiv 2411.13010."""

    out: Buffer
    x: Buffer
    positive: float
    negative: float
    beta: float
    epsilon: float


class Clamp(FurtherOp):
    """x = min(max(x, -limit), limit), in place; only_above: x = min(x, limit)."""

    x: Buffer
    limit: float
    only_above: bool = False


class PreviousRow(FurtherOp):
    """out[r] = x[r - 1] of the same sequence; of a segment's first row what the segment carries, or zeros.

    The segment also says where x of its last row goes. x: None where segments have one row each.
    """

    out: Buffer
    x: Buffer | None = None


class ScaleByPosition(FurtherOp):
    """x *= 1 + slope * ln(1 + floor((position of the row + offset) / period)), in place (Llama 4, Ministral 3)."""

    x: Buffer
    period: int
    slope: float
    offset: int = 0


class ExpertScale(FurtherOp):
    """x[slot] *= expert_weights[slot], in place (models that weigh the input of the down projection)."""

    x: Buffer
    expert_weights: Buffer


class ExpertFactors(FurtherOp):
    """x[slot] *= factors[expert_ids[slot]], in place: one number beside each expert's matrix; factors float32[experts].

    Files of NVFP4 blocks, whose own scales have few bits, have them.
    """

    x: Buffer
    expert_ids: Buffer
    factors: FloatArray


class Softcap(FurtherOp):
    """x = cap * tanh(x / cap), in place."""

    x: Buffer
    cap: float


class MultiplySigmoid(FurtherOp):
    """out = x * sigmoid(gate); gate is as wide as x, or one value for each of equal parts of a row (heads)."""

    out: Buffer
    x: Buffer
    gate: Buffer

    @property
    def is_by_part(self) -> bool:
        """Whether the gate has one value for several columns."""
        return self.gate.width != self.x.width


class CopyHeads(FurtherOp):
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


class AddVector(FurtherOp):
    """x += vector, in place; vector float32[width]."""

    x: Buffer
    vector: FloatArray


class MeanRows(FurtherOp):
    """out[r] = mean over the rows of the segment that output row r lies in; `out` has Rows.OUTPUT.

    The rows are summed one by one, from the first to the last.
    """

    out: Buffer
    x: Buffer
