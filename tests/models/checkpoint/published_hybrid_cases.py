"""Cases of models whose layers differ: linear attention, shared blocks, uneven heads."""

from tests.models.checkpoint.published_case import EXP, YARN, Case

_LAGUNA = {
    **EXP,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "sliding_window": 8,
    "shared_expert_intermediate_size": 40,
    "moe_routed_scaling_factor": 1.7,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
}
_ZAMBA2 = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "adapter_rank": 8,
    "n_mamba_heads": 8,
    "mamba_d_state": 12,
    "mamba_ngroups": 2,
    "mamba_expand": 2,
}
HYBRID_CASES: dict[str, Case] = {
    "minimax": Case(
        "MiniMaxConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "block_size": 8,
            **{f"{name}_alpha_factor": 3.5 for name in ("full_attn", "linear_attn", "mlp")},
        },
        computed=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    ),
    "laguna": Case("LagunaConfig", _LAGUNA),
    "laguna-yarn": Case(
        "LagunaConfig",
        {
            **_LAGUNA,
            "gating": "per-element",
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "zamba2": Case(
        "Zamba2Config",
        {
            **_ZAMBA2,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "tie_word_embeddings": True,
        },
    ),
    "zamba2-plain": Case("Zamba2Config", {**_ZAMBA2, "layers_block_type": ["hybrid", "mamba"] * 3}),
}
