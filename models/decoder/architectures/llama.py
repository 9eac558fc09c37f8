"""Llama (arXiv 2302.13971) and the models that changed a line of it: Mistral, Mixtral, Granite, SmolLM3, Llama 4."""

from dataclasses import replace

from localinfer.kernels.ops import Activation, Gating, Pairing
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.architectures.layer_patterns import windowed
from localinfer.models.decoder.config import ModelConfig

_ROPE_PERIOD = 4
_LLAMA4_MAVERICK_EXPERTS = 128


def llama(config: ModelConfig) -> Architecture:
    """Llama 1 to 3.x, TinyLlama, SmolLM; Mistral (the first has a window); with experts, Mixtral (arXiv 2401.04088)."""
    return Architecture(pairing=Pairing.ADJACENT, windows=(config.sliding_window,) * config.num_layers)


def mistral3(config: ModelConfig) -> Architecture:
    """Ministral 3: queries sharpen with the logarithm of the position."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        temperature_scale=config.temperature_scale,
        temperature_length=config.rope.original_context_length,
    )


def granite(config: ModelConfig) -> Architecture:
    """Granite 3 and 4, dense; some have no RoPE."""
    return replace(granitemoe(config), has_rope=(config.rope.is_used,) * config.num_layers)


def granitemoe(config: ModelConfig) -> Architecture:
    """Granite 3 with experts: four scalars from muP training, logits divided by theirs."""
    return Architecture(
        pairing=Pairing.ADJACENT,
        embedding_scale=config.embedding_scale or 1.0,
        residual_scale=config.residual_scale or 1.0,
        logit_scale=1.0 / (config.logit_scale or 1.0),
    )


def smollm3(config: ModelConfig) -> Architecture:
    """SmolLM3: every fourth layer has no RoPE (NoPE, arXiv 2501.18795)."""
    return Architecture(pairing=Pairing.ADJACENT, has_rope=_rope_except_every_fourth(config))


def arcee(config: ModelConfig) -> Architecture:
    """Arcee AFM: Llama with one squared ReLU in place of the gate."""
    return Architecture(pairing=Pairing.ADJACENT, activation=Activation.RELU_SQUARED, gated=False)


def llama4(config: ModelConfig) -> Architecture:
    """Llama 4: three layers with RoPE that see a chunk to one without RoPE that sees everything, weighed inputs."""
    is_chunked = windowed(config, period=_ROPE_PERIOD)
    return Architecture(
        pairing=Pairing.ADJACENT,
        chunks=tuple(config.sliding_window if chunked else 0 for chunked in is_chunked),
        has_rope=_rope_except_every_fourth(config),
        unweighted_query_key_norm=config.experts is None or config.experts.num_experts != _LLAMA4_MAVERICK_EXPERTS,
        gating=Gating.SIGMOID,
        normalise_experts=False,
        weigh_expert_inputs=True,
        temperature_scale=config.temperature_scale or 0.1,
        temperature_length=config.temperature_length or 8192,
        temperature_offset=1,
        temperature_without_rope_only=True,
    )


def _rope_except_every_fourth(config: ModelConfig) -> tuple[bool, ...]:
    return tuple((layer + 1) % _ROPE_PERIOD != 0 for layer in range(config.num_layers))
