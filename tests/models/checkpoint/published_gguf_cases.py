"""Cases of families that ran as GGUF files before their folders did."""

from tests.models.checkpoint.published_case import LONGROPE, SW, Case

GGUF_CASES: dict[str, Case] = {
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
