"""Model types with Mamba's layers: Mamba 1 and 2, Jamba, Granite 4, Bamba, Nemotron-H, Falcon-H1."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.changes import (
    COLUMN,
    CONVOLUTION,
    FIRST_HALF,
    FIRST_HALVES,
    NEGATIVE_EXPONENTIAL,
    SECOND_HALF,
    SECOND_HALVES,
    Change,
    Computed,
    pairs_adjacent,
    per_group,
    scaled,
    scaled_rows,
)
from localinfer.models.checkpoint.dense_families import GRANITE_SCALES
from localinfer.models.checkpoint.family import ATTENTION, RELU_SQUARED, Family, Metadata, Part, Source, experts, gated
from localinfer.models.checkpoint.settings import Settings

_MANY_TOKENS = 1 << 20
"""Context length where nothing depends on positions, as converters write it."""


def _mixer_1(module: str) -> tuple[dict[str, Source], dict[str, Source]]:
    """Modules and parameters of Mamba 1."""
    blocks: dict[str, Source] = {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": Part(f"{module}.conv1d", CONVOLUTION),
        "ssm_x": f"{module}.x_proj",
        "ssm_dt": f"{module}.dt_proj",
        "ssm_out": f"{module}.out_proj",
    }
    # Before the convolution's bias, which has no taps.
    parameters: dict[str, Source] = {"ssm_a": Part(f"{module}.A_log", NEGATIVE_EXPONENTIAL), "ssm_d": f"{module}.D"}
    return blocks, parameters


def _mixer_2(module: str) -> tuple[dict[str, Source], dict[str, Source]]:
    """Modules and parameters of Mamba 2."""
    blocks: dict[str, Source] = {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": Part(f"{module}.conv1d", CONVOLUTION),
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }
    parameters: dict[str, Source] = {
        "ssm_a": Part(f"{module}.A_log", Computed(lambda values: -np.exp(values.reshape(-1, 1)))),
        "ssm_d": Part(f"{module}.D", COLUMN),
        "ssm_dt.bias": f"{module}.dt_bias",
    }
    return blocks, parameters


def _check_steps(settings: Settings) -> None:
    """Refuse limits of step sizes; the widest, which is none, is written in several ways."""
    limits = settings.entries("time_step_limit")
    settings.mark_read(("time_step_scale", "time_step_rank", "rescale_prenorm_residual", "residual_in_fp32"))
    settings.mark_read(("time_step_init_scheme", "hybrid_override_pattern"))
    if limits and (len(limits) != 2 or limits[0] != 0 or (isinstance(limits[1], int | float) and limits[1] < 1e30)):
        raise settings.unsupported("time_step_limit", "step sizes without limits")


def _mamba(settings: Settings) -> Metadata:
    _check_steps(settings)
    hidden_size = settings.integer("hidden_size", low=1)
    inner_size = settings.integer("inner_size", settings.integer("expand", 2, low=1) * hidden_size, low=1)
    return {"ssm.inner_size": inner_size, "ssm.time_step_rank": _rank(settings, "time_step_rank", hidden_size)}


def _rank(settings: Settings, key: str, hidden_size: int) -> int:
    """The width that step sizes are made of; "auto" is a sixteenth of the model's."""
    automatic = -(-hidden_size // 16)
    return automatic if settings.get(key, "auto") == "auto" else settings.integer(key, low=1)


def _falcon_mamba(settings: Settings) -> Metadata:
    """The norms of the scan's inputs have an epsilon of their own."""
    epsilon = settings.number("mixer_rms_eps", 1e-6, low=0.0, high=1.0)
    is_usual = epsilon == settings.number("layer_norm_epsilon", 1e-5)
    return {**_mamba(settings), "ssm.dt_b_c_rms": True, "ssm.dt_b_c_epsilon": None if is_usual else epsilon}


def _mamba2(settings: Settings) -> Metadata:
    _check_steps(settings)
    hidden_size = settings.integer("hidden_size", low=1)
    num_heads, head_dim = settings.integer("num_heads", 128, low=1), settings.integer("head_dim", 64, low=1)
    if num_heads * head_dim != settings.integer("expand", 2, low=1) * hidden_size:
        raise settings.wrong("num_heads", f"expand x hidden_size over head_dim {head_dim}")
    return {"ssm.inner_size": num_heads * head_dim, "ssm.time_step_rank": num_heads}


def _jamba(settings: Settings) -> Metadata:
    hidden_size = settings.integer("hidden_size", low=1)
    period, offset = settings.integer("attn_layer_period", 8, low=1), settings.integer("attn_layer_offset", 4)
    num_kv_heads = settings.integer("num_key_value_heads", 8, low=1)
    layers = range(settings.integer("num_hidden_layers", low=1))
    return {
        **experts(settings),
        "attention.head_count_kv": [num_kv_heads if layer % period == offset else 0 for layer in layers],
        "ssm.inner_size": settings.integer("mamba_expand", 2, low=1) * hidden_size,
        "ssm.time_step_rank": _rank(settings, "mamba_dt_rank", hidden_size),
    }


def _mamba2_sizes(settings: Settings) -> Metadata:
    """Sizes of Mamba 2 in families whose keys begin with `mamba_`."""
    num_heads, head_dim = settings.integer("mamba_n_heads", low=1), settings.get("mamba_d_head", "auto")
    inner_size = settings.integer("mamba_expand", 2, low=1) * settings.integer("hidden_size", low=1)
    inner_size = settings.integer("mamba_d_ssm", inner_size, low=1)
    _check_steps(settings)
    if head_dim != "auto" and num_heads * settings.integer("mamba_d_head", low=1) != inner_size:
        raise settings.wrong("mamba_d_head", f"{inner_size} over mamba_n_heads {num_heads}")
    return {
        "ssm.conv_kernel": settings.integer("mamba_d_conv", 4, low=2),
        "ssm.inner_size": inner_size,
        "ssm.state_size": settings.integer("mamba_d_state", 256, low=1),
        "ssm.time_step_rank": num_heads,
        "ssm.group_count": settings.integer("mamba_n_groups", 1, low=1),
    }


def _grouped_norm(key: str, default: int = 1) -> Callable[[Settings], dict[str, Change]]:
    """The norm of Mamba 2's result by groups, whose number is a setting."""
    return lambda settings: {"ssm_norm": per_group(settings.integer(key, default, low=1))}


def _attention_layers(settings: Settings) -> list[bool]:
    """Layers that have attention, by their list, their indices, or a period."""
    layers = range(settings.integer("num_hidden_layers", low=1))
    settings.mark_read(("attn_layer_indices", "attn_layer_period", "attn_layer_offset", "layers_block_type"))
    named = settings.entries("attn_layer_indices")
    kinds = settings.entries("layer_types") or settings.entries("layers_block_type")
    if kinds:
        return [kind in ("attention", "full_attention") for kind in kinds]
    if named or "attn_layer_period" not in settings:
        return [layer in named for layer in layers]
    period, offset = settings.integer("attn_layer_period", low=1), settings.integer("attn_layer_offset", 0)
    return [layer % period == offset for layer in layers]


def _granite_hybrid(settings: Settings) -> Metadata:
    num_kv_heads = settings.integer("num_key_value_heads", settings.integer("num_attention_heads"), low=1)
    layers = _attention_layers(settings)
    keys: Metadata = {}
    if settings.get("num_local_experts"):
        keys |= experts(settings)
        keys["expert_shared_feed_forward_length"] = settings.integer("shared_intermediate_size")
    else:
        keys["feed_forward_length"] = settings.integer("shared_intermediate_size")
        settings.mark_read(("num_experts_per_tok", "num_experts", "num_local_experts"))
    has_rope = settings.text("position_embedding_type", "nope") == "rope"
    keys["rope.scaling.finetuned"] = has_rope
    if not all(layers):
        sizes = _mamba2_sizes(settings)
        keys |= {**sizes, "attention.head_count_kv": [num_kv_heads if has_one else 0 for has_one in layers]}
    settings.mark_read(("mamba_expand",))
    return keys


def _granite_variant(settings: Settings, family: Family) -> Family:
    has_experts = bool(settings.get("num_local_experts"))
    shared = "_shexp" if has_experts else ""
    blocks: dict[str, Source] = {
        **family.blocks,
        f"ffn_gate{shared}": Part("shared_mlp.input_linear", FIRST_HALF),
        f"ffn_up{shared}": Part("shared_mlp.input_linear", SECOND_HALF),
        f"ffn_down{shared}": "shared_mlp.output_linear",
    }
    if family.architecture != "granitehybrid" or not all(_attention_layers(settings)):
        return replace(family, blocks=blocks)
    architecture = "granitemoe" if has_experts else "granite"
    return replace(family, architecture=architecture, blocks=blocks, changes=lambda settings: {})


_GRANITE: dict[str, Source] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **ATTENTION,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": Part("block_sparse_moe.input_linear", FIRST_HALVES),
    "ffn_up_exps": Part("block_sparse_moe.input_linear", SECOND_HALVES),
    "ffn_down_exps": "block_sparse_moe.output_linear",
}


