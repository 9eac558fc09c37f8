"""Decoders with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.base_architectures import (
    LLAMA,
    normalises_experts,
)
from localinfer.models.decoder.config import ModelConfig


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
