"""The supported architectures with recurrent layers."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Gating, Pairing
from localinfer.models.decoder.architecture import Architecture, Mixer, Norm, QueryKeyNorm
from localinfer.models.decoder.base_architectures import QK_NORMED, normalises_experts
from localinfer.models.decoder.config import ModelConfig


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