def _bamba(settings: Settings) -> Metadata:
    num_kv_heads = settings.integer("num_key_value_heads", low=1)
    keys = _mamba2_sizes(settings)
    keys["attention.head_count_kv"] = [num_kv_heads if has_one else 0 for has_one in _attention_layers(settings)]
    return keys


def _bamba_changes(settings: Settings) -> dict[str, Change]:
    fraction = settings.number("partial_rotary_factor", 0.5, low=0.0, high=1.0)
    fraction = Settings(settings.record("rope_parameters"), {}).number("partial_rotary_factor", fraction)
    num_heads = settings.integer("num_attention_heads", low=1)
    return {
        **_grouped_norm("mamba_n_groups")(settings),
        "attn_q": pairs_adjacent(num_heads, fraction),
        "attn_k": pairs_adjacent(settings.integer("num_key_value_heads", num_heads, low=1), fraction),
    }


_NEMOTRON_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_variant(settings: Settings, family: Family) -> Family:
    kinds = _nemotron_kinds(settings)
    settings.put("num_hidden_layers", len(kinds))
    return replace(family, architecture="nemotron_h_moe") if "moe" in kinds else family


def _nemotron_kinds(settings: Settings) -> list[str]:
    """The kind of every layer: a list, or in published files a text of one letter each."""
    settings.mark_read(("hybrid_override_pattern", "layers_block_type", "mtp_layers_block_type"))
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    found = settings.entries("layers_block_type")
    kinds = [names.get(str(kind), str(kind)) for kind in found]
    if not kinds:
        letters = settings.text("hybrid_override_pattern").replace("|", "")
        kinds = [_NEMOTRON_KINDS.get(letter, letter) for letter in letters]
    unknown = [kind for kind in kinds if kind not in _NEMOTRON_KINDS.values()]
    if unknown or not kinds:
        raise UnsupportedFormatError(
            f"config.json: the kinds of layers are {kinds!r:.120}; this version runs mamba, attention, mlp and moe. "
            "Update localinfer or choose another model."
        )
    return kinds


