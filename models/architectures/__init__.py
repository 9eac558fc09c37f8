"""The architectures this version runs: GGUF's name of each, and the function that describes a model of it."""

from collections.abc import Callable

from localinfer.errors import UnsupportedFormatError
from localinfer.models.architecture import Architecture
from localinfer.models.architectures import llama, qwen
from localinfer.models.config import ModelConfig

ARCHITECTURES: dict[str, Callable[[ModelConfig], Architecture]] = {
    "arcee": llama.arcee,
    "granite": llama.granite,
    "granitemoe": llama.granite,
    "llama": llama.llama,
    "mistral3": llama.mistral3,
    "qwen": qwen.qwen,
    "qwen2": qwen.qwen2,
    "qwen2moe": qwen.qwen2moe,
    "qwen3": qwen.qwen3,
    "qwen3moe": qwen.qwen3,
    "smollm3": llama.smollm3,
}


def find_architecture(config: ModelConfig) -> Architecture:
    """Describe a model. Raises: UnsupportedFormatError, listing the names known, if its architecture is not one."""
    describe = ARCHITECTURES.get(config.architecture)
    if describe is None:
        raise UnsupportedFormatError(
            f"general.architecture is {config.architecture!r}; this version runs {', '.join(sorted(ARCHITECTURES))}. "
            "Update localinfer or choose another model."
        )
    return describe(config)
