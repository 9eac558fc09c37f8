"""OpenAI's GPT-2 and gpt-oss (arXiv 2508.10925), and GPT-NeoX (arXiv 2204.06745)."""

from localinfer.kernels.ops import Activation, Gating
from localinfer.models.decoder.architecture import Architecture, Norm
from localinfer.models.decoder.architectures.layer_patterns import windows
from localinfer.models.decoder.config import ModelConfig


def gpt2(config: ModelConfig) -> Architecture:
    """GPT-2: learned positions."""
    return Architecture(
        norm=Norm.LAYER,
        activation=Activation.GELU_TANH,
        gated=False,
        learned_positions=True,
        has_rope=(False,) * config.num_layers,
    )


def gpt_oss(config: ModelConfig) -> Architecture:
    """gpt-oss: experts with biases and a clamped gate, attention sinks, every other layer windowed."""
    return Architecture(
        feed_forward_norm="post_attention_norm",
        activation=Activation.SWIGLU_CLAMPED,
        gating=Gating.SOFTMAX_SELECTED,
        normalise_experts=False,
        windows=windows(config, period=2),
    )


def gptneox(config: ModelConfig) -> Architecture:
    """GPT-NeoX and Pythia: branches in parallel, each with its own norm."""
    is_parallel = True if config.parallel_residual is None else config.parallel_residual
    return Architecture(norm=Norm.LAYER, parallel=is_parallel, activation=Activation.GELU_TANH, gated=False)