def _nemotron_h(settings: Settings) -> Metadata:
    kinds = _nemotron_kinds(settings)
    num_kv_heads = settings.integer("num_key_value_heads", low=1)
    _check_steps(settings)
    num_heads = settings.integer("mamba_num_heads", low=1)
    keys: Metadata = {
        "attention.head_count_kv": [num_kv_heads if kind == "attention" else 0 for kind in kinds],
        "ssm.inner_size": num_heads * settings.integer("mamba_head_dim", low=1),
        "ssm.time_step_rank": num_heads,
    }
    size = settings.integer("intermediate_size", 0)
    if "moe" in kinds:
        size = settings.integer("moe_intermediate_size", low=1)
        settings.put("num_experts", settings.integer("n_routed_experts", low=1))
        keys |= {
            **experts(settings),
            "expert_weights_scale": settings.number("routed_scaling_factor", 1.0),
            "expert_weights_norm": settings.boolean("norm_topk_prob", True),
            "expert_group_count": settings.integer("n_group", 1),
            "expert_group_used_count": settings.integer("topk_group", 1),
            "moe_latent_size": settings.get("moe_latent_size"),
        }
    keys["feed_forward_length"] = [size if kind in ("mlp", "moe") else 0 for kind in kinds]
    return keys


def _falcon_h1(settings: Settings) -> Metadata:
    """The multipliers are folded into the matrices."""
    has_norm = settings.boolean("mamba_rms_norm", False)
    comes_first = settings.boolean("mamba_norm_before_gate", True)
    return {**_mamba2_sizes(settings), "ssm.norm_before_gate": has_norm and comes_first}


def _falcon_h1_variant(settings: Settings, family: Family) -> Family:
    """The head has a multiplier of its own: a tied one is made of the embeddings."""
    if settings.boolean("tie_word_embeddings", False):
        settings.put("tie_word_embeddings", False)
        return replace(family, outside={**family.outside, "output": "embed_tokens"})
    return family


