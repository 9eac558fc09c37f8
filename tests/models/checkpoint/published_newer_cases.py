"""Cases of decoders published in 2026 that are combinations of older blocks."""

from tests.models.checkpoint.published_case import DS, LLAMA3, MLA, SW, YARN, Case

_FIVE = {**SW, "num_hidden_layers": 5}
_MUP = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
_GRANITE_SWA = {
    **_MUP,
    **_FIVE,
    "logits_scaling": 2.0,
    "layer_rope_theta": [0, 1e4, 1e4, 1e4, 0],
}
_ROUTED = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}

NEWER_CASES: dict[str, Case] = {
    "ministral": Case(
        "MinistralConfig",
        {**_FIVE, "head_dim": 32, "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
    ),
    "cwm": Case("CwmConfig", {**_FIVE, "head_dim": 16, "rope_parameters": LLAMA3}),
    "exaone": Case("ExaoneConfig", {"rope_parameters": LLAMA3}),
    "jais2": Case("Jais2Config", {"head_dim": 16}),
    "youtu": Case("YoutuConfig", MLA),
    "sarvam_mla": Case(
        "SarvamMLAConfig",
        {**MLA, **DS, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "iquestcoder": Case("IQuestCoderConfig", {"head_dim": 16}),
    "hyperclovax": Case("HyperCLOVAXConfig", _MUP),
    "hyperclovax-plain": Case("HyperCLOVAXConfig", {"use_post_norm": False, "logits_scaling": 0.5}),
    "vaultgemma": Case(
        "VaultGemmaConfig", {**_FIVE, "head_dim": 32, "query_pre_attn_scalar": 20, "final_logit_softcapping": 30.0}
    ),
    "nanochat": Case("NanoChatConfig", {"num_key_value_heads": 4}),
    "nanochat-grouped": Case("NanoChatConfig", {"tie_word_embeddings": True}),
    "granite_swa": Case("GraniteSWAConfig", _GRANITE_SWA),
    "granite_swa-bases": Case("GraniteSWAConfig", {**_FIVE, "layer_rope_theta": [1e6, 1e4, 1e4, 1e4, 1e6]}),
    "granitemoe_swa": Case("GraniteMoeSWAConfig", {**_GRANITE_SWA, **_ROUTED, "shared_intermediate_size": 24}),
    "granitemoe_swa-unshared": Case("GraniteMoeSWAConfig", {**_FIVE, **_ROUTED}),
    "solar_open": Case(
        "SolarOpenConfig", {**DS, "head_dim": 16, "rope_parameters": YARN}, without=("intermediate_size",)
    ),
    "sarvam_moe": Case("SarvamMoEConfig", {**DS, "head_dim": 16}),
    "flex_olmo": Case("FlexOlmoConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "cohere2_moe": Case(
        "Cohere2MoeConfig",
        {
            **_FIVE,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 48,
        },
    ),
    "cohere2_moe-softmax": Case(
        "Cohere2MoeConfig",
        {**_FIVE, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5},
    ),
}
