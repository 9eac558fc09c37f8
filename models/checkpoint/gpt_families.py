"""Dense model types with layer norms: GPT's form, and Cohere's."""

from dataclasses import replace

from localinfer.models.checkpoint.changes import TRANSPOSED, Change, parts_of_groups
from localinfer.models.checkpoint.family import (
    ATTENTION,
    GATED,
    GELU_TANH,
    HEAD_NORMS,
    LLAMA,
    NO_ROPE,
    NORMS,
    RELU_SQUARED,
    Family,
    Metadata,
    Source,
    named_window,
)
from localinfer.models.checkpoint.settings import Settings

_UP_DOWN = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_STACKED_HEAD_NORMS = {f"attn_{letter}_norm": f"self_attn.{letter}_layernorm.norms.{{expert}}" for letter in "qk"}
_GPT_ENDS: dict[str, Source] = {"token_embd": "wte", "output_norm": "norm_f"}


def _olmo(settings: Settings) -> Metadata:
    limit = settings.number("clip_qkv", 0.0, low=0.0)
    return {"attention.clamp_kqv": limit or None}


def _mpt(settings: Settings) -> Metadata:
    attention = Settings(settings.record("attn_config"), {})
    if not attention.boolean("alibi", True) or attention.get("softmax_scale") is not None or attention.get("qk_ln"):
        raise settings.unsupported("attn_config", "ALiBi, without softmax_scale and qk_ln")
    if attention.text("attn_type", "multihead_attention") != "multihead_attention":
        raise settings.unsupported("attn_config", "multihead_attention")
    clip = attention.number("clip_qkv", 0.0, low=0.0)
    return {
        "feed_forward_length": settings.integer("expansion_ratio", 4, low=1) * settings.integer("hidden_size"),
        "attention.max_alibi_bias": attention.number("alibi_bias_max", 8.0, low=0.0),
        "attention.clamp_kqv": clip or None,
    }


def _wide(settings: Settings) -> Metadata:
    """GPT-2's kin have feed-forward blocks four times as wide as the model, unless they say otherwise."""
    return {"feed_forward_length": settings.integer("n_inner", 4 * settings.integer("hidden_size"), low=1)}


def _falcon(settings: Settings) -> Metadata:
    size = settings.integer("ffn_hidden_size", 4 * settings.integer("hidden_size"), low=1)
    return {"feed_forward_length": size, "attention.head_count_kv": _falcon_groups(settings)}


def _falcon_groups(settings: Settings) -> int:
    num_heads = settings.integer("num_attention_heads", low=1)
    if settings.boolean("new_decoder_architecture", False):
        return settings.integer("num_kv_heads", num_heads, low=1)
    settings.mark_read(("num_kv_heads",))
    return 1 if settings.boolean("multi_query", True) else num_heads


def _falcon_changes(settings: Settings) -> dict[str, Change]:
    return {"attn_qkv": _qkv_of_groups(settings, _falcon_groups(settings))}


def _qkv_by_head(settings: Settings) -> dict[str, Change]:
    return {"attn_qkv": _qkv_of_groups(settings, settings.integer("num_attention_heads", low=1))}