def _falcon_h1_changes(settings: Settings) -> dict[str, Change]:
    def number(key: str) -> float:
        return settings.number(key, 1.0)

    ssm, mlp = settings.numbers("ssm_multipliers", 5), settings.numbers("mlp_multipliers", 2)
    sizes = _mamba2_sizes(settings)
    states = sizes["ssm.group_count"] * sizes["ssm.state_size"]
    parts = (sizes["ssm.inner_size"], sizes["ssm.inner_size"], states, states, sizes["ssm.time_step_rank"])
    attention = number("attention_in_multiplier")
    biases = {
        # What multiplies a block's input leaves its bias alone.
        "attn_k.bias": scaled(number("key_multiplier")),
        "attn_output.bias": scaled(number("attention_out_multiplier")),
        "ssm_in.bias": scaled_rows(parts, tuple(ssm)),
        "ssm_out.bias": scaled(number("ssm_out_multiplier")),
        "ffn_gate.bias": scaled(mlp[0]),
        "ffn_down.bias": scaled(mlp[1]),
    }
    return {
        **biases,
        **_grouped_norm("mamba_n_groups")(settings),
        "token_embd": scaled(number("embedding_multiplier")),
        "output": scaled(number("lm_head_multiplier")),
        "attn_q": scaled(attention),
        "attn_k": scaled(attention * number("key_multiplier")),
        "attn_v": scaled(attention),
        "attn_output": scaled(number("attention_out_multiplier")),
        "ssm_in": scaled_rows(parts, tuple(factor * number("ssm_in_multiplier") for factor in ssm)),
        "ssm_out": scaled(number("ssm_out_multiplier")),
        "ffn_gate": scaled(mlp[0]),
        "ffn_down": scaled(mlp[1]),
    }


_BACKBONE: dict[str, Source] = {"token_embd": "embeddings", "output_norm": "norm_f"}
_MAMBA_BLOCKS, _MAMBA_PARAMETERS = _mixer_1("mixer")
_MAMBA = Family(
    architecture="mamba",
    blocks={"attn_norm": "norm", **_MAMBA_BLOCKS},
    parameters=_MAMBA_PARAMETERS,
    outside=_BACKBONE,
    has_attention=False,
    epsilon="layer_norm_epsilon",
    aliases={"inner_size": "intermediate_size"},
    defaults={"max_position_embeddings": _MANY_TOKENS, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    fixed={"use_bcdt_rms": None},
    keys={
        "ssm.conv_kernel": ("conv_kernel", 4, 2),
        "ssm.state_size": ("state_size", 16, 1),
        "feed_forward_length": 0,
    },
    metadata=_mamba,
)
_MAMBA2_BLOCKS, _MAMBA2_PARAMETERS = _mixer_2("mixer")
_JAMBA_BLOCKS, _JAMBA_PARAMETERS = _mixer_1("mamba")
_HYBRID_BLOCKS, _HYBRID_PARAMETERS = _mixer_2("mamba")
_BESIDE: dict[str, Source] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **ATTENTION,
    **gated("feed_forward"),
}
_FINAL: dict[str, Source] = {"token_embd": "embed_tokens", "output_norm": "final_layernorm"}
_MIXER_EXPERT = {"ffn_up": "up_proj", "ffn_down": "down_proj"}
_GRANITE_HYBRID = Family(
    architecture="granitehybrid",
    blocks={**_GRANITE, **_HYBRID_BLOCKS},
    parameters=_HYBRID_PARAMETERS,
    rows_permuted=True,
    layer_kinds=("linear_attention", "mamba", "attention"),
    seen="normalization_function init_method",
    keys=GRANITE_SCALES,
    metadata=_granite_hybrid,
    changes=_grouped_norm("mamba_n_groups"),
    variant=_granite_variant,
)
_GRANITE_MOE = Family(
    architecture="granitemoe",
    blocks=_GRANITE,
    rows_permuted=True,
    keys=GRANITE_SCALES,
    metadata=experts,
    variant=_granite_variant,
)


def _zamba2(settings: Settings) -> Metadata:
    hidden_size, num_heads = settings.integer("hidden_size", low=1), settings.integer("num_attention_heads", low=1)
    inner_size = settings.integer("mamba_expand", 2, low=1) * hidden_size
    num_kv_heads = settings.integer("num_key_value_heads", num_heads, low=1)
    if 2 * hidden_size % num_heads:
        raise settings.wrong("num_attention_heads", f"a divisor of {2 * hidden_size}")
    has_block = [int(layer in _zamba2_layers(settings)) for layer in range(settings.integer("num_hidden_layers"))]
    return {
        "attention.head_count": [num_heads * one for one in has_block],
        "attention.head_count_kv": [num_kv_heads * one for one in has_block],
        "attention.key_length": 2 * hidden_size // num_heads,
        "attention.value_length": 2 * hidden_size // num_heads,
        "rope.dimension_count": 2 * hidden_size // num_heads,
        "ssm.inner_size": inner_size,
        "ssm.least_time_step": settings.number("time_step_min", 0.001, low=0.0, high=1.0),
    }


