"""Architectures with experts, with latent attention, or with recurrent layers: delta nets, convolutions, RWKV and state
space models.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.ops import Activation, Gating, Pairing
from localinfer.models.decoder.architecture import Architecture, Blocks, DraftLayers, Mixer, Norm, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.dense_architectures import (
    COHERE,
    FOUR_NORMS,
    LLAMA,
    NORMS_BEHIND,
    QK_NORMED,
    granite,
    hunyuan,
    named_windows,
    normalises_experts,
    rope_except_every_fourth,
    rope_in_windows,
    same_windows,
    windows,
)


def _afmoe(config: ModelConfig) -> Architecture:
    """Arcee's Trinity: four norms, gated attention, RoPE in the sliding-window layers only."""
    return replace(
        rope_in_windows(FOUR_NORMS, config, period=4),
        embedding_scale=math.sqrt(config.hidden_size),
        gating=Gating.SIGMOID,
        normalise_experts=normalises_experts(config),
    )


def _cohere2moe(config: ModelConfig) -> Architecture:
    """Command A+ : Cohere's parallel block with experts, whose sum with the shared expert is halved."""
    is_windowed = _windowed_after_first(config, period=4)
    return replace(
        COHERE,
        norm=Norm.LAYER if config.is_layer_norm else Norm.RMS,
        logit_scale=config.logit_scale or 1.0,
        windows=tuple(config.sliding_window if windowed else 0 for windowed in is_windowed),
        has_rope=tuple(windowed or layer < config.num_dense_layers for layer, windowed in enumerate(is_windowed)),
        windowed_rope_base=config.rope.base,
        gating=Gating.SIGMOID,
        normalise_experts=normalises_experts(config),
        shared_expert_share=0.5,
    )


def _windowed_after_first(config: ModelConfig, period: int) -> tuple[bool, ...]:
    """Layers with a sliding window: the file's pattern, or all but the first of every `period` layers."""
    return config.windowed_layers or tuple(layer % period > 0 for layer in range(config.num_layers))


def _grok(config: ModelConfig) -> Architecture:
    """Grok 1 and 2: four norms, soft caps; Grok 2 has a dense block beside the experts."""
    is_old = "layer_output_norm.weight" in config.block_tensors
    return Architecture(
        activation=Activation.GELU_TANH,
        attention_post_norm="attn_output_norm",
        feed_forward_post_norm="layer_output_norm" if is_old else "post_ffw_norm",
        embedding_scale=config.embedding_scale or 78.38367176906169,
        logit_scale=config.logit_scale or 0.5773502691896257,
        attention_scale=config.attention_output_scale or 0.08838834764831845,
        attention_softcap=config.attention_softcap or 30.0,
        dense_share=math.sqrt(0.5),
    )


def _maple(config: ModelConfig) -> Architecture:
    """Maple: RoPE in the sliding-window layers only, experts with limits."""
    found = rope_in_windows(QK_NORMED, config, period=1)
    return replace(found, expert_clamps=config.expert_clamps, clamps_gate_input=True)


def _smallthinker(config: ModelConfig) -> Architecture:
    """SmallThinker (arXiv 2507.20984): experts are chosen before attention, so that they can be fetched meanwhile.

    Every fourth layer, from the first on, has no RoPE, and sees everything unless the file has another pattern.
    """
    has_window = config.sliding_window > 0
    return Architecture(
        activation=Activation.RELU,
        routes_layer_input=True,
        # The file's number is not what the model was trained with.
        windows=tuple(4096 if has_window and windowed else 0 for windowed in _windowed_after_first(config, period=4)),
        has_rope=tuple(layer % 4 > 0 for layer in range(config.num_layers)) if has_window else (),
    )


def _step35(config: ModelConfig) -> Architecture:
    """Step 3.5: gated heads; full layers rotate half as much as the sliding-window layers, with divisors."""
    return replace(
        _sigmoid_routed(config),
        windows=windows(config, period=4),
        full_rotary_size=config.rope.rotary_size // 4 * 2,
        divides_windowed_rope=False,
        expert_clamps=config.expert_clamps,
        dense_clamps=config.dense_clamps,
        draft_layers=DraftLayers(from_normed=False),
    )


