"""Typed access to GGUF metadata: every value is checked when read, every error names its key."""

from collections.abc import Mapping, Sequence

import numpy as np

from localinfer.errors import CorruptFileError, LocalinferError, RequestError
from localinfer.quant.gguf.reader import Metadata

_MAX_ENTRIES = 1 << 16
_MAX_NUMBER = 1e30
"""Larger numbers overflow float32 when multiplied."""
_WAY_OUT = "Convert the model again or download another copy."


class MetadataReader:
    """Reads the keys of one architecture, given without their `{architecture}.` prefix."""

    def __init__(self, metadata: Mapping[str, object], prefix: str) -> None:
        self._metadata = metadata
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.full_key(key) in self._metadata

    def full_key(self, key: str) -> str:
        """The key with its prefix."""
        return f"{self.prefix}.{key}"

    def contradiction(self, key: str, found: object, wanted: str) -> LocalinferError:
        """The error, to be raised by the caller, for a value that contradicts the rest of the file.

        RequestError for an override, CorruptFileError for a value of the file.
        """
        whole_key = self.full_key(key)
        if whole_key in getattr(self._metadata, "replaced_keys", ()):
            return RequestError(f"{whole_key} was set to {found}; wanted {wanted}. Set another value or none.")
        return CorruptFileError(f"{whole_key} is {found}; wanted {wanted}. {_WAY_OUT}")

    def is_sequence(self, key: str) -> bool:
        """Return whether the value is an array."""
        return _is_sequence(self._metadata.get(self.full_key(key)))

    def length_of(self, whole_key: str) -> int | None:
        """Number of entries of an array given by its whole key; None where the file has no such key."""
        if whole_key not in self._metadata:
            return None
        if isinstance(self._metadata, Metadata):
            count = self._metadata.stored(whole_key).count  # without decoding a large vocabulary
            if count is not None:
                return count
        value = self._metadata[whole_key]
        if isinstance(value, str) or not hasattr(value, "__len__"):
            raise CorruptFileError(f"{whole_key} is {shown(value)}; wanted an array. {_WAY_OUT}")
        return len(value)

    def integer(self, key: str, default: int | None = None, *, low: int, high: int) -> int:
        """A whole number within [low, high]; an array whose entries agree counts as one number."""
        value = self._metadata.get(self.full_key(key), default)
        if _is_sequence(value):
            values = self._entries(key)
            if len(values) == 0 or any(_is_sequence(entry) or entry != values[0] for entry in values):
                raise self.contradiction(key, "an array of different values", "one whole number")
            value = values[0]
        return self._checked_integer(key, value, low, high)

    def integers(
        self, key: str, count: int, default: tuple[int, ...] | None = None, *, low: int, high: int
    ) -> tuple[int, ...]:
        """One whole number per layer: an array of at least `count` entries, or one number for all."""
        if default is not None and key not in self:
            return default
        if not self.is_sequence(key):
            return (self.integer(key, low=low, high=high),) * count
        return tuple(self._checked_integer(key, value, low, high) for value in self._per_layer(key, count))

    def numbers(self, key: str, count: int, *, low: float, high: float) -> tuple[float, ...]:
        """One finite number per layer, from an array of at least `count` or one number; empty where there is none."""
        if key not in self:
            return ()
        if not self.is_sequence(key):
            return (self.number(key, low=low, high=high),) * count
        return tuple(self._checked_number(key, value, low, high) for value in self._per_layer(key, count))

    def list_of_integers(self, key: str) -> tuple[int, ...]:
        """An array of whole numbers of any length up to 16; empty where the file has none."""
        if key not in self:
            return ()
        values = self._entries(key)
        if len(values) > 16:
            raise self.contradiction(key, f"an array of {len(values)} values", "at most 16")
        return tuple(self._checked_integer(key, value, 0, 1 << 31) for value in values)

    def number(
        self, key: str, default: float | None = None, *, low: float = -_MAX_NUMBER, high: float = _MAX_NUMBER
    ) -> float:
        """A finite number within [low, high]."""
        return self._checked_number(key, self._metadata.get(self.full_key(key), default), low, high)

    def per_layer_numbers(self, key: str, count: int) -> tuple[float, ...]:
        """An array of at least `count` numbers, finite or -inf."""
        values = self._per_layer(key, count)
        for value in values:
            if not _is_within(value, -_MAX_NUMBER, _MAX_NUMBER) and value != float("-inf"):
                raise self.contradiction(key, shown(value), "a number per layer, or -inf")
        return tuple(float(value) for value in values)  # type: ignore[arg-type]

    def optional_boolean(self, key: str) -> bool | None:
        """A truth value, or None where the file has none."""
        value = self._metadata.get(self.full_key(key))
        if value is None:
            return None
        if not isinstance(value, (bool, np.bool_)):
            raise self.contradiction(key, shown(value), "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._metadata.get(self.full_key(key), default)
        if not isinstance(value, str):
            raise self.contradiction(key, shown(value), "a string")
        return value

    def _entries(self, key: str) -> Sequence[object]:
        value = self._metadata[self.full_key(key)]
        if not _is_sequence(value):
            raise self.contradiction(key, shown(value), "an array")
        entries: Sequence[object] = value  # type: ignore[assignment]
        if len(entries) > _MAX_ENTRIES:
            raise self.contradiction(key, f"an array of {len(entries)} values", f"at most {_MAX_ENTRIES}")
        return entries

    def _per_layer(self, key: str, count: int) -> Sequence[object]:
        values = self._entries(key)
        if len(values) < count:
            raise self.contradiction(key, f"an array of {len(values)} values", f"one per layer, {count}")
        return values[:count]

    def _checked_integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, (bool, np.bool_)):
            value = int(value)
        if not isinstance(value, (int, np.integer)) or not low <= int(value) <= high:
            raise self.contradiction(key, shown(value), f"a whole number from {low} to {high}")
        return int(value)

    def _checked_number(self, key: str, value: object, low: float, high: float) -> float:
        if _is_within(value, low, high):
            return float(value)  # type: ignore[arg-type]
        raise self.contradiction(key, shown(value), f"a number from {low:.7g} to {high:.7g}")


def shown(value: object) -> str:
    """A value of unknown type and size for an error message, on one line."""
    if value is None:
        return "missing"
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype}"
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, str | bytes):
        value = value[:80]
    return f"{value!r:.80}"


def _is_within(value: object, low: float, high: float) -> bool:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # Compared as it is: an int may be larger than any float. No comparison with a NaN holds.
    return is_number and low <= value <= high  # type: ignore[operator]


def _is_sequence(value: object) -> bool:
    return not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "__len__") and hasattr(value, "__getitem__")