def _zamba2_layers(settings: Settings) -> list[int]:
    """The layers that use a shared block."""
    num_layers = settings.integer("num_hidden_layers", low=1)
    kinds = settings.entries("layers_block_type") or settings.entries("layer_types")
    if len(kinds) != num_layers or any(kind not in ("hybrid", "mamba", "linear_attention") for kind in kinds):
        raise settings.wrong("layers_block_type", f"{num_layers} times hybrid or linear_attention")
    return [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]


def _zamba2_variant(settings: Settings, family: Family) -> Family:
    """Additions to shared matrices are numbered by the layers that use them."""
    blocks, shared = dict(family.blocks), "shared_transformer"
    sources = {f"shared_attn_{letter}": f"{shared}.self_attn.linear_{letter}_adapter_list" for letter in "qkv"}
    sources["shared_ffn_gate_up"] = f"{shared}.feed_forward.gate_up_proj_adapter_list"
    for use in range(len(_zamba2_layers(settings))):
        for stem, source in sources.items():
            blocks |= {f"{stem}_adapter_{part}.{use}": f"{source}.{use}.{index}" for index, part in enumerate("ab")}
    return replace(family, blocks=blocks)


def _either(ones: Mapping[str, Source], others: Mapping[str, Source]) -> dict[str, Source]:
    """Modules that have one of two names."""

    def names(source: Source) -> tuple[str | Part, ...]:
        return source if isinstance(source, tuple) else (source,)

    return {stem: (*names(ones[stem]), *names(others[stem])) for stem in ones}


def _zamba2_parts() -> tuple[dict[str, Source], dict[str, Source]]:
    """Modules and parameters of Mamba 2, which is deeper in the layers that use a shared block."""
    plain, inner = _mixer_2("mamba"), _mixer_2("mamba_decoder.mamba")
    blocks, parameters = _either(plain[0], inner[0]), _either(plain[1], inner[1])
    blocks["attn_norm"] = ("input_layernorm", "mamba_decoder.input_layernorm")
    blocks["shared_out"] = "linear"
    shared = "shared_transformer"
    blocks |= {f"shared_attn_{letter}": f"{shared}.self_attn.{letter}_proj" for letter in "qkv"}
    blocks |= {
        "shared_attn_output": f"{shared}.self_attn.o_proj",
        "shared_attn_norm": f"{shared}.input_layernorm",
        "shared_ffn_norm": f"{shared}.pre_ff_layernorm",
        "shared_ffn_gate_up": f"{shared}.feed_forward.gate_up_proj",
        "shared_ffn_down": f"{shared}.feed_forward.down_proj",
    }
    return blocks, parameters


_ZAMBA2_BLOCKS, _ZAMBA2_PARAMETERS = _zamba2_parts()

