"""Typed access to config.json: every value is checked as it is read, every complaint names its key."""

import math
from collections.abc import Mapping
from typing import Any

from localinfer.errors import CorruptFileError, UnsupportedFormatError

_WAY_OUT = "Download the folder again or choose another model."


class Settings:
    """The settings of a text model: those of `text_config` where the model has other parts, then the top level's.

    defaults: what the model's own class takes for keys that a file leaves out.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, object]) -> None:
        self._values: dict[str, Any] = dict(defaults)
        nested = config.get("text_config")
        for level in (config, nested if isinstance(nested, dict) else {}):
            for key, value in level.items():
                if value is not None:
                    self._values[key] = value
                else:
                    self._values.pop(key, None)  # null is a choice too, whatever the default

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        """The value as it is, None where there is none."""
        return self._values.get(key)

    def wrong(self, key: str, wanted: str) -> CorruptFileError:
        """An error, to be raised by the caller, about a value that makes no sense."""
        found = repr(self._values[key])[:80] if key in self._values else "missing"
        return CorruptFileError(f"config.json: {key} is {found}; wanted {wanted}. {_WAY_OUT}")

    def unsupported(self, key: str, wanted: str) -> UnsupportedFormatError:
        """An error, to be raised by the caller, about a value this version cannot run."""
        found = repr(self._values.get(key))[:80]
        return UnsupportedFormatError(
            f"config.json: {key} is {found}; this version runs {wanted}. Update localinfer or choose another model."
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, 0 or more."""
        value = self._values.get(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def entries(self, key: str) -> list[Any]:
        """A list; empty where there is none."""
        value = self._values.get(key, [])
        if not isinstance(value, list) or len(value) > 1 << 16:
            raise self.wrong(key, "a list")
        return value

    def must_be(self, key: str, wanted: object, default: object) -> None:
        """Refuse a model whose setting differs from the only one this version runs."""
        if self._values.get(key, default) != wanted:
            raise self.unsupported(key, repr(wanted))
