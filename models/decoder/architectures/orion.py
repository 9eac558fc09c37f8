"""Orion 14B (arXiv 2401.12246)."""

from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.config import ModelConfig


def orion(config: ModelConfig) -> Architecture:
    """Orion: layer norms with biases, a SiLU gate."""
    return Architecture(norm=Norm.LAYER)
