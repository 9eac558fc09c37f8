"""Model types with experts and ordinary attention."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.changes import (
    FIRST_HALF,
    FIRST_HALVES,
    FLAT,
    SECOND_HALF,
    SECOND_HALVES,
    TRANSPOSED,
    UNIT_COLUMNS,
    Change,
    ExpertRows,
    Moved,
    RowOrder,
    adjacent_pairs,
)
from localinfer.models.checkpoint.dense_families import GRANITE_SCALES, HUNYUAN_NORMS, hunyuan_scaling
from localinfer.models.checkpoint.family import (
    ATTENTION,
    EXPERTS,
    FUSED_EXPERTS,
    GATED,
    GROUPS,
    HEAD_NORMS,
    LLAMA,
    NORMS,
    NORMS_BEHIND,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SIGMOID,
    SPARSE_EXPERTS,
    Family,
    Metadata,
    Part,
    Source,
    experts,
    gated,
    normed_experts,
    one_window,
    repeat_layer_types,
    switch_windows,
)
from localinfer.models.checkpoint.settings import Settings

_ROUTED = {"num_experts": "n_routed_experts"}


ROUTED_FIXED: Mapping[str, object] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
ROUTED_SEEN = "mlp_layer_types is_moe_layer use_qk_norm"
ROUTED_KEYS: Mapping[str, object] = {
    **SIGMOID,
    **GROUPS,
    "expert_weights_norm": ("norm_topk_prob", True),
    "leading_dense_block_count": ("first_k_dense_replace", 0),
}
"""Sigmoid routing with a bias on the choice, in groups, its weights normalised and scaled; dense layers first. Shared
experts are as many as their one matrix holds."""


def _ernie(settings: Settings) -> Metadata:
    first, last = settings.integer("moe_layer_start_index", 1), settings.get("moe_layer_end_index", -1)
    if last not in (-1, settings.integer("num_hidden_layers") - 1):
        raise settings.unsupported("moe_layer_end_index", "experts up to the last layer")
    return {**experts(settings), "leading_dense_block_count": first}


def _either(name: str, change: Change) -> Source:
    return Part(name, change), Part(f"{name}.weight", change)


def _afmoe(settings: Settings) -> Metadata:
    settings.must_be("mup_enabled", True, False)
    return experts(settings)


def _hunyuan_moe(settings: Settings) -> Metadata:
    for key in ("moe_topk", "num_shared_expert", "moe_intermediate_size"):
        value = settings.get(key)
        if isinstance(value, list):
            if not value or any(entry != value[0] for entry in value):
                raise settings.unsupported(key, "the same in every layer")
            settings.put(key, value[0])
    settings.put("num_experts_per_tok", settings.integer("moe_topk", 1, low=1))
    settings.mark_read(
        ("num_shared_expert", "use_mixed_mlp_moe", "moe_drop_tokens", "moe_random_routing_dropped_token")
    )
    settings.mark_read(("moe_layer_num_skipped", "routed_scaling_factor", "norm_topk_prob"))
    return {**experts(settings), **hunyuan_scaling(settings)}


def _bailing_changes(settings: Settings) -> dict[str, Change]:
    """One matrix has the rows of queries, keys and values; some heads' columns are divided by their length."""
    num_heads = settings.integer("num_attention_heads", low=1)
    num_kv_heads = settings.integer("num_key_value_heads", num_heads, low=1)
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // num_heads, low=1)
    ends = np.cumsum((0, num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim))

    def rows(part: int, heads: int) -> RowOrder:
        def order(num_rows: int) -> NDArray[np.intp]:
            if num_rows != ends[-1]:
                raise ValueError(f"{num_rows} rows; wanted {ends[-1]}")
            found = np.arange(ends[part], ends[part + 1])
            return found[adjacent_pairs(len(found), heads)] if heads else found

        return RowOrder(order)

    changes: dict[str, Change] = {"attn_q": rows(0, num_heads), "attn_k": rows(1, num_kv_heads), "attn_v": rows(2, 0)}
    if settings.boolean("norm_head", False):
        changes["output"] = UNIT_COLUMNS
    return changes