def _laguna(config: ModelConfig) -> Architecture:
    """Poolside's Laguna: gates over heads or elements; windowed layers rotate otherwise, without the file's scaling."""
    is_windowed = _windowed_after_first(config, period=4)
    return replace(
        _sigmoid_routed(config),
        windows=tuple(config.sliding_window if windowed else 0 for windowed in is_windowed),
        scales_windowed_rope=False,
        divides_windowed_rope=False,
        has_softplus_gates=True,
    )


def _llama4(config: ModelConfig) -> Architecture:
    """Llama 4: three layers of chunked attention with RoPE to one of full attention without, weighted expert inputs."""
    return replace(
        LLAMA,
        chunks=windows(config, period=4),
        has_rope=rope_except_every_fourth(config),
        # All but Maverick.
        unweighted_query_key_norm=config.experts is None or config.experts.num_experts != 128,
        gating=Gating.SIGMOID,
        normalise_experts=False,
        weigh_expert_inputs=True,
        temperature_scale=config.temperature_scale or 0.1,
        temperature_length=config.temperature_length or 8192,
        temperature_offset=1,
        temperature_without_rope_only=True,
    )


def _qwen3moe(config: ModelConfig) -> Architecture:
    """Qwen 3 MoE (arXiv 2505.09388): expert weights that sum to 1, unless the file says otherwise."""
    return replace(QK_NORMED, normalise_experts=normalises_experts(config, default=True), windows=named_windows(config))


def _sigmoid_routed(config: ModelConfig) -> Architecture:
    """dots.llm1 (arXiv 2506.05767) and Ling 2: sigmoid routing with a selection bias, queries and keys normed."""
    return replace(QK_NORMED, gating=Gating.SIGMOID, normalise_experts=normalises_experts(config))


MIXTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "afmoe": _afmoe,
    # Snowflake Arctic: experts read the layer's input, beside a dense block.
    "arctic": replace(LLAMA, expert_norm="ffn_norm_exps"),
    # Ling 1 (arXiv 2503.05139).
    "bailingmoe": lambda config: replace(LLAMA, normalise_experts=normalises_experts(config)),
    "bailingmoe2": _sigmoid_routed,
    "cohere2moe": _cohere2moe,
    # DBRX: layer norms without biases, a limit of queries, keys and values.
    "dbrx": lambda config: Architecture(
        norm=Norm.LAYER, feed_forward_norm="attn_output_norm", projection_clamp=config.projection_clamp
    ),
    # DeepSeek-MoE 16B (arXiv 2401.06066): expert weights as the softmax leaves them.
    "deepseek": replace(LLAMA, normalise_experts=False),
    # DeepSeek-OCR (arXiv 2510.18234), on text: DeepSeek-MoE's layers, with heads that pair halves.
    "deepseek2-ocr": lambda config: Architecture(normalise_experts=normalises_experts(config)),
    "dots1": _sigmoid_routed,
    # ERNIE 4.5 with experts.
    "ernie4_5-moe": LLAMA,
    # K-EXAONE: RoPE in the sliding-window layers only.
    "exaone-moe": lambda config: rope_in_windows(_sigmoid_routed(config), config, period=4),
    # FlexOlmo (arXiv 2507.07024): OLMo 2's layers with experts.
    "flex-olmo": lambda config: replace(NORMS_BEHIND, normalise_experts=normalises_experts(config)),
    # GLM 4.5 and 4.6 (arXiv 2508.06471): sigmoid routing with a selection bias; only the largest norm queries and keys.
    "glm4moe": lambda config: Architecture(
        feed_forward_norm="post_attention_norm",
        query_key_norm=QueryKeyNorm.OPTIONAL,
        gating=Gating.SIGMOID,
        normalise_experts=normalises_experts(config),
    ),
    # gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, attention sinks, every other layer a window.
    "gpt-oss": lambda config: Architecture(
        feed_forward_norm="post_attention_norm",
        activation=Activation.SWIGLU_CLAMPED,
        gating=Gating.SOFTMAX_SELECTED,
        normalise_experts=False,
        windows=windows(config, period=2),
    ),
    # Granite with sliding windows: sinks, and RoPE in the layers that the file names.
    "granite_swa": lambda config: replace(
        granite(config), windows=windows(config, period=1), has_rope=config.rope_pattern
    ),
    "granitemoe": granite,
    "grok": _grok,
    "hunyuan-moe": hunyuan,
    "hy_v3": _sigmoid_routed,
    "laguna": _laguna,
    "llama4": _llama4,
    "maple": _maple,
    # JetBrains' Mellum 2: sliding windows without YaRN.
    "mellum": lambda config: replace(
        QK_NORMED,
        windows=windows(config, period=4),
        windowed_rope_base=config.rope.base_windowed or config.rope.base,
        scales_windowed_rope=False,
        normalise_experts=normalises_experts(config, default=True),
    ),
    # MiMo V2: sinks and a shorter rotation's base in the sliding-window layers, values scaled.
    "mimo2": lambda config: Architecture(
        windows=windows(config, period=6),
        attention_output_scale=config.value_scale or 1.0,
        gating=Gating.SIGMOID,
        draft_layers=DraftLayers(from_normed=False),
    ),
    # Routed as dots.llm1, its norms over whole projections.
    "minimax-m2": replace(QK_NORMED, gating=Gating.SIGMOID),
    # MiniMax M3: norms per head, clamped gates, and layers that attend to chosen blocks of positions.
    "minimax-m3": replace(QK_NORMED, activation=Activation.SWIGLU_CLAMPED, gating=Gating.SIGMOID),
    # arXiv 2409.02060: expert weights as the softmax leaves them, unless the file says otherwise.
    "olmoe": lambda config: replace(QK_NORMED, normalise_experts=normalises_experts(config)),
    # Phi 3.5 MoE: layer norms with biases as in its published code (llama.cpp applies RMS norms here).
    "phimoe": lambda config: Architecture(norm=Norm.LAYER, windows=same_windows(config)),
    # Qwen 1.5 MoE and Qwen 2 MoE: a gated shared expert.
    "qwen2moe": lambda config: Architecture(
        normalise_experts=normalises_experts(config), windows=named_windows(config)
    ),
    "qwen3moe": _qwen3moe,
    # As qwen3vl.
    "qwen3vlmoe": lambda config: replace(_qwen3moe(config), interleaves_axes=True),
    "smallthinker": _smallthinker,
    "step35": _step35,
}


