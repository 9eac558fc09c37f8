"""Cohere's Command R and Command R7B: branches in parallel, layer norms without biases, scaled logits."""

from localinfer.kernels.ops import Pairing
from localinfer.models.decoder.architecture import Architecture, Norm, QueryKeyNorm
from localinfer.models.decoder.architectures.layer_patterns import windowed, windows
from localinfer.models.decoder.config import ModelConfig


def command_r(config: ModelConfig) -> Architecture:
    """Command R; the larger one norms each head of its queries and keys."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        norm=Norm.LAYER,
        feed_forward_norm="attn_norm",
        parallel=True,
        query_key_norm=QueryKeyNorm.OPTIONAL,
        logit_scale=config.logit_scale or 1.0,
    )


def cohere2(config: ModelConfig) -> Architecture:
    """Command R7B and Command A: three windowed layers with RoPE to one that sees everything, without."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        norm=Norm.LAYER,
        feed_forward_norm="attn_norm",
        parallel=True,
        logit_scale=config.logit_scale or 1.0,
        windows=windows(config, period=4),
        has_rope=windowed(config, period=4),
    )
