"""Baichuan 1 and 2 (arXiv 2309.10305)."""

from localinfer.kernels.ops import Pairing
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.config import ModelConfig

_LAYERS_OF_7B = 32
_LAYERS_OF_13B = 40


def baichuan(config: ModelConfig) -> Architecture:
    """Baichuan 1 and 2: the 7B has RoPE, the 13B ALiBi; only the depth tells them apart."""
    is_alibi = config.num_layers == _LAYERS_OF_13B
    return Architecture(
        pairing=Pairing.ADJACENT,
        has_rope=(config.num_layers == _LAYERS_OF_7B,) * config.num_layers,
        max_alibi_bias=8.0 if is_alibi else 0.0,
    )