def _deepseek2(config: ModelConfig) -> Architecture:
    """DeepSeek-V2, V3, R1 (arXiv 2405.04434, 2412.19437) and Kimi K2: latent attention.

    YaRN's temperature is on the scores, not on the rotation; GGUF holds its multiplier already times 0.1.
    """
    rope, latent = config.rope, config.latent
    temperature = rope.attention_factor * (1.0 + rope.log_multiplier * math.log(max(rope.factor, 1.0)))
    return replace(
        LLAMA,
        latent_attention=True,
        attention_scale=temperature**2 / math.sqrt(latent.key_size) if latent else None,
        rope_magnitude=rope.attention_factor if rope.log_multiplier else None,
        normalise_experts=normalises_experts(config),
        temperature_scale=config.temperature_scale,
        temperature_length=config.temperature_length or 8192,
    )


LATENT: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "deepseek2": _deepseek2,
    # DeepSeek-V3.2 (arXiv 2512.02556): an indexer chooses what latent attention attends to.
    "deepseek32": _deepseek2,
    # GLM 5: DeepSeek-V3.2's attention, where some layers take the choice of an earlier one.
    "glm-dsa": _deepseek2,
    # MiniCPM 3: muP's scalars, and LongRoPE.
    "minicpm3": lambda config: Architecture(
        latent_attention=True,
        embedding_scale=12.0,
        residual_scale=1.4 / math.sqrt(config.num_layers),
        logit_scale=256.0 / config.hidden_size,
    ),
    # Mistral's Large 3 and Small 4: DeepSeek's blocks, with queries that sharpen with the logarithm of the position.
    "mistral4": _deepseek2,
    # PLM 1.8B (arXiv 2503.12167): a squared ReLU.
    "plm": replace(LLAMA, latent_attention=True, activation=Activation.RELU_SQUARED, gated=False),
}


