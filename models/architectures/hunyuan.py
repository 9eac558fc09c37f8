"""Tencent's Hunyuan (arXiv 2411.02265)."""

from localinfer.models.architecture import Architecture, QueryKeyNorm
from localinfer.models.config import ModelConfig


def hunyuan(config: ModelConfig) -> Architecture:
    """Hunyuan, dense or with experts: queries and keys normed behind RoPE."""
    return Architecture(query_key_norm=QueryKeyNorm.AFTER_ROPE)
