"""DeepSeek-MoE (arXiv 2401.06066) and models routed like DeepSeek-V3 (arXiv 2412.19437)."""

from localinfer.kernels.ops import Gating, Pairing
from localinfer.models.architecture import Architecture, QueryKeyNorm
from localinfer.models.config import ModelConfig


def deepseek(config: ModelConfig) -> Architecture:
    """DeepSeek-MoE 16B: expert weights as the softmax leaves them."""
    return Architecture(pairing=Pairing.ADJACENT, normalise_experts=False)


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
