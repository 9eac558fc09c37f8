"""Rotary position embeddings: the table of a layer, and options in place of the file's settings.

Sources: RoFormer (arXiv 2104.09864) for the frequencies; position interpolation (arXiv 2306.15595) for linear scaling;
YaRN (arXiv 2309.00071); LongRoPE (arXiv 2402.13753). Llama 3 and LongRoPE files carry divisors, one per pair.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, RequestError
from localinfer.kernels.ops import Pairing, RopeTable
from localinfer.models.decoder.block_sizes import MAX_CONTEXT
from localinfer.models.decoder.config import MAX_BASE, MAX_SCALE, MIN_BASE, MIN_SCALE, RopeConfig
from localinfer.models.decoder.metadata import shown

Float64Array = NDArray[np.float64]

SCALINGS = ("none", "linear", "yarn")
_YARN_KEYS = {
    "yarn_extrapolation_factor": "yarn_ext_factor",
    "yarn_attention_factor": "attn_factor",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
}


def rope_table(
    rope: RopeConfig, pairing: Pairing, divisors: NDArray[np.float32] | None = None, magnitude: float | None = None
) -> RopeTable:
    """The table of layers with these settings.

    divisors: float32[rotary_size / 2] from `rope_freqs.weight` (Llama 3) or `rope_factors_*.weight` (LongRoPE).
    magnitude: replaces the scaling's own factor on sine and cosine.
    Raises: CorruptFileError if divisors have the wrong length, or are zero or not finite.
    """
    frequencies = plain_frequencies(rope.rotary_size, rope.base)
    if divisors is not None:
        _check_divisors(divisors, rope.rotary_size // 2)
        frequencies = frequencies / divisors.astype(np.float64)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "yarn":
        frequencies = yarn_frequencies(frequencies, rope)
    return RopeTable(frequencies, pairing, own_magnitude(rope) if magnitude is None else magnitude)


def own_magnitude(rope: RopeConfig) -> float:
    """The factor on sine and cosine of a file's scaling: 1, or the file's, times YaRN's temperature.

    With a log multiplier m, the temperature is the ratio of those for 1 and for m: the model applies the rest to its
    scores (DeepSeek-V2's `mscale` and `mscale_all_dim`).
    """
    if rope.scaling != "yarn" or not rope.extrapolation_factor:
        return rope.attention_factor
    return rope.attention_factor * yarn_magnitude(rope.factor) / yarn_magnitude(rope.factor, rope.log_multiplier)


def plain_frequencies(rotary_size: int, base: float) -> Float64Array:
    """base^(-2i / rotary_size) for pair i: RoFormer, section 3.2.2. float64[rotary_size / 2]."""
    pairs = np.arange(rotary_size // 2, dtype=np.float64)
    return np.asarray(base ** (-2.0 * pairs / max(rotary_size, 1)), dtype=np.float64)


def yarn_frequencies(frequencies: Float64Array, rope: RopeConfig) -> Float64Array:
    """Interpolate slow pairs, keep fast ones, blend between: YaRN, section 3.2 ("NTK-by-parts").

    A pair is fast if it rotates more than beta_fast times within the original context, slow if fewer than beta_slow.
    """

    def pair_of(rotations: float) -> float:
        of_first_pair = rope.original_context_length / (2.0 * math.pi * rotations)
        return rope.rotary_size * math.log(of_first_pair) / (2.0 * math.log(rope.base))

    first = max(0.0, math.floor(pair_of(rope.beta_fast)))
    last = min(rope.rotary_size - 1.0, math.ceil(pair_of(rope.beta_slow)))
    pairs = np.arange(len(frequencies), dtype=np.float64)
    kept = 1.0 - np.clip((pairs - first) / max(0.001, last - first), 0.0, 1.0)
    kept *= rope.extrapolation_factor
    return frequencies / rope.factor * (1.0 - kept) + frequencies * kept


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's temperature on the scores, applied to queries and keys alike: section 3.4, 0.1 ln(s) + 1."""
    return 1.0 + 0.1 * multiplier * math.log(max(factor, 1.0))


def _check_divisors(divisors: NDArray[np.float32], num_pairs: int) -> None:
    complaint = ""
    if divisors.shape != (num_pairs,):
        complaint = f"have shape {divisors.shape}; wanted ({num_pairs},), half of rope.dimension_count"
    elif not np.all(np.isfinite(divisors)) or not np.all(divisors != 0.0):
        complaint = "contain zero or a value that is not finite; wanted finite numbers"
    if complaint:
        raise CorruptFileError(f"rope divisors {complaint}. Convert the model again or download another copy.")


@dataclass(frozen=True, kw_only=True)
class RopeOptions:
    """Rotary position embedding in place of the file's; None keeps the file's setting.

    scaling: "none", "linear" (arXiv 2306.15595) or "yarn" (arXiv 2309.00071).
    scale: factor by which the context is extended. None: the file's factor for the same scaling, else context_length
        over the trained context. Given alone for a file without scaling: linear.
    base: of the frequencies (theta). frequency_scale: 1 / scale, in place of scale.
    yarn_original_context: context length of the original training. yarn_extrapolation_factor: share of the unscaled
    frequency of fast pairs, from 0 (plain interpolation) to 1. yarn_attention_factor: multiplies YaRN's temperature, in
    place of the file's factor. yarn_beta_fast, yarn_beta_slow: rotations within the original context from which a pair
    counts as fast, and below which as slow.
    """

    scaling: str | None = None
    scale: float | None = None
    base: float | None = None
    frequency_scale: float | None = None
    yarn_original_context: int | None = None
    yarn_extrapolation_factor: float | None = None
    yarn_attention_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        """Raises: RequestError for an invalid value."""
        if self.scaling is not None and self.scaling not in SCALINGS:
            raise RequestError(f"rope scaling is {shown(self.scaling)}; give one of {', '.join(SCALINGS)}")
        limits = {
            "scale": (1 / MAX_SCALE, MAX_SCALE),
            "frequency_scale": (1 / MAX_SCALE, MAX_SCALE),
            "base": (MIN_BASE, MAX_BASE),
            "yarn_extrapolation_factor": (0.0, 100.0),
            "yarn_attention_factor": (0.0, MAX_SCALE),
            "yarn_beta_fast": (MIN_SCALE, MAX_SCALE),
            "yarn_beta_slow": (MIN_SCALE, MAX_SCALE),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and low <= value <= high):
                raise RequestError(f"{name} is {shown(value)}; give a number from {low:.7g} to {high:.7g}")
        original = self.yarn_original_context
        if original is not None and (type(original) is not int or not 1 <= original <= MAX_CONTEXT):
            raise RequestError(
                f"yarn_original_context is {shown(original)}; give a number of tokens from 1 to {MAX_CONTEXT}"
            )
        if self.scale is not None and self.frequency_scale is not None:
            raise RequestError("rope scale and frequency_scale are 1 over each other; give one of them")
        if self.scaling == "none" and (self.scale or self.frequency_scale) is not None:
            raise RequestError("rope scaling is 'none', which has no scale; leave one of them out")

    @property
    def is_empty(self) -> bool:
        """Whether no option is set."""
        return all(getattr(self, field.name) is None for field in fields(self))


def rope_metadata(
    options: RopeOptions, metadata: Mapping[str, object], architecture: str, context_length: int | None
) -> dict[str, bool | int | float | str]:
    """The metadata overrides of the options, for a model with `metadata`.

    context_length: the requested one, or None. Raises: RequestError if the options contradict the file.
    """
    prefix = f"{architecture}.rope."
    file_kind, file_factor = _scaling_of(metadata, prefix)
    factor = options.scale if options.frequency_scale is None else 1.0 / options.frequency_scale
    kind = options.scaling
    if kind is None and factor is not None:
        if file_kind == "longrope":
            raise RequestError(
                "this model's file scales every pair of its positions by a factor of its own (longrope), so there is "
                "no one scale to set; give a scaling with it, or leave rope scale out"
            )
        kind = "linear" if file_kind == "none" else file_kind
    in_force = kind or file_kind
    _check_yarn(options, in_force)
    values: dict[str, bool | int | float | str] = {}
    if kind is not None:
        values[f"{prefix}scaling.type"] = kind
        if kind == "none":
            factor = 1.0
        elif factor is None and kind == file_kind and file_factor is not None:
            factor = file_factor
        elif factor is None:
            factor = _factor_of_context(options, metadata, architecture, context_length)
        values[f"{prefix}scaling.factor"] = float(factor)
    if options.base is not None:
        values[f"{prefix}freq_base"] = float(options.base)
    if options.yarn_original_context is not None:
        values[f"{prefix}scaling.original_context_length"] = options.yarn_original_context
    for name, key in _YARN_KEYS.items():
        if getattr(options, name) is not None:
            values[f"{prefix}scaling.{key}"] = float(getattr(options, name))
    return values


def _scaling_of(metadata: Mapping[str, object], prefix: str) -> tuple[str, float | None]:
    """The file's scaling, and its factor or None; invalid values are refused elsewhere."""
    found = metadata.get(f"{prefix}scaling.factor", metadata.get(f"{prefix}scale_linear"))
    is_set = isinstance(found, int | float | np.number) and found not in (0, 1)
    kind = metadata.get(f"{prefix}scaling.type")
    if not isinstance(kind, str) or not kind:
        kind = "linear" if is_set else "none"
    return kind, float(found) if is_set else None  # type: ignore[arg-type]


def _check_yarn(options: RopeOptions, in_force: str) -> None:
    given = [name for name in _YARN_KEYS if getattr(options, name) is not None]
    if options.yarn_original_context is not None and in_force != "longrope":
        given.append("yarn_original_context")
    if given and in_force != "yarn":
        raise RequestError(
            f"{', '.join(given)} applies to YaRN only, and the scaling is {in_force!r}; give the scaling 'yarn' as "
            "well, or leave it out"
        )


def _factor_of_context(
    options: RopeOptions, metadata: Mapping[str, object], architecture: str, context_length: int | None
) -> float:
    """The ratio of the requested context to the original one."""
    trained = metadata.get(f"{architecture}.context_length")
    original = options.yarn_original_context
    if original is None:
        original = metadata.get(f"{architecture}.rope.scaling.original_context_length", trained)  # type: ignore[assignment]
    is_known = isinstance(original, int | np.integer) and original > 0
    if not is_known or context_length is None or context_length <= original:  # type: ignore[operator]
        raise RequestError(
            f"the rope scaling {options.scaling!r} needs a factor: give a scale, or a context_length above "
            f"the {original} tokens of this model"
        )
    return context_length / original  # type: ignore[operator]
