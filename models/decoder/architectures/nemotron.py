"""Nemotron and Minitron (arXiv 2402.16819)."""

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.config import ModelConfig


def nemotron(config: ModelConfig) -> Architecture:
    """Nemotron: squared ReLU; GGUF stores the norm weights as 1 + w."""
    return Architecture(norm=Norm.LAYER, activation=Activation.RELU_SQUARED, gated=False)
