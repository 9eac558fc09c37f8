"""Architectures with recurrent layers: delta nets, convolutions, RWKV and state space models."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Activation, Gating, Pairing
from localinfer.models.decoder.architecture import Architecture, Blocks, DraftLayers, Mixer, Norm, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.dense_architectures import FOUR_NORMS, QK_NORMED, granite, normalises_experts


def _mixers(config: ModelConfig, recurrent: Mixer) -> tuple[Mixer, ...]:
    """The given kind in recurrent layers, attention in the others."""
    assert config.recurrent is not None, "read for these architectures"
    return tuple(recurrent if is_recurrent else Mixer.ATTENTION for is_recurrent in config.recurrent.layers)


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """A file's window is that of its attention layers, of all unless it has a pattern."""
    windowed = config.windowed_layers or (True,) * config.num_layers
    return tuple(
        config.sliding_window if is_windowed and has_cache else 0
        for is_windowed, has_cache in zip(windowed, config.num_kv_heads, strict=True)
    )


def _lfm2(config: ModelConfig) -> Architecture:
    """Liquid's LFM 2 (arXiv 2511.23404), dense or with sigmoid-routed experts; its last norm has a misleading name."""
    return Architecture(
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        output_norm="token_embd_norm",
        gating=Gating.SIGMOID,
        mixers=_mixers(config, Mixer.SHORT_CONVOLUTION),
        windows=_windows(config),
    )


def _lfm3(config: ModelConfig) -> Architecture:
    """LFM 3: LFM 2 with windows, whose rotation differs, gates over heads, and norms behind the branches too, where the
    file has them.
    """
    has_norms = "post_attention_norm.weight" in config.block_tensors
    return replace(
        _lfm2(config),
        divides_windowed_rope=False,
        attention_post_norm="post_attention_norm" if has_norms else None,
        feed_forward_post_norm="post_ffw_norm" if has_norms else None,
    )


def _olmo_hybrid(config: ModelConfig) -> Architecture:
    """OLMo Hybrid: delta nets whose layers have norms before the branches, and OLMo 2's layers, some without RoPE."""
    return replace(
        QK_NORMED,
        feed_forward_norm="post_attention_norm",
        norms_behind_attention=True,
        mixer_norm_epsilon=1e-5,
        has_rope=(config.rope.is_used,) * config.num_layers,
        mixers=_mixers(config, Mixer.DELTA_NET),
    )


def _qwen3_next(config: ModelConfig) -> Architecture:
    """Qwen3-Next: gated delta nets (arXiv 2412.06464), every fourth layer gated attention; dense or with experts."""
    return Architecture(
        feed_forward_norm="post_attention_norm",
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        gates_attention=True,
        mixers=_mixers(config, Mixer.DELTA_NET),
    )


def _qwen35(config: ModelConfig) -> Architecture:
    """Qwen3.5: as Qwen3-Next, with value heads in another order."""
    return replace(_qwen3_next(config), tiles_value_heads=True)


def _kimi_linear(config: ModelConfig) -> Architecture:
    """Kimi Linear (arXiv 2510.26692): delta attention, and latent attention without positions."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        latent_attention=True,
        attention_scale=1.0 / math.sqrt(config.latent.key_size) if config.latent else None,
        has_rope=(False,) * config.num_layers,
        gating=Gating.SIGMOID,
        mixers=_mixers(config, Mixer.KIMI_DELTA),
    )


def _bailingmoe3(config: ModelConfig) -> Architecture:
    """Ling 3: Kimi Linear's layers, with rotated keys, gates over heads and clamped experts."""
    return replace(
        _kimi_linear(config),
        has_rope=(),
        normalise_experts=normalises_experts(config),
        expert_clamps=config.expert_clamps,
        dense_clamps=config.dense_clamps,
    )


def _minimax01(config: ModelConfig) -> Architecture:
    """MiniMax-01 and M1 (arXiv 2501.08313): lightning attention, every eighth layer softmax attention; experts."""
    return Architecture(stream_weight=config.residual_scale or 1.0, mixers=_mixers(config, Mixer.LIGHTNING))


