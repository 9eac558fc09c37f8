"""Phi 2, Phi 3 and 4 (arXiv 2404.14219) and Phi 3.5 MoE."""

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.config import ModelConfig


def phi2(config: ModelConfig) -> Architecture:
    """Phi 1.5 and 2: both branches read one layer norm."""
    return Architecture(
        norm=Norm.LAYER, feed_forward_norm="attn_norm", parallel=True, activation=Activation.GELU_TANH, gated=False
    )


def phi3(config: ModelConfig) -> Architecture:
    """Phi 3 and 4: fused projections, LongRoPE, one window for all layers in the 4K models."""
    return Architecture(windows=(config.sliding_window,) * config.num_layers)


def phimoe(config: ModelConfig) -> Architecture:
    """Phi 3.5 MoE: experts, and layer norms with biases as in its published code (llama.cpp applies RMS norms here)."""
    return Architecture(norm=Norm.LAYER, windows=(config.sliding_window,) * config.num_layers)
