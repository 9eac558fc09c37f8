"""The record that describes a transformer architecture."""

from dataclasses import replace
from enum import Enum

from localinfer.kernels.ops import Activation, Gating, Pairing
from localinfer.models.decoder.block_config import XieluConfig
from localinfer.types import Record


class Norm(Enum):
    """Norm of every block of the model."""

    RMS = "rms"
    LAYER = "layer"


class QueryKeyNorm(Enum):
    """Norms of queries and keys, before or after RoPE.

    The shape of `attn_q_norm.weight` decides over what: one head, the whole projection, or each head with own weights.
    """

    NONE = "none"
    BEFORE_ROPE = "before_rope"
    AFTER_ROPE = "after_rope"
    OPTIONAL = "optional"
    """Before RoPE, if the file has the tensors."""


class Mixer(Enum):
    """Block that mixes the rows of a sequence in a layer: attention, or a recurrent one (`recurrent.py`)."""

    ATTENTION = "attention"
    SHORT_CONVOLUTION = "short_convolution"
    CENTRED_CONVOLUTION = "centred_convolution"
    """The same around each row, of models whose rows see later ones."""
    DELTA_NET = "delta_net"
    KIMI_DELTA = "kimi_delta"
    WKV = "wkv"
    MAMBA = "mamba"
    MAMBA2 = "mamba2"
    LIGHTNING = "lightning"
    PLAMO_MAMBA = "plamo_mamba"
    NONE = "none"
    """A layer of a feed-forward block alone."""


class SelfSight(Enum):
    """Layers in which the rows of one picture may see each other in both directions, where a batch says so."""

    NONE = "none"
    ALL = "all"
    WINDOWED = "windowed"
    """Those with a sliding window, which then bounds only what lies before a row."""


class RelativeBias(Enum):
    """Bias of attention's scores by the distance of two positions (`positions.py`)."""

    TABLE = "table"
    """A learned number for each head and bucket of distances, the same in all layers (T5, MPNet)."""
    PRODUCTS = "products"
    """Products of queries and keys with a vector for each bucket (DeBERTa)."""


OUTPUT_NAMES = {
    Mixer.ATTENTION: "attn_output",
    Mixer.SHORT_CONVOLUTION: "shortconv.out_proj",
    Mixer.CENTRED_CONVOLUTION: "shortconv.out_proj",
    Mixer.DELTA_NET: "ssm_out",
    Mixer.KIMI_DELTA: "attn_output",
    Mixer.WKV: "time_mix_output",
    Mixer.MAMBA: "ssm_out",
    Mixer.MAMBA2: "ssm_out",
    Mixer.LIGHTNING: "attn_output",
    Mixer.PLAMO_MAMBA: "ssm_out",
}
"""The matrix that a mixer's result is multiplied by."""


class DraftLayers(Record, kw_only=True):
    """Layers for next-token prediction."""

    from_normed: bool = True
    """They read hidden states after a norm, else before."""
    has_layer_norm: bool = False
    """A layer norm before the output head, in place of the model's norm."""
    feed_forward_norm: str | None = None
    """Replaces the model's."""


class Blocks(Enum):
    """Functions that write a layer."""

    PLAIN = "plain"
    """`decoder.write_layer`: attention, then a feed-forward block."""
    GEMMA3N = "gemma3n"
    GEMMA4 = "gemma4"
    ZAMBA2 = "zamba2"


