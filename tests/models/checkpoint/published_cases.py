"""The models of `published_models.py`: classes of transformers and their settings."""

from tests.models.checkpoint.published_bert_kin_cases import BERT_DECODER_CASES
from tests.models.checkpoint.published_case import (
    BASE,
    DS,
    EXP,
    GRANITE,
    LLAMA3,
    LONGROPE,
    MLA,
    NO_HEADS,
    SW,
    YARN,
    Case,
)
from tests.models.checkpoint.published_gguf_cases import GGUF_CASES
from tests.models.checkpoint.published_hybrid_cases import HYBRID_CASES
from tests.models.checkpoint.published_newer_cases import NEWER_CASES
from tests.models.checkpoint.published_recurrent_cases import RECURRENT_CASES
from tests.models.checkpoint.published_setting_cases import SETTING_CASES
from tests.models.checkpoint.published_window_cases import WINDOW_CASES

CASES: dict[str, Case] = {
    **BERT_DECODER_CASES,
    **HYBRID_CASES,
    **RECURRENT_CASES,
    **NEWER_CASES,
    **SETTING_CASES,
    **WINDOW_CASES,
    **GGUF_CASES,
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
    "gpt2": Case("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}, without=NO_HEADS),
    "gpt_neox": Case("GPTNeoXConfig", {}, without=("num_key_value_heads",)),
    "gpt_bigcode": Case(
        "GPTBigCodeConfig", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}, without=NO_HEADS
    ),
    "falcon": Case("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-7b": Case("FalconConfig", {"multi_query": True, "parallel_attn": True, "bias": False}),
    "bloom": Case("BloomConfig", {"n_head": 4, "n_layer": 3}, without=(*NO_HEADS, "max_position_embeddings")),
    "mimo_v2_flash": Case(
        "MiMoV2FlashConfig",
        {
            **SW,
            "num_hidden_layers": 5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 24,
            "v_head_dim": 16,
        },
    ),
    "gemma4": Case(
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 16,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-moe": Case(
        "Gemma4TextConfig",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
}
