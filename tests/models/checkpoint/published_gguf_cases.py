"""Cases of families that ran as GGUF files before their folders did."""

from typing import Any

from tests.models.checkpoint.published_case import BASE, DS, LONGROPE, MLA, SW, YARN, Case

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
_WHOLE: dict[str, Any] = {"mscale": 1.0, "mscale_all_dim": 1.0}
_INDEXED: dict[str, Any] = {
    **MLA,
    **DS,
    "index_topk": 8,
    "index_head_dim": 12,
    # So many that no position is scored 0 by all: of equal scores, one library takes others than the next.
    "index_n_heads": 16,
}
_MINIMAX: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "intermediate_size": 32,
    "dense_intermediate_size": 88,
    "shared_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["full_attention", *("minimax_m3_sparse",) * 3],
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
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
    "deepseek_v32": Case("DeepseekV32Config", {**_INDEXED, "rope_parameters": {**YARN, **_WHOLE}}),
    "glm_moe_dsa": Case(
        "GlmMoeDsaConfig", {**_INDEXED, "indexer_types": ["full", "shared", "full", "shared"], "rms_norm_eps": 1e-2}
    ),
    "minimax_m3": Case("MiniMaxM3VLTextConfig", _MINIMAX, model="MiniMaxM3VLForCausalLM"),
    "minimax_m3_vl": Case(
        "MiniMaxM3VLConfig",
        {
            "text_config": {**BASE, **_MINIMAX},
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "patch_size": 2,
            },
        },
        model="MiniMaxM3SparseForConditionalGeneration",
    ),
    "bitnet": Case("BitNetConfig", {}),
    "bitnet-silu": Case("BitNetConfig", {"hidden_act": "silu", "tie_word_embeddings": True}),
}
