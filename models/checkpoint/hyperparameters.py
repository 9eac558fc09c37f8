"""From config.json to the metadata a GGUF file of the same model would have, tokenizer aside.

Where config.json has lists of divisors of rotary frequencies, GGUF keeps tensors. Older files have `rope_theta` and
`rope_scaling`, newer ones `rope_parameters`, which may be one record per kind of layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.attention_families import latent_sizes
from localinfer.models.checkpoint.changes import Change, Derived
from localinfer.models.checkpoint.encoder_families import is_ranker, ranker_metadata
from localinfer.models.checkpoint.families import FAMILIES, find_family, read_text_config
from localinfer.models.checkpoint.family import Family, Metadata
from localinfer.models.checkpoint.settings import Settings, unknown_settings
from localinfer.models.checkpoint.text_modules import is_jev
from localinfer.models.decoder.block_config import MAX_BASE, MAX_CONTEXT, MAX_LAYERS, MAX_SCALE, MIN_BASE, MIN_SCALE
from localinfer.models.decoder.metadata_keys import DYNAMIC_ROPE_KEY
from localinfer.models.decoder.positions import plain_frequencies

Tensors = dict[str, NDArray[np.float32]]

_BASE = {"low": MIN_BASE, "high": MAX_BASE}
_SHARE: dict[str, Any] = {"low": 0.0, "high": 1.0}
_KNOWN = "default, linear, dynamic, llama3, yarn, longrope and proportional"
_NO_TURN = 1e30


@dataclass(frozen=True)
class Hyperparameters:
    """A family, its sizes as GGUF metadata, and the small tensors that GGUF keeps where config.json has lists."""

    family: Family
    metadata: dict[str, object]
    tensors: Tensors
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ties_embeddings: bool | None
    changes: Mapping[str, Change]
    """Tensors that GGUF stores otherwise."""
    derived: Mapping[str, Derived]
    """Tensors made of several."""
    num_drafters: int
    """Layers behind the last that predict further tokens."""
    unknown_settings: tuple[str, ...]
    """Names of settings that may change results and that nothing here obeys."""
    has_other_parts: bool = False
    """The model also sees, hears or speaks."""
    misnamed_layers: tuple[str, ...] = ()
    """Further texts before the number of a layer."""


def read_hyperparameters(config: dict[str, Any], name: str) -> Hyperparameters:
    """Read config.json; `name` becomes `general.name`.

    Raises: UnsupportedFormatError if this version cannot run such a model, CorruptFileError if a value has no meaning.
    """
    family = find_family(config)
    text = read_text_config(config, FAMILIES)
    settings = Settings(text.settings, {**text.defaults, **family.defaults}, family.aliases)
    if family.variant is not None:
        family = family.variant(settings, family)
    _check_activation(settings, family)
    hidden_size = settings.integer("hidden_size", low=1)
    num_layers = settings.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    keys: Metadata = {
        "vocab_size": settings.integer("vocab_size", low=1, high=MAX_CONTEXT),
        "context_length": settings.integer("max_position_embeddings", low=1, high=MAX_CONTEXT),
        "embedding_length": hidden_size,
        "block_count": num_layers,
        "feed_forward_length": settings.integer("intermediate_size", 0),
        f"attention.layer_norm_{'' if family.has_layer_norms else 'rms_'}epsilon": settings.number(
            family.epsilon, 1e-6, low=0.0, high=1.0
        ),
    }
    tensors: Tensors = {}
    num_heads = num_kv_heads = 0
    if family.has_attention:
        num_heads = settings.integer("num_attention_heads", low=1)
        num_kv_heads = settings.integer("num_key_value_heads", num_heads, low=1)
        found, tensors = _attention(settings, family, num_heads, num_kv_heads)
        keys |= found
    else:
        keys["attention.head_count"] = 0
    for key, value in family.fixed.items():
        settings.must_be(key, value, value)
    settings.mark_read(family.seen.split())
    keys |= family.metadata(settings)
    if text.num_deepstack_layers:
        keys["n_deepstack_layers"] = text.num_deepstack_layers
    keys |= {key: settings.typed(*one) if isinstance(one, tuple) else one for key, one in family.keys.items()}
    is_causal = keys.get("attention.causal") is not False
    ranks = is_causal and is_ranker(settings)
    if ranks:
        # The last token's states times one matrix: `GenericForSequenceClassification` of transformers.
        keys |= ranker_metadata(settings)
        family = replace(family, heads={**family.heads, "cls.output": "score"})
    if is_jev(config):
        family = replace(family, heads={**family.heads, "decision.proj": "proj"})
    is_dynamic = keys.pop(DYNAMIC_ROPE_KEY, False)
    if family.has_windows:
        keys |= _windows(settings, num_layers, family)
    elif "sliding_attention" in _layer_types(settings, num_layers, family):
        raise settings.unsupported("layer_types", f"{family.architecture} models that see their whole context")
    metadata: dict[str, object] = {"general.architecture": family.architecture, "general.name": name}
    for key, value in keys.items():
        if value is not None:
            metadata[key if key.startswith("xielu.") else f"{family.architecture}.{key}"] = value
    if is_dynamic:
        metadata[DYNAMIC_ROPE_KEY] = True
    settings.mark_read(("tie_word_embeddings",))
    ties = text.ties_embeddings
    if ties is None and "tie_word_embeddings" in settings:
        ties = settings.boolean("tie_word_embeddings", True)
    if ranks or not is_causal:
        ties = None  # encoders and classifiers have no head
    num_drafters = settings.integer("num_nextn_predict_layers", 0, high=MAX_LAYERS)
    changes, derived = dict(family.changes(settings)), dict(family.derived(settings))
    return Hyperparameters(
        family,
        metadata,
        tensors,
        num_layers,
        num_heads,
        num_kv_heads,
        ties,
        changes,
        derived,
        num_drafters,
        tuple(unknown_settings(settings)),
        text.has_other_parts,
        text.misnamed_layers,
    )


def _attention(settings: Settings, family: Family, num_heads: int, num_kv_heads: int) -> tuple[Metadata, Tensors]:
    """Sizes of heads, and their rotation."""
    if num_heads % num_kv_heads:
        raise settings.wrong("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // num_heads, low=1)
    if family.has_latent_attention:
        # The part that rotates has a size of its own, so that no fraction applies.
        head_dim = settings.integer("qk_rope_head_dim", low=1)
    context_length = settings.integer("max_position_embeddings", high=MAX_CONTEXT)
    rope, tensors = _read_rope(
        settings,
        head_dim,
        context_length,
        is_whole=family.has_latent_attention,
        fraction=family.defaults.get("partial_rotary_factor"),
    )
    keys: Metadata = {"attention.head_count": num_heads, "attention.head_count_kv": num_kv_heads}
    if family.has_latent_attention:
        keys |= latent_sizes(settings)
    else:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return rope | keys, tensors


def _check_activation(settings: Settings, family: Family) -> None:
    key = "hidden_activation" if "hidden_activation" in settings else "hidden_act"
    settings.mark_read(("hidden_activation", "hidden_act"))
    if settings.text(key, family.activations[0]) not in family.activations:
        raise settings.unsupported(key, f"{family.architecture} models with {family.activations[0]!r}")


def _windows(settings: Settings, num_layers: int, family: Family) -> dict[str, object]:
    """The window's size, and which layers have it where the file says so: by a list or by a period."""
    size = settings.integer("sliding_window", 0, high=MAX_CONTEXT)
    kinds = _layer_types(settings, num_layers, family)
    if not size:
        return {}
    keys: dict[str, object] = {"attention.sliding_window": size}
    if kinds:
        keys["attention.sliding_window_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    elif isinstance(settings.get("sliding_window_pattern"), str):
        letters = settings.text("sliding_window_pattern")
        keys["attention.sliding_window_pattern"] = [
            int(letters[layer % len(letters)] == "L") for layer in range(num_layers if letters else 0)
        ]
    elif "sliding_window_pattern" in settings:
        period = settings.integer("sliding_window_pattern", low=1, high=MAX_LAYERS)
        keys["attention.sliding_window_pattern"] = [int((layer + 1) % period != 0) for layer in range(num_layers)]
    return keys


def _layer_types(settings: Settings, num_layers: int, family: Family) -> list[str]:
    """The kind of attention of each layer, empty where the file does not say."""
    kinds = settings.entries("layer_types")
    known = ("sliding_attention", "full_attention", *family.layer_kinds)
    if kinds and (len(kinds) != num_layers or any(kind not in known for kind in kinds)):
        raise settings.wrong("layer_types", f"{num_layers} times {' or '.join(known)}")
    return kinds


def _read_rope(
    settings: Settings, head_dim: int, context_length: int, *, is_whole: bool, fraction: object
) -> tuple[Metadata, Tensors]:
    """GGUF keys (after the architecture's prefix) and tensors float32[rotary_size / 2] that describe a rotation.

    Raises: UnsupportedFormatError for a scaling this version does not run, CorruptFileError for one without meaning.
    """
    record = settings.rotation()
    windowed = Settings({}, {})
    partial = settings.get("partial_rotary_factor", 1.0)
    if isinstance(record.get("full_attention"), dict):
        partial = fraction or 1.0
        windowed = Settings(Settings(record, {}).record("sliding_attention"), {})
        record = record["full_attention"]
        if windowed.get("rope_type", "default") != "default":
            raise windowed.unsupported("rope_type", "sliding windows without a scaling of their rotation")
    scaling = Settings(record, {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    base = scaling.number("rope_theta", settings.number("rope_theta", 10000.0, **_BASE), **_BASE)
    reads_fraction = fraction is not None or kind == "proportional"
    if reads_fraction:
        settings.put("partial_rotary_factor", partial)
        partial = scaling.number("partial_rotary_factor", settings.number("partial_rotary_factor", **_SHARE), **_SHARE)
    else:
        partial = 1.0
    settings.mark_read(("partial_rotary_factor",))
    rotary_size = head_dim if is_whole else int(head_dim * partial)
    keys: Metadata = {"rope.freq_base": base, "rope.dimension_count": rotary_size}
    sections = scaling.entries("mrope_section")
    # Four sections are of models whose pictures are not read, and words turn alike in all of them.
    if len(sections) == 3:
        if any(type(size) is not int or not 0 <= size <= rotary_size // 2 for size in sections):
            raise scaling.wrong("mrope_section", f"numbers of pairs, of which there are {rotary_size // 2}")
        keys["rope.dimension_sections"] = [*sections, 0]
    if reads_fraction and kind != "proportional" and "rope_theta" in windowed and not is_whole:
        default = fraction if isinstance(fraction, float) else 1.0
        of_windows = windowed.number("partial_rotary_factor", default, **_SHARE)
        if of_windows != partial:
            keys["rope.dimension_count_swa"] = int(head_dim * of_windows)
    for source, key in ((windowed, "rope_theta"), (settings, "rope_local_base_freq")):
        if source.get(key) is not None:
            keys.setdefault("rope.freq_base_swa", source.number(key, **_BASE))
    settings.mark_read(("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"))
    if kind in ("default", "dynamic", "mrope"):
        # Dynamic scaling starts beyond the length the model was trained for.
        return keys if kind != "dynamic" else {**keys, DYNAMIC_ROPE_KEY: True}, {}
    if kind == "proportional":
        # Frequencies are those of whole heads; the pairs beyond the fraction do not turn.
        turning = int(head_dim * partial / 2)
        divisors = np.where(np.arange(head_dim // 2) < turning, 1.0, _NO_TURN).astype(np.float32)
        return {**keys, "rope.dimension_count": head_dim}, {"rope_freqs.weight": divisors}
    if "rope_theta" in windowed:
        keys["rope.scaling.plain_windows"] = True
    # One position has no logarithm to divide by.
    lengths = {"low": 2, "high": MAX_CONTEXT}
    original = settings.integer("original_max_position_embeddings", max(context_length, 2), **lengths)
    original = scaling.integer("original_max_position_embeddings", original, **lengths)
    if kind in ("longrope", "su"):
        return _longrope(settings, scaling, keys, rotary_size, context_length, original)
    factor = scaling.number("factor", low=1.0)
    if kind == "linear":
        return {**keys, "rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}
    if kind == "llama3":
        return keys, {"rope_freqs.weight": _llama3_divisors(scaling, factor, original, base, rotary_size)}
    if kind == "yarn":
        if not scaling.boolean("truncate", True):
            return _untruncated_yarn(scaling, keys, factor, original, rotary_size)
        return {**keys, **_yarn(scaling, factor, original)}, {}
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
    keys: dict[str, object] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": scaling.number("beta_fast", 32.0, low=MIN_SCALE),
        "rope.scaling.yarn_beta_slow": scaling.number("beta_slow", 1.0, low=MIN_SCALE),
    }
    magnitude = _yarn_magnitude(scaling, factor)
    if magnitude is not None:
        # GGUF's factor multiplies YaRN's own temperature; this one replaces it.
        keys["rope.scaling.attn_factor"] = magnitude / _temperature(factor)
    return keys


def _temperature(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's (arXiv 2309.00071, section 3.4)."""
    return 1.0 + 0.1 * multiplier * math.log(factor)


def _yarn_magnitude(scaling: Settings, factor: float) -> float | None:
    """Factor on the rotation, if it is not YaRN's own temperature."""
    if "attention_factor" in scaling:
        return scaling.number("attention_factor", low=0.0)
    mscale, whole = scaling.number("mscale", 0.0, low=0.0), scaling.number("mscale_all_dim", 0.0, low=0.0)
    if mscale and whole:
        return _temperature(factor, mscale) / _temperature(factor, whole)
    if mscale or whole:
        raise scaling.unsupported("mscale", "YaRN with mscale and mscale_all_dim, or neither")
    return None


def _untruncated_yarn(
    scaling: Settings, keys: Metadata, factor: float, original: int, rotary_size: int
) -> tuple[Metadata, Tensors]:
    """YaRN whose blend begins and ends between two pairs: GGUF's begins and ends at one, so these are divisors."""
    base = keys["rope.freq_base"]
    bounds = [
        rotary_size * math.log(original / (2.0 * math.pi * beta)) / (2.0 * math.log(base))
        for beta in (scaling.number("beta_fast", 32.0, low=MIN_SCALE), scaling.number("beta_slow", 1.0, low=MIN_SCALE))
    ]
    low, high = max(bounds[0], 0.0), min(bounds[1], rotary_size - 1.0)
    blend = np.clip((np.arange(rotary_size // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    divisors = (1.0 / (1.0 - blend + blend / factor)).astype(np.float32)
    magnitude = _yarn_magnitude(scaling, factor)
    keys = {**keys, "rope.scaling.attn_factor": _temperature(factor) if magnitude is None else magnitude}
    return keys, {"rope_freqs.weight": divisors}


def _longrope(
    settings: Settings, scaling: Settings, keys: Metadata, rotary_size: int, context_length: int, original: int
) -> tuple[Metadata, Tensors]:
    tensors = {}
    for length in ("long", "short"):
        values = scaling.entries(f"{length}_factor")
        are_divisors = all(type(value) in (int, float) and MIN_SCALE <= value <= MAX_SCALE for value in values)
        if len(values) != rotary_size // 2 or not are_divisors:
            raise scaling.wrong(f"{length}_factor", f"{rotary_size // 2} positive numbers, one for each rotated pair")
        tensors[f"rope_factors_{length}.weight"] = np.array(values, np.float32)
    original = settings.integer("original_max_position_embeddings", original, low=2, high=MAX_CONTEXT)
    factor = context_length / original
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    keys |= {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": scaling.number("attention_factor", magnitude, low=0.0),
    }
    return keys, tensors
