"""What distinguishes one decoder-only transformer from another, as one record of plain values."""

from dataclasses import dataclass
from enum import Enum

from localinfer.kernels.ops import Activation, Gating, Pairing


class Norm(Enum):
    """Which norm every block of the model uses."""

    RMS = "rms"
    LAYER = "layer"


class QueryKeyNorm(Enum):
    """Whether queries and keys are normed, and on which side of RoPE.

    The shape of `attn_q_norm.weight` says over what: one head, the whole projection, or each head by its own weights.
    """

    NONE = "none"
    BEFORE_ROPE = "before_rope"
    AFTER_ROPE = "after_rope"
    OPTIONAL = "optional"
    """Before RoPE, in those files that hold the tensors."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family, given the sizes of one model. Everything a file decides by holding a tensor is not here.

    Names of norms are tensor names within a block; None where there is no such norm. If both branches name the same
    norm, it is computed once. parallel: both branches read the layer's input (GPT-J's form) instead of one after
    the other. windows and chunks: positions a layer sees, 0 for all; has_rope: which layers rotate; each is empty if
    all layers do the plain thing. weigh_expert_inputs: expert weights scale what the experts read, not what they say.
    temperature_length > 0 sharpens queries far into the context, in layers without RoPE or in all of them.
    """

    pairing: Pairing = Pairing.HALVES
    norm: Norm = Norm.RMS
    attention_norm: str | None = "attn_norm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "ffn_norm"
    feed_forward_post_norm: str | None = None
    embedding_norm: str | None = None
    parallel: bool = False
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    unweighted_query_key_norm: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    learned_positions: bool = False
    alibi: bool = False
    attention_scale: float | None = None
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    has_rope: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    gating: Gating = Gating.SOFTMAX
    normalise_experts: bool = True
    weigh_expert_inputs: bool = False
    temperature_scale: float = 0.0
    temperature_length: int = 0
    temperature_offset: int = 0
    temperature_without_rope_only: bool = False