def _bailing_variant(settings: Settings, family: Family) -> Family:
    """Both generations have one name; the second norms queries and keys."""
    classes = settings.entries("architectures")
    is_second = any("V2" in str(name) for name in classes) or settings.boolean("use_qk_norm", False)
    return _BAILING2 if is_second else family


def _llama4(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    wanted = [int((layer + 1) % 4 != 0) for layer in range(num_layers)]
    if settings.entries("no_rope_layers") not in ([], wanted):
        raise settings.unsupported("no_rope_layers", "positions in all but every fourth layer")
    kinds = settings.entries("layer_types")
    if kinds and [int(kind == "chunked_attention") for kind in kinds] != wanted:
        raise settings.unsupported("layer_types", "chunks in all but every fourth layer")
    step = settings.integer("interleave_moe_layer_step", 1, low=1)
    settings.mark_read(("moe_layers", "no_rope_layer_interval", "for_llm_compressor"))
    settings.must_be("attn_temperature_tuning", True, True)
    keys = experts(settings)
    size = settings.integer("intermediate_size", low=1)
    return keys | {
        "expert_feed_forward_length": size,
        "feed_forward_length": settings.integer("intermediate_size_mlp", size),
        "interleave_moe_layer_step": step,
        "attention.sliding_window": settings.integer("attention_chunk_size", 8192, low=1),
        "attention.temperature_scale": settings.number("attn_scale", 0.1),
        "attention.temperature_length": settings.integer("floor_scale", 8192, low=1),
    }


def _llama4_variant(settings: Settings, family: Family) -> Family:
    has_norms = settings.integer("num_local_experts", 16) != 128
    if settings.boolean("use_qk_norm", True) != has_norms:
        raise settings.unsupported("use_qk_norm", "queries and keys normed unless there are 128 experts")
    return family


def _oriented(settings: Settings) -> dict[str, Change]:
    """Stacks whose matrices lie one way or the other, as the writer has them."""
    hidden_size, inner = settings.integer("hidden_size", low=1), settings.integer("moe_intermediate_size", low=1)

    def upright(values: NDArray[Any], num_rows: int, num_columns: int) -> NDArray[Any]:
        """Stacked matrices with this many rows."""
        if values.shape[1:] == (num_rows, num_columns):
            return values
        if values.shape[1:] != (num_columns, num_rows):
            raise ValueError(f"wanted matrices of {num_rows} rows and {num_columns} columns")
        return values.swapaxes(1, 2)

    return {
        "ffn_gate_exps": Moved(lambda values: upright(values, 2 * inner, hidden_size)[:, :inner]),
        "ffn_up_exps": Moved(lambda values: upright(values, 2 * inner, hidden_size)[:, inner:]),
        "ffn_down_exps": Moved(lambda values: upright(values, hidden_size, inner)),
    }


def _cohere2_moe(settings: Settings) -> Metadata:
    """Dense layers come first, and have positions although they see everything."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    kinds = settings.entries("mlp_layer_types")
    num_dense = settings.integer("first_k_dense_replace", 0)
    if kinds:
        num_dense = kinds.index("sparse") if "sparse" in kinds else num_layers
        if kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
            raise settings.unsupported("mlp_layer_types", "dense layers before those with experts")
    prefix = settings.integer("prefix_dense_sliding_window_pattern", 1, low=1)
    period = settings.integer("sliding_window_pattern", 4, low=1)
    if not settings.entries("layer_types"):
        ends = [*((layer + 1) % prefix == 0 for layer in range(num_dense))]
        ends += [(layer + 1) % period == 0 for layer in range(num_layers - num_dense)]
        settings.put("layer_types", ["full_attention" if is_end else "sliding_attention" for is_end in ends])
    if settings.integer("num_shared_experts", 0):
        settings.must_be("shared_expert_combination_strategy", "average", "average")
    settings.mark_read(("shared_expert_combination_strategy", "norm_topk_prob"))
    has_sigmoid = settings.text("expert_selection_fn", "softmax") == "sigmoid"
    if not has_sigmoid:
        settings.must_be("expert_selection_fn", "softmax", "softmax")
    return {
        **experts(settings),
        "feed_forward_length": settings.integer(
            "prefix_dense_intermediate_size", settings.integer("intermediate_size")
        ),
        "expert_gating_func": 2 if has_sigmoid else 3,
        "expert_weights_norm": has_sigmoid and settings.boolean("norm_topk_prob", True),
        "leading_dense_block_count": num_dense if prefix == 1 else 0,
        "logit_scale": settings.number("logit_scale", 0.0625),
    }


def _cohere2_moe_variant(settings: Settings, family: Family) -> Family:
    """Its norms subtract the mean unless it has the epsilon of those that do not."""
    if "rms_norm_eps" not in settings:
        return family
    settings.mark_read(("layer_norm_eps",))
    return replace(family, has_layer_norms=False, epsilon="rms_norm_eps")


def _rope_pattern(settings: Settings) -> Metadata:
    bases = settings.entries("layer_rope_theta")
    return {"attention.rope_pattern": [int(base != 0) for base in bases] or None}


def _granite_swa_variant(settings: Settings, family: Family) -> Family:
    """Each layer has a base of its rotation, 0 for none; GGUF has one for each kind of layer."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    repeat_layer_types(settings, "full_attention", *("sliding_attention",) * 3)
    if not settings.entries("layer_rope_theta"):
        return family
    by_kind: dict[str, set[float]] = {"full_attention": set(), "sliding_attention": set()}
    kinds_and_bases = zip(
        settings.entries("layer_types"), settings.numbers("layer_rope_theta", num_layers), strict=False
    )
    for kind, base in kinds_and_bases:
        by_kind.setdefault(str(kind), set()).update({base} if base else ())
    record = settings.record("rope_parameters")
    full, windowed = by_kind["full_attention"], by_kind["sliding_attention"]
    has_two = bool(full and windowed and full != windowed)
    if max(len(full), len(windowed)) > 1 or (has_two and record.get("rope_type", "default") != "default"):
        raise settings.unsupported("layer_rope_theta", "one base for the layers of each kind, two only without scaling")
    for base in full or windowed:
        settings.put("rope_parameters", {**record, "rope_theta": base})
    for base in windowed:
        settings.put("rope_local_base_freq", base)
    return family


def _phimoe(settings: Settings) -> Metadata:
    """Routing by SparseMixer, and LongRoPE with one magnitude for all lengths."""
    scaling = Settings(settings.rotation(), {})
    settings.mark_read(("input_jitter_noise", "lm_head_bias"))
    settings.must_be("num_experts_per_tok", 2, 2)  # SparseMixer chooses twice
    names = ("short_mscale", "long_mscale")
    settings.mark_read(f"{kind}.{name}" for kind in ("rope_parameters", "rope_scaling") for name in names)
    margin = 2.0 * settings.number("router_jitter_noise", 0.01, low=0.0)
    keys = {**experts(settings), **one_window(settings), "expert_gating_margin": margin}
    if "short_mscale" in scaling:
        magnitude = scaling.number("short_mscale", low=0.0)
        scaling.must_be("long_mscale", magnitude, None)
        keys["rope.scaling.attn_factor"] = magnitude
    return keys


def _smallthinker(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    windows = settings.entries("sliding_window_layout")
    wanted = [int(layer % 4 != 0) for layer in range(num_layers)]
    ropes = settings.entries("rope_layout")
    if any(windows) and (windows != wanted or ropes not in ([], wanted)):
        raise settings.unsupported("sliding_window_layout", "windows and positions in all but every fourth layer")
    if any(windows):
        settings.must_be("sliding_window_size", 4096, 4096)
    has_softmax = settings.boolean("moe_primary_router_apply_softmax", False)
    size = settings.integer("moe_intermediate_size", low=1)
    return {
        **experts(settings),
        "feed_forward_length": size,
        "expert_gating_func": 1 if has_softmax else 2,
        "attention.sliding_window": 4096 if any(windows) else None,
    }


# Transformers saves a text model's gate and up as one matrix.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_SMALLTHINKER: dict[str, Source] = {
    **NORMS,
    **ATTENTION,
    "ffn_gate_inp": "block_sparse_moe.primary_router",
    **gated("block_sparse_moe.experts.{expert}", "_exps", ("gate", "up", "down")),
}


_GRANITE_SWA = Family(
    architecture="granite_swa",
    blocks=LLAMA,
    parameters={"attn_sinks.weight": "self_attn.sinks"},
    rows_permuted=True,
    has_windows=True,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True},
    keys=GRANITE_SCALES,
    metadata=_rope_pattern,
    variant=_granite_swa_variant,
)


