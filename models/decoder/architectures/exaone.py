"""EXAONE 4 (arXiv 2507.11407)."""

from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.architectures.layer_patterns import windowed, windows
from localinfer.models.decoder.config import ModelConfig

_LAYERS_OF_32B = 64


def exaone4(config: ModelConfig) -> Architecture:
    """EXAONE 4: norms behind the branches; the 32B has windows, and RoPE in windowed layers only."""
    has_windows = bool(config.windowed_layers) or config.num_layers == _LAYERS_OF_32B
    return Architecture(
        attention_norm=None,
        attention_post_norm="post_attention_norm",
        feed_forward_norm=None,
        feed_forward_post_norm="post_ffw_norm",
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        windows=windows(config, period=4) if has_windows else (),
        has_rope=windowed(config, period=4) if has_windows else (),
    )
