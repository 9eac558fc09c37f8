"""The structure of one GGUF file: walked once, checked throughout, decoded nowhere.

Everything here is a number read from an untrusted file. Each count and length is compared with the
bytes that are really there before anything is sized by it; sums and products are Python integers,
so nothing wraps; arrays cannot nest, so nothing recurses.
Source: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3.
"""

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.formats.types import TensorRecord, block_size, tensor_type
from localinfer.quant.gguf.mapped_file import MappedFile
from localinfer.system.pieces import PIECE, give_way
from localinfer.types import Record

MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 15
"""Ten times those of the largest models, whose experts are stacked; each takes time and memory beyond its record."""
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 63
MAX_STRING_BYTES = 64 << 20
MAX_ENTRY_BYTES = 1 << 20
"""Longest chat template, and longest entry of a string array."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(1 << power for power in range(3, 17))

_DAMAGED = "The file is damaged or incomplete: download it again, or convert the model again"
_KEY_MINIMUM_BYTES = 8 + 1 + 4 + 1
_TENSOR_MINIMUM_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_WINDOW_BYTES = 1 << 18
"""In which strings are looked for at once: some 1 ms."""
_SHORT_SHARE = 8
"""Strings that take less than one part of so many of a window are found faster one by one, as are those behind them."""
_read_u64 = struct.Struct("<Q").unpack_from
_Record = TypeVar("_Record")


class ValueType(IntEnum):
    """The type of a metadata value, by its id in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# In the order of the ids; strings and arrays have no one size.
_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", None, None, "<u8", "<i8", "<f8")
SCALAR_DTYPES = {type: dtype for type, dtype in zip(ValueType, _DTYPES, strict=True) if dtype is not None}
"""NumPy type of each fixed-size value; a bool is a byte that must be 0 or 1."""

SCALAR_BYTES = {type: np.dtype(dtype).itemsize for type, dtype in SCALAR_DTYPES.items()}

# Loaders size their tables by these arrays, so a wrong element type is refused here.
_ARRAY_TYPES: dict[str, tuple[ValueType, ...]] = {
    "tokenizer.ggml.tokens": (ValueType.STRING,),
    "tokenizer.ggml.merges": (ValueType.STRING,),
    "tokenizer.ggml.scores": (ValueType.FLOAT32,),
    "tokenizer.ggml.token_type": (ValueType.INT32, ValueType.UINT32),
}


class StoredValue(Record):
    """Position of one metadata value in its file: bytes `start` up to `end`.

    `type` is the type of the value, or of the elements of an array; `count` is None unless the
    value is an array. A string's bytes include its 8-byte length. `entries` are the positions of the strings of
    an array in the file, uint32[count], found by the one walk over them.
    """

    type: ValueType
    count: int | None
    start: int
    end: int
    entries: NDArray[np.uint32] | None = field(default=None, repr=False, compare=False)

    @property
    def description(self) -> str:
        """Description of the value, for messages: `uint32` or `array of 5 string`."""
        name = self.type.name.lower()
        return name if self.count is None else f"array of {self.count} {name}"


@dataclass(frozen=True, slots=True)
class TensorInfo(TensorRecord):
    """A tensor of a GGUF file: `offset` counts from the start of the file that holds it, part number `part` from 0."""

    offset: int
    part: int = 0


class GGUFHeader(Record):
    """Everything before the tensor data of one GGUF file."""

    version: int
    alignment: int
    values: dict[str, StoredValue]
    tensors: dict[str, TensorInfo]


def read_header(file: MappedFile, check: Callable[[], None] | None = None) -> GGUFHeader:
    """Walk the header of one GGUF file and check it against the specification and the file's size.

    check: called every few milliseconds; an error that it raises ends the walk.
    Raises: CorruptFileError or UnsupportedFormatError, naming the key or tensor at fault.
    """
    return _Walk(file, check).header()


