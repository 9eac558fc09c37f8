"""Further ops: factors, magnitudes, mixtures of slots, the Gaussian top-k, and the choice of positions."""

from localinfer.kernels.ops import Buffer, Chosen, FurtherOp
from localinfer.types import FloatArray


class Multiply(FurtherOp):
    """out = x * factor: a buffer as wide as x, one value per row, or float32[width] for every row."""

    out: Buffer
    x: Buffer
    factor: Buffer | FloatArray

    @property
    def is_by_row(self) -> bool:
        """Whether the factor is one value per row."""
        return isinstance(self.factor, Buffer) and self.factor.width == 1 and self.x.width != 1


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
