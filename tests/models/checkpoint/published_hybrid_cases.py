"""Cases of models whose layers differ: linear attention, shared blocks, uneven heads."""

from tests.models.checkpoint.published_case import Case

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
}
