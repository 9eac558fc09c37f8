"""Tencent's Hunyuan (arXiv 2411.02265)."""

from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig, RopeConfig


def hunyuan(config: ModelConfig) -> Architecture:
    """Hunyuan, dense or with experts: queries and keys normed behind RoPE, whose base a file may stretch."""
    return Architecture(query_key_norm=QueryKeyNorm.AFTER_ROPE, rope_base=_stretched_base(config.rope))


def _stretched_base(rope: RopeConfig) -> float:
    """NTK-aware scaling as these models have it: the base times alpha^(d / (d - 2)), d elements rotating."""
    if not rope.alpha or rope.rotary_size <= 2:
        return rope.base
    return float(rope.base * rope.alpha ** (rope.rotary_size / (rope.rotary_size - 2)))