_BAILING_FIXED = {"norm_softmax": False}
_BAILING_SEEN = (
    "num_shared_experts moe_shared_expert_intermediate_size norm_head norm_softmax use_qk_norm multi_gate"
    " embedding_dropout moe_router_enable_expert_bias"
)
_BAILING_ENDS: dict[str, Source] = {"token_embd": "word_embeddings", "output_norm": "norm"}
_BAILING_BLOCKS: dict[str, Source] = {
    **NORMS,
    "attn_output": "attention.dense",
    **GATED,
    **EXPERTS,
    **SHARED_EXPERTS,
}
_BAILING2 = Family(
    architecture="bailingmoe2",
    blocks={
        **_BAILING_BLOCKS,
        "attn_qkv": "attention.query_key_value",
        "attn_q_norm": "attention.query_layernorm",
        "attn_k_norm": "attention.key_layernorm",
    },
    parameters={"exp_probs_b.bias": "mlp.gate.expert_bias"},
    outside=_BAILING_ENDS,
    defaults={"partial_rotary_factor": 0.5},
    fixed={"score_function": "sigmoid", "use_qk_norm": True, **_BAILING_FIXED},
    seen=_BAILING_SEEN,
    keys=ROUTED_KEYS,
    metadata=experts,
)
_SIGMOID_ROUTED = Family(
    architecture="dots1",
    blocks={**LLAMA, **HEAD_NORMS, **EXPERTS, **SHARED_EXPERTS},
    parameters={**ROUTER_BIAS, **FUSED_EXPERTS},
    aliases=_ROUTED,
    fixed=ROUTED_FIXED,
    seen=ROUTED_SEEN,
    keys=ROUTED_KEYS,
    metadata=experts,
)

