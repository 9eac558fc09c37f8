"""The models of `published_models.py`: classes of transformers and their settings."""

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """One model. changes: settings beside those of BASE. without: settings of BASE that it does not have."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    without: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """What the configuration's class is called with."""
        return {key: value for key, value in {**BASE, **self.changes}.items() if key not in self.without}


EXP: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LIN: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "head_dim": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
SW: dict[str, Any] = {"sliding_window": 16}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [2 + 0.3 * i for i in range(8)],
}
NO_HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

CASES: dict[str, Case] = {
    "llama": Case("LlamaConfig", {}),
    "llama-biases-tied": Case("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama-3": Case("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": Case("LlamaConfig", {"rope_parameters": {**YARN, "rope_type": "linear"}}),
    "llama-yarn": Case("LlamaConfig", {"rope_parameters": YARN}),
    "llama-yarn-factor": Case("LlamaConfig", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "mistral": Case("MistralConfig", {"sliding_window": 16, "head_dim": 32}),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Case("Qwen2Config", {}),
    "qwen2_moe": Case("Qwen2MoeConfig", {**EXP, "shared_expert_intermediate_size": 48}),
    "qwen3": Case("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": Case("Qwen3MoeConfig", {**EXP, "head_dim": 32, "norm_topk_prob": True}),
    "gemma": Case("GemmaConfig", {"head_dim": 32}),
    "gemma2": Case("Gemma2Config", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 20}),
    "gemma3": Case(
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    ),
    "phi3": Case("Phi3Config", {"sliding_window": 16}),
    "phi3-longrope": Case("Phi3Config", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "granite": Case("GraniteConfig", GRANITE),
    "olmo2": Case("Olmo2Config", {}),
    "olmoe": Case("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "smollm3": Case("SmolLM3Config", {}),
    "seed_oss": Case("SeedOssConfig", {"head_dim": 32}),
    "qwen3_next": Case(
        "Qwen3NextConfig",
        {**EXP, **LIN, "shared_expert_intermediate_size": 40, "num_hidden_layers": 5, "partial_rotary_factor": 0.25},
    ),
    "qwen3_5_text": Case("Qwen3_5TextConfig", {**LIN, "num_hidden_layers": 5}),
    "qwen3_5": Case(
        "Qwen3_5Config",
        {
            "text_config": {**BASE, **LIN, "num_hidden_layers": 5},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
            },
        },
        model="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_moe_text": Case(
        "Qwen3_5MoeTextConfig", {**EXP, **LIN, "shared_expert_intermediate_size": 40, "num_hidden_layers": 5}
    ),
    "lfm2": Case(
        "Lfm2Config",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "block_ff_dim": 88,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-adjust": Case(
        "Lfm2Config",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "intermediate_size": 96,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "lfm2_moe": Case(
        "Lfm2MoeConfig",
        {
            **EXP,
            "num_hidden_layers": 5,
            "num_dense_layers": 2,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        },
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "mamba_n_groups": 2,
            "mamba_expand": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "position_embedding_type": "nope",
        },
    ),
    "granitemoehybrid-dense": Case(
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "mamba_n_groups": 2,
            "mamba_expand": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": Case(
        "BambaConfig",
        {
            "num_hidden_layers": 5,
            "attn_layer_indices": [2, 4],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "mamba_n_groups": 2,
            "mamba_expand": 2,
        },
    ),
    "nemotron_h": Case(
        "NemotronHConfig",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "routed_scaling_factor": 2.5,
        },
    ),
    "falcon_h1": Case(
        "FalconH1Config",
        {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "mamba_n_groups": 2,
            "head_dim": 16,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [0.9, 0.8],
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "mamba_rms_norm": False,
        },
    ),
    "falcon_h1-norm": Case(
        "FalconH1Config",
        {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 12,
            "mamba_n_groups": 2,
            "head_dim": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "jamba": Case(
        "JambaConfig",
        {
            "num_hidden_layers": 6,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 12,
            "mamba_dt_rank": 6,
            "use_mamba_kernels": False,
        },
    ),
    "mamba": Case("MambaConfig", {"state_size": 12, "time_step_rank": 6}, without=NO_HEADS),
    "falcon_mamba": Case(
        "FalconMambaConfig", {"mixer_rms_eps": 1e-5, "state_size": 12, "time_step_rank": 6}, without=NO_HEADS
    ),
    "mamba2": Case(
        "Mamba2Config",
        {"state_size": 12, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2},
        without=NO_HEADS,
    ),
    "kimi_linear": Case(
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
        },
    ),
    "qwen2_vl": Case(
        "Qwen2VLConfig",
        {
            "text_config": {
                **BASE,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2},
        },
        model="Qwen2VLForConditionalGeneration",
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLConfig",
        {
            "text_config": {
                **BASE,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
            },
        },
        model="Qwen2_5_VLForConditionalGeneration",
    ),
    "qwen3_vl": Case(
        "Qwen3VLConfig",
        {
            "text_config": {**BASE, "head_dim": 32},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
        },
        model="Qwen3VLForConditionalGeneration",
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoeConfig",
        {
            "text_config": {**BASE, **EXP, "moe_intermediate_size": 24, "head_dim": 32},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
        },
        model="Qwen3VLMoeForConditionalGeneration",
    ),
    "ministral3": Case(
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "mistral4": Case("Mistral4Config", {**MLA, **DS, "n_group": 1, "topk_group": 1}, model="Mistral4ForCausalLM"),
    "ernie4_5": Case("Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5_moe": Case(
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone4": Case("Exaone4Config", {**SW, "sliding_window_pattern": 4, "num_hidden_layers": 5}),
    "exaone4-full": Case(
        "Exaone4Config", {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4}
    ),
    "exaone_moe": Case(
        "ExaoneMoeConfig",
        {
            **SW,
            **EXP,
            "num_hidden_layers": 5,
            "n_group": 1,
            "topk_group": 1,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "apertus": Case("ApertusConfig", {"rope_parameters": LLAMA3}),
    "afmoe": Case(
        "AfmoeConfig",
        {
            **SW,
            **EXP,
            "num_hidden_layers": 5,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "head_dim": 16,
            "global_attn_every_n_layers": 4,
            "route_scale": 1.4,
            "mup_enabled": True,
        },
    ),
    "olmo": Case("OlmoConfig", {"clip_qkv": 0.5}),
    "olmo3": Case("Olmo3Config", {**SW, "num_hidden_layers": 5}),
    "mpt": Case(
        "MptConfig",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "expansion_ratio": 2,
            "max_seq_len": 256,
            "attn_config": {"alibi": True, "clip_qkv": 0.7},
        },
        without=NO_HEADS,
    ),
    "minicpm3": Case("MiniCPM3Config", {**MLA}),
    "hunyuan_v1_dense": Case("HunYuanDenseV1Config", {"head_dim": 16}),
    "hunyuan_v1_moe": Case("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 8, "moe_topk": [3] * 4}),
    "glm": Case("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": Case("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4_moe": Case("Glm4MoeConfig", {**DS, "head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": Case("Glm4MoeLiteConfig", {**MLA, **DS}),
    "deepseek_v2": Case("DeepseekV2Config", {**MLA, **DS, "topk_method": "greedy"}),
    "deepseek_v2-lite": Case(
        "DeepseekV2Config",
        {
            **MLA,
            **DS,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": Case(
        "DeepseekV3Config", {**MLA, **DS, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "dots1": Case("Dots1Config", {**DS, "head_dim": 16}),
    "gpt_oss": Case(
        "GptOssConfig",
        {
            "intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 16,
            "rope_parameters": {**YARN, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "minimax_m2": Case(
        "MiniMaxM2Config", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8}
    ),
    "cohere": Case("CohereConfig", {"use_qk_norm": True}),
    "cohere-plain": Case("CohereConfig", {"tie_word_embeddings": True}),
    "cohere2": Case("Cohere2Config", {**SW, "num_hidden_layers": 5}),
    "phi": Case("PhiConfig", {"partial_rotary_factor": 0.5}),
    "starcoder2": Case("Starcoder2Config", {"use_bias": True}),
    "granitemoe": Case(
        "GraniteMoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoeshared": Case(
        "GraniteMoeSharedConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 40, "attention_multiplier": 0.2},
    ),
    "nemotron": Case("NemotronConfig", {"partial_rotary_factor": 0.5}),
    "stablelm": Case(
        "StableLmConfig", {"partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True}
    ),
    "stablelm-plain": Case("StableLmConfig", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "arcee": Case("ArceeConfig", {}),
    "internlm3": Case("InternLM3Config", {}),
    "llama4_text": Case(
        "Llama4TextConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "intermediate_size": 32,
            "intermediate_size_mlp": 88,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "num_hidden_layers": 5,
        },
    ),
    "mellum": Case(
        "MellumConfig",
        {
            **SW,
            **EXP,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"],
            "rope_parameters": dict.fromkeys(
                ("full_attention", "sliding_attention"), {"rope_type": "default", "rope_theta": 5e5}
            ),
        },
    ),
}
