"""The model types of config.json that run here: how each names its weights, and what its settings mean in GGUF's keys.

A family is a table. Names on the left are GGUF's, within a block and without `.weight`; on the right the checkpoint's,
within a layer. `{expert}` stands for the number of an expert: its matrices are stacked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MIN_SCALE

Metadata = dict[str, object]

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu")

_ATTENTION = {**{f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"}, "attn_output": "self_attn.o_proj"}
_HEAD_NORMS = {f"attn_{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PARTS = ("gate", "up", "down")
_GATED = {f"ffn_{part}": f"mlp.{part}_proj" for part in _PARTS}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in _PARTS},
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in _PARTS},
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{matrix}"
        for part, matrix in zip(_PARTS, ("w1", "w3", "w2"), strict=True)
    },
}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LLAMA = {**_NORMS, **_ATTENTION, **_GATED}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type.

    architecture: GGUF's name. activations: names of the only activation it runs with. rows_permuted: GGUF stores the
    rows of queries and keys so that the two elements that rotate together lie side by side. norms_plus_one: GGUF stores
    1 + w. windows: metadata of layers with a sliding window. parameters: module and leaf of tensors whose names have no
    leaf, by the ends of their names. stacks: stems whose module holds the matrices of all experts, with the first and
    the distance of the rows that are theirs; plain numbers lie there as [experts, columns, rows]. defaults: what the
    model's class takes for absent keys. metadata: keys only this family has, after the architecture's prefix.
    """

    architecture: str
    blocks: Mapping[str, str]
    activations: tuple[str, ...] = _SILU
    rows_permuted: bool = False
    norms_plus_one: bool = False
    epsilon: str = "rms_norm_eps"
    has_windows: bool = False
    parameters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stacks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    metadata: Callable[[Settings], Metadata] = lambda settings: {}


def _no_windows(settings: Settings) -> Metadata:
    """Qwen's windows start at a layer that no published model reaches."""
    if settings.boolean("use_sliding_window", False):
        raise settings.unsupported("use_sliding_window", "models that see their whole context")
    return {}


def _granite(settings: Settings) -> Metadata:
    return {
        "attention.scale": settings.number("attention_multiplier", 1.0),
        "embedding_scale": settings.number("embedding_multiplier", 1.0),
        "residual_scale": settings.number("residual_multiplier", 1.0),
        "logit_scale": settings.number("logits_scaling", 1.0),
    }


def _gemma2(settings: Settings) -> Metadata:
    return {
        "attention.scale": settings.number("query_pre_attn_scalar", low=MIN_SCALE) ** -0.5,
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 0.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0),
    }


def _gemma3(settings: Settings) -> Metadata:
    settings.must_be("use_bidirectional_attention", False, False)
    return _gemma2(settings)


def _smollm3(settings: Settings) -> Metadata:
    _no_windows(settings)
    wanted = [int((layer + 1) % 4 != 0) for layer in range(settings.integer("num_hidden_layers"))]
    if settings.entries("no_rope_layers") not in (wanted, []) or settings.integer("no_rope_layer_interval", 4) != 4:
        raise settings.unsupported("no_rope_layers", "positions in all but every fourth layer")
    return {}


def _experts(settings: Settings) -> Metadata:
    key = "num_local_experts" if settings.get("num_local_experts") else "num_experts"
    return {
        "expert_count": settings.integer(key, low=1),
        "expert_used_count": settings.integer("num_experts_per_tok", low=1),
        "expert_feed_forward_length": settings.integer("moe_intermediate_size", settings.integer("intermediate_size")),
    }


def _qwen2_moe(settings: Settings) -> Metadata:
    settings.must_be("norm_topk_prob", False, False)
    shared = settings.integer("shared_expert_intermediate_size")
    return {**_no_windows(settings), **_experts(settings), "expert_shared_feed_forward_length": shared}


def _qwen3_moe(settings: Settings) -> Metadata:
    settings.must_be("norm_topk_prob", True, False)
    return {**_no_windows(settings), **_experts(settings)}


def _olmoe(settings: Settings) -> Metadata:
    settings.must_be("norm_topk_prob", False, False)
    settings.must_be("clip_qkv", None, None)
    return _experts(settings)


def _gpt_oss(settings: Settings) -> Metadata:
    settings.must_be("swiglu_limit", 7.0, 7.0)
    settings.must_be("swiglu_alpha", 1.702, 1.702)
    settings.mark_read(("experts_per_token",))
    return _experts(settings)


