"""Architectures with experts, and those with latent attention."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Activation, Gating
from localinfer.models.decoder.architecture import Architecture, DraftLayers, Norm, QueryKeyNorm
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


def _exaone_moe(config: ModelConfig) -> Architecture:
    """K-EXAONE: RoPE in the sliding-window layers only."""
    return rope_in_windows(_sigmoid_routed(config), config, period=4)


def _granite_swa(config: ModelConfig) -> Architecture:
    """Granite with sliding windows: sinks, and RoPE in the layers that the file names."""
    return replace(granite(config), windows=windows(config, period=1), has_rope=config.rope_pattern)


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
    "exaone-moe": _exaone_moe,
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
    "granite_swa": _granite_swa,
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
    "qwen3vlmoe": _qwen3moe,
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
