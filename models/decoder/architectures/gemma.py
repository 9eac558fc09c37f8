"""Gemma 1 to 3 (arXiv 2403.08295, 2408.00118, 2503.19786). GGUF stores their norm weights as 1 + w."""

import math

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.architectures.layer_patterns import windows
from localinfer.models.decoder.config import ModelConfig

_LAYERS_OF_GEMMA2_27B = 46
_LAYERS_OF_GEMMA3_27B = 62


def gemma(config: ModelConfig) -> Architecture:
    """Gemma 1: scaled embeddings and a GELU gate."""
    return Architecture(activation=Activation.GELU_TANH, embedding_scale=math.sqrt(config.hidden_size))


def gemma2(config: ModelConfig) -> Architecture:
    """Gemma 2: norms on both sides of each branch, every other layer windowed, soft caps."""
    return Architecture(
        activation=Activation.GELU_TANH,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
        attention_scale=_attention_scale(config, _LAYERS_OF_GEMMA2_27B),
        windows=windows(config, period=2),
    )


def gemma3(config: ModelConfig) -> Architecture:
    """Gemma 3: queries and keys normed, five windowed layers to one that sees everything, each kind with its base."""
    return Architecture(
        activation=Activation.GELU_TANH,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        attention_scale=_attention_scale(config, _LAYERS_OF_GEMMA3_27B),
        windows=windows(config, period=6),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        scales_windowed_rope=False,
    )


def _attention_scale(config: ModelConfig, layers_of_27b: int) -> float | None:
    """The largest models divide by the root of hidden_size / num_heads, which is not their head size."""
    if config.attention_scale is None and config.num_layers == layers_of_27b:
        return 1.0 / math.sqrt(config.hidden_size / config.num_heads[0])
    return None
