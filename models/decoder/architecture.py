"""The record that describes a decoder-only transformer architecture."""

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


class Blocks(Enum):
    """Which functions write a layer."""

    PLAIN = "plain"
    """`decoder.write_layer`: attention, then a feed-forward block."""
    GEMMA3N = "gemma3n"
    GEMMA4 = "gemma4"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family, given the sizes of one model, without what follows from the tensors in a file.

    Norms: names of tensors within a block, None for no norm. If both branches name the same norm, it is computed once.
    parallel: both branches read the layer's input (GPT-J's form) instead of one after the other.
    windows, chunks: positions a layer attends to, 0 for all. has_rope: which layers have RoPE. Each has one entry per
    layer, or is empty for the default in all layers. rope_base: replaces the file's, 0 to keep it. windowed_rope_base:
    base of sliding-window layers if the file has none, 0 for the others' base. rope_magnitude: replaces the one of the
    file's scaling. scales_windowed_rope, divides_windowed_rope: whether the scaling, and the divisors of frequencies in
    the file, are for sliding-window layers too.
    attention_scale: replaces the file's and 1 / sqrt(head_dim). max_alibi_bias: 0 without ALiBi.
    logit_softcap: where the file has none, 0 without.
    weigh_expert_inputs: expert weights scale the experts' inputs, not their outputs.
    temperature_length > 0 sharpens queries by the logarithm of their position, counted in temperature_length positions,
    in layers without RoPE or in all of them.
    """

    blocks: Blocks = Blocks.PLAIN
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
    max_alibi_bias: float = 0.0
    latent_attention: bool = False
    attention_scale: float | None = None
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    has_rope: tuple[bool, ...] = ()
    rope_base: float = 0.0
    windowed_rope_base: float = 0.0
    scales_windowed_rope: bool = True
    divides_windowed_rope: bool = True
    rope_magnitude: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    gating: Gating = Gating.SOFTMAX
    normalise_experts: bool = True
    weigh_expert_inputs: bool = False
    temperature_scale: float = 0.0
    temperature_length: int = 0
    temperature_offset: int = 0
    temperature_without_rope_only: bool = False
