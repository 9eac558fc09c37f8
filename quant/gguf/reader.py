"""Open a GGUF model, one file or all parts of a split one, mapped read-only and proven sound; decode its metadata."""

import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, ModelFileError, TokenizerError
from localinfer.quant.gguf.header import SCALAR_DTYPES, GGUFHeader, StoredValue, TensorInfo, ValueType, read_header
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile, MappedFiles
from localinfer.system.pieces import PIECE, give_way

SingleValue: TypeAlias = bool | int | float | str
MetadataValue: TypeAlias = SingleValue | list[str] | NDArray[Any]

_REPLACED_TYPES = {bool: ValueType.BOOL, int: ValueType.INT64, float: ValueType.FLOAT64, str: ValueType.STRING}

_CONVERT_AGAIN = "Convert the model again with a current converter"
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
        """Return the type, length and position of a value without decoding it."""
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
                f"wanted UTF-8. {_CONVERT_AGAIN}"
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
        """Positions of an array of strings, and of each of them."""
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
            raise CorruptFileError(f"{name} has no key {key!r}; wanted {wanted}. {_CONVERT_AGAIN}")
        stored = self._values[key]
        found = stored.description
        if stored.count is None:
            found = f"{self[key]!r:.80} ({found})"
        raise CorruptFileError(f"{name}: key {key!r} is {found}; wanted {wanted}. {_CONVERT_AGAIN}")


def _cut_texts(raw: NDArray[np.uint8], starts: NDArray[np.int64]) -> list[str]:
    """Cut strings apart that lie in a row, each after eight bytes of its length; one with a zero byte becomes two."""
    # Of the eight bytes of each length one becomes a separator, which ends a character that is cut short.
    is_kept = np.ones(raw.size, np.bool_)
    for offset in range(7):
        is_kept[starts + offset] = False
    raw[starts + 7] = 0
    return raw[is_kept][1:].tobytes().decode("utf-8", "surrogateescape").split("\0")


__all__ = ["GGUFFile", "Metadata", "MetadataValue", "TensorInfo", "read_gguf"]

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
# Keys that rightly differ between the parts of one model.
_PER_PART_KEYS = {"split.no", "general.alignment", "GGUF.tensor_count", "GGUF.kv_count"}


