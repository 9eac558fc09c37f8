"""StarCoder 2 (arXiv 2402.19173)."""

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.config import ModelConfig


def starcoder2(config: ModelConfig) -> Architecture:
    """StarCoder 2: layer norms, biases everywhere, no gate."""
    return Architecture(norm=Norm.LAYER, activation=Activation.GELU_TANH, gated=False)
