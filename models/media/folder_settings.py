"""Settings of a Hugging Face folder's processor: how it prepares pictures and sounds, read from all forms of its files.

Today's writers keep all in one `processor_config.json`, with a record for each part. Published folders mostly have the
older form: `preprocessor_config.json` with the settings of one part, and `processor_config.json` with the processor's
own few. What a file leaves out is as in the class, whose values a family gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.decoder.metadata import shown

PROCESSOR, PREPROCESSOR, TOKENIZER = "processor_config.json", "preprocessor_config.json", "tokenizer_config.json"
PICTURE_PART = "image_processor"
SOUND_PARTS = ("feature_extractor", "audio_processor")

MAX_SIDE = 1 << 16
MAX_AREA = 1 << 31
_WAY_OUT = "Download the folder again or choose another model."


class JsonFolder(Protocol):
    """The files of a folder as far as a processor reads them."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""

    def json(self, name: str) -> dict[str, Any] | None:
        """An object of a file; None where the folder lacks it."""


class PartSettings:
    """Settings of one part of a processor, over the values of its class.

    Null and absent settings are the class's; every complaint names the file and the setting.
    """

    def __init__(self, file: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self._values = dict(defaults or {}) | {key: value for key, value in values.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    def __repr__(self) -> str:
        return f"{self.file}: {dict(sorted(self._values.items()))}"

    def over(self, defaults: Mapping[str, Any]) -> "PartSettings":
        """The same settings over the values of a class."""
        return PartSettings(self.file, self._values, defaults)

    def under(self, given: Mapping[str, Any]) -> "PartSettings":
        """The same settings, but for those that are given."""
        return PartSettings(self.file, {**self._values, **given})

    def get(self, key: str) -> Any:
        """The value as it is; None where there is none."""
        return self._values.get(key)

    def wrong(self, key: str, wanted: str) -> CorruptFileError:
        """An error, to be raised by the caller, about a value that makes no sense."""
        return CorruptFileError(f"{self.file}: {key} is {shown(self.get(key))}; wanted {wanted}. {_WAY_OUT}")

    def unsupported(self, key: str, wanted: str) -> UnsupportedFormatError:
        """An error, to be raised by the caller, about a value that does not run."""
        return UnsupportedFormatError(
            f"{self.file}: {key} is {shown(self.get(key))}; this version runs {wanted}. Update localinfer or choose "
            "another model."
        )

    def integer(self, key: str, *, low: int = 1, high: int = MAX_SIDE) -> int:
        """A whole number within [low, high]."""
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, *, low: float = -1e6, high: float = 1e6) -> float:
        """A finite number within [low, high]."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(key, f"a finite number from {low:.7g} to {high:.7g}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def channels(self, key: str) -> tuple[float, float, float]:
        """A number for each channel; one alone stands for all three."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * 3
        for entry in values:
            if isinstance(entry, bool) or not isinstance(entry, int | float) or not -1e6 <= entry <= 1e6:
                raise self.wrong(key, "a finite number for each of three channels")
        if len(values) != 3:
            raise self.wrong(key, "a finite number for each of three channels")
        return float(values[0]), float(values[1]), float(values[2])

    def edges(self, key: str, *names: str, high: int = MAX_SIDE) -> tuple[int, ...]:
        """Whole numbers of a size that is a record with these names, or one number for all of them."""
        value = self.get(key)
        values = value if isinstance(value, dict) else dict.fromkeys(names, value)
        found = [one for name in names if type(one := values.get(name)) is int and 1 <= one <= high]
        if len(found) != len(names):
            raise self.wrong(key, f"a record of {' and '.join(names)}, whole numbers from 1 to {high}")
        return tuple(found)

    def square(self, key: str) -> int:
        """The side of a square, however it is written."""
        value = self.get(key)
        if isinstance(value, dict) and "height" not in value:
            return self.edges(key, "shortest_edge" if "shortest_edge" in value else "longest_edge")[0]
        height, width = self.edges(key, "height", "width")
        if height != width:
            raise self.unsupported(key, "squares")
        return height


@dataclass(frozen=True)
class ProcessorSettings:
    """Everything that a folder says of its processor."""

    model_type: str
    """Type in config.json."""
    config: PartSettings
    """config.json: sizes of the parts and numbers of special tokens."""
    processor: PartSettings
    """The processor's own settings: texts and numbers of embeddings."""
    picture: PartSettings
    """Settings of what prepares pictures, without those of its class."""
    sound: PartSettings
    """Settings of what prepares sounds, without those of its class."""
    tokens: Mapping[str, str]
    """Special tokens by the names that the tokenizer gives them, such as `image_token`."""

    def token(self, name: str, default: str) -> str:
        """A special token's text: the processor's word for it, the tokenizer's, or the family's."""
        found = self.processor.get(name)
        if isinstance(found, dict) and isinstance(found.get("content"), str):
            return str(found["content"])
        return self.processor.text(name) or self.tokens.get(name, default)

    def part(self, *names: str) -> PartSettings:
        """The first of these records of config.json, at its outer level or in that of a thinker; empty if none."""
        levels = [self.config.get("thinker_config"), self.config.get("vlm_config")]
        for level in [
            {name: self.config.get(name) for name in names},
            *(one for one in levels if isinstance(one, dict)),
        ]:
            for name in names:
                if isinstance(level.get(name), dict):
                    return PartSettings(f"config.json: {name}", level[name])
        return PartSettings("config.json", {})


def read_processor_settings(folder: JsonFolder) -> ProcessorSettings:
    """Read the settings of a folder's processor; those of an absent file are empty.

    Raises: CorruptFileError if a file is damaged, or a record in it is none.
    """
    whole, older = folder.json(PROCESSOR) or {}, folder.json(PREPROCESSOR) or {}
    found = {}
    for part in (PICTURE_PART, *SOUND_PARTS):
        record = whole.get(part, {})
        if not isinstance(record, dict):
            raise PartSettings(PROCESSOR, whole).wrong(part, "an object")
        found[part] = record
    sound = next((found[part] for part in SOUND_PARTS if found[part]), {})
    # A part in today's form is whole: older files beside it were left by a conversion. One older file may be of
    # pictures, sounds, or both.
    picture_file, picture = (PROCESSOR, found[PICTURE_PART]) if found[PICTURE_PART] else (PREPROCESSOR, older)
    sound_file, sound = (PROCESSOR, sound) if sound else (PREPROCESSOR, older)
    model_type = folder.config.get("model_type")
    return ProcessorSettings(
        model_type if isinstance(model_type, str) else "",
        PartSettings("config.json", folder.config),
        PartSettings(PROCESSOR, whole),
        PartSettings(picture_file, picture),
        PartSettings(sound_file, sound),
        _named_tokens(folder.json(TOKENIZER) or {}),
    )


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        record = settings.get(key)
        named |= record if isinstance(record, dict) else {}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
