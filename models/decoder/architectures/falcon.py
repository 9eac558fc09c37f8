"""Falcon (arXiv 2311.16867)."""

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.config import ModelConfig


def falcon(config: ModelConfig) -> Architecture:
    """Falcon: branches in parallel; the 40B has a second norm, for attention."""
    has_second_norm = "attn_norm_2.weight" in config.block_tensors
    return Architecture(
        norm=Norm.LAYER,
        attention_norm="attn_norm_2" if has_second_norm else "attn_norm",
        feed_forward_norm="attn_norm",
        parallel=True,
        activation=Activation.GELU_TANH,
        gated=False,
    )
