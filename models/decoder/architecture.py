"""The record that describes a transformer architecture."""

from dataclasses import dataclass, replace
from enum import Enum

from localinfer.kernels.ops import Activation, Gating, Pairing
from localinfer.models.decoder.block_config import XieluConfig


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


class Mixer(Enum):
    """What mixes the rows of a sequence in a layer: attention, or a recurrent block (`recurrent.py`)."""

    ATTENTION = "attention"
    SHORT_CONVOLUTION = "short_convolution"
    DELTA_NET = "delta_net"
    KIMI_DELTA = "kimi_delta"
    WKV = "wkv"
    MAMBA = "mamba"
    MAMBA2 = "mamba2"
    LIGHTNING = "lightning"
    PLAMO_MAMBA = "plamo_mamba"
    NONE = "none"
    """A layer of a feed-forward block alone."""


class RelativeBias(Enum):
    """What attention adds to scores by the distance of two positions (`attention.py`)."""

    TABLE = "table"
    """A learned number for each head and bucket of distances, the same in all layers (T5, MPNet)."""
    PRODUCTS = "products"
    """Products of queries and keys with a vector for each bucket (DeBERTa)."""


OUTPUT_NAMES = {
    Mixer.ATTENTION: "attn_output",
    Mixer.SHORT_CONVOLUTION: "shortconv.out_proj",
    Mixer.DELTA_NET: "ssm_out",
    Mixer.KIMI_DELTA: "attn_output",
    Mixer.WKV: "time_mix_output",
    Mixer.MAMBA: "ssm_out",
    Mixer.MAMBA2: "ssm_out",
    Mixer.LIGHTNING: "attn_output",
    Mixer.PLAMO_MAMBA: "ssm_out",
}
"""The matrix that a mixer's result is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class DraftLayers:
    """Layers for next-token prediction. from_normed: they read hidden states after a norm, else before. has_layer_norm:
    before the output head, in place of the model's norm. feed_forward_norm: in place of the model's."""

    from_normed: bool = True
    has_layer_norm: bool = False
    feed_forward_norm: str | None = None


class Blocks(Enum):
    """Which functions write a layer."""

    PLAIN = "plain"
    """`decoder.write_layer`: attention, then a feed-forward block."""
    GEMMA3N = "gemma3n"
    GEMMA4 = "gemma4"
    ZAMBA2 = "zamba2"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family, given the sizes of one model, without what follows from the tensors in a file.

    Fields with one entry per layer may be empty for the default in all layers.

    Norms: names of tensors within a block, None for no norm. If both branches name the same norm, it is computed once.
    weighted_norms: whether norms have weights. normalises_embedding: a norm without weights follows the embedding.
    post_norm_epsilon: of norms after a branch, if not the file's. expert_norm: over the layer's input, for experts that
    run beside a dense block instead of in its place.
    attention_sum_norm, feed_forward_sum_norm: norms of the residual stream after a branch was added to it;
    second_sum_norm: one more after attention's, of its result and the layer's input. first_attention_norm: whether the
    first layer has the attention's norm. output_norm: after the last. causal: positions see no later
    ones. has_token_types: a vector of its token type is added to every embedding; encoders may do without one.
    projects_embedding: a matrix follows the embedding's norm, where the embedding is narrower. classifier_activation:
    of a reranker's first matrix, None for tanh. has_prediction_head: a matrix, that activation and a norm stand before
    the output matrix. has_output_projection: a matrix follows the output norm. mixers: of each layer; empty for
    attention in all. mixer_beside: a recurrent block that reads what attention reads, in every layer.
    norms_behind_attention: layers with attention have norms behind their branches (OLMo 2's), the others those that are
    named here. mixer_norm_epsilon: of the norm of a recurrent block's result, if not the file's. has_feed_forward:
    whether any layer has that block.
    tiles_value_heads: whether delta nets have their value heads in the order of grouped keys repeated as a whole.
    gates_attention: `attn_q` also has a gate for every element of attention's result. has_softplus_gates: gates in a
    matrix of their own weigh it by their softplus, not by their sigmoid.
    parallel: both branches read the layer's input (GPT-J's form) instead of one after the other.

    Attention: windows, chunks: positions a layer attends to, 0 for all. attention_scale: replaces the file's and
    1 / sqrt(head_dim). relative_bias: what is added to scores by distance. attention_softcap: replaces the file's.
    attention_output_scale: factor on attention's result. projection_clamp: limit of queries, keys and values, 0 for
    none. max_alibi_bias: 0 without ALiBi.
    temperature_length > 0 sharpens queries by the logarithm of their position, counted in temperature_length positions,
    in layers without RoPE or in all of them.

    RoPE: has_rope: which layers have it. rope_base: replaces the file's, 0 to keep it. windowed_rope_base: base of
    sliding-window layers if the file has none, 0 for the others' base. full_rotary_size: elements of a head that rotate
    in layers without a window, if not as many as in the others. scales_windowed_rope, divides_windowed_rope: whether
    the file's scaling, and its divisors of frequencies, are for sliding-window layers too. rope_magnitude: replaces the
    one of the file's scaling.

    Feed-forward: xielu: per layer, in place of the activation. expert_clamps, dense_clamps: limits of the gated
    activation per layer, of routed experts and of other blocks; 0 for none. clamps_gate_input: the limit is of what the
    activation reads, not of its result. weigh_expert_inputs: expert weights scale
    the experts' inputs, not their outputs. routes_layer_input: experts are chosen by what the layer reads, before its
    attention. dense_share: factor on the sum of experts and of a dense block that reads the same, 0 where experts take
    its place. shared_expert_share: factor on the sum of the chosen experts and the shared one.

    stream_weight: where it is not 0, a branch's norm is of the residual stream itself, which has this factor where the
    branch is added (DeepNorm, arXiv 2203.00555).

    has_output_bias: whether a bias beside the output matrix is added. logit_softcap: where the file has none, 0
    without. blocks: which functions write a layer.
    """

    blocks: Blocks = Blocks.PLAIN
    pairing: Pairing = Pairing.HALVES
    norm: Norm = Norm.RMS
    weighted_norms: bool = True
    attention_norm: str | None = "attn_norm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "ffn_norm"
    feed_forward_post_norm: str | None = None
    attention_sum_norm: str | None = None
    second_sum_norm: str | None = None
    feed_forward_sum_norm: str | None = None
    first_attention_norm: bool = True
    expert_norm: str | None = None
    post_norm_epsilon: float | None = None
    embedding_norm: str | None = None
    normalises_embedding: bool = False
    output_norm: str | None = "output_norm"
    causal: bool = True
    has_token_types: bool = False
    projects_embedding: bool = False
    has_prediction_head: bool = False
    has_output_projection: bool = False
    classifier_activation: Activation | None = None
    draft_layers: DraftLayers = DraftLayers()
    mixers: tuple[Mixer, ...] = ()
    mixer_beside: Mixer | None = None
    norms_behind_attention: bool = False
    mixer_norm_epsilon: float | None = None
    has_feed_forward: bool = True
    tiles_value_heads: bool = False
    gates_attention: bool = False
    has_softplus_gates: bool = False
    parallel: bool = False
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    unweighted_query_key_norm: bool = False
    activation: Activation = Activation.SILU
    xielu: tuple[XieluConfig, ...] = ()
    gated: bool = True
    learned_positions: bool = False
    relative_bias: RelativeBias | None = None
    max_alibi_bias: float = 0.0
    latent_attention: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_output_scale: float = 1.0
    projection_clamp: float = 0.0
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    has_rope: tuple[bool, ...] = ()
    rope_base: float = 0.0
    windowed_rope_base: float = 0.0
    full_rotary_size: int | None = None
    scales_windowed_rope: bool = True
    divides_windowed_rope: bool = True
    rope_magnitude: float | None = None
    has_output_bias: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    stream_weight: float = 0.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    gating: Gating = Gating.SOFTMAX
    normalise_experts: bool = True
    weigh_expert_inputs: bool = False
    dense_share: float = 0.0
    shared_expert_share: float = 1.0
    routes_layer_input: bool = False
    expert_clamps: tuple[float, ...] = ()
    dense_clamps: tuple[float, ...] = ()
    clamps_gate_input: bool = False
    temperature_scale: float = 0.0
    temperature_length: int = 0
    temperature_offset: int = 0
    temperature_without_rope_only: bool = False

    def mixer(self, layer: int) -> Mixer:
        """What mixes rows in a layer."""
        return self.mixers[layer] if self.mixers else Mixer.ATTENTION

    def of_layer(self, layer: int) -> "Architecture":
        """The record with the norms of one layer."""
        if not self.norms_behind_attention or self.mixer(layer) is not Mixer.ATTENTION:
            return self
        return replace(
            self,
            attention_norm=None,
            attention_post_norm="post_attention_norm",
            feed_forward_norm=None,
            feed_forward_post_norm="post_ffw_norm",
        )