class Architecture(Record, kw_only=True):
    """One model family, given the sizes of one model, without what follows from the tensors in a file.

    Fields with one entry per layer may be empty for the default in all layers. Norms are names of tensors in a block,
    None for no norm; if both branches name the same norm, it is computed once.
    """

    blocks: Blocks = Blocks.PLAIN
    """Functions that write a layer."""
    pairing: Pairing = Pairing.HALVES
    norm: Norm = Norm.RMS
    weighted_norms: bool = True
    """Norms have weights."""
    attention_norm: str | None = "attn_norm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "ffn_norm"
    feed_forward_post_norm: str | None = None
    attention_sum_norm: str | None = None
    """Norm of the residual stream after attention was added to it."""
    second_sum_norm: str | None = None
    """One more norm after that, of its result and the layer's input."""
    feed_forward_sum_norm: str | None = None
    """Norm of the residual stream after the feed-forward block was added to it."""
    first_attention_norm: bool = True
    """The first layer has the attention's norm."""
    expert_norm: str | None = None
    """Over the layer's input, for experts that run beside a dense block instead of in its place."""
    post_norm_epsilon: float | None = None
    """Epsilon of norms after a branch, if not the file's."""
    embedding_norm: str | None = None
    normalises_embedding: bool = False
    """A norm without weights follows the embedding."""
    output_norm: str | None = "output_norm"
    """After the last layer."""
    causal: bool = True
    """Positions see no later ones."""
    compares_pictures: bool = False
    """Pictures have a tower of their own, which makes vectors beside those of texts; no prompt holds their rows."""
    picture_sight: SelfSight = SelfSight.NONE
    """Rows of pictures that see the later ones of theirs."""
    picture_rows: int = 0
    """Rows of the family's largest picture, which one batch has to hold then; 0 where usual batches hold it."""
    hides_start: bool = False
    """Rows may be told which position they see first: what fills up a text before its first token is hidden."""
    has_token_types: bool = False
    """A vector of its token type is added to every embedding; encoders may do without one."""
    projects_embedding: bool = False
    """A matrix follows the embedding's norm, where the embedding is narrower."""
    has_prediction_head: bool = False
    """A matrix, the classifier's activation and a norm stand before the output matrix."""
    has_output_projection: bool = False
    """A matrix follows the output norm."""
    first_decision_layer: int | None = None
    """Layers from here on are plain ones of a head for decisions: their input is the output norm's result and a vector
    of the question's type, and a norm stands before the classifier's first matrix in place of behind it."""
    classifier_activation: Activation | None = None
    """Activation after a reranker's first matrix, None for tanh."""
    draft_layers: DraftLayers = DraftLayers()
    mixers: tuple[Mixer, ...] = ()
    """Kinds of the layers' blocks; empty for attention in all."""
    mixer_beside: Mixer | None = None
    """A recurrent block that reads what attention reads, in every layer."""
    norms_behind_attention: bool = False
    """Layers with attention have norms behind their branches (OLMo 2's), the others those named here."""
    mixer_norm_epsilon: float | None = None
    """Epsilon of the norm of a recurrent block's result, if not the file's."""
    has_feed_forward: bool = True
    """Some layer has a feed-forward block."""
    tiles_value_heads: bool = False
    """Delta nets have their value heads in the order of grouped keys repeated as a whole."""
    gates_attention: bool = False
    """`attn_q` also has a gate for every element of attention's result."""
    has_softplus_gates: bool = False
    """Gates in a matrix of their own weigh attention's result by their softplus, not by their sigmoid."""
    parallel: bool = False
    """Both branches read the layer's input (GPT-J's form) instead of one after the other."""
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    unweighted_query_key_norm: bool = False
    activation: Activation = Activation.SILU
    xielu: tuple[XieluConfig, ...] = ()
    """Per layer, in place of the activation."""
    gated: bool = True
    learned_positions: bool = False
    relative_bias: RelativeBias | None = None
    """Added to scores by distance."""
    max_alibi_bias: float = 0.0
    """0 without ALiBi."""
    latent_attention: bool = False
    attention_scale: float | None = None
    """Replaces the file's and 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Replaces the file's."""
    attention_output_scale: float = 1.0
    """Factor on attention's result."""
    projection_clamp: float = 0.0
    """Limit of queries, keys and values, 0 for none."""
    windows: tuple[int, ...] = ()
    """Positions of a sliding window, 0 for all."""
    chunks: tuple[int, ...] = ()
    """Positions of a chunk, 0 for all."""
    has_rope: tuple[bool, ...] = ()
    """Layers that have RoPE."""
    rope_base: float = 0.0
    """Replaces the file's, 0 to keep it."""
    windowed_rope_base: float = 0.0
    """Base of sliding-window layers if the file has none, 0 for the others' base."""
    full_rotary_size: int | None = None
    """Elements of a head that rotate in layers without a window, if not as many as in the others."""
    scales_windowed_rope: bool = True
    """The file's scaling is for sliding-window layers too."""
    divides_windowed_rope: bool = True
    """The file's divisors of frequencies are for sliding-window layers too."""
    rope_magnitude: float | None = None
    """Replaces the one of the file's scaling."""
    interleaves_axes: bool = False
    """Of the sections of M-RoPE, pairs take turns instead of lying side by side."""
    has_output_bias: bool = True
    """A bias beside the output matrix is added."""
    embedding_scale: float = 1.0
    scales_media: bool = False
    """That factor is of pictures and sounds too, and not of words alone."""
    residual_scale: float = 1.0
    stream_weight: float = 0.0
    """If not 0, a branch's norm is of the residual stream itself, which has this factor where the branch
    is added (DeepNorm, arXiv 2203.00555)."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """Replaces a missing one of the file, 0 without."""
    gating: Gating = Gating.SOFTMAX
    normalise_experts: bool = True
    weigh_expert_inputs: bool = False
    """Expert weights scale the experts' inputs, not their outputs."""
    dense_share: float = 0.0
    """Factor on the sum of experts and of a dense block that reads the same, 0 where experts take its place."""
    shared_expert_share: float = 1.0
    """Factor on the sum of the chosen experts and the shared one."""
    routes_layer_input: bool = False
    """Experts are chosen by what the layer reads, before its attention."""
    expert_clamps: tuple[float, ...] = ()
    """Limits of the gated activation of routed experts per layer; 0 for none."""
    dense_clamps: tuple[float, ...] = ()
    """Limits of the gated activation of other blocks per layer; 0 for none."""
    clamps_gate_input: bool = False
    """The limit is of the activation's input, not of its result."""
    temperature_scale: float = 0.0
    temperature_length: int = 0
    """Above 0, queries are sharpened by the logarithm of their position, counted in so many positions."""
    temperature_offset: int = 0
    temperature_without_rope_only: bool = False
    """Only layers without RoPE sharpen queries, else all."""

    def mixer(self, layer: int) -> Mixer:
        """The block that mixes rows in a layer."""
        return self.mixers[layer] if self.mixers else Mixer.ATTENTION

    def of_layer(self, layer: int) -> "Architecture":
        """The record with the norms and activation of one layer."""
        if self.first_decision_layer is not None and layer >= self.first_decision_layer:
            none = QueryKeyNorm.NONE
            return replace(self, gated=False, activation=Activation.RELU, norm=Norm.LAYER, query_key_norm=none)
        if not self.norms_behind_attention or self.mixer(layer) is not Mixer.ATTENTION:
            return self
        return replace(
            self,
            attention_norm=None,
            attention_post_norm="post_attention_norm",
            feed_forward_norm=None,
            feed_forward_post_norm="post_ffw_norm",
        )
