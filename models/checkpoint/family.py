"""The record of a model type, and the names of modules that many of them share.

Names on the left are GGUF's, within a block; on the right the checkpoint's, within a layer. `{expert}` stands for the
number of an expert: its matrices are stacked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localinfer.models.checkpoint.changes import FIRST_HALVES, SECOND_HALVES, Change, Derived
from localinfer.models.checkpoint.settings import Settings

Metadata = dict[str, Any]

SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu", "gelu_fast")
RELU_SQUARED = ("relu2",)

PARTS = ("gate", "up", "down")
ATTENTION = {**{f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"}, "attn_output": "self_attn.o_proj"}
HEAD_NORMS = {f"attn_{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def gated(
    module: str, suffix: str = "", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """The three matrices of a gated block."""
    return {f"ffn_{part}{suffix}": f"{module}.{name}" for part, name in zip(PARTS, names, strict=True)}


GATED = gated("mlp")
W_NAMES = ("w1", "w3", "w2")
EXPERTS = {"ffn_gate_inp": "mlp.gate", **gated("mlp.experts.{expert}", "_exps")}
SHARED_EXPERTS = gated("mlp.shared_experts", "_shexp")
SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **gated("mlp.shared_expert", "_shexp")}
SPARSE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **gated("block_sparse_moe.experts.{expert}", "_exps", W_NAMES),
}
"""Router and experts under the name that Mixtral's module has."""
LLAMA = {**NORMS, **ATTENTION, **GATED}
ROUTER_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
NO_ROPE: Mapping[str, object] = {"rope.dimension_count": None, "rope.freq_base": None}
GROUPS: Mapping[str, object] = {"expert_group_count": ("n_group", 1), "expert_group_used_count": ("topk_group", 1)}
"""Groups of experts, of which some are chosen from."""
SCALED_WEIGHTS: Mapping[str, object] = {"expert_weights_scale": ("routed_scaling_factor", 1.0)}
SIGMOID: Mapping[str, object] = {"expert_gating_func": 2, **SCALED_WEIGHTS}
"""Routing by sigmoids, and the factor on the weights of experts."""


@dataclass(frozen=True)
class Part:
    """Tensor that is made of a module or tensor of this name, by a change."""

    source: str
    change: Change


Source = str | Part | tuple[str | Part, ...]
"""Source of a tensor: one name, or those that different writers have for it."""

