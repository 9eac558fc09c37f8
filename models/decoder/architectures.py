"""The supported architectures: GGUF's name of each, and its record.

An architecture whose record depends on the model's sizes has a function from `ModelConfig` to the record. A new one
that combines existing features is one entry of `ARCHITECTURES`; a new kind of block is a function beside
`write_attention`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.ops import Activation, Gating, Pairing
from localinfer.models.decoder.architecture import Architecture, Norm, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.encoder_architectures import ENCODERS

_LLAMA = Architecture(pairing=Pairing.ADJACENT)
_QK_NORMED = Architecture(query_key_norm=QueryKeyNorm.BEFORE_ROPE)
_GELU_MLP = Architecture(norm=Norm.LAYER, activation=Activation.GELU_TANH, gated=False)
_NORMS_BEHIND = replace(
    _QK_NORMED,
    attention_norm=None,
    attention_post_norm="post_attention_norm",
    feed_forward_norm=None,
    feed_forward_post_norm="post_ffw_norm",
)
_COHERE = replace(_LLAMA, norm=Norm.LAYER, feed_forward_norm="attn_norm", parallel=True)
_GEMMA = Architecture(activation=Activation.GELU_TANH)
_GEMMA_FOUR_NORMS = replace(_GEMMA, attention_post_norm="post_attention_norm", feed_forward_post_norm="post_ffw_norm")


def _windowed(config: ModelConfig, period: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: the file's pattern, or all but every period-th layer."""
    if not config.sliding_window:
        return (False,) * config.num_layers
    return config.windowed_layers or tuple(layer % period < period - 1 for layer in range(config.num_layers))


