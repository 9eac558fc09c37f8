"""Gemma 3n's and Gemma 4's text models, whose layers have inputs of their own, and Gemma 4's draft models."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.changes import Change, Rows
from localinfer.models.checkpoint.family import (
    ATTENTION,
    FOUR_NORMS,
    GATED,
    GELU_TANH,
    HEAD_NORMS,
    Family,
    Metadata,
)
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MAX_CONTEXT


def _of_full_layers(settings: Settings, key: str, name: str) -> int | None:
    """A size of the full layers, if they have one of their own: a setting, or the same in their records."""
    found = settings.get(name)
    if found is not None:
        return settings.integer(name, low=1)
    records = Settings(settings.record("per_layer_config"), {})
    for layer, kind in enumerate(settings.entries("layer_types")):
        record = Settings(records.record(str(layer)), {})
        if kind == "full_attention" and key in record:
            return record.integer(key, low=1)
    return None


def _gemma4_variant(settings: Settings, family: Family) -> Family:
    """GGUF's size of heads is that of the full layers."""
    size = settings.integer("head_dim", 256, low=1)
    settings.put("swa_head_dim", size)
    settings.put("head_dim", _of_full_layers(settings, "head_dim", "global_head_dim") or size)
    return family


def _gemma4(settings: Settings) -> Metadata:
    if settings.get("use_bidirectional_attention") != "vision":  # inside pictures only: a text is causal
        settings.must_be("use_bidirectional_attention", None, None)
    num_layers = settings.integer("num_hidden_layers", low=1)
    size, num_shared = settings.integer("swa_head_dim", low=1), settings.integer("num_kv_shared_layers", 0)
    num_kv_heads = settings.integer("num_key_value_heads", low=1)
    full_heads = _of_full_layers(settings, "num_key_value_heads", "num_global_key_value_heads") or num_kv_heads
    inner = settings.integer("intermediate_size", low=1)
    is_wide = settings.boolean("use_double_wide_mlp", False)
    settings.mark_read(("attention_k_eq_v", "vocab_size_per_layer_input", "per_layer_config", "enable_moe_block"))
    keys: Metadata = {
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count_swa": size,
        "attention.shared_kv_layers": num_shared,
        "attention.head_count_kv": [
            full_heads if kind == "full_attention" else num_kv_heads for kind in settings.entries("layer_types")
        ],
        "feed_forward_length": [
            2 * inner if is_wide and layer >= num_layers - num_shared else inner for layer in range(num_layers)
        ],
        "embedding_length_per_layer_input": settings.integer("hidden_size_per_layer_input", 0) or None,
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0) or None,
    }
    if settings.get("enable_moe_block"):
        keys |= {
            "expert_count": settings.integer("num_experts", low=1),
            "expert_used_count": settings.integer("top_k_experts", low=1),
            "expert_feed_forward_length": settings.integer("moe_intermediate_size", low=1),
        }
    settings.mark_read(("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"))
    return keys


_INPUTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
"""Embeddings, among them the input that each layer has for itself."""
_INPUT_GATE = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""How a layer takes the input of its own."""
_GEMMA4 = Family(
    architecture="gemma4",
    blocks={
        **FOUR_NORMS,
        **ATTENTION,
        **HEAD_NORMS,
        **GATED,
        **_INPUT_GATE,
        "ffn_gate_inp": "router.proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    parameters={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
    },
    outside=_INPUTS,
    activations=GELU_TANH,
    has_windows=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
    },
    metadata=_gemma4,
    variant=_gemma4_variant,
)


def _assistant(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    settings.must_be("hidden_size_per_layer_input", 0, 0)
    settings.must_be("enable_moe_block", False, False)
    # Of the head that scores some tokens only, which is noted with its tensor.
    settings.mark_read(("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"))
    return {
        **_gemma4(settings),
        "attention.shared_kv_layers": num_layers,
        "nextn_predict_layers": num_layers,
        "embedding_length_out": settings.integer("backbone_hidden_size", low=1),
    }


def _embedding2(settings: Settings) -> Metadata:
    """EmbeddingGemma 2, whose window is counted to one side, and stored as both."""
    settings.mark_read(("embedding_dim",))  # the rows of a tensor
    return {**_gemma4(settings), "attention.causal": False}


def _embedding2_variant(settings: Settings, family: Family) -> Family:
    settings.put("sliding_window", 2 * settings.integer("sliding_window", 512, high=MAX_CONTEXT // 2))
    return _gemma4_variant(settings, family)


_EMBEDDING2 = replace(
    _GEMMA4,
    architecture="gemma-embedding2",
    outside={
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "output_proj": "embedding_projection",
        "per_layer_model_proj": "ple.per_layer_model_projection",
        "per_layer_proj_norm": "ple.per_layer_projection_norm",
    },
    blocks={
        **_GEMMA4.blocks,
        "inp_gate": "ple_block.per_layer_input_gate",
        "proj": "ple_block.per_layer_projection",
        "post_norm": "ple_block.post_per_layer_input_norm",
    },
    metadata=_embedding2,
    variant=_embedding2_variant,
)
_ASSISTANT = replace(
    _GEMMA4,
    architecture="gemma4-assistant",
    outside={"token_embd": "embed_tokens", "output_norm": "norm"},
    heads={
        "nextn.pre_projection": "pre_projection",
        "nextn.post_projection": "post_projection",
        "masked_embd_centroids": "masked_embedding.centroids",
    },
    unused=r"masked_embedding\.token_ordering",
    metadata=_assistant,
)


def _gemma3n_variant(settings: Settings, family: Family) -> Family:
    """Sizes of blocks are a list."""
    sizes = settings.get("intermediate_size")
    if isinstance(sizes, list):
        settings.put("intermediate_sizes", sizes)
        settings.put("intermediate_size", 0)
    return family


def _gemma3n(settings: Settings) -> Metadata:
    num_layers = settings.integer("num_hidden_layers", low=1)
    sizes = settings.entries("intermediate_sizes") or [settings.integer("intermediate_size")] * num_layers
    if len(sizes) < num_layers or any(type(size) is not int or size < 1 for size in sizes):
        raise settings.wrong("intermediate_sizes", f"{num_layers} positive whole numbers")
    if "layer_types" not in settings:
        kinds = [*("sliding_attention",) * 4, "full_attention"]
        settings.put("layer_types", [kinds[layer % 5] for layer in range(num_layers)])
    settings.must_be("altup_active_idx", 0, 0)
    settings.must_be("altup_correct_scale", True, True)
    settings.mark_read(("altup_coef_clip", "laurel_rank", "altup_num_inputs", "vocab_size_per_layer_input"))
    return {
        "feed_forward_length": sizes[:num_layers],
        "attention.shared_kv_layers": settings.integer("num_kv_shared_layers", 15),
        "embedding_length_per_layer_input": settings.integer("hidden_size_per_layer_input", 256, low=1),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
        "activation_sparsity_scale": _deviations(settings, sizes),
    }


def _deviations(settings: Settings, sizes: list[int]) -> list[float]:
    """How many deviations above the mean the gates of a layer are kept from, -inf where all are.

    The published code's deviation is that of a population, GGUF's that of a sample.
    """
    most = [0.95 if layer < 10 < len(sizes) else 0.0 for layer in range(len(sizes))]
    shares = settings.get("activation_sparsity_pattern", most)
    shares = shares if isinstance(shares, list) else [shares] * len(sizes)
    if len(shares) < len(sizes) or any(type(share) not in (int, float) or not 0 <= share < 1 for share in shares):
        raise settings.wrong("activation_sparsity_pattern", f"{len(sizes)} numbers from 0 to below 1")
    return [
        NormalDist().inv_cdf(share) * ((size - 1) / size) ** 0.5 if share else float("-inf")
        for share, size in zip(shares, sizes, strict=False)
    ]


def _gemma3n_changes(settings: Settings) -> dict[str, Change]:
    """Tokens behind the last of the table of inputs have the inputs of the first."""
    num_tokens = settings.integer("vocab_size", low=1)
    if settings.integer("vocab_size_per_layer_input", num_tokens) >= num_tokens:
        return {}

    def order(num_rows: int) -> NDArray[np.intp]:
        return np.concatenate([np.arange(num_rows), np.zeros(max(num_tokens - num_rows, 0), np.intp)])

    return {"per_layer_token_embd": Rows(order)}


_GEMMA3N = Family(
    architecture="gemma3n",
    blocks={
        **FOUR_NORMS,
        **ATTENTION,
        **HEAD_NORMS,
        **GATED,
        **_INPUT_GATE,
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
    },
    parameters={"altup_correct_scale.weight": "altup.correct_output_scale"},
    outside={
        **_INPUTS,
        "altup_proj": "altup_projections.{expert}",
        "altup_unembd_proj": "altup_unembed_projections.{expert}",
    },
    activations=GELU_TANH,
    has_windows=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "head_dim": 256,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "max_position_embeddings": 32768,
    },
    metadata=_gemma3n,
    changes=_gemma3n_changes,
    variant=_gemma3n_variant,
)

GEMMA4: dict[str, Family] = {
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), _EMBEDDING2),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _ASSISTANT),
}
"""By `model_type`."""
