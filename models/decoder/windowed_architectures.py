"""Dense decoders whose layers differ: sliding windows, or layers without RoPE."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Activation, Pairing
from localinfer.models.decoder.architecture import Architecture, Blocks, QueryKeyNorm
from localinfer.models.decoder.base_architectures import (
    COHERE,
    LLAMA,
    NORMS_BEHIND,
    QK_NORMED,
    named_windows,
    rope_except_every_fourth,
    windowed_layers,
    windows,
)
from localinfer.models.decoder.config import ModelConfig

_GEMMA = Architecture(activation=Activation.GELU_TANH)
_GEMMA_FOUR_NORMS = replace(_GEMMA, attention_post_norm="post_attention_norm", feed_forward_post_norm="post_ffw_norm")


def _exaone4(config: ModelConfig) -> Architecture:
    """EXAONE 4 (arXiv 2507.11407): post-norms; the 32B has sliding windows, and RoPE in those layers only."""
    if not config.windowed_layers and config.num_layers != 64:
        return NORMS_BEHIND
    return replace(NORMS_BEHIND, windows=windows(config, period=4), has_rope=windowed_layers(config, period=4))


def _muse_glimmer(config: ModelConfig) -> Architecture:
    """Muse Glimmer: four norms, gated attention, RoPE in the sliding-window layers only."""
    return replace(
        QK_NORMED,
        pairing=Pairing.ADJACENT,
        normalises_embedding=True,
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
        post_norm_epsilon=1e-8,
        windows=windows(config, period=4),
        has_rope=windowed_layers(config, period=4),
        logit_scale=config.logit_scale or 1.0,
    )


def _gemma2(config: ModelConfig) -> Architecture:
    """Gemma 2 (arXiv 2408.00118): pre- and post-norms, a sliding window in every other layer, soft caps."""
    return replace(
        _GEMMA_FOUR_NORMS,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=_gemma_scale(config, layers_of_27b=46),
        windows=windows(config, period=2),
    )


def _gemma3(config: ModelConfig) -> Architecture:
    """Gemma 3 (arXiv 2503.19786): five sliding-window layers to one of full attention, each kind with its RoPE base."""
    return replace(
        _GEMMA_FOUR_NORMS,
        embedding_scale=math.sqrt(config.hidden_size),
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        attention_scale=_gemma_scale(config, layers_of_27b=62),
        windows=windows(config, period=6),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        scales_windowed_rope=False,
    )


def gemma_with_shared_keys(config: ModelConfig, blocks: Blocks, period: int) -> Architecture:
    """Gemma 3n and Gemma 4: unscaled scores of normed queries and keys."""
    return replace(
        _GEMMA_FOUR_NORMS,
        blocks=blocks,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=1.0,
        windows=windows(config, period),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        divides_windowed_rope=False,
        logit_softcap=30.0 if blocks is Blocks.GEMMA3N else 0.0,
    )


def _gemma_scale(config: ModelConfig, layers_of_27b: int) -> float | None:
    """The largest models divide by the root of hidden_size / num_heads, which differs from their head size."""
    if config.attention_scale is None and config.num_layers == layers_of_27b:
        return 1.0 / math.sqrt(config.hidden_size / config.num_heads[0])
    return None


WINDOWED: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # Command R7B and Command A: three sliding-window layers with RoPE to one of full attention without.
    "cohere2": lambda config: replace(
        COHERE,
        logit_scale=config.logit_scale or 1.0,
        windows=windows(config, period=4),
        has_rope=windowed_layers(config, period=4),
    ),
    # Nemotron's models found by Puzzle (arXiv 2411.19146): layers without attention, or with one matrix in its place.
    "deci": LLAMA,
    "exaone4": _exaone4,
    # Gemma (arXiv 2403.08295): scaled embeddings and a GELU gate. GGUF stores the norms of this family as 1 + w.
    "gemma": lambda config: replace(_GEMMA, embedding_scale=math.sqrt(config.hidden_size)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": lambda config: gemma_with_shared_keys(config, Blocks.GEMMA3N, period=5),
    "gemma4": lambda config: gemma_with_shared_keys(config, Blocks.GEMMA4, period=6),
    "muse-glimmer": _muse_glimmer,
    # OLMo 2 (arXiv 2501.00656): post-norms; OLMo 3 adds sliding windows, without YaRN in those layers.
    "olmo2": lambda config: replace(NORMS_BEHIND, windows=windows(config, period=4), scales_windowed_rope=False),
    # OpenELM (arXiv 2404.14619): heads and feed-forward sizes grow with the layers.
    "openelm": QK_NORMED,
    # PLaMo 3: four norms.
    "plamo3": lambda config: replace(
        QK_NORMED,
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
        windows=windows(config, period=8),
    ),
    # SmolLM3: every fourth layer has no RoPE, unless the file says otherwise.
    "smollm3": lambda config: replace(
        LLAMA,
        has_rope=config.rope_pattern or rope_except_every_fourth(config),
        windows=named_windows(config),
    ),
    # VaultGemma (arXiv 2510.15001): Gemma 2 without norms behind the branches.
    "vaultgemma": lambda config: replace(_gemma2(config), attention_post_norm=None, feed_forward_post_norm=None),
}
