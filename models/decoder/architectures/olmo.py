"""OLMo 2 and 3 (arXiv 2501.00656) and OLMoE (arXiv 2409.02060)."""

from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.architectures.layer_patterns import windows
from localinfer.models.decoder.config import ModelConfig


def olmo2(config: ModelConfig) -> Architecture:
    """OLMo 2: norms behind the branches instead of before them; OLMo 3 adds windows, without YaRN in those layers."""
    return Architecture(
        attention_norm=None,
        attention_post_norm="post_attention_norm",
        feed_forward_norm=None,
        feed_forward_post_norm="post_ffw_norm",
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        windows=windows(config, period=4),
        scales_windowed_rope=False,
    )


def olmoe(config: ModelConfig) -> Architecture:
    """OLMoE: expert weights as the softmax leaves them."""
    return Architecture(query_key_norm=QueryKeyNorm.BEFORE_ROPE, normalise_experts=False)
