"""MiniCPM (arXiv 2404.06395)."""

import math

from localinfer.kernels.ops import Pairing
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.config import ModelConfig


def minicpm(config: ModelConfig) -> Architecture:
    """MiniCPM 1: muP's scalars, those of its 2B model where the file has none."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        embedding_scale=config.embedding_scale or 12.0,
        residual_scale=config.residual_scale or 1.4 / math.sqrt(config.num_layers),
        logit_scale=1.0 / (config.logit_scale or config.hidden_size / 256.0),
    )