def _qkv_of_groups(settings: Settings, num_groups: int) -> Change:
    """One matrix has, group by group, heads of queries and one of keys and of values each."""
    num_heads = settings.integer("num_attention_heads", low=1)
    head_dim = settings.integer("hidden_size", low=1) // num_heads
    return parts_of_groups(num_groups, (num_heads // num_groups * head_dim, head_dim, head_dim), (0, 1, 2))


_GPT2_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_GPT2_SEEN = (
    "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 n_ctx activation_function"
)
_GPT_BLOCKS: dict[str, Source] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_MATRICES = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
_GPT_BIGCODE = Family(
    architecture="starcoder",
    blocks=_GPT_BLOCKS,
    outside={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"},
    layers="h",
    activations=GELU_TANH,
    has_layer_norms=True,
    epsilon="layer_norm_epsilon",
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
    },
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    fixed={**_GPT2_FIXED, "multi_query": True},
    seen=_GPT2_SEEN,
    keys={**NO_ROPE, "attention.head_count_kv": 1},
    metadata=_wide,
)
_BLOOM_BLOCKS: dict[str, Source] = {
    **NORMS,
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_COHERE_BLOCKS: dict[str, Source] = {"attn_norm": "input_layernorm", **ATTENTION, **HEAD_NORMS, **GATED}
_COHERE_SCALE = {"logit_scale": ("logit_scale", 0.0625)}
_COHERE_DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0}

GPT: dict[str, Family] = {
    "bloom": Family(
        architecture="bloom",
        blocks=_BLOOM_BLOCKS,
        outside={
            "token_embd": "word_embeddings",
            "token_embd_norm": "word_embeddings_layernorm",
            "output_norm": "ln_f",
        },
        layers="h",
        activations=GELU_TANH,
        has_layer_norms=True,
        epsilon="layer_norm_epsilon",
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
        },
        fixed={"apply_residual_connection_post_layernorm": False},
        seen="offset_alibi slow_but_exact masked_softmax_fusion skip_bias_add skip_bias_add_qkv",
        keys=NO_ROPE,
        metadata=lambda settings: {"feed_forward_length": 4 * settings.integer("hidden_size")},
        changes=_qkv_by_head,
    ),
    "cohere": Family(
        architecture="command-r",
        blocks=_COHERE_BLOCKS,
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        defaults={**_COHERE_DEFAULTS, "logit_scale": 0.0625},
        seen="use_qk_norm",  # the tensors show it
        keys=_COHERE_SCALE,
    ),
    "cohere2": Family(
        architecture="cohere2",
        blocks=_COHERE_BLOCKS,
        has_layer_norms=True,
        has_windows=True,
        epsilon="layer_norm_eps",
        defaults=_COHERE_DEFAULTS,
        fixed={"use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False},
        seen="use_qk_norm order_of_interleaved_layers rotary_pct position_embedding_type",
        keys=_COHERE_SCALE,
    ),
    "falcon": Family(
        architecture="falcon",
        blocks={
            "attn_norm": ("input_layernorm", "ln_mlp"),
            "attn_norm_2": "ln_attn",
            **{stem: source for stem, source in _BLOOM_BLOCKS.items() if stem not in NORMS},
        },
        outside={"token_embd": "word_embeddings", "output_norm": "ln_f"},
        layers="h",
        activations=GELU_TANH,
        has_layer_norms=True,
        epsilon="layer_norm_epsilon",
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_act": "activation"},
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 2048},
        fixed={"alibi": False, "parallel_attn": True},
        seen="multi_query new_decoder_architecture num_ln_in_parallel_attn",
        metadata=_falcon,
        changes=_falcon_changes,
    ),
    "gpt2": replace(
        _GPT_BIGCODE,
        architecture="gpt2",
        fixed=_GPT2_FIXED,
        keys=NO_ROPE,
        # Its layers multiply inputs by matrices, where others multiply matrices by inputs.
        changes=lambda settings: {f"{stem}.weight": TRANSPOSED for stem in _MATRICES},
    ),
    "gpt_bigcode": _GPT_BIGCODE,
    "gpt_neox": Family(
        architecture="gptneox",
        blocks={
            **NORMS,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        outside={"token_embd": "embed_in", "output_norm": "final_layer_norm"},
        activations=GELU_TANH,
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        keys={"use_parallel_residual": ("use_parallel_residual", True)},
        changes=_qkv_by_head,
    ),
    "mpt": Family(
        architecture="mpt",
        blocks={
            "attn_norm": "norm_1",
            "ffn_norm": "norm_2",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        outside=_GPT_ENDS,
        layers="blocks",
        activations=GELU_TANH,
        has_layer_norms=True,
        epsilon="layer_norm_epsilon",
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        # Learned positions are of models without ALiBi, which are refused.
        fixed={"no_bias": True, "norm_type": "low_precision_layernorm", "learned_pos_emb": True},
        seen="embedding_fraction attn_config logit_scale",
        keys=NO_ROPE,
        metadata=_mpt,
    ),
    "jais2": Family(
        architecture="jais2",
        blocks={**NORMS, **ATTENTION, **_UP_DOWN},
        activations=RELU_SQUARED,
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5},
    ),
    "nemotron": Family(
        architecture="nemotron",
        blocks={**NORMS, **ATTENTION, **_UP_DOWN},
        activations=RELU_SQUARED,
        norms_plus_one=True,
        has_layer_norms=True,
        epsilon="norm_eps",
        defaults={"partial_rotary_factor": 0.5, "norm_eps": 1e-5},
    ),
    "olmo": Family(
        architecture="olmo",
        blocks={**ATTENTION, **GATED},
        rows_permuted=True,
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        # Its class has no other.
        defaults={"layer_norm_eps": 1e-5},
        outside={"token_embd": "embed_tokens"},
        metadata=_olmo,
    ),
    "orion": Family(
        architecture="orion",
        blocks=LLAMA,
        has_layer_norms=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "phi": Family(
        architecture="phi2",
        blocks={
            "attn_norm": "input_layernorm",
            **ATTENTION,
            "attn_output": "self_attn.dense",
            "attn_qkv": "self_attn.query_key_value",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        outside={"token_embd": "embed_tokens", "output_norm": "final_layernorm"},
        activations=GELU_TANH,
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        defaults={"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
        fixed={"qk_layernorm": False},
    ),
    "stablelm": Family(
        architecture="stablelm",
        blocks={**LLAMA, **_STACKED_HEAD_NORMS},
        has_layer_norms=True,
        epsilon="layer_norm_eps",
        aliases={"partial_rotary_factor": "rope_pct"},
        defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        seen="use_parallel_residual qk_layernorm",  # the tensors show both
    ),
    "starcoder2": Family(
        architecture="starcoder2",
        blocks={**NORMS, **ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        activations=GELU_TANH,
        has_layer_norms=True,
        epsilon="norm_epsilon",
        has_windows=True,
        defaults={"norm_epsilon": 1e-5, "tie_word_embeddings": True},
        metadata=named_window,
    ),
}
"""Families by `model_type`."""