_GLM4_MOE = replace(
    _SIGMOID_ROUTED,
    architecture="glm4moe",
    blocks={
        **{stem: source for stem, source in _SIGMOID_ROUTED.blocks.items() if stem != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
    },
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
)


def _qwen2_moe(settings: Settings) -> Metadata:
    first_without = settings.integer("max_window_layers", 28)
    switch_windows(settings, lambda layer: layer % 2 == 0 and layer < first_without)
    shared = settings.integer("shared_expert_intermediate_size")
    return {**normed_experts(settings), "expert_shared_feed_forward_length": shared}


def _qwen3_moe(settings: Settings) -> Metadata:
    one_window(settings)
    switch_windows(settings, lambda layer: True)
    return normed_experts(settings)


MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        architecture="llama",
        blocks={**NORMS, **ATTENTION, **SPARSE_EXPERTS},
        rows_permuted=True,
        has_windows=True,
        metadata=lambda settings: {**experts(settings), **one_window(settings)},
    ),
    "qwen2_moe": Family(
        architecture="qwen2moe", blocks={**LLAMA, **EXPERTS, **SHARED_EXPERT}, has_windows=True, metadata=_qwen2_moe
    ),
    "qwen3_moe": Family(
        architecture="qwen3moe", blocks={**LLAMA, **HEAD_NORMS, **EXPERTS}, has_windows=True, metadata=_qwen3_moe
    ),
    "afmoe": Family(
        architecture="afmoe",
        blocks={
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **ATTENTION,
            "attn_gate": "self_attn.gate_proj",
            **HEAD_NORMS,
            **GATED,
            **EXPERTS,
            "ffn_gate_inp": "mlp.router.gate",
            **SHARED_EXPERTS,
        },
        parameters={"exp_probs_b.bias": "mlp.expert_bias"},
        has_windows=True,
        defaults={"rms_norm_eps": 1e-5},
        fixed={"score_func": "sigmoid"},
        seen="global_attn_every_n_layers load_balance_coeff num_expert_groups num_limited_groups",
        keys={
            **GROUPS,
            "expert_gating_func": 2,
            "expert_weights_norm": ("route_norm", True),
            "expert_weights_scale": ("route_scale", 1.0),
            "leading_dense_block_count": ("num_dense_layers", 0),
        },
        metadata=_afmoe,
    ),
    "bailing_moe": Family(
        architecture="bailingmoe",
        blocks={**_BAILING_BLOCKS, **{f"attn_{letter}": "attention.query_key_value" for letter in "qkv"}},
        outside=_BAILING_ENDS,
        fixed=_BAILING_FIXED,
        seen=_BAILING_SEEN,
        keys={key: ROUTED_KEYS[key] for key in ("expert_weights_norm", "leading_dense_block_count")},
        metadata=experts,
        changes=_bailing_changes,
        variant=_bailing_variant,
    ),
    "bailing_moe_v2": _BAILING2,
    "dots1": _SIGMOID_ROUTED,
    "ernie4_5_moe": Family(
        architecture="ernie4_5-moe",
        blocks={**LLAMA, **EXPERTS, **SHARED_EXPERTS},
        parameters={"exp_probs_b.bias": Part("mlp.moe_statics.e_score_correction_bias", FLAT)},
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        fixed={"moe_layer_interval": 1, "moe_use_aux_free": True},
        seen="moe_norm_min moe_num_shared_experts moe_capacity moe_gate moe_multimodal_paired",
        metadata=_ernie,
    ),
    "exaone_moe": replace(
        _SIGMOID_ROUTED,
        architecture="exaone-moe",
        parameters={
            "exp_probs_b.bias": ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            **FUSED_EXPERTS,
        },
        has_windows=True,
        aliases={},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "cohere2_moe": Family(
        architecture="cohere2moe",
        blocks={"attn_norm": "input_layernorm", **ATTENTION, **GATED, **EXPERTS, **SHARED_EXPERTS},
        has_windows=True,
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5, "sliding_window": 4096, "head_dim": 128, "tie_word_embeddings": True},
        metadata=_cohere2_moe,
        variant=_cohere2_moe_variant,
    ),
    "flex_olmo": Family(
        architecture="flex-olmo",
        blocks={**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **EXPERTS},
        defaults={"rope_theta": 5e5},
        metadata=normed_experts,
    ),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text"), _GLM4_MOE),
    "solar_open": replace(
        _GLM4_MOE,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "intermediate_size": 0, "partial_rotary_factor": 1.0},
        # All layers have experts, whatever `first_k_dense_replace` is.
        seen=f"{ROUTED_SEEN} first_k_dense_replace",
        keys={**ROUTED_KEYS, "leading_dense_block_count": 0},
    ),
    "granite_swa": _GRANITE_SWA,
    "granitemoe_swa": replace(
        _GRANITE_SWA,
        blocks={
            **NORMS,
            **ATTENTION,
            "ffn_gate_inp": ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
            "ffn_gate_shexp": Part("shared_mlp.input_linear", FIRST_HALF),
            "ffn_up_shexp": Part("shared_mlp.input_linear", SECOND_HALF),
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        parameters={
            **_GRANITE_SWA.parameters,
            # As the model's class names them, and as older Granite models are stored.
            "ffn_gate_exps.weight": (
                Part("block_sparse_moe.experts.gate_up_proj", FIRST_HALVES),
                Part("block_sparse_moe.input_linear.weight", FIRST_HALVES),
            ),
            "ffn_up_exps.weight": (
                Part("block_sparse_moe.experts.gate_up_proj", SECOND_HALVES),
                Part("block_sparse_moe.input_linear.weight", SECOND_HALVES),
            ),
            "ffn_down_exps.weight": (
                "block_sparse_moe.experts.down_proj",
                "block_sparse_moe.output_linear.weight",
            ),
        },
        defaults={"sliding_window": 128},
        keys={**GRANITE_SCALES, "expert_shared_feed_forward_length": ("shared_intermediate_size", 0)},
        metadata=lambda settings: {**experts(settings), **_rope_pattern(settings)},
    ),
    "gpt_oss": Family(
        architecture="gpt-oss",
        blocks={
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            **ATTENTION,
            "ffn_gate_inp": "mlp.router",
        },
        parameters={
            "attn_sinks.weight": "self_attn.sinks",
            # Rows of gate and up take turns. Quantized matrices have a leaf, plain ones none.
            "ffn_gate_exps.weight": _either("mlp.experts.gate_up_proj", ExpertRows(0, 2)),
            "ffn_up_exps.weight": _either("mlp.experts.gate_up_proj", ExpertRows(1, 2)),
            "ffn_down_exps.weight": _either("mlp.experts.down_proj", ExpertRows(0, 1)),
            "ffn_gate_exps.bias": Part("mlp.experts.gate_up_proj_bias", ExpertRows(0, 2)),
            "ffn_up_exps.bias": Part("mlp.experts.gate_up_proj_bias", ExpertRows(1, 2)),
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        has_windows=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE},
        fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        seen="experts_per_token initial_context_length",
        keys={"expert_feed_forward_length": ("intermediate_size", int, 1)},
        metadata=experts,
    ),
    "hunyuan_v1_moe": Family(
        architecture="hunyuan-moe",
        blocks={
            **LLAMA,
            **HUNYUAN_NORMS,
            **EXPERTS,
            "ffn_gate_inp": "mlp.gate.wg",
            **gated("mlp.shared_mlp", "_shexp"),
        },
        defaults={"rms_norm_eps": 1e-5},
        metadata=_hunyuan_moe,
    ),
    "llama4_text": Family(
        architecture="llama4",
        blocks={
            **NORMS,
            **ATTENTION,
            **gated("feed_forward"),
            "ffn_gate_inp": "feed_forward.router",
            **gated("feed_forward.shared_expert", "_shexp"),
        },
        parameters={
            # Input times matrix, where others have matrix times input.
            "ffn_gate_exps.weight": Part(
                "feed_forward.experts.gate_up_proj", Moved(lambda values: FIRST_HALVES.apply(values.swapaxes(1, 2)))
            ),
            "ffn_up_exps.weight": Part(
                "feed_forward.experts.gate_up_proj", Moved(lambda values: SECOND_HALVES.apply(values.swapaxes(1, 2)))
            ),
            "ffn_down_exps.weight": Part("feed_forward.experts.down_proj", TRANSPOSED),
        },
        layer_kinds=("chunked_attention",),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        metadata=_llama4,
        variant=_llama4_variant,
    ),
    "mellum": Family(
        architecture="mellum",
        blocks={**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS},
        parameters=FUSED_EXPERTS,
        has_windows=True,
        defaults={"rope_parameters": _MELLUM_ROPE, "partial_rotary_factor": 1.0},
        seen="mlp_layer_types mtp_layer_types mtp_mlp_layer_types use_sliding_window",
        metadata=partial(normed_experts, default=True),
    ),
    "phimoe": Family(
        architecture="phimoe",
        blocks={**NORMS, **ATTENTION, **SPARSE_EXPERTS},
        has_windows=True,
        has_layer_norms=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        metadata=_phimoe,
    ),
    **dict.fromkeys(
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        Family(
            architecture="qwen3vlmoe",
            blocks={**LLAMA, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
            parameters={
                "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
                "ffn_down_exps.weight": "mlp.experts.down_proj",
            },
            seen="norm_topk_prob",  # the published class normalises whatever it says
            metadata=experts,
            changes=_oriented,
        ),
    ),
    "sarvam_moe": replace(
        _BAILING2,
        aliases=_ROUTED,
        defaults={"rope_theta": 8e6, "routed_scaling_factor": 2.5, "partial_rotary_factor": 1.0},
    ),
    "qwen3_omni_moe_text": Family(
        architecture="qwen3vlmoe",
        blocks={**LLAMA, **HEAD_NORMS, **EXPERTS},
        metadata=partial(normed_experts, default=True),
    ),
    "smallthinker": Family(
        architecture="smallthinker",
        blocks=_SMALLTHINKER,
        activations=("relu", "silu"),
        aliases={
            "num_experts": "moe_num_primary_experts",
            "num_experts_per_tok": "moe_num_active_primary_experts",
            "moe_intermediate_size": "moe_ffn_hidden_size",
        },
        fixed={"moe_enable_secondary_experts": False, "norm_topk_prob": True, "moe_enable_early_router": True},
        seen="moe_layer_layout moe_num_secondary_experts moe_secondary_expert_size",
        metadata=_smallthinker,
    ),
}
"""Families by `model_type`."""
