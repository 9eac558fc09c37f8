"""Families with latent attention."""

import math
from dataclasses import replace

from localinfer.models.checkpoint.changes import Change, latent_keys, latent_values
from localinfer.models.checkpoint.family import (
    EXPERTS,
    FUSED_EXPERTS,
    GATED,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    Metadata,
    Source,
    experts,
    usual_epsilon,
)
from localinfer.models.checkpoint.mixture_families import ROUTED_FIXED, ROUTED_KEYS, ROUTED_SEEN
from localinfer.models.checkpoint.settings import Settings

LATENT_ATTENTION: dict[str, Source] = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}


def latent_sizes(settings: Settings) -> Metadata:
    """GGUF's keys. The rotation's size is that of the part of keys that rotates, whatever `head_dim` says."""
    rank, rotary_size = settings.integer("kv_lora_rank", low=1), settings.integer("qk_rope_head_dim", low=1)
    query_rank = settings.integer("q_lora_rank", 0)
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": query_rank or None,
        "attention.key_length": rank + rotary_size,
        "attention.value_length": rank,
        "attention.key_length_mla": settings.integer("qk_nope_head_dim", low=1) + rotary_size,
        "attention.value_length_mla": settings.integer("v_head_dim", low=1),
        # Published classes leave out the model's for these norms.
        "attention.latent_norm_epsilon": usual_epsilon(settings),
        "rope.dimension_count": rotary_size,
    }


def split_keys_and_values(settings: Settings) -> dict[str, Change]:
    """Take the matrix of keys and values apart."""
    sizes = (
        settings.integer("num_attention_heads", low=1),
        settings.integer("qk_nope_head_dim", low=1),
        settings.integer("v_head_dim", low=1),
    )
    return {"attn_k_b": latent_keys(*sizes), "attn_v_b": latent_values(*sizes)}


def _scaling(settings: Settings) -> Metadata:
    """YaRN's temperature is that of the scores: GGUF has its multiplier times a tenth, and no factor beside it."""
    record = Settings(settings.rotation(), {})
    settings.must_be("rope_interleave", True, True)
    settings.mark_read(("qk_head_dim", "ep_size", "moe_router_activation_func", "qk_nope_head_dim"))
    if "mscale_all_dim" not in record:
        return {}
    whole = record.number("mscale_all_dim", low=0.0)
    if record.number("mscale", whole) != whole:
        raise record.unsupported("mscale", "YaRN with mscale as large as mscale_all_dim")
    return {"rope.scaling.yarn_log_multiplier": 0.1 * whole, "rope.scaling.attn_factor": None}


def _scaled_experts(settings: Settings) -> Metadata:
    return {**experts(settings), **_scaling(settings)}


