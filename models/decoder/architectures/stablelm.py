"""StableLM (arXiv 2402.17834)."""

from localinfer.models.decoder.architecture import Architecture, Norm, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig


def stablelm(config: ModelConfig) -> Architecture:
    """StableLM 1 and 2: layer norms; the 12B runs its branches in parallel on one norm."""
    is_parallel = "ffn_norm.weight" not in config.block_tensors
    return Architecture(
        norm=Norm.LAYER,
        feed_forward_norm="attn_norm" if is_parallel else "ffn_norm",
        parallel=is_parallel,
        query_key_norm=QueryKeyNorm.OPTIONAL,
    )
