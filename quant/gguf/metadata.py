"""The metadata of a GGUF file as a mapping whose values are decoded on access."""

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.gguf.header import SCALAR_DTYPES, StoredValue, ValueType
from localinfer.quant.gguf.mapped_file import MappedFile
from localinfer.system.pieces import PIECE, give_way

SingleValue: TypeAlias = bool | int | float | str
MetadataValue: TypeAlias = SingleValue | list[str] | NDArray[Any]

_REPLACED_TYPES = {bool: ValueType.BOOL, int: ValueType.INT64, float: ValueType.FLOAT64, str: ValueType.STRING}

_WAY_OUT = "Convert the model again with a current converter"
_read_u64 = struct.Struct("<Q").unpack_from


class Metadata(Mapping[str, MetadataValue]):
    """Keys and values of a GGUF file.

    Indexing decodes: a number, bool or string gives the Python one, an array of numbers a NumPy
    array of the stored type, an array of strings a list[str]. Nothing is kept, so hold on to a
    large array instead of indexing twice. The typed getters below add the checks a loader needs:
    each raises CorruptFileError naming the key, what it holds and what was wanted, also where the
    key is missing and no default is given.
    """

    def __init__(self, file: MappedFile, values: dict[str, StoredValue]) -> None:
        self._file = file
        self._values = values
        self._replaced: dict[str, SingleValue] = {}

    @property
    def replaced_keys(self) -> frozenset[str]:
        """Keys whose values are not the file's."""
        return frozenset(self._replaced)

    def with_values(self, values: Mapping[str, SingleValue]) -> "Metadata":
        """The same metadata but for some values, which need not be there; the file is left as it is."""
        stored = {key: StoredValue(_REPLACED_TYPES[type(value)], None, 0, 0) for key, value in values.items()}
        result = Metadata(self._file, self._values | stored)
        result._replaced = self._replaced | dict(values)
        return result

    def __getitem__(self, key: str) -> MetadataValue:
        if key in self._replaced:
            return self._replaced[key]
        stored = self._values[key]
        if stored.count is not None:
            if stored.type is ValueType.STRING:
                return self.strings(key)
            return self._numbers(key, stored)
        raw = self._file.read(stored.start, stored.end)
        if stored.type is ValueType.STRING:
            return raw[8:].decode("utf-8")  # proven valid when the header was walked
        if stored.type is ValueType.BOOL:
            return raw[0] == 1
        value: int | float = np.frombuffer(raw, SCALAR_DTYPES[stored.type])[0].item()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def stored(self, key: str) -> StoredValue:
        """Return the type, length and place of a value without decoding it."""
        return self._values[key]

    def value_bytes(self, key: str) -> bytes:
        """Return a value exactly as the file holds it, after its type and an array's length; others as text."""
        if key in self._replaced:
            return f"replaced by {self._replaced[key]!r}".encode()
        stored = self._values[key]
        return self._file.read(stored.start, stored.end)

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value: str = self._single(key, default, str, "a string")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return a bool."""
        value: bool = self._single(key, default, bool, "a bool")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**63 - 1) -> int:
        """Return an integer of any stored width that lies in minimum..maximum."""
        wanted = f"an integer from {minimum} to {maximum}"
        value: int = self._single(key, default, int, wanted)
        if not minimum <= value <= maximum and key in self._values:
            self._refuse(key, wanted)
        return value

    def number(
        self, key: str, default: float | None = None, *, minimum: float = -math.inf, maximum: float = math.inf
    ) -> float:
        """Return a finite number in minimum..maximum; an integer counts as one."""
        wanted = f"a finite number from {minimum} to {maximum}"
        value: float = self._single(key, default, int | float, wanted)
        if key not in self._values:
            return value
        if not math.isfinite(value) or not minimum <= value <= maximum:
            self._refuse(key, wanted)
        return float(value)

    def _single(self, key: str, default: SingleValue | None, kind: Any, wanted: str) -> Any:
        """The value of a key, which must be of this kind; bools are no integers."""
        if key not in self._values and default is not None:
            return default
        value = self._require(key, wanted)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._refuse(key, wanted)
        return value

    def integers(
        self, key: str, count: int | None = None, *, minimum: int = 0, maximum: int = 2**63 - 1
    ) -> NDArray[np.int64]:
        """Return int64[count], each in minimum..maximum.

        A single number stands for `count` equal ones: files store per-layer sizes either way.
        """
        wanted = f"{'' if count is None else f'{count} '}integers from {minimum} to {maximum}"
        value = self._require(key, wanted)
        if count is not None and isinstance(value, int) and not isinstance(value, bool):
            return np.full(count, self.integer(key, minimum=minimum, maximum=maximum), np.int64)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            self._refuse(key, wanted)
        if count not in (None, value.size):
            self._refuse(key, wanted)
        if value.size and not (minimum <= int(value.min()) and int(value.max()) <= maximum):
            self._refuse(key, wanted)
        return value.astype(np.int64)

    def numbers(self, key: str, count: int | None = None) -> NDArray[np.float32]:
        """Return float32[count] of numbers that are finite as float32."""
        wanted = f"{'' if count is None else f'{count} '}finite numbers"
        value = self._require(key, wanted)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
            self._refuse(key, wanted)
        with np.errstate(over="ignore"):
            numbers = value.astype(np.float32)
        if count not in (None, numbers.size) or not np.isfinite(numbers).all():
            self._refuse(key, wanted)
        return numbers

    def strings(self, key: str) -> list[str]:
        """Return an array of strings; an entry that is not UTF-8 is an error (see raw_strings)."""
        entries = self.raw_strings(key)
        try:
            return [entry.decode("utf-8") for entry in entries]
        except UnicodeDecodeError as error:
            index = entries.index(error.object)
            raise CorruptFileError(
                f"{self._file.path.name}: entry {index} of key {key!r} is {error.object[:40]!r}; "
                f"wanted UTF-8. {_WAY_OUT}"
            ) from error

    def raw_strings(self, key: str) -> list[bytes]:
        """Return the bytes of each entry of an array of strings; tokens need not be UTF-8."""
        stored, entries = self._entries(key)
        raw = self._file.read(stored.start, stored.end)
        starts = (entries - np.uint32(stored.start)).tolist()
        return [raw[start + 8 : end] for start, end in zip(starts, [*starts, len(raw)][1:], strict=True)]

    def texts(self, key: str) -> list[str]:
        """Return an array of strings as text, bytes that are not UTF-8 as surrogate escapes.

        Thousands of entries are decoded as one text and cut apart, in a third of the time of one by one; other threads
        run between them.
        """
        stored, entries = self._entries(key)
        raw = np.frombuffer(self._file.read(stored.start, stored.end), np.uint8)
        starts = entries.astype(np.int64) - stored.start
        found: list[str] = []
        for first in range(0, starts.size, PIECE):
            begins = starts[first : first + PIECE]
            end = int(starts[first + PIECE]) if first + PIECE < starts.size else raw.size
            texts = _cut_texts(raw[begins[0] : end].copy(), begins - begins[0])
            if len(texts) != begins.size:
                return [entry.decode("utf-8", "surrogateescape") for entry in self.raw_strings(key)]
            found += texts
            give_way()
        return found

    def _entries(self, key: str) -> tuple[StoredValue, NDArray[np.uint32]]:
        """Where an array of strings lies, and each of them."""
        stored = self._values.get(key)
        if stored is None or stored.entries is None:
            self._refuse(key, "an array of strings")
        return stored, stored.entries

    def _numbers(self, key: str, stored: StoredValue) -> NDArray[Any]:
        raw = self._file.read(stored.start, stored.end)
        array = np.frombuffer(raw, SCALAR_DTYPES[stored.type])
        if stored.type is not ValueType.BOOL:
            return array.astype(array.dtype.newbyteorder("="))
        if array.size and array.max() > 1:
            self._refuse(key, "bools that are 0 or 1")
        return array.astype(np.bool_)

    def _require(self, key: str, wanted: str) -> MetadataValue:
        if key not in self._values:
            self._refuse(key, wanted)
        return self[key]

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        name = self._file.path.name
        if key not in self._values:
            raise CorruptFileError(f"{name} has no key {key!r}; wanted {wanted}. {_WAY_OUT}")
        stored = self._values[key]
        found = stored.description
        if stored.count is None:
            found = f"{self[key]!r:.80} ({found})"
        raise CorruptFileError(f"{name}: key {key!r} is {found}; wanted {wanted}. {_WAY_OUT}")


def _cut_texts(raw: NDArray[np.uint8], starts: NDArray[np.int64]) -> list[str]:
    """Cut strings apart that lie in a row, each after eight bytes of its length; one with a zero byte becomes two."""
    # Of the eight bytes of each length one becomes a separator, which ends a character that is cut short.
    is_kept = np.ones(raw.size, np.bool_)
    for offset in range(7):
        is_kept[starts + offset] = False
    raw[starts + 7] = 0
    return raw[is_kept][1:].tobytes().decode("utf-8", "surrogateescape").split("\0")
