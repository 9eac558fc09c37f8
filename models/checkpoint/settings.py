"""Typed access to config.json: every value is checked as it is read, every complaint names its key."""

from collections.abc import Iterable, Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.decoder.config import MAX_SCALE, MAX_WIDTH
from localinfer.models.decoder.metadata import shown

_WAY_OUT = "Download the folder again or choose another model."


class Settings:
    """The settings of a text model: those of `text_config` where the model has other parts, then the top level's.

    defaults: what the model's own class takes for keys that a file leaves out.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, object]) -> None:
        self._values: dict[str, Any] = dict(defaults)
        self._read: set[str] = set()
        nested = config.get("text_config")
        for level in (config, nested if isinstance(nested, dict) else {}):
            for key, value in level.items():
                if value is not None:
                    self._values[key] = value
                else:
                    self._values.pop(key, None)  # null is a choice too, whatever the default

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: object = None) -> Any:
        """The value as it is, the default where there is none."""
        self._read.add(key)
        return self._values.get(key, default)

    def unread(self) -> dict[str, Any]:
        """The settings that nobody has asked for yet."""
        return {key: value for key, value in self._values.items() if key not in self._read}

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
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def record(self, key: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def entries(self, key: str) -> list[Any]:
        """A list; empty where there is none."""
        value = self.get(key, [])
        if not isinstance(value, list) or len(value) > 1 << 16:
            raise self.wrong(key, "a list")
        return value

    def must_be(self, key: str, wanted: object, default: object) -> None:
        """Refuse a model whose setting differs from the only one this version runs."""
        if self.get(key, default) != wanted:
            raise self.unsupported(key, repr(wanted))
