"""Families whose layers differ: in their numbers of heads, and Gemma's."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.changes import Change, RowOrder, adjacent_pairs
from localinfer.models.checkpoint.family import (
    ATTENTION,
    EXPERTS,
    FOUR_NORMS,
    FUSED_EXPERTS,
    GATED,
    GELU_TANH,
    GROUPS,
    HEAD_NORMS,
    LLAMA,
    NORMS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    SIGMOID,
    Family,
    Metadata,
    Source,
    experts,
    gated,
)
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MAX_CONTEXT


def _deci(settings: Settings) -> Metadata:
    """Each layer's record says how many heads share keys, and how wide its feed-forward block is."""
    num_heads, hidden_size = settings.integer("num_attention_heads", low=1), settings.integer("hidden_size", low=1)
    heads, kv_heads, sizes = [], [], []
    num_layers = settings.integer("num_hidden_layers", low=1)
    blocks = settings.entries("block_configs")
    if len(blocks) != num_layers or not all(isinstance(block, dict) for block in blocks):
        raise settings.wrong("block_configs", f"{num_layers} records")
    for block in blocks:
        attention = Settings(Settings(block, {}).record("attention"), {})
        group = attention.get("n_heads_in_group")
        is_matrix = group is None and attention.boolean("replace_with_linear", False)
        heads.append(0 if group is None and not is_matrix else num_heads)
        kv_heads.append(
            0 if group is None else num_heads // attention.integer("n_heads_in_group", low=1, high=num_heads)
        )
        feed_forward = Settings(Settings(block, {}).record("ffn"), {})
        if feed_forward.get("replace_with_linear") is True:
            raise settings.unsupported("block_configs", "layers without a matrix in place of a feed-forward block")
        factor = feed_forward.number("ffn_mult", 0.0, low=0.0)
        # As its published code rounds.
        sizes.append(-(-int(2 * factor * hidden_size / 3) // 256) * 256)
    return {"attention.head_count": heads, "attention.head_count_kv": kv_heads, "feed_forward_length": sizes}


def _pairs_by_size(settings: Settings) -> dict[str, Change]:
    """Rows that rotate together side by side, however many heads a layer has."""
    num_heads = settings.integer("num_attention_heads", low=1)
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // num_heads, low=1)

    def order(num_rows: int) -> NDArray[np.intp]:
        return adjacent_pairs(num_rows, max(num_rows // head_dim, 1))

    return {"attn_q": RowOrder(order), "attn_k": RowOrder(order)}


def _heads_by_kind(settings: Settings, is_windowed: list[bool], other: Settings, names: tuple[str, str]) -> Metadata:
    """Numbers of heads by layer, where those with a window have numbers of their own, under these names."""
    keys: Metadata = {}
    usual = ("num_attention_heads", "num_key_value_heads")
    for key, name, suffix in zip(usual, names, ("", "_kv"), strict=True):
        full = settings.integer(key, low=1)
        windowed = other.integer(name, full, low=1)
        keys[f"attention.head_count{suffix}"] = [windowed if has_window else full for has_window in is_windowed]
    return keys


def _step3p5(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    kinds = settings.entries("layer_types")[:num_layers]
    settings.put("layer_types", kinds)  # the lists end with layers that predict further tokens
    is_windowed = [kind == "sliding_attention" for kind in kinds]
    fractions = settings.entries("partial_rotary_factors")[:num_layers]
    if fractions and fractions != [1.0 if windowed else 0.5 for windowed in is_windowed]:
        raise settings.unsupported("partial_rotary_factors", "whole heads in windowed layers, half in others")
    other = Settings(settings.record("attention_other_setting"), {})
    keys = _heads_by_kind(settings, is_windowed, other, ("num_attention_heads", "num_attention_groups"))
    for key, name in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        limits = [limit or 0.0 for limit in settings.entries(key)[:num_layers]]
        if limits:
            keys[name] = Settings({key: limits}, {}).numbers(key, num_layers)
    layers = [int(entry) for entry in settings.text("moe_layers_enum", "").split(",") if entry.strip().isdigit()]
    return {**keys, **experts(settings), "leading_dense_block_count": min(layers, default=0)}


def _step3p5_variant(settings: Settings, family: Family) -> Family:
    """The base of the rotation is a list by layers: that of the first full one and of the first windowed one."""
    bases, kinds = settings.get("rope_theta"), settings.entries("layer_types")
    if isinstance(bases, list):
        by_kind = dict(reversed([*zip(map(str, kinds), bases, strict=False)]))
        settings.put("rope_theta", by_kind.get("full_attention", 10000.0))
        settings.put("rope_local_base_freq", by_kind.get("sliding_attention"))
    return family


def _mimo_v2(settings: Settings) -> Metadata:
    """Windowed layers have a base and heads of keys of their own."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    pattern = settings.entries("hybrid_layer_pattern")
    if pattern and (len(pattern) != num_layers or any(entry not in (0, 1) for entry in pattern)):
        raise settings.wrong("hybrid_layer_pattern", f"{num_layers} times 0 or 1")
    if pattern:
        settings.put("layer_types", ["sliding_attention" if entry else "full_attention" for entry in pattern])
    is_windowed = [kind == "sliding_attention" for kind in settings.entries("layer_types")]
    if "swa_num_key_value_heads" not in settings:
        settings.put("swa_num_key_value_heads", 2 * settings.integer("num_key_value_heads", low=1))
    head_dim = settings.integer("head_dim", low=1)
    value_size = settings.integer("v_head_dim", head_dim, low=1)
    for key, wanted in (("swa_head_dim", head_dim), ("swa_v_head_dim", value_size)):
        settings.must_be(key, wanted, wanted)
    return {
        **_heads_by_kind(settings, is_windowed, settings, ("swa_num_attention_heads", "swa_num_key_value_heads")),
        **experts(settings),
        "attention.value_length": value_size,
    }


def _laguna(settings: Settings) -> Metadata:
    """Layers have numbers of heads of their own, and windowed ones a rotation."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    heads = settings.entries("num_attention_heads_per_layer")
    if heads and (len(heads) != num_layers or any(type(count) is not int or count < 1 for count in heads)):
        raise settings.wrong("num_attention_heads_per_layer", f"{num_layers} whole numbers from 1")
    windowed = Settings(Settings(settings.record("rope_parameters"), {}).record("sliding_attention"), {})
    if windowed.get("rope_type", "default") != "default":
        raise settings.unsupported("rope_parameters", "sliding_attention layers without scaling")
    head_dim = settings.integer("head_dim", low=1)
    partial = windowed.number("partial_rotary_factor", 1.0, low=0.0, high=1.0)
    return {
        **experts(settings),
        "attention.head_count": heads or settings.integer("num_attention_heads", low=1),
        "rope.dimension_count_swa": int(head_dim * partial) if windowed.get("rope_theta") is not None else None,
    }


_LAGUNA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_MIMO = Family(
    architecture="mimo2",
    blocks={**NORMS, **ATTENTION, "attn_qkv": "self_attn.qkv_proj", **GATED, **EXPERTS},
    parameters={**ROUTER_BIAS, "attn_sinks.weight": "self_attn.attention_sink_bias"},
    has_windows=True,
    aliases={
        "num_experts": "n_routed_experts",
        "rope_local_base_freq": "swa_rope_theta",
        "rms_norm_eps": "layernorm_epsilon",
    },
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.334},
    fixed={
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "add_full_attention_sink_bias": False,
    },
    seen=(
        "moe_layer_freq add_swa_attention_sink_bias sliding_window_size attention_chunk_size mlp_layer_types"
        " n_shared_experts attention_projection_layout"
    ),
    keys={**SIGMOID, **GROUPS, "attention.value_scale": ("attention_value_scale", 1.0)},
    metadata=_mimo_v2,
)
_STEP: dict[str, Source] = {
    **LLAMA,
    **HEAD_NORMS,
    "attn_gate": "self_attn.g_proj",
    "ffn_gate_inp": "moe.gate",
    **{f"ffn_{part}_exps": f"moe.{part}_proj" for part in ("gate", "up", "down")},
    **gated("share_expert", "_shexp"),
}

UNEVEN: dict[str, Family] = {
    "laguna": Family(
        architecture="laguna",
        blocks={
            **LLAMA,
            **HEAD_NORMS,
            "attn_gate": "self_attn.g_proj",
            **EXPERTS,
            **{
                stem: (module, module.replace("shared_experts", "shared_expert"))
                for stem, module in SHARED_EXPERTS.items()
            },
        },
        parameters={
            "exp_probs_b.bias": ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            **FUSED_EXPERTS,
        },
        has_windows=True,
        defaults={
            "head_dim": 128,
            "partial_rotary_factor": 1.0,
            "sliding_window": 512,
            "rope_parameters": _LAGUNA_ROPE,
        },
        fixed={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        seen=(
            "mlp_layer_types shared_expert_intermediate_size gating gating_types norm_topk_prob"
            " swa_attention_sink_enabled use_bidirectional_attention"
        ),
        keys={
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": ("moe_routed_scaling_factor", 1.0),
        },
        metadata=_laguna,
    ),
    "nemotron-nas": Family(
        architecture="deci",
        blocks={**LLAMA, "attn_output": ("self_attn.o_proj", "self_attn.linear_attn")},
        metadata=_deci,
        changes=_pairs_by_size,
    ),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), _MIMO),
    "step3p5": Family(
        architecture="step35",
        blocks=_STEP,
        parameters={"exp_probs_b.bias": "moe.router_bias"},
        norms_plus_one=True,
        has_windows=True,
        aliases={
            "num_key_value_heads": "num_attention_groups",
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_top_k",
        },
        defaults={"rms_norm_eps": 1e-5},
        fixed={"moe_router_activation": "sigmoid"},
        seen=(
            "share_expert_dim moe_every_n_layer use_head_wise_attn_gate use_qk_norm use_moe use_moe_router_bias"
            " need_fp32_gate yarn_only_types sink moe_layer_offset"
        ),
        keys={
            "expert_gating_func": 2,
            "expert_weights_norm": ("norm_expert_weight", True),
            "expert_weights_scale": ("moe_router_scaling_factor", 1.0),
        },
        metadata=_step3p5,
        variant=_step3p5_variant,
    ),
}
"""Families by `model_type`."""


def _of_full_layers(settings: Settings, key: str, name: str) -> int | None:
    """A size of the full layers, if they have one of their own: a setting, or the same in their records."""
    found = settings.get(name)
    if found is not None:
        return settings.integer(name, low=1)
    records = Settings(settings.record("per_layer_config"), {})
    for layer, kind in enumerate(settings.entries("layer_types")):
        record = Settings(records.record(str(layer)), {})
        if kind == "full_attention" and key in record:
            return record.integer(key, low=1)
    return None


def _gemma4_variant(settings: Settings, family: Family) -> Family:
    """GGUF's size of heads is that of the full layers."""
    size = settings.integer("head_dim", 256, low=1)
    settings.put("swa_head_dim", size)
    settings.put("head_dim", _of_full_layers(settings, "head_dim", "global_head_dim") or size)
    return family


def _gemma4(settings: Settings) -> Metadata:
    if settings.get("use_bidirectional_attention") != "vision":  # inside pictures only: a text is causal
        settings.must_be("use_bidirectional_attention", None, None)
    num_layers = settings.integer("num_hidden_layers", low=1)
    size, num_shared = settings.integer("swa_head_dim", low=1), settings.integer("num_kv_shared_layers", 0)
    num_kv_heads = settings.integer("num_key_value_heads", low=1)
    full_heads = _of_full_layers(settings, "num_key_value_heads", "num_global_key_value_heads") or num_kv_heads
    inner = settings.integer("intermediate_size", low=1)
    is_wide = settings.boolean("use_double_wide_mlp", False)
    keys: Metadata = {
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count_swa": size,
        "attention.shared_kv_layers": num_shared,
        "attention.head_count_kv": [
            full_heads if kind == "full_attention" else num_kv_heads for kind in settings.entries("layer_types")
        ],
        "feed_forward_length": [
            2 * inner if is_wide and layer >= num_layers - num_shared else inner for layer in range(num_layers)
        ],
        "embedding_length_per_layer_input": settings.integer("hidden_size_per_layer_input", 0) or None,
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0) or None,
    }
    if settings.get("enable_moe_block"):
        keys |= {
            "expert_count": settings.integer("num_experts", low=1),
            "expert_used_count": settings.integer("top_k_experts", low=1),
            "expert_feed_forward_length": settings.integer("moe_intermediate_size", low=1),
        }
    return keys


def _gemma4_unified(settings: Settings) -> Metadata:
    """The same, but that rows of a picture see each other in all layers."""
    return {**_gemma4(settings), "attention.full_layers_see_pictures": True}


_INPUTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
"""Embeddings, among them the input that each layer has for itself."""
_INPUT_GATE = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Modules by which a layer takes the input of its own."""
_GEMMA4 = Family(
    architecture="gemma4",
    blocks={
        **FOUR_NORMS,
        **ATTENTION,
        **HEAD_NORMS,
        **GATED,
        **_INPUT_GATE,
        "ffn_gate_inp": "router.proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    parameters={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
    },
    outside=_INPUTS,
    activations=GELU_TANH,
    has_windows=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
    },
    seen=(
        "attention_k_eq_v vocab_size_per_layer_input per_layer_config enable_moe_block num_experts top_k_experts"
        " moe_intermediate_size expert_intermediate_size"
    ),
    metadata=_gemma4,
    variant=_gemma4_variant,
)


def _assistant(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    return {**_gemma4(settings), "attention.shared_kv_layers": num_layers, "nextn_predict_layers": num_layers}


def _embedding2_variant(settings: Settings, family: Family) -> Family:
    """EmbeddingGemma 2's window is counted to one side, and stored as both."""
    settings.put("sliding_window", 2 * settings.integer("sliding_window", 512, high=MAX_CONTEXT // 2))
    return _gemma4_variant(settings, family)


_EMBEDDING2 = replace(
    _GEMMA4,
    architecture="gemma-embedding2",
    outside={
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "output_proj": "embedding_projection",
        "per_layer_model_proj": "ple.per_layer_model_projection",
        "per_layer_proj_norm": "ple.per_layer_projection_norm",
    },
    blocks={
        **_GEMMA4.blocks,
        "inp_gate": "ple_block.per_layer_input_gate",
        "proj": "ple_block.per_layer_projection",
        "post_norm": "ple_block.post_per_layer_input_norm",
    },
    seen=f"{_GEMMA4.seen} embedding_dim",
    keys={"attention.causal": False},
    variant=_embedding2_variant,
)
_ASSISTANT = replace(
    _GEMMA4,
    architecture="gemma4-assistant",
    outside={"token_embd": "embed_tokens", "output_norm": "norm"},
    heads={
        "nextn.pre_projection": "pre_projection",
        "nextn.post_projection": "post_projection",
        "masked_embd_centroids": "masked_embedding.centroids",
    },
    unused=r"masked_embedding\.token_ordering",
    fixed={"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    # Of the head that scores some tokens only, which is noted with its tensor.
    seen=f"{_GEMMA4.seen} use_ordered_embeddings num_centroids centroid_intermediate_top_k",
    keys={"embedding_length_out": ("backbone_hidden_size", int, 1)},
    metadata=_assistant,
)


def _gemma3n_variant(settings: Settings, family: Family) -> Family:
    """Sizes of blocks are a list."""
    sizes = settings.get("intermediate_size")
    if isinstance(sizes, list):
        settings.put("intermediate_sizes", sizes)
        settings.put("intermediate_size", 0)
    return family


def _gemma3n(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    sizes = settings.entries("intermediate_sizes") or [settings.integer("intermediate_size")] * num_layers
    if len(sizes) < num_layers or any(type(size) is not int or size < 1 for size in sizes):
        raise settings.wrong("intermediate_sizes", f"{num_layers} positive whole numbers")
    if "layer_types" not in settings:
        kinds = [*("sliding_attention",) * 4, "full_attention"]
        settings.put("layer_types", [kinds[layer % 5] for layer in range(num_layers)])
    return {
        "feed_forward_length": sizes[:num_layers],
        "activation_sparsity_scale": _deviations(settings, sizes),
    }


def _deviations(settings: Settings, sizes: list[int]) -> list[float]:
    """Deviations above the mean from which the gates of a layer are kept, -inf where all are.

    The published code's deviation is that of a population, GGUF's that of a sample.
    """
    most = [0.95 if layer < 10 < len(sizes) else 0.0 for layer in range(len(sizes))]
    shares = settings.get("activation_sparsity_pattern", most)
    shares = shares if isinstance(shares, list) else [shares] * len(sizes)
    if len(shares) < len(sizes) or any(type(share) not in (int, float) or not 0 <= share < 1 for share in shares):
        raise settings.wrong("activation_sparsity_pattern", f"{len(sizes)} numbers from 0 to below 1")
    return [
        NormalDist().inv_cdf(share) * ((size - 1) / size) ** 0.5 if share else float("-inf")
        for share, size in zip(shares, sizes, strict=False)
    ]


def _gemma3n_changes(settings: Settings) -> dict[str, Change]:
    """Tokens behind the last of the table of inputs have the inputs of the first."""
    num_tokens = settings.integer("vocab_size", low=1)
    if settings.integer("vocab_size_per_layer_input", num_tokens) >= num_tokens:
        return {}

    def order(num_rows: int) -> NDArray[np.intp]:
        return np.concatenate([np.arange(num_rows), np.zeros(max(num_tokens - num_rows, 0), np.intp)])

    return {"per_layer_token_embd": RowOrder(order)}


_GEMMA3N = Family(
    architecture="gemma3n",
    blocks={
        **FOUR_NORMS,
        **ATTENTION,
        **HEAD_NORMS,
        **GATED,
        **_INPUT_GATE,
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
    },
    parameters={"altup_correct_scale.weight": "altup.correct_output_scale"},
    outside={
        **_INPUTS,
        "altup_proj": "altup_projections.{expert}",
        "altup_unembd_proj": "altup_unembed_projections.{expert}",
    },
    activations=GELU_TANH,
    has_windows=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "head_dim": 256,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "max_position_embeddings": 32768,
    },
    fixed={"altup_active_idx": 0, "altup_correct_scale": True},
    seen="altup_coef_clip laurel_rank altup_num_inputs vocab_size_per_layer_input",
    keys={
        "attention.shared_kv_layers": ("num_kv_shared_layers", 15),
        "embedding_length_per_layer_input": ("hidden_size_per_layer_input", 256, 1),
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    },
    metadata=_gemma3n,
    changes=_gemma3n_changes,
    variant=_gemma3n_variant,
)

GEMMA4: dict[str, Family] = {
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), replace(_GEMMA4, metadata=_gemma4_unified)),
    **dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), _EMBEDDING2),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _ASSISTANT),
}
"""Families by `model_type`."""
