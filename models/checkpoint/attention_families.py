"""Families whose attention is latent, or linear: delta nets, short convolutions, and MiniMax's lightning attention."""

import math
from dataclasses import replace

import numpy as np

from localinfer.models.checkpoint.changes import (
    CONVOLUTION,
    FLAT,
    NEGATIVE_EXPONENTIAL,
    Change,
    Computed,
    Moved,
    latent_keys,
    latent_values,
    parts_of_groups,
    tiled_columns,
    tiled_heads,
)
from localinfer.models.checkpoint.family import (
    ATTENTION,
    EXPERTS,
    FUSED_EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SIGMOID,
    SPARSE_EXPERTS,
    W_NAMES,
    Family,
    Metadata,
    Part,
    Source,
    experts,
    gated,
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


_LINEAR = ("linear_attention",)
_QWEN: dict[str, Source] = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **ATTENTION,
    **HEAD_NORMS,
    **GATED,
    "ssm_conv1d": Part("linear_attn.conv1d", CONVOLUTION),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN_PARAMETERS: dict[str, Source] = {
    "ssm_a": Part("linear_attn.A_log", NEGATIVE_EXPONENTIAL),
    "ssm_dt.bias": "linear_attn.dt_bias",
}


def recurrent_layers(settings: Settings, kinds: tuple[str, ...] = _LINEAR) -> list[bool]:
    """Layers of `layer_types` that are of a recurrent kind, by default all but every fourth."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    interval = settings.integer("full_attention_interval", 4, low=1)
    found = settings.entries("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else kinds[0] for layer in range(num_layers)
    ]
    return [kind in kinds for kind in found]


def _delta_sizes(settings: Settings) -> tuple[int, int, int]:
    """Heads of keys, of values, and the size of each."""
    head_dim = settings.integer("linear_key_head_dim", 128, low=1)
    if settings.integer("linear_value_head_dim", 128, low=1) != head_dim:
        raise settings.unsupported("linear_value_head_dim", f"heads of values as large as those of keys, {head_dim}")
    return settings.integer("linear_num_key_heads", low=1), settings.integer("linear_num_value_heads", low=1), head_dim


def _qwen(settings: Settings) -> Metadata:
    num_key_heads, num_heads, head_dim = _delta_sizes(settings)
    if num_heads % num_key_heads:
        raise settings.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads {num_key_heads}")
    keys: Metadata = {
        "ssm.state_size": head_dim,
        "ssm.group_count": num_key_heads,
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * head_dim,
        "ssm.length_epsilon": usual_epsilon(settings),
        "attention.recurrent_layers": [int(is_recurrent) for is_recurrent in recurrent_layers(settings)],
    }
    if "num_experts" in settings and settings.integer("num_experts"):
        settings.must_be("norm_topk_prob", True, True)
        keys |= experts(settings)
        keys["expert_shared_feed_forward_length"] = settings.integer("shared_expert_intermediate_size")
    return keys


def _qwen3_next_changes(settings: Settings) -> dict[str, Change]:
    """One matrix has, group by group, the rows of queries, keys, values and gates."""
    num_key_heads, num_heads, head_dim = _delta_sizes(settings)
    values = num_heads // num_key_heads * head_dim
    sizes = (head_dim, head_dim, values, values)
    return {
        "attn_qkv": parts_of_groups(num_key_heads, sizes, (0, 1, 2)),
        "attn_gate": parts_of_groups(num_key_heads, sizes, (3,)),
    }


def _qwen35_changes(settings: Settings) -> dict[str, Change]:
    """Heads of values that share a head of keys lie apart in GGUF."""
    num_key_heads, num_heads, head_dim = _delta_sizes(settings)
    keys = 2 * num_key_heads * head_dim
    single = tiled_heads(num_key_heads, num_heads, 1)
    channels = tiled_heads(num_key_heads, num_heads, head_dim, keys)
    return {
        "attn_qkv": channels,
        "attn_gate": tiled_heads(num_key_heads, num_heads, head_dim),
        "ssm_alpha": single,
        "ssm_beta": single,
        "ssm_a": Computed(lambda values: -single.apply(np.exp(values))),
        "ssm_dt.bias": single,
        "ssm_conv1d": Moved(lambda values: channels.apply(CONVOLUTION.apply(values))),
        "ssm_out": tiled_columns(num_key_heads, num_heads, head_dim),
    }


_QWEN3_NEXT = Family(
    architecture="qwen3next",
    blocks={
        **_QWEN,
        **EXPERTS,
        **SHARED_EXPERT,
        "attn_qkv": "linear_attn.in_proj_qkvz",
        "attn_gate": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    parameters={**_QWEN_PARAMETERS, **FUSED_EXPERTS},
    norms_plus_one=True,
    plain_norms=("ssm_norm",),
    layer_kinds=_LINEAR,
    defaults={"partial_rotary_factor": 0.25, "head_dim": 256},
    fixed={"attn_output_gate": True},
    seen="mamba_ssm_dtype mlp_only_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    keys={"ssm.conv_kernel": ("linear_conv_kernel_dim", 4, 1)},
    metadata=_qwen,
    changes=_qwen3_next_changes,
)
_QWEN35 = replace(
    _QWEN3_NEXT,
    architecture="qwen35",
    blocks={
        **{stem: source for stem, source in _QWEN.items() if stem != "ssm_conv1d"},
        "ssm_conv1d": "linear_attn.conv1d",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    },
    parameters={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    changes=_qwen35_changes,
)
_QWEN35_MOE = replace(
    _QWEN35,
    architecture="qwen35moe",
    blocks={**_QWEN35.blocks, **EXPERTS, **SHARED_EXPERT},
    parameters={**_QWEN35.parameters, **FUSED_EXPERTS},
    defaults={**_QWEN35.defaults, "intermediate_size": 0},
)


def _lfm2(settings: Settings) -> Metadata:
    num_kv_heads = settings.integer("num_key_value_heads", settings.integer("num_attention_heads"), low=1)
    size = settings.integer("intermediate_size", settings.integer("block_ff_dim", 0))
    if settings.boolean("block_auto_adjust_ff_dim", False):
        multiple = settings.integer("block_multiple_of", 256, low=1)
        size = int(settings.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return {
        "attention.head_count_kv": [0 if is_conv else num_kv_heads for is_conv in _convolutions(settings)],
        "feed_forward_length": size,
    }


def _convolutions(settings: Settings) -> list[bool]:
    named = settings.entries("full_attn_idxs")
    if named and not settings.entries("layer_types"):
        return [layer not in named for layer in range(settings.integer("num_hidden_layers", low=1))]
    return recurrent_layers(settings, ("conv",))


def _lfm3(settings: Settings) -> Metadata:
    if not settings.entries("layer_types"):
        kinds = ("sliding_attention", "conv", "full_attention", "conv")
        num_layers = settings.integer("num_hidden_layers", low=1)
        settings.put("layer_types", ["conv", *(kinds[layer % 4] for layer in range(1, num_layers))])
    num_kv_heads = settings.integer("num_key_value_heads", low=1)
    convolutions = recurrent_layers(settings, ("conv",))
    return {"attention.head_count_kv": [0 if is_conv else num_kv_heads for is_conv in convolutions]}


def _olmo_hybrid(settings: Settings) -> Metadata:
    """Files say that layers have no positions by a rotation whose base or kind is null, or by none."""
    num_heads = settings.integer("num_attention_heads", low=1)
    num_key_heads = settings.integer("linear_num_key_heads", num_heads, low=1)
    num_value_heads = settings.integer("linear_num_value_heads", num_heads, low=1)
    if num_key_heads != num_value_heads:
        raise settings.unsupported("linear_num_value_heads", f"as many heads of values as of keys, {num_key_heads}")
    key_size = settings.integer(
        "linear_key_head_dim", 3 * settings.integer("hidden_size") // (4 * num_key_heads), low=1
    )
    rope = settings.record("rope_parameters")
    has_base = rope.get("rope_theta", settings.get("rope_theta")) is not None
    return {
        "ssm.state_size": key_size,
        "ssm.group_count": num_key_heads,
        "ssm.time_step_rank": num_value_heads,
        "ssm.inner_size": num_value_heads * settings.integer("linear_value_head_dim", 2 * key_size, low=1),
        "ssm.beta_scale": 2.0 if settings.boolean("linear_allow_neg_eigval", True) else 1.0,
        "attention.recurrent_layers": [int(is_recurrent) for is_recurrent in recurrent_layers(settings)],
        "ssm.length_epsilon": usual_epsilon(settings),
        "rope.scaling.finetuned": has_base and rope.get("rope_type", "default") is not None,
    }


_OLMO_HYBRID = Family(
    architecture="olmo-hybrid",
    blocks={
        # Before the branches of delta nets; behind those of attention. Writers name the second alike in both.
        "attn_norm": ("input_layernorm", "attention_layer_norm"),
        "post_attention_norm": ("post_attention_layernorm", "feedforward_layer_norm"),
        "post_ffw_norm": "post_feedforward_layernorm",
        **{f"attn_{letter}": (f"self_attn.{letter}_proj", f"linear_attn.{letter}_proj") for letter in "qkv"},
        "attn_output": "self_attn.o_proj",
        "attn_gate": "linear_attn.g_proj",
        **HEAD_NORMS,
        **GATED,
        "ssm_alpha": "linear_attn.a_proj",
        "ssm_beta": "linear_attn.b_proj",
        "ssm_conv1d": Part("linear_attn.conv1d", CONVOLUTION),
        **{f"ssm_conv1d_{letter}": Part(f"linear_attn.{letter}_conv1d", CONVOLUTION) for letter in "qkv"},
        "ssm_norm": "linear_attn.o_norm",
        "ssm_out": "linear_attn.o_proj",
    },
    parameters=_QWEN_PARAMETERS,
    layer_kinds=_LINEAR,
    seen="linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min",
    keys={"ssm.conv_kernel": ("linear_conv_kernel_dim", 4, 2)},
    metadata=_olmo_hybrid,
)


_LFM2 = Family(
    architecture="lfm2",
    blocks={
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        **ATTENTION,
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "shortconv.conv": Part("conv.conv", CONVOLUTION),
        **gated("feed_forward", names=W_NAMES),
    },
    # GGUF's name of the last norm is an old slip.
    outside={"token_embd": "embed_tokens", "token_embd_norm": "embedding_norm"},
    layer_kinds=("conv",),
    epsilon="norm_eps",
    defaults={"rope_theta": 1e6, "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False},
    fixed={"conv_bias": False},
    seen=(
        "block_ff_dim block_ffn_dim_multiplier block_multiple_of block_use_swiglu block_norm_eps block_out_dim"
        " block_dim block_mlp_init_scale conv_dim block_use_xavier_init conv_dim_out conv_use_xavier_init"
        " full_attn_idxs"
    ),
    keys={"shortconv.l_cache": ("conv_L_cache", 3, 2)},
    metadata=_lfm2,
)


def _kimi_linear(settings: Settings) -> Metadata:
    linear = Settings(settings.record("linear_attn_config"), {})
    num_layers = settings.integer("num_hidden_layers", low=1)
    if "full_attn_layers" in linear:
        has_attention = [layer + 1 in linear.entries("full_attn_layers") for layer in range(num_layers)]
    elif settings.entries("layer_types"):
        has_attention = [not is_recurrent for is_recurrent in recurrent_layers(settings)]
    else:
        has_attention = [layer > 0 and layer % 4 == 0 for layer in range(num_layers)]
    num_heads = linear.integer("num_heads", settings.integer("linear_num_heads", 32, low=1), low=1)
    if num_heads != settings.integer("num_attention_heads"):
        raise settings.unsupported("num_attention_heads", f"as many heads in all layers, {num_heads}")
    kernel = linear.integer("short_conv_kernel_size", settings.integer("linear_conv_kernel_dim", 4, low=2), low=2)
    return {
        **experts(settings),
        "attention.head_count_kv": [int(has_one) for has_one in has_attention],
        "ssm.conv_kernel": kernel,
        "ssm.length_epsilon": usual_epsilon(settings),
        "kda.head_dim": linear.integer("head_dim", settings.integer("linear_head_dim", 128, low=1), low=1),
    }


_BOTH = ("block_sparse_moe", "mlp")
_KIMI_LINEAR = Family(
    architecture="kimi-linear",
    blocks={
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **LATENT_ATTENTION,
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        **{f"ssm_conv1d_{letter}": Part(f"self_attn.{letter}_conv1d", CONVOLUTION) for letter in "qkv"},
        **{f"ssm_{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj",
        "ssm_norm": "self_attn.o_norm",
        **{
            stem: tuple(f"{module}.{source}" for module in _BOTH)
            for stem, source in {
                "ffn_gate_inp": "gate",
                **{f"ffn_{part}": f"{part}_proj" for part in ("gate", "up", "down")},
                **gated("shared_experts", "_shexp"),
                **gated("experts.{expert}", "_exps", W_NAMES),
            }.items()
        },
    },
    parameters={
        "ssm_a": Part("self_attn.A_log", Computed(lambda values: -np.exp(FLAT.apply(values)))),
        "ssm_dt.bias": "self_attn.dt_bias",
        "exp_probs_b.bias": tuple(f"{module}.gate.e_score_correction_bias" for module in _BOTH),
    },
    layer_kinds=_LINEAR,
    aliases={"max_position_embeddings": "model_max_length", "num_experts_per_tok": "num_experts_per_token"},
    defaults={"rms_norm_eps": 1e-5},
    has_latent_attention=True,
    fixed={"moe_renormalize": True, "mla_use_nope": True, "num_expert_group": 1},
    seen=(
        "linear_head_dim linear_num_heads linear_conv_kernel_dim qk_head_dim moe_router_activation_func moe_layer_freq"
        " mlp_layer_types topk_group use_grouped_topk"
    ),
    keys={**SIGMOID, "leading_dense_block_count": ("first_k_dense_replace", 1)},
    metadata=_kimi_linear,
    changes=split_keys_and_values,
)

DELTA: dict[str, Family] = {
    "qwen3_next": _QWEN3_NEXT,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN35),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN35_MOE),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        architecture="lfm2moe",
        blocks={
            **_LFM2.blocks,
            "ffn_gate_inp": "feed_forward.gate",
            **gated("feed_forward.experts.{expert}", "_exps", W_NAMES),
        },
        parameters={"exp_probs_b.bias": "feed_forward.expert_bias"},
        fixed={**_LFM2.fixed, "norm_topk_prob": True},
        seen=f"{_LFM2.seen} use_expert_bias",
        keys={
            **_LFM2.keys,
            **SIGMOID,
            "feed_forward_length": ("intermediate_size", int),
            "leading_dense_block_count": ("num_dense_layers", 0),
        },
        metadata=lambda settings: {**_lfm2(settings), **experts(settings)},
    ),
    "lfm3": replace(
        _LFM2,
        architecture="lfm3",
        blocks={
            **_LFM2.blocks,
            **ATTENTION,
            **HEAD_NORMS,
            "attn_gate": ("self_attn.g_proj", "self_attn.gate_proj"),
            "post_attention_norm": "post_operator_norm",
            "post_ffw_norm": "post_ffn_norm",
        },
        has_windows=True,
        defaults={"norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 256},
        seen="use_sandwich_norm use_attention_gate",  # the tensors show both
        keys={"shortconv.l_cache": ("conv_L_cache", 7, 2)},
        metadata=_lfm3,
    ),
    "kimi_linear": _KIMI_LINEAR,
    "olmo_hybrid": _OLMO_HYBRID,
}
"""Families by `model_type`."""


def _minimax_m2(settings: Settings) -> Metadata:
    keys = experts(settings)
    if "rotary_dim" in settings and "partial_rotary_factor" not in settings.rotation():
        keys["rope.dimension_count"] = settings.integer("rotary_dim", low=2)
    return keys


def _minimax(settings: Settings) -> Metadata:
    """MiniMax-01; GGUF has one weight of the residual stream, and none of the branches."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    weights = {settings.number(f"{name}_alpha_factor", 1.0) for name in ("full_attn", "linear_attn", "mlp")}
    if len(weights) > 1:
        raise settings.unsupported("mlp_alpha_factor", "one weight of the residual stream in all layers")
    if settings.get("sliding_window"):
        raise settings.unsupported("sliding_window", "minimax-01 models without windows")
    kinds = settings.entries("layer_types")
    is_recurrent = [kind == "linear_attention" for kind in kinds] or [layer % 2 == 1 for layer in range(num_layers)]
    if settings.entries("attn_type_list"):
        is_recurrent = [kind == 0 for kind in settings.entries("attn_type_list")]
    if len(is_recurrent) != num_layers:
        raise settings.wrong("attn_type_list", f"0 or 1 for each of {num_layers} layers")
    keys = experts(settings)
    if "rotary_dim" in settings:
        keys["rope.dimension_count"] = settings.integer("rotary_dim", low=2)
    return keys | {"residual_scale": weights.pop(), "attention.recurrent_layers": [int(one) for one in is_recurrent]}


def _minimax_m3(settings: Settings) -> Metadata:
    """Sizes of the indexer, which older files nest."""
    old = Settings(settings.record("sparse_attention_config"), {})
    sizes = {
        "head_count": ("index_n_heads", "sparse_num_index_heads", 4),
        "key_length": ("index_head_dim", "sparse_index_dim", 128),
        "block_size": ("index_block_size", "sparse_block_size", 128),
        "top_k": ("index_topk_blocks", "sparse_topk_blocks", 16),
        "local_blocks": ("index_local_blocks", "sparse_local_block", 1),
    }
    return {
        **experts(settings),
        **{
            f"attention.indexer.{key}": old.integer(nested, settings.integer(name, default))
            for key, (name, nested, default) in sizes.items()
        },
    }


def _index_names(part: str) -> Source:
    """Both names of an indexer's module: in files of its authors and in those of transformers."""
    return f"self_attn.index_{part}", f"self_attn.indexer.{part}"


_M3_EXPERTS: dict[str, Source] = {
    **{
        stem: tuple(f"{module}.{name}" for module in ("block_sparse_moe", "mlp"))
        for stem, name in {
            "ffn_gate_inp": "gate",
            **gated("experts.{expert}", "_exps", W_NAMES),
            "ffn_gate_shexp": "shared_experts.gate_proj",
            "ffn_down_shexp": "shared_experts.down_proj",
        }.items()
    },
    "ffn_up_shexp": (
        "block_sparse_moe.shared_experts.up_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.gate_up_proj",
    ),
}
_MINIMAX = Family(
    architecture="minimax-01",
    blocks={
        **NORMS,
        **ATTENTION,
        "attn_output": ("self_attn.o_proj", "self_attn.out_proj"),
        "attn_qkv": "self_attn.qkv_proj",
        "attn_gate": "self_attn.output_gate",
        "attn_norm_2": "self_attn.norm",
        **SPARSE_EXPERTS,
    },
    left_out=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    layer_kinds=("linear_attention",),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    fixed={
        **{f"{name}_beta_factor": 1.0 for name in ("full_attn", "linear_attn", "mlp")},
        "postnorm": True,
        "shared_intermediate_size": 0,
    },
    seen="block_size layernorm_attention_alpha layernorm_attention_beta shared_moe_mode",
    metadata=_minimax,
)

MINIMAX: dict[str, Family] = {
    "minimax": _MINIMAX,
    **dict.fromkeys(
        ("minimax_m1", "minimax_text_01"),
        replace(
            _MINIMAX,
            aliases={
                f"{name}_{part}_factor": f"layernorm_{long_name}_{part}"
                for name, long_name in (
                    ("full_attn", "full_attention"),
                    ("linear_attn", "linear_attention"),
                    ("mlp", "mlp"),
                )
                for part in ("alpha", "beta")
            },
        ),
    ),
    "minimax_m2": Family(
        architecture="minimax-m2",
        blocks={**NORMS, **ATTENTION, **HEAD_NORMS, **SPARSE_EXPERTS},
        parameters={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        defaults={"partial_rotary_factor": 1.0},
        fixed={"scoring_func": "sigmoid", "shared_intermediate_size": 0, "qk_norm_type": "per_layer"},
        seen="attn_type_list mtp_transformer_layers num_mtp_modules use_mtp use_qk_norm use_routing_bias rotary_dim",
        keys={"expert_gating_func": 2},
        metadata=_minimax_m2,
    ),
    **dict.fromkeys(
        ("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"),
        Family(
            architecture="minimax-m3",
            blocks={
                **NORMS,
                **ATTENTION,
                **HEAD_NORMS,
                **GATED,
                "ffn_up": ("mlp.up_proj", "mlp.gate_up_proj"),
                **_M3_EXPERTS,
                **{f"indexer.{part}": _index_names(part) for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
            },
            parameters={
                "exp_probs_b.bias": (
                    "block_sparse_moe.e_score_correction_bias",
                    "mlp.gate.e_score_correction_bias",
                ),
                **FUSED_EXPERTS,
            },
            activations=("swigluoai", "silu"),
            norms_plus_one=True,
            layer_kinds=("minimax_m3_sparse",),
            defaults={
                "rms_norm_eps": 1e-6,
                "rope_theta": 5e6,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "partial_rotary_factor": 1.0,
            },
            fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "scoring_func": "sigmoid"},
            seen=(
                "mlp_layer_types moe_layer_freq shared_intermediate_size rotary_dim layer_types use_qk_norm"
                " qk_norm_type use_gemma_norm use_routing_bias num_mtp_modules"
            ),
            keys={
                # Experts' size is `intermediate_size`; layers without experts have another.
                "expert_feed_forward_length": ("intermediate_size", int, 1),
                "feed_forward_length": ("dense_intermediate_size", 12288, 1),
                "expert_gating_func": 2,
                "expert_weights_norm": True,
                "expert_weights_scale": ("routed_scaling_factor", 2.0),
            },
            metadata=_minimax_m3,
        ),
    ),
}
"""Families by `model_type`."""
