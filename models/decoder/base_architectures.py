"""What the tables of architectures share: base records, and patterns over layers."""

from dataclasses import replace

from localinfer.kernels.ops import Activation, Pairing
from localinfer.models.decoder.architecture import Architecture, Norm, QueryKeyNorm
from localinfer.models.decoder.config import ModelConfig

LLAMA = Architecture(pairing=Pairing.ADJACENT)
QK_NORMED = Architecture(query_key_norm=QueryKeyNorm.BEFORE_ROPE)
GELU_MLP = Architecture(norm=Norm.LAYER, activation=Activation.GELU_TANH, gated=False)
COHERE = replace(LLAMA, norm=Norm.LAYER, feed_forward_norm="attn_norm", parallel=True)
NORMS_BEHIND = replace(
    QK_NORMED,
    attention_norm=None,
    attention_post_norm="post_attention_norm",
    feed_forward_norm=None,
    feed_forward_post_norm="post_ffw_norm",
)


def windowed_layers(config: ModelConfig, period: int) -> tuple[bool, ...]:
    """Which layers have a sliding window: the file's pattern, or all but every period-th layer."""
    if not config.sliding_window:
        return (False,) * config.num_layers
    return config.windowed_layers or tuple(layer % period < period - 1 for layer in range(config.num_layers))


def windows(config: ModelConfig, period: int) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention."""
    return tuple(config.sliding_window if is_windowed else 0 for is_windowed in windowed_layers(config, period))


def named_windows(config: ModelConfig) -> tuple[int, ...]:
    """The windows of families that mostly have none: those of a file that names the layers which have one."""
    return windows(config, period=1) if config.windowed_layers else ()


def same_windows(config: ModelConfig) -> tuple[int, ...]:
    """The file's window in every layer, or in those of its pattern."""
    is_windowed = config.windowed_layers or (True,) * config.num_layers
    return tuple(config.sliding_window if windowed else 0 for windowed in is_windowed)


def rope_except_every_fourth(config: ModelConfig) -> tuple[bool, ...]:
    """Which layers have RoPE: all but every fourth (NoPE, arXiv 2501.18795)."""
    return tuple(layer % 4 < 3 for layer in range(config.num_layers))


def normalises_experts(config: ModelConfig, default: bool = False) -> bool:
    """Whether expert weights sum to 1: what the file asks for. default: where it does not say."""
    found = None if config.experts is None else config.experts.normalise
    return default if found is None else found


def granite(config: ModelConfig) -> Architecture:
    """Granite 3, dense or with experts: four scalars from muP training, logits divided by theirs."""
    return replace(
        LLAMA,
        embedding_scale=config.embedding_scale or 1.0,
        residual_scale=config.residual_scale or 1.0,
        logit_scale=1.0 / (config.logit_scale or 1.0),
    )


def hunyuan(config: ModelConfig) -> Architecture:
    """Tencent's Hunyuan (arXiv 2411.02265), dense or with experts: NTK-aware scaling stretches the RoPE base.

    The base is multiplied by alpha^(d / (d - 2)), d elements rotating.
    """
    rope = config.rope
    base = rope.base
    if rope.alpha and rope.rotary_size > 2:
        base = float(rope.base * rope.alpha ** (rope.rotary_size / (rope.rotary_size - 2)))
    return Architecture(query_key_norm=QueryKeyNorm.AFTER_ROPE, rope_base=base)