class _Walk:
    """A position in the header that only moves forward and never past the end."""

    def __init__(self, file: MappedFile, check: Callable[[], None] | None) -> None:
        self.check = check
        self.file_name = file.path.name
        self.buffer = file.buffer
        self.file_bytes = file.num_bytes
        self.limit = min(file.num_bytes, MAX_HEADER_BYTES)
        self.position = 0

    def fail(self, found: str) -> NoReturn:
        raise CorruptFileError(f"{self.file_name}: {found}. {_DAMAGED}")

    def advance(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.limit - start:
            if self.limit < self.file_bytes:
                self.fail(f"{what} runs past the first {MAX_HEADER_BYTES} bytes; wanted metadata shorter than that")
            self.fail(f"{what} needs {num_bytes} bytes at byte {start}, but the file ends at byte {self.file_bytes}")
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def i32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little", signed=True)

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def take(self, num_bytes: int, what: str) -> bytes:
        start = self.advance(num_bytes, what)
        return self.buffer[start : start + num_bytes]

    def string(self, what: str, max_bytes: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > max_bytes:
            self.fail(f"{what} is {length} bytes long; wanted at most {max_bytes}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 ({error.reason} at its byte {error.start})")

    def name(self, what: str, max_bytes: int) -> str:
        name = self.string(what, max_bytes)
        if not name or "\0" in name:
            self.fail(f"{what} is {name!r}; wanted a name without NUL characters")
        return name

    def header(self) -> GGUFHeader:
        version = self.check_magic_and_version()
        num_tensors = self.count("tensors", MAX_TENSORS, _TENSOR_MINIMUM_BYTES)
        num_keys = self.count("metadata keys", MAX_KEYS, _KEY_MINIMUM_BYTES)
        values = self.records(num_keys, "metadata key", MAX_KEY_BYTES, self.value)
        alignment = self.alignment(values.get("general.alignment"))
        tensors = self.records(num_tensors, "tensor", MAX_TENSOR_NAME_BYTES, self.tensor_info)
        return GGUFHeader(version, alignment, values, self.place(tensors, alignment))

    def check_magic_and_version(self) -> int:
        start = self.buffer[: min(64, self.file_bytes)]
        if not start.startswith(b"GGUF"):
            raise CorruptFileError(
                f"{self.file_name} {_describe_foreign(start)}; wanted a GGUF file, which starts with the letters GGUF"
            )
        self.advance(4, "the magic")
        version = self.u32("the GGUF version")
        if version in (2, 3):
            return version
        if version and not version & 0xFFFF:
            raise UnsupportedFormatError(
                f"{self.file_name} is a big-endian GGUF file; wanted little-endian: convert it "
                "with gguf_convert_endian.py, or convert the model again on this machine"
            )
        raise UnsupportedFormatError(
            f"{self.file_name} is GGUF version {version}; this version of localinfer reads 2 and "
            "3: " + ("convert the model again" if version < 2 else "update localinfer")
        )

    def count(self, what: str, maximum: int, minimum_bytes: int) -> int:
        count = self.u64(f"the number of {what}")
        if count > maximum or count * minimum_bytes > self.file_bytes:
            signed = f" ({count - (1 << 64)} as a signed number)" if count >> 63 else ""
            self.fail(
                f"it declares {count}{signed} {what}, which a file of {self.file_bytes} bytes "
                f"cannot hold (limit {maximum})"
            )
        return count

    def records(self, count: int, what: str, max_bytes: int, read: Callable[[str], _Record]) -> dict[str, _Record]:
        """Read records that each begin with a name of its own."""
        found: dict[str, _Record] = {}
        for index in range(count):
            name = self.name(f"the name of {what} {index}", max_bytes)
            if name in found:
                self.fail(f"{what} {name!r} appears twice")
            found[name] = read(name)
        return found

    def value(self, key: str) -> StoredValue:
        value_type = self.value_type(key)
        start = self.position
        if value_type is ValueType.ARRAY:
            stored = self.array(key)
        else:
            if value_type is ValueType.STRING:
                is_template = key.startswith("tokenizer.chat_template")
                self.string(f"key {key!r}", MAX_ENTRY_BYTES if is_template else MAX_STRING_BYTES)
            else:
                raw = self.take(SCALAR_BYTES[value_type], f"key {key!r}")
                if value_type is ValueType.BOOL and raw[0] > 1:
                    self.fail(f"key {key!r} is a bool with the value {raw[0]}; wanted 0 or 1")
            stored = StoredValue(value_type, None, start, self.position)
        wanted = _ARRAY_TYPES.get(key)
        if wanted and (stored.count is None or stored.type not in wanted):
            names = " or ".join(value_type.name.lower() for value_type in wanted)
            self.fail(f"key {key!r} is {stored.description}; wanted an array of {names}")
        return stored

    def value_type(self, key: str) -> ValueType:
        type_id = self.i32(f"the type of key {key!r}")
        try:
            return ValueType(type_id)
        except ValueError:
            self.fail(f"key {key!r} has the unknown value type {type_id}; wanted 0 to 12")

    def array(self, key: str) -> StoredValue:
        element_type = self.value_type(key)
        if element_type is ValueType.ARRAY:
            self.fail(f"key {key!r} is an array of arrays; GGUF arrays cannot nest")
        count = self.u64(f"the length of key {key!r}")
        start, entries = self.position, None
        if element_type is ValueType.STRING:
            entries = self.skip_strings(key, count)
        else:
            self.advance(count * SCALAR_BYTES[element_type], f"key {key!r} ({count} elements)")
        return StoredValue(element_type, count, start, self.position, entries)

    def skip_strings(self, key: str, count: int) -> NDArray[np.uint32]:
        """Step over `count` strings by their lengths, and return where each begins."""
        if count * 8 > self.limit - self.position:
            self.advance(count * 8, f"key {key!r} ({count} strings)")
        position, left, entries = self.position, count, [np.empty(0, np.uint32)]
        with memoryview(self.buffer) as whole, whole[: self.limit] as header:
            while left and position <= self.limit:
                if self.check is not None:
                    self.check()
                give_way()
                window = header[position : position + _WINDOW_BYTES]
                starts, num_bytes = _short_strings(window, left)
                entries.append(starts + np.uint32(position))
                left -= len(starts)
                position += num_bytes
                # At the header's end, too, where the next length is found missing.
                if _SHORT_SHARE * num_bytes <= len(window):
                    rest, position = self._strings_one_by_one(header, position, min(left, PIECE), key)
                    entries.append(rest)
                    left -= len(rest)
        self.advance(position - self.position, f"key {key!r} ({count} strings)")
        return np.concatenate(entries)

    def _strings_one_by_one(
        self, header: memoryview, position: int, count: int, key: str
    ) -> tuple[NDArray[np.uint32], int]:
        """The positions of up to `count` strings, each read after the one before, and that behind the last of them.

        It is behind the header's end if a length is there.
        """
        entries = array("I")
        try:
            for _ in range(count):
                (length,) = _read_u64(header, position)
                if length > MAX_ENTRY_BYTES:
                    wanted = f"wanted at most {MAX_ENTRY_BYTES}"
                    self.fail(f"an entry of key {key!r} is {length} bytes long; {wanted}")
                entries.append(position)
                position += 8 + length
        except struct.error:
            position = self.limit + 1
        return np.array(entries, np.uint32), position

    def alignment(self, stored: StoredValue | None) -> int:
        if stored is None:
            return DEFAULT_ALIGNMENT
        if stored.type is not ValueType.UINT32 or stored.count is not None:
            self.fail(f"key 'general.alignment' is {stored.description}; wanted uint32")
        value = int.from_bytes(self.buffer[stored.start : stored.end], "little")
        if value not in ALIGNMENTS:
            self.fail(
                f"key 'general.alignment' is {value}; wanted a power of two from {ALIGNMENTS[0]} to {ALIGNMENTS[-1]}"
            )
        return value

    def tensor_info(self, name: str) -> TensorInfo:
        """Read one tensor's record; its offset still counts from the start of the data."""
        num_dimensions = self.u32(f"the shape of tensor {name!r}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {num_dimensions} dimensions; wanted 1 to {MAX_DIMENSIONS}")
        # The file lists the fastest axis first.
        sizes = [self.u64(f"the shape of tensor {name!r}") for _ in range(num_dimensions)]
        shape = tuple(reversed(sizes))
        if any(size == 0 or size >> 63 for size in sizes) or prod(sizes) >> 63:
            self.fail(f"tensor {name!r} has the impossible shape {list(shape)}")
        type_id = self.i32(f"the type of tensor {name!r}")
        try:
            type = tensor_type(type_id)
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"{self.file_name}: tensor {name!r}: {error}") from None
        if sizes[0] % block_size(type):
            self.fail(
                f"tensor {name!r} has rows of {sizes[0]} columns, but {type.name} stores blocks of {block_size(type)}"
            )
        offset = self.u64(f"the offset of tensor {name!r}")
        return TensorInfo(name, type, shape, offset)

    def place(self, tensors: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Turn offsets into positions in the file, and prove that each extent lies inside, alone."""
        data_start = -(-self.position // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            start = data_start + info.offset
            if info.offset % alignment:
                self.fail(
                    f"tensor {name!r} starts at offset {info.offset}, which is not a multiple of "
                    f"the alignment {alignment}"
                )
            if start + info.num_bytes > self.file_bytes:
                self.fail(
                    f"tensor {name!r} ({info.type.name}, {list(info.shape)}) ends at byte "
                    f"{start + info.num_bytes}, but the file ends at byte {self.file_bytes}"
                )
            placed[name] = replace(info, offset=start)
        previous: TensorInfo | None = None
        for info in sorted(placed.values(), key=lambda info: info.offset):
            if previous and previous.offset + previous.num_bytes > info.offset:
                self.fail(f"tensors {previous.name!r} and {info.name!r} overlap")
            previous = info
        return placed


def _short_strings(window: memoryview, most: int) -> tuple[NDArray[np.uint32], int]:
    """Find strings that lie in a row from a window's first byte on, by the zeros of their lengths.

    Returns where each begins, uint32[found], at most `most` of them, and the bytes that they take, which may be more
    than the window has. Strings of 256 bytes and more end the row, and may those do that are empty or hold zeros.
    """
    data = np.frombuffer(window, np.uint8)
    is_zero = data == 0
    is_length = is_zero[1:-6].copy()
    for offset in range(2, 8):
        is_length &= is_zero[offset : len(data) - 7 + offset]
    starts = np.flatnonzero(is_length)
    if not len(starts) or starts[0]:
        return np.empty(0, np.uint32), 0
    ends = starts + 8 + data[starts]
    breaks = np.flatnonzero(ends[:-1] != starts[1:])
    count = min(int(breaks[0]) + 1 if len(breaks) else len(starts), most)
    return starts[:count].astype(np.uint32), int(ends[count - 1])


def _describe_foreign(start: bytes) -> str:
    """Say what a file that is not GGUF seems to be, from its first bytes."""
    known = {
        b"FUGG": "is a byte-swapped GGUF file",
        b"lmgg": "is a model in the GGML format that came before GGUF",
        b"fmgg": "is a model in the GGMF format that came before GGUF",
        b"tjgg": "is a model in the GGJT format that came before GGUF",
        b"PK\x03\x04": "is a ZIP or PyTorch file",
        b"version https://git-lfs": "is a Git LFS pointer (fetch the file with `git lfs pull`)",
        b"<!": "is a web page",
        b"<h": "is a web page",
    }
    for magic, description in known.items():
        if start.startswith(magic):
            return description
    if start[8:9] == b"{" and not any(start[4:8]):
        return "is a safetensors file"
    return f"starts with {start[:4]!r}"