def _rwkv7(config: ModelConfig) -> Architecture:
    """RWKV-7 (arXiv 2503.14456): recurrent layers alone, without positions."""
    return Architecture(
        norm=Norm.LAYER, embedding_norm="token_embd_norm", mixers=_mixers(config, Mixer.WKV),
        has_rope=(False,) * config.num_layers,
    )  # fmt: skip


RECURRENT_ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "bailingmoe3": _bailingmoe3,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "lfm3": _lfm3,
    "minimax-01": _minimax01,
    "olmo-hybrid": _olmo_hybrid,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3_next,
    "rwkv7": _rwkv7,
}


_MIXER_ONLY = Architecture(feed_forward_norm=None, has_feed_forward=False)


def _sparse_mixers(config: ModelConfig, recurrent: Mixer) -> tuple[Mixer, ...]:
    """The given kind in recurrent layers, attention in those with keys and values, and none in the others."""
    assert config.recurrent is not None, "read for these architectures"
    return tuple(
        recurrent if is_recurrent else Mixer.ATTENTION if num_kv_heads else Mixer.NONE
        for is_recurrent, num_kv_heads in zip(config.recurrent.layers, config.num_kv_heads, strict=True)
    )


def _granitehybrid(config: ModelConfig) -> Architecture:
    """Granite 4: Mamba 2 and attention, mostly without positions; dense or with experts, with muP's scalars."""
    has_rope = (config.rope.is_used,) * config.num_layers
    return replace(granite(config), has_rope=has_rope, mixers=_sparse_mixers(config, Mixer.MAMBA2))


def _nemotron_h(config: ModelConfig) -> Architecture:
    """Nemotron-H (arXiv 2504.03624) and Nemotron 3: each layer is Mamba 2, attention or a feed-forward block."""
    return Architecture(
        feed_forward_norm="attn_norm",
        has_rope=(False,) * config.num_layers,
        activation=Activation.RELU_SQUARED,
        gated=False,
        gating=Gating.SIGMOID,
        normalise_experts=normalises_experts(config),
        mixers=_sparse_mixers(config, Mixer.MAMBA2),
        draft_layers=DraftLayers(has_layer_norm=True, feed_forward_norm="post_attention_norm"),
    )


STATE_SPACE_ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # Falcon-H1 (arXiv 2507.22448): attention and Mamba 2 side by side in every layer.
    "falcon-h1": Architecture(mixer_beside=Mixer.MAMBA2),
    "granitehybrid": _granitehybrid,
    # Jamba (arXiv 2403.19887): Mamba 1 with normed inputs; attention without positions, experts in every other layer.
    "jamba": lambda config: Architecture(
        has_rope=(False,) * config.num_layers, normalise_experts=False, mixers=_sparse_mixers(config, Mixer.MAMBA)
    ),
    # Mamba (arXiv 2312.00752) and Falcon Mamba (2410.05355), which norms the scan's inputs.
    "mamba": lambda config: replace(_MIXER_ONLY, mixers=_sparse_mixers(config, Mixer.MAMBA)),
    # Mamba 2 (arXiv 2405.21060).
    "mamba2": lambda config: replace(_MIXER_ONLY, mixers=_sparse_mixers(config, Mixer.MAMBA2)),
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    # PLaMo 2 (arXiv 2509.04897): Mamba 2 with normed inputs, every other layer attention; norms before and behind.
    "plamo2": lambda config: replace(FOUR_NORMS, mixers=_sparse_mixers(config, Mixer.PLAMO_MAMBA)),
    # Zamba 2 (arXiv 2411.15242): Mamba 2, and blocks of attention over twice the width that layers share.
    "zamba2": lambda config: Architecture(
        blocks=Blocks.ZAMBA2, mixer_beside=Mixer.MAMBA2, attention_scale=math.sqrt(2.0 / max(config.head_dim, 1))
    ),
}
