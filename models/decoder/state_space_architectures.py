"""The supported architectures with Mamba's layers."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Activation, Gating
from localinfer.models.decoder.architecture import Architecture, Blocks, DraftLayers, Mixer, QueryKeyNorm
from localinfer.models.decoder.base_architectures import granite, normalises_experts
from localinfer.models.decoder.config import ModelConfig

_MIXER_ONLY = Architecture(feed_forward_norm=None, has_feed_forward=False)


def _mixers(config: ModelConfig, recurrent: Mixer) -> tuple[Mixer, ...]:
    """The given kind in recurrent layers, attention in those with keys and values, and none in the others."""
    assert config.recurrent is not None, "read for these architectures"
    return tuple(
        recurrent if is_recurrent else Mixer.ATTENTION if num_kv_heads else Mixer.NONE
        for is_recurrent, num_kv_heads in zip(config.recurrent.layers, config.num_kv_heads, strict=True)
    )


def _granitehybrid(config: ModelConfig) -> Architecture:
    """Granite 4: Mamba 2 and attention, mostly without positions; dense or with experts, with muP's scalars."""
    has_rope = (config.rope.is_used,) * config.num_layers
    return replace(granite(config), has_rope=has_rope, mixers=_mixers(config, Mixer.MAMBA2))


def _nemotron_h(config: ModelConfig) -> Architecture:
    """Nemotron-H (arXiv 2504.03624) and Nemotron 3: each layer is Mamba 2, attention or a feed-forward block."""
    return Architecture(
        feed_forward_norm="attn_norm",
        has_rope=(False,) * config.num_layers,
        activation=Activation.RELU_SQUARED,
        gated=False,
        gating=Gating.SIGMOID,
        normalise_experts=normalises_experts(config),
        mixers=_mixers(config, Mixer.MAMBA2),
        draft_layers=DraftLayers(has_layer_norm=True, feed_forward_norm="post_attention_norm"),
    )


STATE_SPACE_ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # Falcon-H1 (arXiv 2507.22448): attention and Mamba 2 side by side in every layer.
    "falcon-h1": Architecture(mixer_beside=Mixer.MAMBA2),
    "granitehybrid": _granitehybrid,
    # Jamba (arXiv 2403.19887): Mamba 1 with normed inputs; attention without positions, experts in every other layer.
    "jamba": lambda config: Architecture(
        has_rope=(False,) * config.num_layers, normalise_experts=False, mixers=_mixers(config, Mixer.MAMBA)
    ),
    # Mamba (arXiv 2312.00752) and Falcon Mamba (2410.05355), which norms the scan's inputs.
    "mamba": lambda config: replace(_MIXER_ONLY, mixers=_mixers(config, Mixer.MAMBA)),
    # Mamba 2 (arXiv 2405.21060).
    "mamba2": lambda config: replace(_MIXER_ONLY, mixers=_mixers(config, Mixer.MAMBA2)),
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    # PLaMo 2 (arXiv 2509.04897): Mamba 2 with normed inputs, every other layer attention; norms before and behind.
    "plamo2": lambda config: Architecture(
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        mixers=_mixers(config, Mixer.PLAMO_MAMBA),
    ),
    # Zamba 2 (arXiv 2411.15242): Mamba 2, and blocks of attention over twice the width that layers share.
    "zamba2": lambda config: Architecture(
        blocks=Blocks.ZAMBA2, mixer_beside=Mixer.MAMBA2, attention_scale=math.sqrt(2.0 / max(config.head_dim, 1))
    ),
}
