"""Typed access to config.json: every value is checked as it is read, every complaint names its key.

What is not read may still change what a model answers. Most of what config.json holds is of no consequence to a
forward pass. So two lists decide: words in a name that speak of the forward pass, and names with
such a word that change nothing, with the reason.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.decoder.block_config import MAX_SCALE, MAX_WIDTH
from localinfer.models.decoder.metadata import shown

_WAY_OUT = "Download the folder again or choose another model."

_OF_THE_FORWARD_PASS = re.compile(
    "rope|rotary|nope|alibi|position|scal|multiplier|factor|alpha|mup|temperature|attn|attention|qk|sink|softcap|window"
    "|chunk|clip|clamp|norm|residual|parallel|bias|activation|hidden_act|expert|moe|router|routed|topk|layer|^use_|embed"
)
_HARMLESS: dict[str, str] = {
    r".*(dropout|pdrop|_drop)(_.*)?": "training only",
    r"(embedding_)?(initializer|init)_.*": "training only",
    r"(output_)?router_(logits|aux_loss_coef|jitter_noise|z_loss_coef)": "training only",
    r"(add_|use_)?((mlp|attn|attention|qkv|lm_head)_)?(out_)?bias": "a bias is added where the checkpoint holds one",
    r"(mamba_|use_)conv_bias": "a bias is added where the checkpoint holds one",
    r"(mamba_)?chunk_size|use_(mamba_kernels|associative_scan|mambapy)|num_logits_to_keep": "how the scan is computed",
    r"use_cache|use_return_dict|output_attentions|chunk_size_feed_forward": "how a program calls the model",
    r"_?(use_)?(attn_implementation|flash_attn|sdpa)(_.*)?|use_flash_.*": "which kernels compute it",
    r"temperature|num_beams|num_beam_groups": "sampling, which the caller chooses",
    r"(vision|image|audio|video|mm|projector|multimodal)_.*": "of parts that do not run",
    r".*_config": "of parts that do not run, or read elsewhere",
    r"max_window_layers|_?sliding_window_pattern": "windows are given by the list of layers, or are off",
    r"sliding_window": "of a family whose published code has no window, or has it switched off",
    r"decoder_sparse_step|mlp_only_layers|first_k_dense_replace": "layers with experts are those that hold a router",
    r"(num|n)_shared_experts": "the shared experts' tensors are one matrix of all of them",
    r"layer_norm_eps(ilon)?": "these families have RMS norms, whose epsilon has another name",
}
_HARMLESS_NAME = re.compile("|".join(f"({pattern})" for pattern in _HARMLESS))
_NEUTRAL_AT_ONE = re.compile(".*(multiplier|factor|scale|scaling|step|interval)")

_ROPE_KEYS = frozenset(
    (
        *("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        *("short_factor", "long_factor", "mscale", "mscale_all_dim", "full_attention", "sliding_attention"),
        # A note of the writer; and sections, whose positions are equal for text.
        *("finetuned", "mrope_section", "mrope_interleaved"),
    )
)


class Settings:
    """The settings of a text model.

    defaults: what the model's own class takes for keys that a file leaves out. aliases: the names that a family's files
    have for settings, by their usual ones.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, object], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._values: dict[str, Any] = dict(defaults)
        self._read: set[str] = set()
        for key, value in config.items():
            if value is not None:
                self._values[key] = value
            else:
                self._values.pop(key, None)  # null is a choice too, whatever the default
        for key, alias in (aliases or {}).items():
            if alias in self._values:
                self._values[key] = self._values.pop(alias)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: object = None) -> Any:
        """The value as it is, the default where there is none."""
        self._read.add(key)
        return self._values.get(key, default)

    def put(self, key: str, value: object) -> None:
        """Set what follows from other settings."""
        self._values[key] = value
        self._read.add(key)

    def unread(self) -> dict[str, Any]:
        """The settings that have not been read yet."""
        return {key: value for key, value in self._values.items() if key not in self._read}

    def was_read(self, key: str) -> bool:
        """Return whether this was read, or noted as such."""
        return key in self._read

    def mark_read(self, keys: Iterable[str]) -> None:
        """Note that these were read elsewhere, or change nothing."""
        self._read.update(keys)

    def wrong(self, key: str, wanted: str) -> CorruptFileError:
        """An error, to be raised by the caller, about a value that makes no sense."""
        found = shown(self._values.get(key))
        return CorruptFileError(f"config.json: {key} is {found}; wanted {wanted}. {_WAY_OUT}")

    def unsupported(self, key: str, wanted: str) -> UnsupportedFormatError:
        """An error, to be raised by the caller, about a value this version cannot run."""
        found = shown(self._values.get(key))
        return UnsupportedFormatError(
            f"config.json: {key} is {found}; this version runs {wanted}. Update localinfer or choose another model."
        )

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = MAX_WIDTH) -> int:
        """A whole number within [low, high]."""
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float = -MAX_SCALE, high: float = MAX_SCALE
    ) -> float:
        """A finite number within [low, high]."""
        value = self.get(key, default)
        # Compared as it is: an int may be larger than any float. No comparison with a NaN holds.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(key, f"a finite number from {low:.7g} to {high:.7g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._typed(key, default, bool, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._typed(key, default, str, "a string"))

    def typed(self, key: str, default: object, low: int = 0) -> Any:
        """A value of the default's type; with `int` a whole number that has to be there. low: of whole numbers."""
        if default is int:
            return self.integer(key, low=low)
        if type(default) is int:
            return self.integer(key, default, low=low)
        readers: dict[type, Any] = {bool: self.boolean, float: self.number, str: self.text}
        return readers[type(default)](key, default)

    def record(self, key: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        found: dict[str, Any] = self._typed(key, {}, dict, "an object")
        return found

    def entries(self, key: str) -> list[Any]:
        """A list; empty where there is none."""
        found: list[Any] = self._typed(key, [], list, "a list")
        if len(found) > 1 << 16:
            raise self.wrong(key, "a list")
        return found

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of so many factors; ones where there is none."""
        found = self.entries(key) or [1.0] * count
        for value in found:
            if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_SCALE <= value <= MAX_SCALE:
                raise self.wrong(key, f"{count} finite numbers")
        if len(found) != count:
            raise self.wrong(key, f"{count} finite numbers")
        return [float(value) for value in found]

    def _typed(self, key: str, default: object, kind: type, wanted: str) -> Any:
        value = self.get(key, default)
        if not isinstance(value, kind):
            raise self.wrong(key, wanted)
        return value

    def rotation(self) -> dict[str, Any]:
        """The record of the rotation: older files' `rope_scaling`, which published classes prefer, or the newer one."""
        return self.record("rope_scaling") or self.record("rope_parameters")

    def must_be(self, key: str, wanted: object, default: object) -> None:
        """Refuse a model whose setting differs from the only one this version runs."""
        if self.get(key, default) != wanted:
            raise self.unsupported(key, repr(wanted))


def unknown_settings(settings: Settings) -> list[str]:
    """Names of the settings that were not read and may change results, sorted; those of the rotation with its name."""
    found = [
        key
        for key, value in settings.unread().items()
        if _OF_THE_FORWARD_PASS.search(key) and not _HARMLESS_NAME.fullmatch(key) and not _is_neutral(key, value)
    ]
    for name in ("rope_parameters", "rope_scaling"):
        record = settings.get(name)
        if isinstance(record, dict):
            found += [f"{name}.{key}" for key in _unknown_rope_keys(record)]
    return sorted(key for key in found if not settings.was_read(key))


def _unknown_rope_keys(record: Mapping[str, Any]) -> list[str]:
    found = [key for key, value in record.items() if key not in _ROPE_KEYS and not _is_neutral(key, value)]
    for kind in ("full_attention", "sliding_attention"):
        inner = record.get(kind)
        if isinstance(inner, dict):
            found += [f"{kind}.{key}" for key in inner if key not in _ROPE_KEYS]
    return found


def _is_neutral(key: str, value: object) -> bool:
    """Return whether a value switches off: nothing, false, 0, and 1 where something is multiplied by it."""
    return not value or (type(value) in (int, float) and value == 1 and _NEUTRAL_AT_ONE.fullmatch(key) is not None)
