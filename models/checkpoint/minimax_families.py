"""MiniMax's model types: lightning attention (01), plain attention (M2), attention to chosen blocks (M3)."""

from dataclasses import replace

from localinfer.models.checkpoint.family import (
    ATTENTION,
    FUSED_EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS,
    W_NAMES,
    Family,
    Metadata,
    Source,
    experts,
    gated,
)
from localinfer.models.checkpoint.mixture_families import SPARSE_NAMES
from localinfer.models.checkpoint.settings import Settings


def _minimax_m2(settings: Settings) -> Metadata:
    settings.must_be("scoring_func", "sigmoid", "sigmoid")
    settings.must_be("shared_intermediate_size", 0, 0)
    settings.must_be("qk_norm_type", "per_layer", "per_layer")
    settings.mark_read(("attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "use_qk_norm"))
    settings.mark_read(("use_routing_bias", "rotary_dim"))
    keys = {**experts(settings), "expert_gating_func": 2}
    if "rotary_dim" in settings and "partial_rotary_factor" not in settings.rotation():
        keys["rope.dimension_count"] = settings.integer("rotary_dim", low=2)
    return keys


def _minimax(settings: Settings) -> Metadata:
    """MiniMax-01; GGUF has one weight of the residual stream, and none of the branches."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    names = ("full_attn", "linear_attn", "mlp")
    weights = {settings.number(f"{name}_alpha_factor", 1.0) for name in names}
    if len(weights) > 1:
        raise settings.unsupported("mlp_alpha_factor", "one weight of the residual stream in all layers")
    for name in names:
        settings.must_be(f"{name}_beta_factor", 1.0, 1.0)
    settings.must_be("postnorm", True, True)
    settings.must_be("shared_intermediate_size", 0, 0)
    if settings.get("sliding_window"):
        raise settings.unsupported("sliding_window", "minimax-01 models without windows")
    settings.mark_read(("block_size", "layernorm_attention_alpha", "layernorm_attention_beta", "shared_moe_mode"))
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
    """Experts' size is `intermediate_size`; layers without experts have another. Older files nest the indexer's."""
    settings.must_be("swiglu_alpha", 1.702, 1.702)
    settings.must_be("swiglu_limit", 7.0, 7.0)
    settings.must_be("scoring_func", "sigmoid", "sigmoid")
    old = Settings(settings.record("sparse_attention_config"), {})
    settings.mark_read(("mlp_layer_types", "moe_layer_freq", "shared_intermediate_size", "rotary_dim", "layer_types"))
    settings.mark_read(("use_qk_norm", "qk_norm_type", "use_gemma_norm", "use_routing_bias", "num_mtp_modules"))
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
        "expert_feed_forward_length": settings.integer("intermediate_size", low=1),
        "feed_forward_length": settings.integer("dense_intermediate_size", 12288, low=1),
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": settings.number("routed_scaling_factor", 2.0),
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
        **SPARSE_NAMES,
    },
    left_out=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    layer_kinds=("linear_attention",),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
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
        blocks={**NORMS, **ATTENTION, **HEAD_NORMS, **SPARSE_NAMES},
        parameters={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        defaults={"partial_rotary_factor": 1.0},
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
            metadata=_minimax_m3,
        ),
    ),
}
"""By `model_type`."""