def _windows(config: ModelConfig, period: int) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention."""
    return tuple(config.sliding_window if is_windowed else 0 for is_windowed in _windowed(config, period))


def _same_windows(config: ModelConfig) -> tuple[int, ...]:
    return (config.sliding_window,) * config.num_layers


def _rope_except_every_fourth(config: ModelConfig) -> tuple[bool, ...]:
    """NoPE, arXiv 2501.18795."""
    return tuple(layer % 4 < 3 for layer in range(config.num_layers))


def _normalises_experts(config: ModelConfig) -> bool:
    return bool(config.experts and config.experts.normalise)


def _baichuan(config: ModelConfig) -> Architecture:
    """Baichuan 1 and 2 (arXiv 2309.10305): the 7B has RoPE, the 13B ALiBi; only the number of layers differs."""
    has_rope = (config.num_layers == 32,) * config.num_layers
    return replace(_LLAMA, has_rope=has_rope, max_alibi_bias=8.0 if config.num_layers == 40 else 0.0)


def _deepseek2(config: ModelConfig) -> Architecture:
    """DeepSeek-V2, V3, R1 (arXiv 2405.04434, 2412.19437) and Kimi K2: latent attention.

    YaRN's temperature is on the scores, not on the rotation; GGUF holds its multiplier already times 0.1.
    """
    rope, latent = config.rope, config.latent
    temperature = rope.attention_factor * (1.0 + rope.log_multiplier * math.log(max(rope.factor, 1.0)))
    return replace(
        _LLAMA,
        latent_attention=True,
        attention_scale=temperature**2 / math.sqrt(latent.key_size) if latent else None,
        rope_magnitude=rope.attention_factor if rope.log_multiplier else None,
        normalise_experts=_normalises_experts(config),
        temperature_scale=config.temperature_scale,
        temperature_length=config.temperature_length or 8192,
    )


def _exaone4(config: ModelConfig) -> Architecture:
    """EXAONE 4 (arXiv 2507.11407): post-norms; the 32B has sliding windows, and RoPE in those layers only."""
    if not config.windowed_layers and config.num_layers != 64:
        return _NORMS_BEHIND
    return replace(_NORMS_BEHIND, windows=_windows(config, period=4), has_rope=_windowed(config, period=4))


def _falcon(config: ModelConfig) -> Architecture:
    """Falcon (arXiv 2311.16867): branches in parallel; the 40B has a second norm, for attention."""
    attention_norm = "attn_norm_2" if "attn_norm_2.weight" in config.block_tensors else "attn_norm"
    return replace(_GELU_MLP, attention_norm=attention_norm, feed_forward_norm="attn_norm", parallel=True)


def _gemma2(config: ModelConfig) -> Architecture:
    """Gemma 2 (arXiv 2408.00118): pre- and post-norms, a sliding window in every other layer, soft caps."""
    return replace(
        _GEMMA_FOUR_NORMS,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=_gemma_scale(config, layers_of_27b=46),
        windows=_windows(config, period=2),
    )


def _gemma3(config: ModelConfig) -> Architecture:
    """Gemma 3 (arXiv 2503.19786): five sliding-window layers to one of full attention, each kind with its RoPE base."""
    return replace(
        _GEMMA_FOUR_NORMS,
        embedding_scale=math.sqrt(config.hidden_size),
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        attention_scale=_gemma_scale(config, layers_of_27b=62),
        windows=_windows(config, period=6),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        scales_windowed_rope=False,
    )


def _gemma_scale(config: ModelConfig, layers_of_27b: int) -> float | None:
    """The largest models divide by the root of hidden_size / num_heads, which differs from their head size."""
    if config.attention_scale is None and config.num_layers == layers_of_27b:
        return 1.0 / math.sqrt(config.hidden_size / config.num_heads[0])
    return None


def _granitemoe(config: ModelConfig) -> Architecture:
    """Granite 3 with experts: four scalars from muP training, logits divided by theirs."""
    return replace(
        _LLAMA,
        embedding_scale=config.embedding_scale or 1.0,
        residual_scale=config.residual_scale or 1.0,
        logit_scale=1.0 / (config.logit_scale or 1.0),
    )


def _hunyuan(config: ModelConfig) -> Architecture:
    """Tencent's Hunyuan (arXiv 2411.02265), dense or with experts: NTK-aware scaling stretches the RoPE base.

    The base is multiplied by alpha^(d / (d - 2)), d elements rotating.
    """
    rope = config.rope
    base = rope.base
    if rope.alpha and rope.rotary_size > 2:
        base = float(rope.base * rope.alpha ** (rope.rotary_size / (rope.rotary_size - 2)))
    return Architecture(query_key_norm=QueryKeyNorm.AFTER_ROPE, rope_base=base)


def _llama4(config: ModelConfig) -> Architecture:
    """Llama 4: three layers of chunked attention with RoPE to one of full attention without, weighted expert inputs."""
    return replace(
        _LLAMA,
        chunks=_windows(config, period=4),
        has_rope=_rope_except_every_fourth(config),
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


def _minicpm(config: ModelConfig) -> Architecture:
    """MiniCPM 1 (arXiv 2404.06395): muP's scalars, those of its 2B model where the file has none."""
    return replace(
        _LLAMA,
        embedding_scale=config.embedding_scale or 12.0,
        residual_scale=config.residual_scale or 1.4 / math.sqrt(config.num_layers),
        logit_scale=1.0 / (config.logit_scale or config.hidden_size / 256.0),
    )


def _sigmoid_routed(config: ModelConfig) -> Architecture:
    """dots.llm1 (arXiv 2506.05767) and Ling 2: sigmoid routing with a selection bias, queries and keys normed."""
    return replace(_QK_NORMED, gating=Gating.SIGMOID, normalise_experts=_normalises_experts(config))