FUSED_EXPERTS: dict[str, Source] = {
    "ffn_gate_exps.weight": Part("mlp.experts.gate_up_proj", FIRST_HALVES),
    "ffn_up_exps.weight": Part("mlp.experts.gate_up_proj", SECOND_HALVES),
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
"""Stacks of all experts' matrices."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type."""

    architecture: str
    """GGUF's name."""
    blocks: Mapping[str, Source]
    """Modules of a layer."""
    parameters: Mapping[str, Source] = field(default_factory=dict)
    """Tensors of a layer that are not a module's weight or bias, by whole names; several of GGUF's may be made of
    one."""
    outside: Mapping[str, Source] = field(default_factory=lambda: {"token_embd": "embed_tokens", "output_norm": "norm"})
    """Modules beyond the layers."""
    heads: Mapping[str, Source] = field(default_factory=dict)
    """Modules beside the model, without its prefix."""
    unused: str = ""
    """Pattern of the names of tensors that nothing here goes through."""
    layers: str = "layers"
    """Text before the number of a layer."""
    left_out: tuple[str, ...] = ()
    """Tensors of a layer that nothing needs, because they hold settings."""
    activations: tuple[str, ...] = SILU
    """Names of the only activation it runs with."""
    rows_permuted: bool = False
    """GGUF stores the rows of queries and keys so that the two elements that rotate together lie side by side."""
    norms_plus_one: bool = False
    """GGUF stores 1 + w, but for `plain_norms`."""
    plain_norms: tuple[str, ...] = ()
    changes: Callable[[Settings], Mapping[str, Change]] = lambda settings: {}
    """Further differences of GGUF's tensors, by their names, with or without `.weight`, where settings decide."""
    derived: Callable[[Settings], Mapping[str, Derived]] = lambda settings: {}
    """Tensors that GGUF has in place of several, by its names."""
    inner: tuple[str, ...] = ()
    """Names of tensors that only `derived` ones are made of."""
    has_windows: bool = False
    """Layers may have a sliding window."""
    layer_kinds: tuple[str, ...] = ()
    """Names that `layer_types` may have beside attention."""
    has_attention: bool = True
    """Some layer has attention."""
    has_latent_attention: bool = False
    """Attention is DeepSeek's."""
    has_layer_norms: bool = False
    """Norms subtract the mean."""
    epsilon: str = "rms_norm_eps"
    """The key of the norms' epsilon."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of settings in its files, by the usual ones."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of the model's class for absent keys. With a `partial_rotary_factor` among them it reads that, where
    other classes rotate whole heads whatever a file says."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Settings that run with one value only, which is the default too."""
    seen: str = ""
    """Settings that are read elsewhere or change nothing, in one text."""
    keys: Mapping[str, object] = field(default_factory=dict)
    """Keys only this family has, after the architecture's prefix: a value, None for a key that it lacks, or a setting
    and its default (see `Settings.typed`)."""
    metadata: Callable[[Settings], Metadata] = lambda settings: {}
    """Further such keys, where one setting does not give them; `keys` go before them."""
    per_layer: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Metadata that checkpoints hold as a tensor in every layer, by key, and its value where they do not."""
    variant: "Callable[[Settings, Family], Family] | None" = None
    """The family of one model, if its settings decide."""


def experts(settings: Settings) -> Metadata:
    """The numbers of experts and of those that run, and their size."""
    key = "num_local_experts" if settings.get("num_local_experts") else "num_experts"
    return {
        "expert_count": settings.integer(key, low=1),
        "expert_used_count": settings.integer("num_experts_per_tok", low=1),
        "expert_feed_forward_length": settings.integer("moe_intermediate_size", settings.integer("intermediate_size")),
    }


def usual_epsilon(settings: Settings) -> float | None:
    """1e-6, for what has this epsilon whatever the model's is; None where they are the same."""
    return None if settings.number("rms_norm_eps", 1e-6) == 1e-6 else 1e-6


def normed_experts(settings: Settings, default: bool = False) -> Metadata:
    """The metadata of `experts`, and whether the weights of those that run sum to 1."""
    return {**experts(settings), "expert_weights_norm": settings.boolean("norm_topk_prob", default)}


def qwen_windows(settings: Settings) -> Metadata:
    """Qwen's windows, off in most models: in the layers listed, or from `max_window_layers` on."""
    first = settings.integer("max_window_layers", 28)
    switch_windows(settings, lambda layer: layer >= first)
    return {}


def repeat_layer_types(settings: Settings, *kinds: str) -> None:
    """Give layers these kinds in turn, unless the file says otherwise."""
    if not settings.entries("layer_types"):
        num_layers = settings.integer("num_hidden_layers", low=1)
        settings.put("layer_types", [kinds[layer % len(kinds)] for layer in range(num_layers)])


def one_window(settings: Settings) -> Metadata:
    """The window of a class that has it in every layer, whatever `layer_types` says."""
    settings.put("layer_types", [])
    return {}


def named_window(settings: Settings) -> Metadata:
    """The same for architectures whose GGUF files have windows only in layers that they name."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    settings.put("layer_types", ["sliding_attention"] * num_layers if settings.get("sliding_window") else [])
    return {}


def switch_windows(settings: Settings, is_windowed: Callable[[int], bool]) -> None:
    """Settle the windows of a family with a switch for them. is_windowed: whether a layer has one by default.

    Raises: UnsupportedFormatError where they are off and a layer is said to have one.
    """
    num_layers = settings.integer("num_hidden_layers", low=1)
    is_on = settings.boolean("use_sliding_window", False)
    kinds = settings.entries("layer_types")
    if not is_on and "sliding_attention" in kinds:
        raise settings.unsupported("layer_types", "sliding windows where use_sliding_window is true")
    if not kinds:
        kinds = [
            "sliding_attention" if is_on and is_windowed(layer) else "full_attention" for layer in range(num_layers)
        ]
    settings.put("layer_types", kinds)
    if "sliding_attention" not in kinds:
        settings.put("sliding_window", 0)
