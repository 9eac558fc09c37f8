"""The supported architectures with recurrent layers."""

from collections.abc import Callable

from localinfer.kernels.ops import Gating
from localinfer.models.decoder.architecture import Architecture, Mixer, QueryKeyNorm
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


RECURRENT_ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
}
