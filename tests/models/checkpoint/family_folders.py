"""The smallest Hugging Face folders of common families, with the settings that published ones have."""

from pathlib import Path
from typing import Any

import numpy as np

from localinfer.models.checkpoint.families import FAMILIES
from tests.support.checkpoint_files import write_folder

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS, EXPERTS = 32, 32, 2, 1, 16, 40, 2, 4
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    # What else a published file has, and what changes nothing.
    "architectures": ["ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": True,
}
_EXPERTS = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
_QWEN = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
_ROUTING = {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.1}
_GEMMA2 = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "x",
}
_GEMMA2 |= {"final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA3 = {"query_pre_attn_scalar": 16, "sliding_window": 16, "rope_local_base_freq": 1e4, "_sliding_window_pattern": 6}
_GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "router_jitter_noise": 0.1, **_ROUTING},
    "qwen2": _QWEN,
    "qwen2_moe": {**_QWEN, **_EXPERTS, **_ROUTING, "shared_expert_intermediate_size": INNER, "norm_topk_prob": False},
    "qwen3": {**_QWEN, "layer_types": ["full_attention"] * LAYERS},
    "qwen3_moe": {**_QWEN, **_EXPERTS, **_ROUTING, "norm_topk_prob": True},
    "gemma": {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": {**_GEMMA3, "vision_config": {"hidden_size": 3}, "mm_tokens_per_image": 256, "image_token_index": 3},
    "phi3": {
        "sliding_window": 16,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * (HEAD // 2), "long_factor": [2.0] * (HEAD // 2)},
    },
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "olmo2": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "olmoe": {**_EXPERTS, **_ROUTING, "norm_topk_prob": False, "clip_qkv": None},
    "smollm3": {**_QWEN, "no_rope_layers": [1, 1], "no_rope_layer_interval": 4, "layer_types": ["full_attention"] * 2},
    "seed_oss": {"residual_dropout": 0.1, "attention_out_bias": False, "rope_scaling": {"rope_type": "default"}},
}
_GPT_OSS: dict[str, Any] = {
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 16,
    "swiglu_limit": 7.0,
    "initial_context_length": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
"""Its tensors are written by the tests that need them."""
_ROWS = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
_SHAPES: dict[str, tuple[int, ...]] = {
    **{name: (rows, HIDDEN) for name, rows in _ROWS.items()},
    "attn_qkv": (sum(_ROWS.values()), HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD),
    "attn_q_norm": (HEAD,),
    "attn_k_norm": (HEAD,),
    "ffn_gate_inp": (EXPERTS, HIDDEN),
    "ffn_gate_inp_shexp": (1, HIDDEN),
}


def family_config(model_type: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    return {"model_type": model_type, **BASE, **(_GPT_OSS if model_type == "gpt_oss" else SETTINGS[model_type])}


def write_family(folder: Path, model_type: str) -> Path:
    """Write a tiny model of random weights; returns its folder."""
    family = FAMILIES[model_type]
    generator = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for stem, module in family.blocks.items():
            if stem.startswith("ffn_") and "mlp.experts" not in module and _is_dense(stem) and _has_experts(model_type):
                continue
            for expert in range(EXPERTS if "{expert}" in module else 1):
                shapes[f"layers.{layer}.{module.replace('{expert}', str(expert))}"] = _shape(stem, model_type)
    tensors = {
        f"model.{name}.weight": generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    return write_folder(folder, tensors, family_config(model_type))


def _has_experts(model_type: str) -> bool:
    return any(stem.endswith("_exps") for stem in FAMILIES[model_type].blocks)


def _is_dense(stem: str) -> bool:
    return stem in ("ffn_gate", "ffn_up", "ffn_down")


def _shape(stem: str, model_type: str) -> tuple[int, ...]:
    if stem in ("attn_q_norm", "attn_k_norm") and model_type in ("olmo2", "olmoe"):
        return (_ROWS[stem.removesuffix("_norm")],)
    if stem in _SHAPES:
        return _SHAPES[stem]
    if stem.endswith("_norm"):
        return (HIDDEN,)
    if stem == "ffn_up" and "ffn_gate" not in FAMILIES[model_type].blocks:
        return (2 * INNER, HIDDEN)
    return (HIDDEN, INNER) if "down" in stem else (INNER, HIDDEN)
