"""Rotary positions of config.json in GGUF's terms: metadata keys, and the divisors that GGUF keeps as tensors.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, which may be one record per kind of
layer.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.config import MAX_BASE, MAX_CONTEXT, MAX_SCALE, MIN_BASE, MIN_SCALE
from localinfer.models.decoder.rope import plain_frequencies

_BASE = {"low": MIN_BASE, "high": MAX_BASE}
_KNOWN = "default, linear, dynamic, llama3, yarn and longrope"


@dataclass(frozen=True)
class RopeSettings:
    """GGUF keys (after the architecture's prefix) and tensors float32[rotary_size / 2] that describe a rotation.

    is_dynamic: beyond the context it was trained for, the frequencies would change with every further token.
    """

    keys: dict[str, object]
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    is_dynamic: bool = False


def read_rope(settings: Settings, head_dim: int, context_length: int) -> RopeSettings:
    """Read the rotation of a model.

    Raises: UnsupportedFormatError for a scaling this version does not know, CorruptFileError for one without meaning.
    """
    record = settings.record("rope_parameters") or settings.record("rope_scaling")
    windowed = Settings({}, {})
    if isinstance(record.get("full_attention"), dict):
        windowed = Settings(Settings(record, {}).record("sliding_attention"), {})
        record = record["full_attention"]
    scaling = Settings(record, {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    base = scaling.number("rope_theta", settings.number("rope_theta", 10000.0, **_BASE), **_BASE)
    partial = settings.number("partial_rotary_factor", 1.0, low=0.0, high=1.0)
    partial = scaling.number("partial_rotary_factor", partial, low=0.0, high=1.0)
    rotary_size = int(head_dim * partial)
    keys: dict[str, object] = {"rope.freq_base": base, "rope.dimension_count": rotary_size}
    for source, key in ((windowed, "rope_theta"), (settings, "rope_local_base_freq")):
        if source.get(key) is not None:
            keys.setdefault("rope.freq_base_swa", source.number(key, **_BASE))
    settings.mark_read(("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"))
    if kind in ("default", "dynamic"):
        # Dynamic scaling starts beyond the length the model was trained for.
        return RopeSettings(keys, is_dynamic=kind == "dynamic")
    # One position has no logarithm to divide by.
    lengths = {"low": 2, "high": MAX_CONTEXT}
    original = settings.integer("original_max_position_embeddings", max(context_length, 2), **lengths)
    original = scaling.integer("original_max_position_embeddings", original, **lengths)
    if kind in ("longrope", "su"):
        return _longrope(settings, scaling, keys, rotary_size, context_length, original)
    factor = scaling.number("factor", low=1.0)
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
    low, high = scaling.number("low_freq_factor", 1.0, low=MIN_SCALE), scaling.number("high_freq_factor", 4.0)
    if not low < high:
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
        "rope.scaling.yarn_beta_fast": scaling.number("beta_fast", 32.0, low=MIN_SCALE),
        "rope.scaling.yarn_beta_slow": scaling.number("beta_slow", 1.0, low=MIN_SCALE),
    }
    if "attention_factor" in scaling:
        # GGUF's factor multiplies YaRN's own temperature; this one replaces it.
        keys["rope.scaling.attn_factor"] = scaling.number("attention_factor", low=0.0) / (1.0 + 0.1 * math.log(factor))
    return keys


def _longrope(
    settings: Settings, scaling: Settings, keys: dict[str, object], rotary_size: int, context_length: int, original: int
) -> RopeSettings:
    tensors = {}
    for length in ("long", "short"):
        values = scaling.entries(f"{length}_factor")
        if len(values) != rotary_size // 2 or not all(_is_divisor(value) for value in values):
            raise scaling.wrong(f"{length}_factor", f"{rotary_size // 2} positive numbers, one for each rotated pair")
        tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    original = settings.integer("original_max_position_embeddings", original, low=2, high=MAX_CONTEXT)
    factor = context_length / original
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    keys |= {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": scaling.number("attention_factor", magnitude, low=0.0),
    }
    return RopeSettings(keys, tensors)


def _is_divisor(value: object) -> bool:
    return type(value) in (int, float) and MIN_SCALE <= value <= MAX_SCALE  # type: ignore[operator]
