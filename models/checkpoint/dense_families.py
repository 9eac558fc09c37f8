"""Dense model types: Llama's, Qwen's and Gemma's kin with RMS norms, GPT's form with layer norms, and Cohere's."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.changes import (
    TRANSPOSED,
    Change,
    RowOrder,
    adjacent_pairs,
    pairs_in_halves,
    parts_of_groups,
)
from localinfer.models.checkpoint.family import (
    ATTENTION,
    EXPERTS,
    FOUR_NORMS,
    GATED,
    GELU_TANH,
    HEAD_NORMS,
    LLAMA,
    NO_ROPE,
    NORMS,
    NORMS_BEHIND,
    RELU_SQUARED,
    SILU,
    W_NAMES,
    Family,
    Metadata,
    Source,
    gated,
    named_window,
    normed_experts,
    one_window,
    qwen_windows,
    repeat_layer_types,
    switch_windows,
)
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MIN_SCALE
from localinfer.models.decoder.metadata_keys import DYNAMIC_ROPE_KEY

GRANITE_SCALES = {
    "attention.scale": ("attention_multiplier", 1.0),
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "logit_scale": ("logits_scaling", 1.0),
}
"""Granite's factors, from muP training."""


def _gemma(settings: Settings) -> Metadata:
    """Its class reads `hidden_act`, whose "gelu" is the tanh form, and no other key."""
    if settings.text("hidden_act", GELU_TANH[0]) not in GELU_TANH:
        raise settings.unsupported("hidden_act", f"gemma models with {GELU_TANH[0]!r}")
    return _picture_tokens(settings)


def _picture_tokens(settings: Settings) -> Metadata:
    """The rows of a picture in PaliGemma, whose settings of the text model say it."""
    num_tokens = settings.integer("num_image_tokens", 0, low=0)
    if num_tokens:
        # Of prompts with pictures, which see themselves where there are some.
        settings.mark_read(("use_bidirectional_attention",))
    return {"num_picture_tokens": num_tokens or None}


def _gemma2(settings: Settings) -> Metadata:
    return {
        "attention.scale": settings.number("query_pre_attn_scalar", low=MIN_SCALE) ** -0.5,
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 0.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0),
        **_picture_tokens(settings),
    }


def _gemma3(settings: Settings) -> Metadata:
    """Its class has no limit of scores, whatever the file says."""
    return {**_gemma2(settings), "attn_logit_softcapping": None}


def _gemma3_variant(settings: Settings, family: Family) -> Family:
    """EmbeddingGemma (arXiv 2509.20354) where positions see later ones; its window counts both sides."""
    if not settings.boolean("use_bidirectional_attention", False):
        return family
    return replace(
        family,
        architecture="gemma-embedding",
        metadata=lambda settings: {**_gemma2(settings), "attention.causal": False},
    )


def _smollm3(settings: Settings) -> Metadata:
    """Layers without positions, by a list (of ones where there are some, whatever its name) or a period."""
    num_layers, period = settings.integer("num_hidden_layers"), settings.integer("no_rope_layer_interval", 4, low=1)
    turning = settings.entries("no_rope_layers") or [int((layer + 1) % period != 0) for layer in range(num_layers)]
    if len(turning) != num_layers or any(entry not in (0, 1) for entry in turning):
        raise settings.wrong("no_rope_layers", f"{num_layers} times 0 or 1")
    if settings.get("sliding_window") is None:
        settings.put("use_sliding_window", False)
    switch_windows(settings, lambda layer: not turning[layer])
    return {"attention.rope_pattern": [int(entry) for entry in turning]}