class GGUFFile(MappedFiles):
    """A GGUF model, open until `close` (or the end of a `with` block).

    `metadata` comes from the first part, `tensors` from all; both were checked against the files'
    sizes, so kernels may trust every shape and extent. `path` is the first part's.
    """

    tokenizer_error: TokenizerError | None = None

    def __init__(self, files: list[MappedFile], headers: list[GGUFHeader]) -> None:
        super().__init__(files)
        self.path = self.paths[0]
        self.version = headers[0].version
        self.alignment = headers[0].alignment
        self.metadata = Metadata(files[0], headers[0].values)
        self.tensors = {
            name: replace(info, part=part) if part else info
            for part, header in enumerate(headers)
            for name, info in header.tensors.items()
        }

    def replace_metadata(self, values: Mapping[str, SingleValue]) -> None:
        """Use these values instead of the file's, which is left as it is."""
        self.metadata = self.metadata.with_values(values)

    def tensor(self, name: str) -> TensorInfo:
        """Return a tensor's record. Raises: CorruptFileError if the model lacks it."""
        if name not in self.tensors:
            raise CorruptFileError(
                f"{self.path.name} has no tensor {name!r} (it has {len(self.tensors)} tensors); "
                "wanted a complete model of this architecture: convert it again"
            )
        return self.tensors[name]

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes], a read-only view into the map: nothing is copied.

        The view keeps its map alive after `close`. Raises: CorruptFileError if the tensor is
        missing or its file was changed since it was opened, ClosedError after `close`.
        """
        info = self.tensor(name)
        return self.files[info.part].view(info.offset, info.offset + info.num_bytes)

    def stretch(self, name: str) -> FileStretch:
        """Return where a tensor's bytes lie. Raises: CorruptFileError if the model lacks it."""
        info = self.tensor(name)
        return FileStretch(self.files[info.part], info.offset, info.offset + info.num_bytes)

    def grouped(self, name: str) -> None:
        """Return None: GGUF keeps every weight in blocks, unlike the checkpoints that `ModelFile` also stands for."""

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop bytes first..end of a tensor from memory, once they have been packed."""
        info = self.tensor(name)
        assert 0 <= first <= end <= info.num_bytes, "a stretch of the tensor"
        self.files[info.part].forget(info.offset + first, info.offset + end)


def read_gguf(path: str | os.PathLike[str], check: Callable[[], None] | None = None) -> GGUFFile:
    """Open the GGUF model at `path`; any part of a split model opens all of them.

    check: called every few milliseconds; an error that it raises ends the reading.
    Raises: ModelFileError if a file cannot be opened, CorruptFileError or UnsupportedFormatError
        if a file is not sound GGUF, naming the key, tensor or part at fault.
    """
    with ExitStack() as opened:
        first = opened.enter_context(MappedFile(path))
        header = read_header(first, check)
        count = _split_number(first, header, "split.count")
        files, headers = _read_parts(first, header, count, opened) if count > 1 else ([first], [header])
        model = GGUFFile(files, headers)
        opened.pop_all()
        return model


def _read_parts(
    given: MappedFile, header: GGUFHeader, count: int, opened: ExitStack
) -> tuple[list[MappedFile], list[GGUFHeader]]:
    """Open every part of the model that `given` is one of, to be closed by `opened`; return them in order."""
    given_path = given.path
    match = _PART_NAME.fullmatch(given_path.name)
    number = _split_number(given, header, "split.no")
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise CorruptFileError(
            f"{given_path.name} holds part {number + 1} of {count}; wanted it to be named "
            f"NAME-{number + 1:05}-of-{count:05}.gguf, as the other parts are found by their names"
        )
    paths = [given_path.with_name(f"{match['stem']}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ModelFileError(
            f"{given_path.name} is one of {count} parts, but {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''} cannot be found in {given_path.parent}; "
            "download all parts into one folder"
        )
    files = [given if index == number else opened.enter_context(MappedFile(path)) for index, path in enumerate(paths)]
    headers = [header if file is given else read_header(file) for file in files]
    _check_parts(files, headers)
    return files, headers


def _check_parts(files: list[MappedFile], headers: list[GGUFHeader]) -> None:
    """Prove that each part is the one its name says, and that all come from one model."""
    shared: dict[str, tuple[str, str, bytes]] = {}
    owners: dict[str, str] = {}
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        name = file.path.name
        number = _split_number(file, header, "split.no")
        count = _split_number(file, header, "split.count")
        if (number, count) != (index, len(files)):
            raise CorruptFileError(
                f"{name} holds part {number + 1} of {count}; wanted part {index + 1} of "
                f"{len(files)}: download this part again"
            )
        for key in header.values.keys() - _PER_PART_KEYS:
            stored = header.values[key]
            kind, raw = stored.description, file.read(stored.start, stored.end)
            first, *wanted = shared.setdefault(key, (name, kind, raw))
            if [kind, raw] != wanted:
                raise CorruptFileError(
                    f"{name} is not a part of the same model as {first}: their key {key!r} "
                    "differs; download all parts of one model"
                )
        for tensor in header.tensors:
            if tensor in owners:
                raise CorruptFileError(
                    f"{name} and {owners[tensor]} both hold tensor {tensor!r}; wanted parts of one "
                    "model: download them again"
                )
            owners[tensor] = name
    wanted_tensors = _split_number(files[0], headers[0], "split.tensors.count", len(owners))
    if len(owners) != wanted_tensors:
        raise CorruptFileError(
            f"the {len(files)} parts of {files[0].path.name} hold {len(owners)} tensors; wanted "
            f"{wanted_tensors}: download all parts of one model again"
        )


def _split_number(file: MappedFile, header: GGUFHeader, key: str, default: int = 0) -> int:
    return Metadata(file, header.values).integer(key, default, maximum=2**31 - 1)