def _mixers(config: ModelConfig, recurrent: Mixer) -> tuple[Mixer, ...]:
    """The given kind in recurrent layers, attention in the others."""
    assert config.recurrent is not None, "read for these architectures"
    return tuple(recurrent if is_recurrent else Mixer.ATTENTION for is_recurrent in config.recurrent.layers)


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """A file's window is that of its attention layers, of all unless it has a pattern."""
    windowed = config.windowed_layers or (True,) * config.num_layers
    return tuple(
        config.sliding_window if is_windowed and has_cache else 0
        for is_windowed, has_cache in zip(windowed, config.num_kv_heads, strict=True)
    )


def _lfm2(config: ModelConfig) -> Architecture:
    """Liquid's LFM 2 (arXiv 2511.23404), dense or with sigmoid-routed experts; its last norm has a misleading name.

    As an encoder its convolutions see both sides, and layers of a head for decisions may follow, without positions.
    """
    plain = Architecture(
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        output_norm="token_embd_norm",
        gating=Gating.SIGMOID,
        mixers=_mixers(config, Mixer.SHORT_CONVOLUTION),
        windows=_windows(config),
    )
    if not config.is_encoder:
        return plain
    assert config.recurrent is not None, "read for these architectures"
    if config.recurrent.kernel_size % 2 == 0:
        raise UnsupportedFormatError(
            f"{config.architecture}.shortconv.l_cache is {config.recurrent.kernel_size}; convolutions of a model "
            "without a causal mask are over an odd number of rows. Convert the model again."
        )
    plain = replace(plain, causal=False, mixers=_mixers(config, Mixer.CENTRED_CONVOLUTION))
    if not config.num_decision_layers:
        return plain
    first = config.num_layers - config.num_decision_layers
    return replace(
        plain,
        has_rope=tuple(layer < first for layer in range(config.num_layers)),
        first_decision_layer=first,
        classifier_activation=Activation.GELU_ERF,
    )


def _lfm3(config: ModelConfig) -> Architecture:
    """LFM 3: LFM 2 with windows, whose rotation differs, gates over heads, and norms behind the branches too, where the
    file has them.
    """
    has_norms = "post_attention_norm.weight" in config.block_tensors
    return replace(
        _lfm2(config),
        divides_windowed_rope=False,
        attention_post_norm="post_attention_norm" if has_norms else None,
        feed_forward_post_norm="post_ffw_norm" if has_norms else None,
    )


def _olmo_hybrid(config: ModelConfig) -> Architecture:
    """OLMo Hybrid: delta nets whose layers have norms before the branches, and OLMo 2's layers, some without RoPE."""
    return replace(
        QK_NORMED,
        feed_forward_norm="post_attention_norm",
        norms_behind_attention=True,
        mixer_norm_epsilon=1e-5,
        has_rope=(config.rope.is_used,) * config.num_layers,
        mixers=_mixers(config, Mixer.DELTA_NET),
    )


def _qwen3_next(config: ModelConfig) -> Architecture:
    """Qwen3-Next: gated delta nets (arXiv 2412.06464), every fourth layer gated attention; dense or with experts."""
    return Architecture(
        feed_forward_norm="post_attention_norm",
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        gates_attention=True,
        mixers=_mixers(config, Mixer.DELTA_NET),
    )


def _kimi_linear(config: ModelConfig) -> Architecture:
    """Kimi Linear (arXiv 2510.26692): delta attention, and latent attention without positions."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        latent_attention=True,
        attention_scale=1.0 / math.sqrt(config.latent.key_size) if config.latent else None,
        has_rope=(False,) * config.num_layers,
        gating=Gating.SIGMOID,
        mixers=_mixers(config, Mixer.KIMI_DELTA),
    )


def _bailingmoe3(config: ModelConfig) -> Architecture:
    """Ling 3: Kimi Linear's layers, with rotated keys, gates over heads and clamped experts."""
    return replace(
        _kimi_linear(config),
        has_rope=(),
        normalise_experts=normalises_experts(config),
        expert_clamps=config.expert_clamps,
        dense_clamps=config.dense_clamps,
    )


