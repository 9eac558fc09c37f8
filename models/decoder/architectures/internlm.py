"""InternLM 2 and 3 (arXiv 2403.17297)."""

from localinfer.kernels.ops import Pairing
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.config import ModelConfig


def internlm2(config: ModelConfig) -> Architecture:
    """InternLM 2 and 3: Llama with its projections fused in the checkpoint."""
    return Architecture(pairing=Pairing.ADJACENT)
