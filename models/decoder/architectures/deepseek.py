"""DeepSeek-MoE (arXiv 2401.06066), DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), and models routed like V3."""

import math

from localinfer.kernels.ops import Gating, Pairing
from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig


def deepseek(config: ModelConfig) -> Architecture:
    """DeepSeek-MoE 16B: expert weights as the softmax leaves them."""
    return Architecture(pairing=Pairing.ADJACENT, normalise_experts=False)


def deepseek2(config: ModelConfig) -> Architecture:
    """DeepSeek-V2, V3, R1 and Kimi K2: latent attention. YaRN's temperature is on the scores, not on the rotation."""
    rope, latent = config.rope, config.latent
    # GGUF holds the multiplier already times the 0.1 of YaRN's temperature.
    temperature = rope.attention_factor * (1.0 + rope.log_multiplier * math.log(max(rope.factor, 1.0)))
    return Architecture(
        pairing=Pairing.ADJACENT,
        latent_attention=True,
        attention_scale=temperature**2 / math.sqrt(latent.key_size) if latent else None,
        rope_magnitude=rope.attention_factor if rope.log_multiplier else None,
        normalise_experts=bool(config.experts and config.experts.normalise),
        temperature_scale=config.temperature_scale,
        temperature_length=config.temperature_length or 8192,
    )


def sigmoid_routed(config: ModelConfig) -> Architecture:
    """dots.llm1 (arXiv 2506.05767) and Ling 2: sigmoid routing with a selection bias, queries and keys normed."""
    return Architecture(
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        gating=Gating.SIGMOID,
        normalise_experts=bool(config.experts and config.experts.normalise),
    )


def minimax_m2(config: ModelConfig) -> Architecture:
    """MiniMax M2: as above, its norms over whole projections."""
    return Architecture(query_key_norm=QueryKeyNorm.BEFORE_ROPE, gating=Gating.SIGMOID)