_GPT_OSS_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_WINDOWED_GEMMA_DEFAULTS = {**_GEMMA_DEFAULTS, "query_pre_attn_scalar": 256, "sliding_window": 4096, "head_dim": 256}
_GEMMA2_DEFAULTS = {
    **_WINDOWED_GEMMA_DEFAULTS,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Published files leave out whatever is as in the model's class.
_GEMMA3_DEFAULTS = {
    **_WINDOWED_GEMMA_DEFAULTS,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

_GEMMA3 = Family(
    architecture="gemma3",
    blocks={**_FOUR_NORMS, **_ATTENTION, **_HEAD_NORMS, **_GATED},
    activations=_GELU_TANH,
    norms_plus_one=True,
    has_windows=True,
    defaults=_GEMMA3_DEFAULTS,
    metadata=_gemma3,
)
FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="llama", blocks=_LLAMA, rows_permuted=True),
    "mistral": Family(architecture="llama", blocks=_LLAMA, rows_permuted=True, has_windows=True),
    "mixtral": Family(
        architecture="llama",
        blocks={**_NORMS, **_ATTENTION, **_MIXTRAL_EXPERTS},
        rows_permuted=True,
        has_windows=True,
        metadata=_experts,
    ),
    "qwen2": Family(architecture="qwen2", blocks=_LLAMA, metadata=_no_windows),
    "qwen2_moe": Family(architecture="qwen2moe", blocks={**_LLAMA, **_EXPERTS, **_SHARED_EXPERT}, metadata=_qwen2_moe),
    "qwen3": Family(architecture="qwen3", blocks={**_LLAMA, **_HEAD_NORMS}, metadata=_no_windows),
    "qwen3_moe": Family(architecture="qwen3moe", blocks={**_LLAMA, **_HEAD_NORMS, **_EXPERTS}, metadata=_qwen3_moe),
    "gemma": Family(
        architecture="gemma",
        blocks=_LLAMA,
        activations=_GELU_TANH,
        norms_plus_one=True,
        defaults={**_GEMMA_DEFAULTS, "head_dim": 256},
    ),
    "gemma2": Family(
        architecture="gemma2",
        blocks={**_FOUR_NORMS, **_ATTENTION, **_GATED},
        activations=_GELU_TANH,
        norms_plus_one=True,
        has_windows=True,
        defaults=_GEMMA2_DEFAULTS,
        metadata=_gemma2,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family(
        architecture="phi3",
        blocks={
            **_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        has_windows=True,
    ),
    "granite": Family(architecture="granite", blocks=_LLAMA, rows_permuted=True, metadata=_granite),
    "olmo2": Family(architecture="olmo2", blocks={**_NORMS_BEHIND, **_ATTENTION, **_HEAD_NORMS, **_GATED}),
    "olmoe": Family(architecture="olmoe", blocks={**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_EXPERTS}, metadata=_olmoe),
    "smollm3": Family(architecture="smollm3", blocks=_LLAMA, rows_permuted=True, metadata=_smollm3),
    "gpt_oss": Family(
        architecture="gpt-oss",
        blocks={
            **_ATTENTION,
            "attn_sinks": "self_attn.sinks",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": _GPT_OSS_STACKS[0],
            "ffn_up_exps": _GPT_OSS_STACKS[0],
            "ffn_down_exps": _GPT_OSS_STACKS[1],
        },
        has_windows=True,
        parameters={
            "self_attn.sinks": ("self_attn.sinks", "weight"),
            **{module: (module, "weight") for module in _GPT_OSS_STACKS},
            **{f"{module}_bias": (module, "bias") for module in _GPT_OSS_STACKS},
        },
        # Rows of gate and up take turns.
        stacks={"ffn_gate_exps": (0, 2), "ffn_up_exps": (1, 2), "ffn_down_exps": (0, 1)},
        metadata=_gpt_oss,
    ),
    "seed_oss": Family(
        architecture="seed_oss",
        blocks=_ATTENTION
        | _GATED
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    ),
}
"""By `model_type`."""


def find_family(settings_type: object) -> Family:
    """Return the family of a `model_type`. Raises: UnsupportedFormatError, listing the types known, for any other."""
    family = FAMILIES.get(settings_type) if isinstance(settings_type, str) else None
    if family is None:
        raise UnsupportedFormatError(
            f"config.json: model_type is {settings_type!r:.60}; this version runs folders of {', '.join(FAMILIES)}. "
            "Use a GGUF file of the model, update localinfer, or choose another model."
        )
    return family
