"""BLOOM (arXiv 2211.05100)."""

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.config import ModelConfig


def bloom(config: ModelConfig) -> Architecture:
    """BLOOM: ALiBi, and a norm on the embeddings."""
    return Architecture(
        norm=Norm.LAYER,
        embedding_norm="token_embd_norm",
        activation=Activation.GELU_TANH,
        gated=False,
        max_alibi_bias=config.max_alibi_bias or 8.0,
        has_rope=(False,) * config.num_layers,
    )
