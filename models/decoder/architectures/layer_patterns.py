"""Patterns of layers, one entry per layer, as architectures share them."""

from localinfer.models.decoder.config import ModelConfig


def windowed(config: ModelConfig, period: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: the file's pattern, or all but every period-th layer."""
    if not config.sliding_window:
        return (False,) * config.num_layers
    return config.windowed_layers or tuple(layer % period < period - 1 for layer in range(config.num_layers))


def windows(config: ModelConfig, period: int) -> tuple[int, ...]:
    """The window of each layer, 0 for layers that see everything."""
    return tuple(config.sliding_window if is_windowed else 0 for is_windowed in windowed(config, period))
