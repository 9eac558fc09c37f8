"""Cases of families that ran as GGUF files before their folders did."""

from typing import Any

from tests.models.checkpoint.published_case import LONGROPE, SW, Case

_GEMMA3N: dict[str, Any] = {
    **SW,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "layer_types": [*("sliding_attention", "full_attention") * 3, "sliding_attention"],
    "num_kv_shared_layers": 3,
    "intermediate_size": [88, 88, 72, 88, 88, 96, 88],
    "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0, 0.5, 0.0, 0.0],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 80,
    "laurel_rank": 10,
    "tie_word_embeddings": True,
}

GGUF_CASES: dict[str, Case] = {
    "gemma3n": Case("Gemma3nTextConfig", _GEMMA3N, model="Gemma3nForCausalLM"),
    "phimoe": Case(
        "PhimoeConfig",
        {
            **SW,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "lm_head_bias": True,
            "attention_bias": True,
            "router_jitter_noise": 0.2,
        },
    ),
    "phimoe-longrope": Case(
        "PhimoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": {
                **LONGROPE,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 256,
            },
        },
    ),
}