RECURRENT_ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "bailingmoe3": _bailingmoe3,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "lfm3": _lfm3,
    # MiniMax-01 and M1 (arXiv 2501.08313): lightning attention, every eighth layer softmax attention; experts.
    "minimax-01": lambda config: Architecture(
        stream_weight=config.residual_scale or 1.0, mixers=_mixers(config, Mixer.LIGHTNING)
    ),
    "olmo-hybrid": _olmo_hybrid,
    # Qwen3.5: value heads in another order. Clef: the same, with a head that decides about a whole prompt.
    **dict.fromkeys(
        ("clef", "qwen35", "qwen35moe"),
        lambda config: replace(_qwen3_next(config), tiles_value_heads=True, interleaves_axes=True),
    ),
    "qwen3next": _qwen3_next,
    # RWKV-7 (arXiv 2503.14456): recurrent layers alone, without positions.
    "rwkv7": lambda config: Architecture(
        norm=Norm.LAYER,
        embedding_norm="token_embd_norm",
        mixers=_mixers(config, Mixer.WKV),
        has_rope=(False,) * config.num_layers,
    ),
}


_MIXER_ONLY = Architecture(feed_forward_norm=None, has_feed_forward=False)


def _sparse_mixers(config: ModelConfig, recurrent: Mixer) -> tuple[Mixer, ...]:
    """The given kind in recurrent layers, attention in those with keys and values, and none in the others."""
    assert config.recurrent is not None, "read for these architectures"
    return tuple(
        recurrent if is_recurrent else Mixer.ATTENTION if num_kv_heads else Mixer.NONE
        for is_recurrent, num_kv_heads in zip(config.recurrent.layers, config.num_kv_heads, strict=True)
    )


def _nemotron_h(config: ModelConfig) -> Architecture:
    """Nemotron-H (arXiv 2504.03624) and Nemotron 3: each layer is Mamba 2, attention or a feed-forward block."""
    return Architecture(
        feed_forward_norm="attn_norm",
        has_rope=(False,) * config.num_layers,
        activation=Activation.RELU_SQUARED,
        gated=False,
        gating=Gating.SIGMOID,
        normalise_experts=normalises_experts(config),
        mixers=_sparse_mixers(config, Mixer.MAMBA2),
        draft_layers=DraftLayers(has_layer_norm=True, feed_forward_norm="post_attention_norm"),
    )


STATE_SPACE_ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # Falcon-H1 (arXiv 2507.22448): attention and Mamba 2 side by side in every layer.
    "falcon-h1": Architecture(mixer_beside=Mixer.MAMBA2),
    # Granite 4: Mamba 2 and attention, mostly without positions; dense or with experts, with muP's scalars.
    "granitehybrid": lambda config: replace(
        granite(config),
        has_rope=(config.rope.is_used,) * config.num_layers,
        mixers=_sparse_mixers(config, Mixer.MAMBA2),
    ),
    # Jamba (arXiv 2403.19887): Mamba 1 with normed inputs; attention without positions, experts in every other layer.
    "jamba": lambda config: Architecture(
        has_rope=(False,) * config.num_layers, normalise_experts=False, mixers=_sparse_mixers(config, Mixer.MAMBA)
    ),
    # Mamba (arXiv 2312.00752) and Falcon Mamba (2410.05355), which norms the scan's inputs.
    "mamba": lambda config: replace(_MIXER_ONLY, mixers=_sparse_mixers(config, Mixer.MAMBA)),
    # Mamba 2 (arXiv 2405.21060).
    "mamba2": lambda config: replace(_MIXER_ONLY, mixers=_sparse_mixers(config, Mixer.MAMBA2)),
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    # PLaMo 2 (arXiv 2509.04897): Mamba 2 with normed inputs, every other layer attention; norms before and behind.
    "plamo2": lambda config: replace(FOUR_NORMS, mixers=_sparse_mixers(config, Mixer.PLAMO_MAMBA)),
    # Zamba 2 (arXiv 2411.15242): Mamba 2, and blocks of attention over twice the width that layers share.
    "zamba2": lambda config: Architecture(
        blocks=Blocks.ZAMBA2, mixer_beside=Mixer.MAMBA2, attention_scale=math.sqrt(2.0 / max(config.head_dim, 1))
    ),
}