def _stablelm(config: ModelConfig) -> Architecture:
    """StableLM 1 and 2 (arXiv 2402.17834): layer norms; the 12B runs its branches in parallel on one norm."""
    is_parallel = "ffn_norm.weight" not in config.block_tensors
    return Architecture(
        norm=Norm.LAYER,
        feed_forward_norm="attn_norm" if is_parallel else "ffn_norm",
        parallel=is_parallel,
        query_key_norm=QueryKeyNorm.OPTIONAL,
    )


ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # Arcee AFM: one squared ReLU in place of the gate.
    "arcee": replace(_LLAMA, activation=Activation.RELU_SQUARED, gated=False),
    "baichuan": _baichuan,
    "bailingmoe2": _sigmoid_routed,
    # BLOOM (arXiv 2211.05100): ALiBi, and a norm on the embeddings.
    "bloom": lambda config: replace(
        _GELU_MLP,
        embedding_norm="token_embd_norm",
        max_alibi_bias=config.max_alibi_bias or 8.0,
        has_rope=(False,) * config.num_layers,
    ),
    # ChatGLM 2 and 3, GLM 4 9B Chat (arXiv 2406.12793): half of each head rotates.
    "chatglm": _LLAMA,
    # Command R7B and Command A: three sliding-window layers with RoPE to one of full attention without.
    "cohere2": lambda config: replace(
        _COHERE,
        logit_scale=config.logit_scale or 1.0,
        windows=_windows(config, period=4),
        has_rope=_windowed(config, period=4),
    ),
    # Command R; the larger one norms each head of its queries and keys.
    "command-r": lambda config: replace(
        _COHERE, query_key_norm=QueryKeyNorm.OPTIONAL, logit_scale=config.logit_scale or 1.0
    ),
    # DeepSeek-MoE 16B (arXiv 2401.06066): expert weights as the softmax leaves them.
    "deepseek": replace(_LLAMA, normalise_experts=False),
    "deepseek2": _deepseek2,
    "dots1": _sigmoid_routed,
    "exaone4": _exaone4,
    "falcon": _falcon,
    # Gemma (arXiv 2403.08295): scaled embeddings and a GELU gate. GGUF stores the norms of this family as 1 + w.
    "gemma": lambda config: replace(_GEMMA, embedding_scale=math.sqrt(config.hidden_size)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    # GLM 4 0414: pre- and post-norms; vision models (sectioned RoPE) pair the halves of a head.
    "glm4": lambda config: Architecture(
        pairing=Pairing.HALVES if any(config.rope.sections) else Pairing.ADJACENT,
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
    ),
    # GLM 4.5 and 4.6 (arXiv 2508.06471): sigmoid routing with a selection bias; only the largest norm queries and keys.
    "glm4moe": lambda config: Architecture(
        feed_forward_norm="post_attention_norm",
        query_key_norm=QueryKeyNorm.OPTIONAL,
        gating=Gating.SIGMOID,
        normalise_experts=_normalises_experts(config),
    ),
    # gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, attention sinks, every other layer a window.
    "gpt-oss": lambda config: Architecture(
        feed_forward_norm="post_attention_norm",
        activation=Activation.SWIGLU_CLAMPED,
        gating=Gating.SOFTMAX_SELECTED,
        normalise_experts=False,
        windows=_windows(config, period=2),
    ),
    "gpt2": lambda config: replace(_GELU_MLP, learned_positions=True, has_rope=(False,) * config.num_layers),
    # GPT-NeoX (arXiv 2204.06745) and Pythia: branches in parallel, each with its own norm.
    "gptneox": lambda config: replace(_GELU_MLP, parallel=config.parallel_residual is not False),
    # Granite 3 and 4, dense; some have no RoPE.
    "granite": lambda config: replace(_granitemoe(config), has_rope=(config.rope.is_used,) * config.num_layers),
    "granitemoe": _granitemoe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan,
    # InternLM 2 and 3 (arXiv 2403.17297): Llama with its projections fused in the checkpoint.
    "internlm2": _LLAMA,
    # Llama 1 to 3.x (arXiv 2302.13971), TinyLlama, SmolLM; Mistral (the first has a window), Mixtral (2401.04088).
    "llama": lambda config: replace(_LLAMA, windows=_same_windows(config)),
    "llama4": _llama4,
    "minicpm": _minicpm,
    # Routed as dots.llm1, its norms over whole projections.
    "minimax-m2": replace(_QK_NORMED, gating=Gating.SIGMOID),
    # Ministral 3: queries sharpen with the logarithm of the position.
    "mistral3": lambda config: replace(
        _LLAMA, temperature_scale=config.temperature_scale, temperature_length=config.rope.original_context_length
    ),
    # Nemotron and Minitron (arXiv 2402.16819): squared ReLU; GGUF stores the norm weights as 1 + w.
    "nemotron": Architecture(norm=Norm.LAYER, activation=Activation.RELU_SQUARED, gated=False),
    # OLMo 2 (arXiv 2501.00656): post-norms; OLMo 3 adds sliding windows, without YaRN in those layers.
    "olmo2": lambda config: replace(_NORMS_BEHIND, windows=_windows(config, period=4), scales_windowed_rope=False),
    # arXiv 2409.02060: expert weights as the softmax leaves them.
    "olmoe": replace(_QK_NORMED, normalise_experts=False),
    # Orion 14B (arXiv 2401.12246): layer norms with biases, a SiLU gate.
    "orion": Architecture(norm=Norm.LAYER),
    # Phi 1.5 and 2: both branches read one layer norm.
    "phi2": replace(_GELU_MLP, feed_forward_norm="attn_norm", parallel=True),
    # Phi 3 and 4 (arXiv 2404.14219): fused projections, LongRoPE, one window for all layers in the 4K models.
    "phi3": lambda config: Architecture(windows=_same_windows(config)),
    # Phi 3.5 MoE: layer norms with biases as in its published code (llama.cpp applies RMS norms here).
    "phimoe": lambda config: Architecture(norm=Norm.LAYER, windows=_same_windows(config)),
    # Qwen 1 (arXiv 2309.16609) with fused projections; Qwen 2 and 2.5 (2407.10671). Their biases are in the file.
    "qwen": Architecture(),
    "qwen2": Architecture(),
    # Qwen 1.5 MoE and Qwen 2 MoE: a gated shared expert.
    "qwen2moe": Architecture(normalise_experts=False),
    # Qwen 3 (arXiv 2505.09388): queries and keys normed per head.
    "qwen3": _QK_NORMED,
    "qwen3moe": _QK_NORMED,
    # ByteDance's Seed-OSS: its feed-forward norm has another name.
    "seed_oss": Architecture(feed_forward_norm="post_attention_norm"),
    # SmolLM3: every fourth layer has no RoPE.
    "smollm3": lambda config: replace(_LLAMA, has_rope=_rope_except_every_fourth(config)),
    "stablelm": _stablelm,
    # StarCoder 2 (arXiv 2402.19173): layer norms, biases everywhere, no gate.
    "starcoder2": _GELU_MLP,
    **ENCODERS,
}

RECURRENT = (
    *("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"),
    *("nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
)
"""Architectures with recurrent layers, which keep a running state instead of keys and values."""


def check_architecture(name: str) -> None:
    """Raise UnsupportedFormatError, with the reason or with the names known, unless this version runs it."""
    if name in RECURRENT:
        raise UnsupportedFormatError(
            f"general.architecture is {name!r}, a model with recurrent layers; their state cannot be shared between "
            "sequences, truncated or cached by position, as this version requires. Choose a model with attention in "
            "all layers."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedFormatError(
            f"general.architecture is {name!r}; this version runs {', '.join(sorted(ARCHITECTURES))}. "
            "Update localinfer or choose another model."
        )


def find_architecture(config: ModelConfig) -> Architecture:
    """Describe a model. Raises: as `check_architecture`."""
    check_architecture(config.architecture)
    found = ARCHITECTURES[config.architecture]
    return found if isinstance(found, Architecture) else found(config)