STATE_SPACE: dict[str, Family] = {
    "zamba2": Family(
        architecture="zamba2",
        blocks=_ZAMBA2_BLOCKS,
        parameters=_ZAMBA2_PARAMETERS,
        outside={"token_embd": "embed_tokens", "output_norm": "final_layernorm"},
        activations=("gelu",),
        layer_kinds=("hybrid", "mamba", "linear_attention"),
        defaults={"rms_norm_eps": 1e-5, "num_mem_blocks": 1},
        fixed={"use_long_context": False, "rms_norm_eps": 1e-5},
        seen=(
            "attention_head_dim attention_hidden_size kv_channels num_query_groups hybrid_layer_ids layers_block_type"
            " layer_types use_shared_mlp_adapter ft_lora time_step_max time_step_floor use_mem_eff_path adapter_rank"
            " mamba_headdim use_shared_attention_adapter use_shared_block add_bias_linear shared_qk"
        ),
        keys={
            "rope.scaling.finetuned": ("use_mem_rope", False),
            "ssm.conv_kernel": ("mamba_d_conv", 4, 2),
            "ssm.state_size": ("mamba_d_state", 64, 1),
            "ssm.time_step_rank": ("n_mamba_heads", 8, 1),
            "ssm.group_count": ("mamba_ngroups", 1, 1),
            "shared_block_count": ("num_mem_blocks", 1, 1),
        },
        metadata=_zamba2,
        changes=_grouped_norm("mamba_ngroups"),
        variant=_zamba2_variant,
    ),
    "mamba": _MAMBA,
    "falcon_mamba": replace(_MAMBA, metadata=_falcon_mamba),
    "mamba2": Family(
        architecture="mamba2",
        blocks={"attn_norm": "norm", **_MAMBA2_BLOCKS},
        parameters=_MAMBA2_PARAMETERS,
        outside=_BACKBONE,
        has_attention=False,
        epsilon="layer_norm_epsilon",
        defaults={"max_position_embeddings": _MANY_TOKENS, "layer_norm_epsilon": 1e-5},
        seen="norm_before_gate",  # the published class does not read it
        keys={
            "ssm.conv_kernel": ("conv_kernel", 4, 2),
            "ssm.state_size": ("state_size", 128, 1),
            "ssm.group_count": ("n_groups", 8, 1),
            "feed_forward_length": 0,
        },
        metadata=_mamba2,
        changes=_grouped_norm("n_groups", 8),
    ),
    "jamba": Family(
        architecture="jamba",
        blocks={
            **_BESIDE,
            **_JAMBA_BLOCKS,
            **{f"ssm_{name}_norm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")},
            "ffn_gate_inp": "feed_forward.router",
            **gated("feed_forward.experts.{expert}", "_exps"),
        },
        parameters=_JAMBA_PARAMETERS,
        outside=_FINAL,
        layer_kinds=("linear_attention", "mamba", "attention"),
        seen="expert_layer_period expert_layer_offset layers_block_type mamba_inner_layernorms",
        keys={"ssm.conv_kernel": ("mamba_d_conv", 4, 2), "ssm.state_size": ("mamba_d_state", 16, 1)},
        metadata=_jamba,
    ),
    "granitemoehybrid": _GRANITE_HYBRID,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "bamba": Family(
        architecture="granitehybrid",
        blocks={**_BESIDE, **_HYBRID_BLOCKS},
        parameters=_HYBRID_PARAMETERS,
        outside=_FINAL,
        layer_kinds=("linear_attention", "mamba", "attention"),
        defaults={"partial_rotary_factor": 0.5},
        seen="attn_rotary_emb num_logits_to_keep z_loss_coefficient",
        keys={"rope.scaling.finetuned": True},
        metadata=_bamba,
        changes=_bamba_changes,
    ),
    "nemotron_h": Family(
        architecture="nemotron_h",
        blocks={
            "attn_norm": "norm",
            **_MAMBA2_BLOCKS,
            **{f"attn_{letter}": f"mixer.{letter}_proj" for letter in "qkv"},
            "attn_output": "mixer.o_proj",
            **{stem: f"mixer.{name}" for stem, name in _MIXER_EXPERT.items()},
            "ffn_gate_inp": "mixer.gate",
            **{f"{stem}_exps": f"mixer.experts.{{expert}}.{name}" for stem, name in _MIXER_EXPERT.items()},
            **{f"{stem}_shexp": f"mixer.shared_experts.{name}" for stem, name in _MIXER_EXPERT.items()},
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        parameters={
            **_MAMBA2_PARAMETERS,
            "exp_probs_b.bias": ("mixer.gate.e_score_correction_bias", "mixer.gate.e_score_correction.bias"),
        },
        outside=_BACKBONE,
        activations=RELU_SQUARED,
        epsilon="layer_norm_epsilon",
        aliases={"hidden_act": "mlp_hidden_act"},
        defaults={"layer_norm_epsilon": 1e-5},
        fixed={"mamba_hidden_act": "silu"},
        seen=(
            "num_experts_per_tok n_group topk_group routed_scaling_factor norm_topk_prob moe_shared_expert_overlap"
            " attention_head_dim moe_shared_expert_intermediate_size"
        ),
        keys={
            "ssm.conv_kernel": ("conv_kernel", 4, 2),
            "ssm.state_size": ("ssm_state_size", 128, 1),
            "ssm.group_count": ("n_groups", 8, 1),
        },
        metadata=_nemotron_h,
        changes=_grouped_norm("n_groups", 8),
        variant=_nemotron_variant,
    ),
    "falcon_h1": Family(
        architecture="falcon-h1",
        blocks={**_BESIDE, **_HYBRID_BLOCKS},
        parameters=_HYBRID_PARAMETERS,
        outside=_FINAL,
        metadata=_falcon_h1,
        changes=_falcon_h1_changes,
        variant=_falcon_h1_variant,
    ),
}
"""Families by `model_type`."""
