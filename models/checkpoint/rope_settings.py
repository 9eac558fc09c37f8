"""Rotary positions of config.json in GGUF's terms: metadata keys, and the divisors that GGUF keeps as tensors.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, which may be one record per kind of
layer.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.rope import plain_frequencies

_KNOWN = "default, linear, dynamic, llama3, yarn and longrope"


@dataclass(frozen=True)
class RopeSettings:
    """GGUF keys (after the architecture's prefix) and tensors float32[rotary_size / 2] that describe a rotation."""

    keys: dict[str, object]
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def read_rope(settings: Settings, head_dim: int, context_length: int) -> RopeSettings:
    """Read the rotation of a model.

    Raises: UnsupportedFormatError for a scaling this version does not know, CorruptFileError for one without meaning.
    """
    record = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(record, dict):
        raise settings.wrong("rope_scaling", "an object")
    windowed: dict[str, Any] = {}
    if isinstance(record.get("full_attention"), dict):
        windowed = record.get("sliding_attention") or {}
        record = record["full_attention"]
    scaling = Settings(record, {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    base = scaling.number("rope_theta", settings.number("rope_theta", 10000.0))
    partial = scaling.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    rotary_size = int(head_dim * partial)
    keys: dict[str, object] = {"rope.freq_base": base, "rope.dimension_count": rotary_size}
    windowed_base = Settings(windowed, {}).get("rope_theta") or settings.get("rope_local_base_freq")
    if windowed_base is not None:
        keys["rope.freq_base_swa"] = windowed_base
    if kind in ("default", "dynamic"):
        # Dynamic scaling starts beyond the length the model was trained for, and no context here is longer.
        return RopeSettings(keys)
    original = scaling.integer(
        "original_max_position_embeddings", settings.integer("original_max_position_embeddings", context_length)
    )
    if kind in ("longrope", "su"):
        return _longrope(settings, scaling, keys, rotary_size, context_length, original)
    factor = scaling.number("factor")
    if factor < 1.0 or original < 1:
        raise scaling.wrong("factor", "a number of at least 1, and an original length of at least 1")
    if kind == "linear":
        return RopeSettings({**keys, "rope.scaling.type": "linear", "rope.scaling.factor": factor})
    if kind == "llama3":
        return RopeSettings(keys, {"rope_freqs.weight": _llama3_divisors(scaling, factor, original, base, rotary_size)})
    if kind == "yarn":
        return RopeSettings({**keys, **_yarn(scaling, factor, original)})
    raise UnsupportedFormatError(
        f"config.json: the RoPE scaling {kind!r:.40} is not known; this version runs {_KNOWN}. "
        "Update localinfer or choose another model."
    )


def _llama3_divisors(
    scaling: Settings, factor: float, original: int, base: float, rotary_size: int
) -> NDArray[np.float32]:
    """Llama 3.1's scaling: slow pairs are interpolated, fast ones kept, those between blended.

    Source: the published model code (llama-models, `apply_scaling`).
    """
    low, high = scaling.number("low_freq_factor", 1.0), scaling.number("high_freq_factor", 4.0)
    if not 0.0 < low < high:
        raise scaling.wrong("high_freq_factor", f"a number above low_freq_factor {low}, both above 0")
    wavelength = 2.0 * math.pi / plain_frequencies(rotary_size, base)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _yarn(scaling: Settings, factor: float, original: int) -> dict[str, object]:
    for key in ("mscale", "mscale_all_dim"):
        if key in scaling:
            raise scaling.unsupported(key, "YaRN without it")
    scaling.must_be("truncate", True, True)
    keys: dict[str, object] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": scaling.number("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": scaling.number("beta_slow", 1.0),
    }
    if "attention_factor" in scaling:
        # GGUF's factor multiplies YaRN's own temperature; this one replaces it.
        keys["rope.scaling.attn_factor"] = scaling.number("attention_factor") / (1.0 + 0.1 * math.log(factor))
    return keys


def _longrope(
    settings: Settings, scaling: Settings, keys: dict[str, object], rotary_size: int, context_length: int, original: int
) -> RopeSettings:
    tensors = {}
    for length in ("long", "short"):
        values = scaling.entries(f"{length}_factor")
        if len(values) != rotary_size // 2 or not all(type(value) in (int, float) for value in values):
            raise scaling.wrong(f"{length}_factor", f"{rotary_size // 2} numbers, one for each rotated pair")
        tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    original = settings.integer("original_max_position_embeddings", original)
    factor = context_length / original if original else 0.0
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    keys |= {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": scaling.number("attention_factor", magnitude),
    }
    return RopeSettings(keys, tensors)
