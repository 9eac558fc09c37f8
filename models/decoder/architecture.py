"""The record that describes a transformer architecture."""

from dataclasses import dataclass
from enum import Enum

from localinfer.kernels.ops import Activation, Gating, Pairing


class Norm(Enum):
    """Which norm every block of the model uses."""

    RMS = "rms"
    LAYER = "layer"


class QueryKeyNorm(Enum):
    """Whether queries and keys are normed, before or after RoPE.

    The shape of `attn_q_norm.weight` decides over what: one head, the whole projection, or each head with own weights.
    """

    NONE = "none"
    BEFORE_ROPE = "before_rope"
    AFTER_ROPE = "after_rope"
    OPTIONAL = "optional"
    """Before RoPE, if the file has the tensors."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family, given the sizes of one model, without what follows from the tensors in a file.

    Norms: names of tensors within a block, None for no norm. If both branches name the same norm, it is computed once.
    attention_sum_norm, feed_forward_sum_norm: norms of the residual stream after a branch was added to it;
    second_sum_norm: one more after attention's, of its result and the layer's input. first_attention_norm: whether the
    first layer has the attention's norm. output_norm: after the last layer.
    causal: positions see no later ones. has_token_types: the first token type's vector is added to every embedding.
    classifier_activation: of a reranker's first matrix, None for tanh.
    parallel: both branches read the layer's input (GPT-J's form) instead of one after the other.
    windows, chunks: positions a layer attends to, 0 for all. has_rope: which layers have RoPE. Each has one entry per
    layer, or is empty for the default in all layers. rope_base: replaces the file's, 0 to keep it. windowed_rope_base:
    base of sliding-window layers if the file has none, 0 for the others' base. rope_magnitude: replaces the one of the
    file's scaling.
    attention_scale: replaces the file's and 1 / sqrt(head_dim). max_alibi_bias: 0 without ALiBi.
    weigh_expert_inputs: expert weights scale the experts' inputs, not their outputs.
    temperature_length > 0 sharpens queries by the logarithm of their position, counted in temperature_length positions,
    in layers without RoPE or in all of them.
    """

    pairing: Pairing = Pairing.HALVES
    norm: Norm = Norm.RMS
    attention_norm: str | None = "attn_norm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "ffn_norm"
    feed_forward_post_norm: str | None = None
    attention_sum_norm: str | None = None
    second_sum_norm: str | None = None
    feed_forward_sum_norm: str | None = None
    first_attention_norm: bool = True
    embedding_norm: str | None = None
    output_norm: str | None = "output_norm"
    causal: bool = True
    has_token_types: bool = False
    classifier_activation: Activation | None = None
    parallel: bool = False
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    unweighted_query_key_norm: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    learned_positions: bool = False
    max_alibi_bias: float = 0.0
    latent_attention: bool = False
    attention_scale: float | None = None
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    has_rope: tuple[bool, ...] = ()
    rope_base: float = 0.0
    windowed_rope_base: float = 0.0
    scales_windowed_rope: bool = True
    rope_magnitude: float | None = None
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
