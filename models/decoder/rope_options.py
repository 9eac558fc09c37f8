"""Options in place of a file's rotary position embedding, and the metadata that they stand for."""

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real

from localinfer.errors import RequestError
from localinfer.models.decoder.block_config import MAX_BASE, MAX_CONTEXT, MAX_SCALE, MIN_BASE, MIN_SCALE
from localinfer.types import Record

SCALINGS = ("none", "linear", "yarn")
_YARN_KEYS = {
    "yarn_extrapolation_factor": "yarn_ext_factor",
    "yarn_attention_factor": "attn_factor",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
}


class RopeOptions(Record, kw_only=True):
    """Rotary position embedding in place of the file's; None keeps the file's setting."""

    scaling: str | None = None
    """The method: "none", "linear" (arXiv 2306.15595) or "yarn" (arXiv 2309.00071)."""
    scale: float | None = None
    """Factor by which the context is extended. None: the file's factor for the same scaling, else context_length
    over the trained context. Given alone for a file without scaling: linear."""
    base: float | None = None
    """Base of the frequencies (theta)."""
    frequency_scale: float | None = None
    """1 / scale, in place of scale."""
    yarn_original_context: int | None = None
    """Context length of the original training."""
    yarn_extrapolation_factor: float | None = None
    """Share of the unscaled frequency of fast pairs, from 0 (plain interpolation) to 1."""
    yarn_attention_factor: float | None = None
    """Multiplies YaRN's temperature, in place of the file's factor."""
    yarn_beta_fast: float | None = None
    """Rotations within the original context from which a pair counts as fast, and below which as slow."""
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        """Raises: RequestError for an invalid value."""
        if self.scaling is not None and self.scaling not in SCALINGS:
            raise RequestError(f"rope scaling is {_shown(self.scaling)}; give one of {', '.join(SCALINGS)}")
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
                raise RequestError(f"{name} is {_shown(value)}; give a number from {low:.7g} to {high:.7g}")
        original = self.yarn_original_context
        if original is not None and (type(original) is not int or not 1 <= original <= MAX_CONTEXT):
            raise RequestError(
                f"yarn_original_context is {_shown(original)}; give a number of tokens from 1 to {MAX_CONTEXT}"
            )
        if self.scale is not None and self.frequency_scale is not None:
            raise RequestError("rope scale and frequency_scale are 1 over each other; give one of them")
        if self.scaling == "none" and (self.scale or self.frequency_scale) is not None:
            raise RequestError("rope scaling is 'none', which has no scale; leave one of them out")

    @property
    def is_empty(self) -> bool:
        """Return whether no option is set."""
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
    is_set = isinstance(found, Real) and found not in (0, 1)
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
    is_known = isinstance(original, Integral) and original > 0
    if not is_known or context_length is None or context_length <= original:  # type: ignore[operator]
        raise RequestError(
            f"the rope scaling {options.scaling!r} needs a factor: give a scale, or a context_length above "
            f"the {original} tokens of this model"
        )
    return context_length / original  # type: ignore[operator]


def _shown(value: object) -> str:
    from localinfer.models.decoder.metadata import shown

    return shown(value)
