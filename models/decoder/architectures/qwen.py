"""Qwen 1 to 3 (arXiv 2309.16609, 2407.10671, 2505.09388), dense and with experts."""

from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig


def qwen(config: ModelConfig) -> Architecture:
    """Qwen 1: fused projections with biases."""
    return Architecture()


def qwen2(config: ModelConfig) -> Architecture:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    return Architecture()


def qwen2moe(config: ModelConfig) -> Architecture:
    """Qwen 1.5 MoE and Qwen 2 MoE: expert weights as the softmax leaves them, a gated shared expert."""
    return Architecture(normalise_experts=False)


def qwen3(config: ModelConfig) -> Architecture:
    """Qwen 3, dense or with experts: queries and keys normed per head."""
    return Architecture(query_key_norm=QueryKeyNorm.BEFORE_ROPE)
