"""Dense model types with RMS norms, and those that hold experts in the same layers: Llama's, Qwen's and Gemma's kin."""

from localinfer.models.checkpoint.family import (
    ATTENTION,
    EXPERTS,
    FOUR_NORMS,
    GATED,
    GELU_TANH,
    HEAD_NORMS,
    LLAMA,
    NORMS,
    NORMS_BEHIND,
    W_NAMES,
    Family,
    Metadata,
    experts,
    gated,
    no_windows,
)
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MIN_SCALE

_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **gated("mlp.shared_expert", "_shexp")}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **gated("block_sparse_moe.experts.{expert}", "_exps", W_NAMES),
}


def granite_scales(settings: Settings) -> Metadata:
    """Granite's factors, from muP training."""
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
    no_windows(settings)
    wanted = [int((layer + 1) % 4 != 0) for layer in range(settings.integer("num_hidden_layers"))]
    if settings.entries("no_rope_layers") not in (wanted, []) or settings.integer("no_rope_layer_interval", 4) != 4:
        raise settings.unsupported("no_rope_layers", "positions in all but every fourth layer")
    return {}


def _qwen2_moe(settings: Settings) -> Metadata:
    settings.must_be("norm_topk_prob", False, False)
    shared = settings.integer("shared_expert_intermediate_size")
    return {**no_windows(settings), **experts(settings), "expert_shared_feed_forward_length": shared}


def _qwen3_moe(settings: Settings) -> Metadata:
    settings.must_be("norm_topk_prob", True, False)
    return {**no_windows(settings), **experts(settings)}


def _olmoe(settings: Settings) -> Metadata:
    settings.must_be("norm_topk_prob", False, False)
    settings.must_be("clip_qkv", None, None)
    return experts(settings)


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
    blocks={**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **GATED},
    activations=GELU_TANH,
    norms_plus_one=True,
    has_windows=True,
    defaults=_GEMMA3_DEFAULTS,
    metadata=_gemma3,
)
DENSE: dict[str, Family] = {
    "llama": Family(architecture="llama", blocks=LLAMA, rows_permuted=True),
    "mistral": Family(architecture="llama", blocks=LLAMA, rows_permuted=True, has_windows=True),
    "mixtral": Family(
        architecture="llama",
        blocks={**NORMS, **ATTENTION, **_MIXTRAL_EXPERTS},
        rows_permuted=True,
        has_windows=True,
        metadata=experts,
    ),
    "qwen2": Family(architecture="qwen2", blocks=LLAMA, metadata=no_windows),
    "qwen2_moe": Family(architecture="qwen2moe", blocks={**LLAMA, **EXPERTS, **_SHARED_EXPERT}, metadata=_qwen2_moe),
    "qwen3": Family(architecture="qwen3", blocks={**LLAMA, **HEAD_NORMS}, metadata=no_windows),
    "qwen3_moe": Family(architecture="qwen3moe", blocks={**LLAMA, **HEAD_NORMS, **EXPERTS}, metadata=_qwen3_moe),
    "gemma": Family(
        architecture="gemma",
        blocks=LLAMA,
        activations=GELU_TANH,
        norms_plus_one=True,
        defaults={**_GEMMA_DEFAULTS, "head_dim": 256},
    ),
    "gemma2": Family(
        architecture="gemma2",
        blocks={**FOUR_NORMS, **ATTENTION, **GATED},
        activations=GELU_TANH,
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
            **NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        has_windows=True,
    ),
    "granite": Family(architecture="granite", blocks=LLAMA, rows_permuted=True, metadata=granite_scales),
    "olmo2": Family(architecture="olmo2", blocks={**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **GATED}),
    "olmoe": Family(architecture="olmoe", blocks={**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}, metadata=_olmoe),
    "smollm3": Family(architecture="smollm3", blocks=LLAMA, rows_permuted=True, metadata=_smollm3),
    "seed_oss": Family(
        architecture="seed_oss",
        blocks=ATTENTION | GATED | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    ),
}
