"""Cases of models with recurrent layers."""

from tests.models.checkpoint.published_case import BASE, EXP, LIN, MLA, NO_HEADS, SW, Case

_WIDE_VALUES = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}

RECURRENT_CASES: dict[str, Case] = {
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
    "lfm3": Case(
        "Lfm3Config",
        {
            **SW,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv", "sliding_attention"],
        },
    ),
    "lfm3-plain": Case(
        "Lfm3Config",
        {
            **SW,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "conv_L_cache": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
    ),
    "olmo_hybrid": Case(
        "OlmoHybridConfig", {**_WIDE_VALUES, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    ),
    "olmo_hybrid-nope": Case(
        "OlmoHybridConfig",
        {
            **_WIDE_VALUES,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
}
