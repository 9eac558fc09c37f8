"""ByteDance's Seed-OSS."""

from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.config import ModelConfig


def seed_oss(config: ModelConfig) -> Architecture:
    """Seed-OSS: its feed-forward norm has another name."""
    return Architecture(feed_forward_norm="post_attention_norm")