def _glm_dsa(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    kinds: list[object] = list(settings.get("indexer_types") or settings.get("index_topk_pattern") or ())
    period, first = settings.integer("index_topk_freq", 1) or 1, settings.integer("index_skip_topk_offset", 2)
    if not kinds:
        kinds = ["full" if max(layer - first + 1, 0) % period == 0 else "shared" for layer in range(num_layers)]
    if len(kinds) < num_layers or any(kind not in ("full", "shared", "F", "S") for kind in kinds):
        raise settings.wrong("indexer_types", f"{num_layers} times full or shared")
    types = [int(kind in ("full", "F")) for kind in kinds[:num_layers]]
    return {**_scaled_experts(settings), "attention.indexer.types": types}


def _softmax_routed(settings: Settings, normalises: bool) -> Metadata:
    settings.must_be("scoring_func", "softmax", "softmax")
    settings.must_be("moe_layer_freq", 1, 1)
    settings.mark_read(("n_group", "topk_group", "seq_aux"))
    return {
        **experts(settings),
        "expert_gating_func": 1,
        "expert_weights_norm": settings.boolean("norm_topk_prob", normalises),
        "expert_weights_scale": settings.number("routed_scaling_factor", 1.0),
        "leading_dense_block_count": settings.integer("first_k_dense_replace", 0),
    }


def _deepseek_v2(settings: Settings) -> Metadata:
    """Its class reads no norm_topk_prob. Groups of experts are compared by their best."""
    keys = {**_softmax_routed(settings, normalises=False), **_scaling(settings), "expert_weights_norm": False}
    method = settings.text("topk_method", "greedy")
    if method == "greedy":
        return keys
    if method != "group_limited_greedy":
        raise settings.unsupported("topk_method", "greedy and group_limited_greedy")
    return keys | {
        "expert_group_count": settings.integer("n_group", low=1),
        "expert_group_used_count": settings.integer("topk_group", low=1),
        "expert_group_score_count": 1,
    }


def _mistral4(settings: Settings) -> Metadata:
    record = Settings(settings.rotation(), {})
    names = ("llama_4_scaling_beta", "max_position_embeddings")
    settings.mark_read(f"{kind}.{name}" for kind in ("rope_parameters", "rope_scaling") for name in names)
    return {
        **_softmax_routed(settings, normalises=True),
        **_scaling(settings),
        "expert_group_count": settings.integer("n_group", 1, low=1),
        "expert_group_used_count": settings.integer("topk_group", 1, low=1),
        "attention.temperature_scale": record.number("llama_4_scaling_beta", 0.0),
        "attention.temperature_length": record.integer("original_max_position_embeddings", 8192, low=1),
    }


def _minicpm3(settings: Settings) -> Metadata:
    """Its factors are fixed in GGUF's runtimes. Keys and values are stored as the checkpoint has them."""
    settings.must_be("scale_emb", 12, 12)
    settings.must_be("dim_model_base", 256, 256)
    if not math.isclose(settings.number("scale_depth", 1.4), 1.4):
        raise settings.unsupported("scale_depth", "1.4")
    rope = Settings(settings.rotation(), {})
    if rope.get("mscale_all_dim"):
        raise rope.unsupported("mscale_all_dim", "minicpm3 models without it")
    rotary_size = settings.integer("qk_rope_head_dim", low=1)
    settings.mark_read(("qk_head_dim",))
    return {
        "attention.head_count_kv": settings.integer("num_key_value_heads", settings.integer("num_attention_heads")),
        "attention.key_length": settings.integer("qk_nope_head_dim", low=1) + rotary_size,
        "attention.value_length": settings.integer("v_head_dim", low=1),
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


def _sarvam_mla_variant(settings: Settings, family: Family) -> Family:
    """Its first files name YaRN after DeepSeek."""
    record = settings.record("rope_scaling")
    if "deepseek_yarn" in (record.get("type"), record.get("rope_type")):
        kept = {key: value for key, value in record.items() if key != "type"}
        settings.put("rope_scaling", {**kept, "rope_type": "yarn"})
    settings.mark_read(("q_head_dim",))  # the sum of its parts
    return family


_DEEPSEEK3 = Family(
    architecture="deepseek2",
    blocks={**NORMS, **LATENT_ATTENTION, **GATED, **EXPERTS, **SHARED_EXPERTS},
    parameters={**ROUTER_BIAS, **FUSED_EXPERTS},
    has_latent_attention=True,
    aliases={"num_experts": "n_routed_experts"},
    fixed=ROUTED_FIXED,
    seen=ROUTED_SEEN,
    keys=ROUTED_KEYS,
    metadata=_scaled_experts,
    changes=split_keys_and_values,
)

_INDEXER: dict[str, Source] = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_DEEPSEEK32 = replace(
    _DEEPSEEK3,
    architecture="deepseek32",
    blocks={**_DEEPSEEK3.blocks, **_INDEXER},
    layer_kinds=("indexed_attention", "deepseek_sparse_attention"),
    keys={
        **ROUTED_KEYS,
        "attention.indexer.head_count": ("index_n_heads", int, 1),
        "attention.indexer.key_length": ("index_head_dim", int, 1),
        "attention.indexer.top_k": ("index_topk", int, 1),
    },
)

LATENT: dict[str, Family] = {
    "deepseek_v32": _DEEPSEEK32,
    "glm_moe_dsa": replace(_DEEPSEEK32, architecture="glm-dsa", defaults={"rms_norm_eps": 1e-5}, metadata=_glm_dsa),
    "deepseek_v2": replace(_DEEPSEEK3, fixed={}, seen="", keys={}, metadata=_deepseek_v2),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite"), _DEEPSEEK3),
    "sarvam_mla": replace(
        _DEEPSEEK3, defaults={"first_k_dense_replace": 1, "q_lora_rank": None}, variant=_sarvam_mla_variant
    ),
    # Youtu-LLM (arXiv 2512.24618): no experts.
    "youtu": replace(
        _DEEPSEEK3,
        blocks={**NORMS, **LATENT_ATTENTION, **GATED},
        parameters={},
        aliases={},
        defaults={"tie_word_embeddings": True},
        fixed={},
        seen="",
        keys={},
        metadata=_scaling,
    ),
    "mistral4": replace(_DEEPSEEK3, architecture="mistral4", fixed={}, seen="", keys={}, metadata=_mistral4),
    "minicpm3": Family(
        architecture="minicpm3",
        blocks={
            **NORMS,
            **{stem: source for stem, source in LATENT_ATTENTION.items() if stem not in ("attn_k_b", "attn_v_b")},
            "attn_kv_b": "self_attn.kv_b_proj",
            **GATED,
        },
        has_latent_attention=True,
        defaults={"rms_norm_eps": 1e-5},
        metadata=_minicpm3,
    ),
}
"""Families by `model_type`."""
