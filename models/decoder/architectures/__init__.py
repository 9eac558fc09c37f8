"""The architectures this version runs: GGUF's name of each, and the function that describes a model of it."""

from collections.abc import Callable

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.architectures import (
    baichuan,
    bloom,
    cohere,
    deepseek,
    exaone,
    falcon,
    gemma,
    glm,
    gpt,
    hunyuan,
    internlm,
    llama,
    minicpm,
    nemotron,
    olmo,
    orion,
    phi,
    qwen,
    seed,
    stablelm,
    starcoder,
)
from localinfer.models.decoder.config import ModelConfig

ARCHITECTURES: dict[str, Callable[[ModelConfig], Architecture]] = {
    "arcee": llama.arcee,
    "baichuan": baichuan.baichuan,
    "bailingmoe2": deepseek.sigmoid_routed,
    "bloom": bloom.bloom,
    "chatglm": glm.chatglm,
    "cohere2": cohere.cohere2,
    "command-r": cohere.command_r,
    "deepseek": deepseek.deepseek,
    "deepseek2": deepseek.deepseek2,
    "dots1": deepseek.sigmoid_routed,
    "exaone4": exaone.exaone4,
    "falcon": falcon.falcon,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "glm4": glm.glm4,
    "glm4moe": glm.glm4moe,
    "gpt-oss": gpt.gpt_oss,
    "gpt2": gpt.gpt2,
    "gptneox": gpt.gptneox,
    "granite": llama.granite,
    "granitemoe": llama.granitemoe,
    "hunyuan-dense": hunyuan.hunyuan,
    "hunyuan-moe": hunyuan.hunyuan,
    "internlm2": internlm.internlm2,
    "llama": llama.llama,
    "llama4": llama.llama4,
    "minicpm": minicpm.minicpm,
    "minimax-m2": deepseek.minimax_m2,
    "mistral3": llama.mistral3,
    "nemotron": nemotron.nemotron,
    "olmo2": olmo.olmo2,
    "olmoe": olmo.olmoe,
    "orion": orion.orion,
    "phi2": phi.phi2,
    "phi3": phi.phi3,
    "phimoe": phi.phimoe,
    "qwen": qwen.qwen,
    "qwen2": qwen.qwen2,
    "qwen2moe": qwen.qwen2moe,
    "qwen3": qwen.qwen3,
    "qwen3moe": qwen.qwen3,
    "seed_oss": seed.seed_oss,
    "smollm3": llama.smollm3,
    "stablelm": stablelm.stablelm,
    "starcoder2": starcoder.starcoder2,
}


RECURRENT = (
    *("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"),
    *("nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
)
"""Architectures with layers that keep one running state instead of something for each position."""


def check_architecture(name: str) -> None:
    """Raise UnsupportedFormatError, with the reason or with the names known, unless this version runs it."""
    if name in RECURRENT:
        raise UnsupportedFormatError(
            f"general.architecture is {name!r}, a model with recurrent layers; their state belongs to one whole text, "
            "so it cannot be shared, taken back or kept as what this version caches. Choose a model whose layers are "
            "all attention."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedFormatError(
            f"general.architecture is {name!r}; this version runs {', '.join(sorted(ARCHITECTURES))}. "
            "Update localinfer or choose another model."
        )


def find_architecture(config: ModelConfig) -> Architecture:
    """Describe a model. Raises: as `check_architecture`."""
    check_architecture(config.architecture)
    return ARCHITECTURES[config.architecture](config)
