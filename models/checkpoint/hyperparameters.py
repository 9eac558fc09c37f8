"""From config.json to the metadata a GGUF file of the same model would have, tokenizer aside."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.families import Family, find_family
from localinfer.models.checkpoint.rope_settings import read_rope
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.checkpoint.unknown_settings import unknown_settings
from localinfer.models.decoder.config import MAX_CONTEXT, MAX_LAYERS
from localinfer.models.decoder.metadata_keys import DYNAMIC_ROPE_KEY


@dataclass(frozen=True)
class Hyperparameters:
    """A family, its sizes as GGUF metadata, and the small tensors that GGUF keeps where config.json has lists.

    unknown_settings: names of settings that may change results and that nothing here obeys.
    """

    family: Family
    metadata: dict[str, object]
    tensors: dict[str, NDArray[np.float32]]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ties_embeddings: bool | None
    unknown_settings: tuple[str, ...]


def read_hyperparameters(config: dict[str, Any], name: str) -> Hyperparameters:
    """Read config.json; `name` becomes `general.name`.

    Raises: UnsupportedFormatError if this version cannot run such a model, CorruptFileError if a value has no meaning.
    """
    family = find_family(config.get("model_type"))
    settings = Settings(config, family.defaults)
    _check_activation(settings, family)
    hidden_size, num_heads = settings.integer("hidden_size", low=1), settings.integer("num_attention_heads", low=1)
    num_kv_heads = settings.integer("num_key_value_heads", num_heads, low=1)
    if num_heads % num_kv_heads:
        raise settings.wrong("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    head_dim = settings.integer("head_dim", hidden_size // num_heads, low=1)
    num_layers = settings.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    context_length = settings.integer("max_position_embeddings", low=1, high=MAX_CONTEXT)
    rope = read_rope(settings, head_dim, context_length)
    keys: dict[str, object] = {
        "vocab_size": settings.integer("vocab_size", low=1, high=MAX_CONTEXT),
        "context_length": context_length,
        "embedding_length": hidden_size,
        "block_count": num_layers,
        "feed_forward_length": settings.integer("intermediate_size"),
        "attention.head_count": num_heads,
        "attention.head_count_kv": num_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": settings.number(family.epsilon, 1e-6, low=0.0, high=1.0),
        **rope.keys,
        **family.metadata(settings),
    }
    if family.has_windows:
        keys |= _windows(settings, num_layers)
    elif "sliding_attention" in _layer_types(settings, num_layers):
        raise settings.unsupported("layer_types", f"{family.architecture} models that see their whole context")
    metadata: dict[str, object] = {"general.architecture": family.architecture, "general.name": name}
    metadata |= {f"{family.architecture}.{key}": value for key, value in keys.items()}
    if rope.is_dynamic:
        metadata[DYNAMIC_ROPE_KEY] = True
    ties = settings.boolean("tie_word_embeddings", True) if "tie_word_embeddings" in settings else None
    unknown = tuple(unknown_settings(settings))
    return Hyperparameters(family, metadata, rope.tensors, num_layers, num_heads, num_kv_heads, ties, unknown)


def _check_activation(settings: Settings, family: Family) -> None:
    key = "hidden_activation" if "hidden_activation" in settings else "hidden_act"
    settings.mark_read(("hidden_activation", "hidden_act"))
    if settings.text(key, family.activations[0]) not in family.activations:
        raise settings.unsupported(key, f"{family.architecture} models with {family.activations[0]!r}")


def _windows(settings: Settings, num_layers: int) -> dict[str, object]:
    """The window's size, and which layers have it where the file says so: by a list or by a period."""
    size = settings.integer("sliding_window", 0, high=MAX_CONTEXT)
    kinds = _layer_types(settings, num_layers)
    if not size:
        return {}
    keys: dict[str, object] = {"attention.sliding_window": size}
    if kinds:
        keys["attention.sliding_window_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    elif "sliding_window_pattern" in settings:
        period = settings.integer("sliding_window_pattern", low=1, high=MAX_LAYERS)
        keys["attention.sliding_window_pattern"] = [int((layer + 1) % period != 0) for layer in range(num_layers)]
    return keys


def _layer_types(settings: Settings, num_layers: int) -> list[str]:
    """What each layer attends to, empty where the file does not say."""
    kinds = settings.entries("layer_types")
    known = ("sliding_attention", "full_attention")
    if kinds and (len(kinds) != num_layers or any(kind not in known for kind in kinds)):
        raise settings.wrong("layer_types", f"{num_layers} times sliding_attention or full_attention")
    return kinds