_GEMMA_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_WINDOWED_GEMMA_DEFAULTS = {**_GEMMA_DEFAULTS, "query_pre_attn_scalar": 256, "sliding_window": 4096, "head_dim": 256}
_GEMMA2_DEFAULTS = {
    **_WINDOWED_GEMMA_DEFAULTS,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Published files leave out whatever is as in the model's class.
_GEMMA3_DEFAULTS = {
    **_WINDOWED_GEMMA_DEFAULTS,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

_GEMMA3 = Family(
    architecture="gemma3",
    blocks={**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **GATED},
    activations=GELU_TANH,
    norms_plus_one=True,
    has_windows=True,
    defaults=_GEMMA3_DEFAULTS,
    metadata=_gemma3,
    variant=_gemma3_variant,
)

_TWO_MATRICES = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_ROTATES_HALF = {"partial_rotary_factor": 0.5}
_ERNIE = {"rms_norm_eps": 1e-5, "rope_theta": 5e5}


def hunyuan_scaling(settings: Settings) -> Metadata:
    """Their dynamic scaling has a fixed alpha, which stretches the base: nothing of it depends on the length."""
    scaling = Settings(settings.rotation(), {})
    settings.mark_read(("rope_scaling.alpha", "rope_parameters.alpha", "use_qk_norm", "use_cla", "use_rotary_pos_emb"))
    settings.must_be("use_cla", False, False)
    if not scaling.get("alpha"):
        return {}
    return {"rope.scaling.alpha": scaling.number("alpha", low=1.0), DYNAMIC_ROPE_KEY: None}


def _mistral3(settings: Settings) -> Metadata:
    """Queries sharpen with the position, from the length that the scaling begins with."""
    scaling = Settings(settings.rotation(), {})
    names = ("llama_4_scaling_beta", "max_position_embeddings")
    settings.mark_read(f"{record}.{name}" for record in ("rope_parameters", "rope_scaling") for name in names)
    named_window(settings)
    return {"attention.temperature_scale": scaling.number("llama_4_scaling_beta", 0.0)}


def _attention_scale(settings: Settings) -> Metadata:
    is_given = "attention_multiplier" in settings
    return {"attention.scale": settings.number("attention_multiplier")} if is_given else {}


def _cwm(settings: Settings) -> Metadata:
    """Every fourth layer sees everything, from the first on, unless the file says otherwise."""
    repeat_layer_types(settings, "full_attention", *("sliding_attention",) * 3)
    return {}


def _turned_back(settings: Settings) -> dict[str, Change]:
    """NanoChat rotates by negative angles, which is by positive ones with the halves of each head exchanged."""
    num_heads = settings.integer("num_attention_heads", low=1)
    counts = {"attn_q": num_heads, "attn_k": settings.integer("num_key_value_heads", num_heads, low=1)}
    return {name: _halves_exchanged(count) for name, count in counts.items()}


def _halves_exchanged(num_heads: int) -> RowOrder:
    def order(num_rows: int) -> NDArray[np.intp]:
        if num_rows % (2 * num_heads):
            raise ValueError(f"{num_rows} rows; wanted an even number for each of {num_heads} heads")
        return np.arange(num_rows).reshape(num_heads, 2, -1)[:, ::-1].reshape(-1)

    return RowOrder(order)


def _minicpm(settings: Settings) -> Metadata:
    num_layers, base = settings.integer("num_hidden_layers", low=1), settings.integer("dim_model_base", 1, low=1)
    return {
        "embedding_scale": settings.number("scale_emb", 1.0),
        "residual_scale": settings.number("scale_depth", 1.0) / num_layers**0.5,
        "logit_scale": settings.integer("hidden_size") / base,
    }


def llama3_rope(base: float, factor: float) -> dict[str, object]:
    """Llama 3.1's scaling of a model trained on 8192 positions, as some classes have it by default."""
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


def _internlm2_changes(settings: Settings) -> dict[str, Change]:
    """One matrix has, for each head of keys, the heads of its queries, its own, and that of values."""
    num_heads = settings.integer("num_attention_heads", low=1)
    num_kv_heads = settings.integer("num_key_value_heads", num_heads, low=1)
    head_dim = settings.integer("hidden_size") // num_heads
    sizes = (num_heads // num_kv_heads * head_dim, head_dim, head_dim)
    changes: dict[str, Change] = {"attn_v": parts_of_groups(num_kv_heads, sizes, (2,))}
    for part, (name, heads) in enumerate((("attn_q", num_heads), ("attn_k", num_kv_heads))):
        changes[name] = _with_pairs(parts_of_groups(num_kv_heads, sizes, (part,)), heads)
    return changes


def _with_pairs(part: RowOrder, num_heads: int) -> RowOrder:
    """Some rows, with those that rotate together side by side."""

    def order(num_rows: int) -> NDArray[np.intp]:
        rows = part.order(num_rows)
        return rows[adjacent_pairs(len(rows), num_heads)]

    return RowOrder(order)


_GLM4 = Family(
    architecture="glm4",
    blocks={
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        **ATTENTION,
        **_FUSED_GATE,
    },
    defaults=_ROTATES_HALF,
)


def _glm4v_changes(settings: Settings) -> dict[str, Change]:
    """GGUF's GLM 4 rotates halves where its rotation has sections, the published one adjacent pairs."""
    rotation = Settings(settings.rotation(), {})
    if not rotation.entries("mrope_section"):
        return {}
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // settings.integer("num_attention_heads"))
    share = rotation.number("partial_rotary_factor", settings.number("partial_rotary_factor"), low=0.0, high=1.0)
    fraction = int(head_dim * share) / head_dim
    heads = settings.integer("num_attention_heads")
    return {
        "attn_q": pairs_in_halves(heads, fraction),
        "attn_k": pairs_in_halves(settings.integer("num_key_value_heads", heads), fraction),
    }


_HUNYUAN = Family(
    architecture="hunyuan-dense",
    blocks={**LLAMA, **HUNYUAN_NORMS},
    defaults={"rms_norm_eps": 1e-5},
    metadata=hunyuan_scaling,
)

DENSE: dict[str, Family] = {
    "llama": Family(architecture="llama", blocks=LLAMA, rows_permuted=True),
    "mistral": Family(architecture="llama", blocks=LLAMA, rows_permuted=True, has_windows=True, metadata=one_window),
    "qwen2": Family(architecture="qwen2", blocks=LLAMA, has_windows=True, metadata=qwen_windows),
    "qwen3": Family(architecture="qwen3", blocks={**LLAMA, **HEAD_NORMS}, has_windows=True, metadata=qwen_windows),
    "gemma": Family(
        architecture="gemma",
        blocks=LLAMA,
        activations=GELU_TANH,
        norms_plus_one=True,
        defaults={**_GEMMA_DEFAULTS, "head_dim": 256},
        metadata=_gemma,
    ),
    "gemma2": Family(
        architecture="gemma2",
        blocks={**FOUR_NORMS, **ATTENTION, **GATED},
        activations=GELU_TANH,
        norms_plus_one=True,
        has_windows=True,
        defaults=_GEMMA2_DEFAULTS,
        metadata=_gemma2,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family(
        architecture="phi3",
        blocks={
            **NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        has_windows=True,
        defaults={"partial_rotary_factor": 1.0},
        metadata=one_window,
    ),
    "granite": Family(architecture="granite", blocks=LLAMA, rows_permuted=True, keys=GRANITE_SCALES),
    "granite_docling_text": Family(
        architecture="granite",
        blocks=LLAMA,
        rows_permuted=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
        },
        keys=GRANITE_SCALES,
    ),
    "olmo2": Family(architecture="olmo2", blocks={**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **GATED}),
    "olmoe": Family(
        architecture="olmoe",
        blocks={**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS},
        metadata=normed_experts,
        fixed={"clip_qkv": None},
    ),
    "olmo3": Family(
        architecture="olmo2", blocks={**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **GATED}, has_windows=True
    ),
    "smollm3": Family(architecture="smollm3", blocks=LLAMA, rows_permuted=True, has_windows=True, metadata=_smollm3),
    "seed_oss": Family(
        architecture="seed_oss",
        blocks=ATTENTION | GATED | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    ),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        Family(architecture="qwen2vl", blocks=LLAMA, has_windows=True, metadata=qwen_windows),
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_text"),
        Family(architecture="qwen3vl", blocks={**LLAMA, **HEAD_NORMS}),
    ),
    "ministral3": Family(
        architecture="mistral3", blocks=LLAMA, rows_permuted=True, has_windows=True, metadata=_mistral3
    ),
    "ernie4_5": Family(architecture="ernie4_5", blocks=LLAMA, defaults=_ERNIE),
    # Its rows are those of halves that rotate together, unlike ERNIE's.
    **dict.fromkeys(
        ("paddleocr_vl", "paddleocr_vl_text"), Family(architecture="paddleocr", blocks=LLAMA, defaults=_ERNIE)
    ),
    "exaone4": Family(
        architecture="exaone4",
        blocks={**NORMS_BEHIND, **ATTENTION, **HEAD_NORMS, **GATED},
        has_windows=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "apertus": Family(
        architecture="apertus",
        blocks={
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
            **ATTENTION,
            **HEAD_NORMS,
            **_TWO_MATRICES,
        },
        left_out=("alpha_p", "alpha_n", "beta", "eps"),
        activations=("xielu",),
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "xielu",
            "rope_parameters": llama3_rope(12e6, 8.0),
        },
        fixed={"post_norm": False, "qk_norm": True},
        per_layer={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", 0.0),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", 0.0),
            "xielu.beta": ("mlp.act_fn.beta", 0.5),
            "xielu.eps": ("mlp.act_fn.eps", -1e-6),
        },
    ),
    "arcee": Family(
        architecture="arcee",
        blocks={**NORMS, **ATTENTION, **_TWO_MATRICES},
        activations=RELU_SQUARED,
        rows_permuted=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "glm": Family(architecture="chatglm", blocks={**NORMS, **ATTENTION, **_FUSED_GATE}, defaults=_ROTATES_HALF),
    "glm4": _GLM4,
    **dict.fromkeys(
        ("glm4v_text", "glm_ocr_text"),
        replace(_GLM4, defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}, changes=_glm4v_changes),
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": replace(_HUNYUAN, architecture="hunyuan_vl"),
    "internlm2": Family(
        architecture="internlm2",
        blocks={
            "attn_norm": "attention_norm",
            "ffn_norm": "ffn_norm",
            **{f"attn_{letter}": "attention.wqkv" for letter in "qkv"},
            "attn_output": "attention.wo",
            **gated("feed_forward", names=W_NAMES),
        },
        outside={"token_embd": "tok_embeddings", "output_norm": "norm"},
        changes=_internlm2_changes,
    ),
    "bitnet": Family(
        architecture="bitnet",
        blocks={
            **LLAMA,
            "attn_sub_norm": "self_attn.attn_sub_norm",
            "ffn_sub_norm": "mlp.ffn_sub_norm",
        },
        activations=("relu2", *SILU),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        keys={"hidden_activation": ("hidden_act", "relu2")},
    ),
    "internlm3": Family(architecture="llama", blocks=LLAMA, rows_permuted=True),
    # Meta's Code World Model (arXiv 2510.02387).
    "cwm": Family(
        architecture="llama",
        blocks=LLAMA,
        rows_permuted=True,
        has_windows=True,
        defaults={"rms_norm_eps": 1e-5, "rope_parameters": llama3_rope(1e6, 16.0)},
        metadata=_cwm,
    ),
    "exaone": Family(
        architecture="exaone",
        blocks={
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            **{f"attn_{letter}": f"attn.attention.{letter}_proj" for letter in "qkv"},
            "attn_output": "attn.attention.out_proj",
            **gated("mlp", names=("c_fc_0", "c_fc_1", "c_proj")),
        },
        outside={"token_embd": "wte", "output_norm": "ln_f"},
        layers="h",
        aliases={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "hyperclovax": Family(
        architecture="hyperclovax",
        blocks={**LLAMA, "post_attention_norm": "post_norm1", "post_ffw_norm": "post_norm2"},
        seen="use_post_norm",  # the tensors show it
        keys={key: one for key, one in GRANITE_SCALES.items() if key != "attention.scale"},
        metadata=_attention_scale,
    ),
    "iquestcoder": Family(
        architecture="llama",
        blocks=LLAMA,
        rows_permuted=True,
        defaults={"rms_norm_eps": 1e-5},
        fixed={"clip_qkv": None, "use_sliding_window": False},
    ),
    "ministral": Family(architecture="llama", blocks=LLAMA, rows_permuted=True, has_windows=True),
    "nanochat": Family(
        architecture="nanochat",
        blocks={**ATTENTION, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outside={"token_embd": "embed_tokens"},
        activations=RELU_SQUARED,
        defaults={"final_logit_softcapping": 15.0},
        keys={"final_logit_softcapping": ("final_logit_softcapping", 0.0)},
        changes=_turned_back,
    ),
    "vaultgemma": Family(
        architecture="vaultgemma",
        blocks={"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **ATTENTION, **GATED},
        activations=GELU_TANH,
        norms_plus_one=True,
        has_windows=True,
        defaults=_GEMMA2_DEFAULTS,
        metadata=_gemma2,
    ),
    "minicpm": Family(
        architecture="minicpm",
        blocks=LLAMA,
        rows_permuted=True,
        metadata=_minicpm,
    ),
}
"""Families by `model_type`."""


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
