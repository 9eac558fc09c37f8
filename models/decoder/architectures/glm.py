"""ChatGLM, GLM 4 (arXiv 2406.12793) and GLM 4.5 (arXiv 2508.06471)."""

from localinfer.kernels.ops import Gating, Pairing
from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig


def chatglm(config: ModelConfig) -> Architecture:
    """ChatGLM 2 and 3, GLM 4 9B Chat: half of each head rotates."""
    return Architecture(pairing=Pairing.ADJACENT)


def glm4(config: ModelConfig) -> Architecture:
    """GLM 4 0414: norms on both sides of each branch; vision models (sectioned RoPE) pair the halves of a head."""
    return Architecture(
        pairing=Pairing.HALVES if any(config.rope.sections) else Pairing.ADJACENT,
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
    )


def glm4moe(config: ModelConfig) -> Architecture:
    """GLM 4.5 and 4.6: sigmoid routing with a selection bias; only the largest norm queries and keys."""
    return Architecture(
        feed_forward_norm="post_attention_norm",
        query_key_norm=QueryKeyNorm.OPTIONAL,
        gating=Gating.SIGMOID,
        normalise_experts=bool(config.experts and config.experts.normalise),
    )
