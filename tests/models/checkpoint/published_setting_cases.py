"""Cases of settings that few published models have, of families whose usual ones are in `published_cases.py`."""

from typing import Any

from tests.models.checkpoint.published_case import BASE, DS, EXP, MLA, SW, YARN, Case

_WINDOWS: dict[str, Any] = {**SW, "use_sliding_window": True, "max_window_layers": 2}
_MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_SHARED: dict[str, Any] = {**EXP, "shared_expert_intermediate_size": 48}
_LATENT: dict[str, Any] = {**MLA, **DS, "rms_norm_eps": 1e-2}
_SEES: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}
_SIDE_BY_SIDE: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "head_dim": 16,
}

SETTING_CASES: dict[str, Case] = {
    "olmoe-normed": Case("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen2_moe-normed": Case("Qwen2MoeConfig", {**_SHARED, "norm_topk_prob": True}),
    "qwen3_moe-plain": Case("Qwen3MoeConfig", {**EXP, "head_dim": 32, "norm_topk_prob": False}),
    "qwen2-windows": Case("Qwen2Config", _WINDOWS),
    "qwen3-windows": Case("Qwen3Config", {**_WINDOWS, "head_dim": 32, "layer_types": _MIXED}),
    "qwen2_moe-windows": Case("Qwen2MoeConfig", {**_SHARED, **_WINDOWS}),
    "qwen3_moe-windows": Case("Qwen3MoeConfig", {**EXP, **SW, "use_sliding_window": True}),
    "qwen2_vl-windows": Case(
        "Qwen2VLConfig",
        {
            "text_config": {
                **BASE,
                **_WINDOWS,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            "vision_config": _SEES,
        },
        model="Qwen2VLForConditionalGeneration",
    ),
    "smollm3-list": Case("SmolLM3Config", {"no_rope_layers": [1, 0, 0, 1]}),
    "smollm3-period": Case("SmolLM3Config", {"no_rope_layer_interval": 3}),
    "smollm3-windows": Case("SmolLM3Config", {**SW, "use_sliding_window": True, "no_rope_layers": [0, 1, 1, 0]}),
    "mellum-bases": Case("MellumConfig", {**SW, **EXP, "head_dim": 16, "layer_types": _MIXED, "norm_topk_prob": False}),
    "mellum-yarn": Case(
        "MellumConfig",
        {
            **SW,
            **EXP,
            "head_dim": 16,
            "layer_types": _MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "falcon_h1-norm-first": Case(
        "FalconH1Config", {**_SIDE_BY_SIDE, "mamba_rms_norm": True, "mamba_norm_before_gate": True}
    ),
    # Norms of latents, whose epsilon is not the model's.
    "deepseek_v2-groups": Case(
        "DeepseekV2Config", {**_LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": True}
    ),
    "deepseek_v3-epsilon": Case("DeepseekV3Config", _LATENT),
    "glm4_moe_lite-epsilon": Case("Glm4MoeLiteConfig", _LATENT),
    "mistral4-groups": Case("Mistral4Config", _LATENT, model="Mistral4ForCausalLM"),
    "minicpm3-epsilon": Case("MiniCPM3Config", {**MLA, "rms_norm_eps": 1e-2}),
    "kimi_linear-epsilon": Case(
        "KimiLinearConfig",
        {
            **MLA,
            "q_lora_rank": None,
            "num_hidden_layers": 5,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "rms_norm_eps": 1e-2,
        },
    ),
}
