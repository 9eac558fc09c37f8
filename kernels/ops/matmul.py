"""Products with weights: matrices, matrices per head, and experts with their routing."""

from collections.abc import Sequence
from enum import Enum

from localinfer.kernels.ops.records import Buffer, LinearWeight, OpRecord
from localinfer.types import FloatArray

MAX_EXPERTS = 4096
"""Experts of a router: kernels have scratch memory for this many scores."""


class Projection(OpRecord):
    """One product of a `Matmul`: out = residual + scale * (x @ weight.T + bias)."""

    weight: LinearWeight
    out: Buffer
    bias: FloatArray | None = None
    """float32[num_rows] of the weight."""
    residual: Buffer | None = None
    """May be `out` itself."""
    scale: float = 1.0


class Matmul(OpRecord):
    """Multiply one input by one or several weights; all `out` hold the same rows as x."""

    x: Buffer
    projections: Sequence[Projection]


class HeadMatmul(OpRecord):
    """For every head h: out[h][out_offset:] = weight[h] @ x[h][x_offset:], num_rows from num_columns elements.

    weight is a stack of one matrix per head; the rest of out stays (latent attention, arXiv 2405.04434).
    """

    out: Buffer
    x: Buffer
    weight: LinearWeight
    out_head_size: int
    x_head_size: int
    out_offset: int = 0
    x_offset: int = 0


class Gating(Enum):
    """Functions from router logits to expert weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_SELECTED = "softmax_selected"
    """Softmax over the selected experts only."""
    SPARSE_MIXER = "sparse_mixer"
    """Of each expert chosen, its share in a softmax over those left that are within a margin of it (SparseMixer-v2,
    arXiv 2409.12136)."""


class Routing(OpRecord):
    """Selection of experts by `Route`: the best `num_selected` by gating value.

    Of equal values the lower expert wins, and slots are in order of falling value. SOFTMAX_SELECTED and
    SPARSE_MIXER select by logits.
    """

    num_experts: int
    num_selected: int
    gating: Gating
    normalise: bool = False
    """Divide the selected weights by their sum."""
    scale: float = 1.0
    """Factor on the weights afterwards."""
    selection_bias: FloatArray | None = None
    """Added to gating values for the selection only."""
    num_groups: int = 1
    """More than 1: first keep the groups of experts with the largest sums of their best values."""
    num_selected_groups: int = 1
    num_group_values: int = 2
    """Best values of a group that are summed: two in DeepSeek-V3, one in DeepSeek-V2."""
    margin: float = 0.0
    """For SPARSE_MIXER: bound of (best - logit) / max(|logit|, best)."""
    output_scales: FloatArray | None = None
    """float32[num_experts]: each expert's own factor on its weight."""


class Route(OpRecord):
    """Choose experts per row; ids are stored as float32 whole numbers. Both outputs are num_selected wide."""

    expert_ids: Buffer
    expert_weights: Buffer
    logits: Buffer
    routing: Routing


class ExpertMatmul(OpRecord):
    """For each row and each selected expert e: out[row, slot] = x[row or row, slot] @ weight[e].T + bias[e].

    out is num_selected * num_rows(weight) wide; x is num_columns wide, num_selected times that if input_per_slot.
    bias float32[num_experts, num_rows].
    """

    out: Buffer
    x: Buffer
    weight: LinearWeight
    expert_ids: Buffer
    bias: FloatArray | None = None
    input_per_slot: bool = False


class ExpertSum(OpRecord):
    """out = residual + sum over slots, in slot order, of expert_weights[slot] * x[slot]."""

    out: Buffer
    x: Buffer
    expert_weights: Buffer
    residual: Buffer | None = None


class ExpertScale(OpRecord):
    """x[slot] *= expert_weights[slot], in place (models that weigh the input of the down projection)."""

    x: Buffer
    expert_weights: Buffer


class ExpertFactors(OpRecord):
    """x[slot] *= factors[expert_ids[slot]], in place: one number beside each expert's matrix; factors float32[experts].

    Files of NVFP4 blocks, whose own scales have few bits, have them.
    """

    x: Buffer
    expert_ids: Buffer
    factors: FloatArray
