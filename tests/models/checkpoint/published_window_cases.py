"""Cases whose layers with a window and without one differ in their rotation."""

from typing import Any

from tests.models.checkpoint.published_case import EXP, LLAMA3, SW, YARN, Case

_SIX = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _rotations(full: dict[str, Any], windowed: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return settings of six layers, two in three with a window, whose rotation is plain unless it is given."""
    plain = windowed or {"rope_type": "default", "rope_theta": 500.0}
    return {
        **SW,
        "num_hidden_layers": 6,
        "layer_types": _SIX,
        "rope_parameters": {"full_attention": full, "sliding_attention": plain},
    }


def _share(share: float, base: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}


_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
_MIMO: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 24,
    "v_head_dim": 16,
}
_GEMMA3N: dict[str, Any] = {
    "head_dim": 16,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
    "intermediate_size": [88] * 6,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
}

WINDOW_CASES: dict[str, Case] = {
    "gemma3-divided": Case("Gemma3TextConfig", {**_rotations(LLAMA3), **_GEMMA}),
    "gemma3-limited": Case("Gemma3TextConfig", {**_rotations(YARN), **_GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3n-scaled": Case("Gemma3nTextConfig", {**_GEMMA3N, **_rotations(_LINEAR)}, model="Gemma3nForCausalLM"),
    "olmo3-divided": Case("Olmo3Config", _rotations(LLAMA3)),
    "mimo_v2_flash-scaled": Case("MiMoV2FlashConfig", {**_MIMO, **_rotations({**YARN, "partial_rotary_factor": 0.5})}),
    "mimo_v2_flash-shares": Case("MiMoV2FlashConfig", {**_MIMO, **_rotations(_share(0.5, 5e6), _share(0.25))}),
    "mellum-outside": Case(
        "MellumConfig",
        {
            **EXP,
            **_rotations({"rope_type": "default", "rope_theta": 1e4}),
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
        },
    ),
    "modernbert-decoder-scaled": Case(
        "ModernBertDecoderConfig", {**_rotations(LLAMA3), "local_attention": 128}, without=("num_key_value_heads",)
    ),
}
