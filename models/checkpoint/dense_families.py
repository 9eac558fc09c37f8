"""Dense model types with RMS norms, and those that hold experts in the same layers: Llama's, Qwen's and Gemma's kin."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.changes import Change, RowOrder, adjacent_pairs, parts_of_groups
from localinfer.models.checkpoint.family import (
    ATTENTION,
    EXPERTS,
    FOUR_NORMS,
    GATED,
    GELU_TANH,
    HEAD_NORMS,
    LLAMA,
    NORMS,
    NORMS_BEHIND,
    RELU_SQUARED,
    SILU,
    W_NAMES,
    Family,
    Metadata,
    experts,
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

_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **gated("mlp.shared_expert", "_shexp")}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **gated("block_sparse_moe.experts.{expert}", "_exps", W_NAMES),
}


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
    return {}


def _gemma2(settings: Settings) -> Metadata:
    return {
        "attention.scale": settings.number("query_pre_attn_scalar", low=MIN_SCALE) ** -0.5,
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 0.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0),
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


def _qwen2_moe(settings: Settings) -> Metadata:
    first_without = settings.integer("max_window_layers", 28)
    switch_windows(settings, lambda layer: layer % 2 == 0 and layer < first_without)
    shared = settings.integer("shared_expert_intermediate_size")
    return {**normed_experts(settings), "expert_shared_feed_forward_length": shared}


def _qwen3_moe(settings: Settings) -> Metadata:
    one_window(settings)
    switch_windows(settings, lambda layer: True)
    return normed_experts(settings)


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

_HUNYUAN = Family(
    architecture="hunyuan-dense",
    blocks={**LLAMA, **HUNYUAN_NORMS},
    defaults={"rms_norm_eps": 1e-5},
    metadata=hunyuan_scaling,
)

DENSE: dict[str, Family] = {
    "llama": Family(architecture="llama", blocks=LLAMA, rows_permuted=True),
    "mistral": Family(architecture="llama", blocks=LLAMA, rows_permuted=True, has_windows=True, metadata=one_window),
    "mixtral": Family(
        architecture="llama",
        blocks={**NORMS, **ATTENTION, **_MIXTRAL_EXPERTS},
        rows_permuted=True,
        has_windows=True,
        metadata=lambda settings: {**experts(settings), **one_window(settings)},
    ),
    "qwen2": Family(architecture="qwen2", blocks=LLAMA, has_windows=True, metadata=qwen_windows),
    "qwen2_moe": Family(
        architecture="qwen2moe", blocks={**LLAMA, **EXPERTS, **_SHARED_EXPERT}, has_windows=True, metadata=_qwen2_moe
    ),
    "qwen3": Family(architecture="qwen3", blocks={**LLAMA, **HEAD_NORMS}, has_windows=True, metadata=qwen_windows),
    "qwen3_moe": Family(
        architecture="qwen3moe", blocks={**LLAMA, **HEAD_NORMS, **EXPERTS}, has_windows=True, metadata=_qwen3_moe
    ),
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
        ("glm4v_text", "glm_ocr_text"), replace(_GLM4, defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0})
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
