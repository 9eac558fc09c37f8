"""Llama (arXiv 2302.13971) and the models that changed a line of it: Mistral, Mixtral, Granite, SmolLM3, MiniCPM."""

from localinfer.kernels.ops import Activation, Pairing
from localinfer.models.architecture import Architecture
from localinfer.models.config import ModelConfig

_SMOLLM3_ROPE_PERIOD = 4


def llama(config: ModelConfig) -> Architecture:
    """Llama 1 to 3.x, Mistral, TinyLlama, SmolLM; with experts, Mixtral (arXiv 2401.04088)."""
    return Architecture(pairing=Pairing.ADJACENT)


def mistral3(config: ModelConfig) -> Architecture:
    """Ministral 3: queries sharpen with the logarithm of the position."""
    length = config.temperature_length or config.rope.original_context_length
    return Architecture(
        pairing=Pairing.ADJACENT,
        temperature_scale=config.temperature_scale,
        temperature_length=length if config.temperature_scale else 0,
    )


def granite(config: ModelConfig) -> Architecture:
    """Granite 3 and 4 without state space layers: four scalars from muP training, logits divided by theirs."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        embedding_scale=config.embedding_scale or 1.0,
        residual_scale=config.residual_scale or 1.0,
        logit_scale=1.0 / (config.logit_scale or 1.0),
    )


def smollm3(config: ModelConfig) -> Architecture:
    """SmolLM3: every fourth layer has no RoPE (NoPE, arXiv 2501.18795)."""
    has_rope = tuple((layer + 1) % _SMOLLM3_ROPE_PERIOD != 0 for layer in range(config.num_layers))
    return Architecture(pairing=Pairing.ADJACENT, has_rope=has_rope)


def arcee(config: ModelConfig) -> Architecture:
    """Arcee AFM: Llama with one squared ReLU in place of the gate."""
    return Architecture(pairing=Pairing.ADJACENT, activation=Activation.RELU_SQUARED, gated=False)
