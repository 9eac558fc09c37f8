"""A GGUF file to be changed: its header as records, however wrong, and where each of its numbers lies."""

import struct
from dataclasses import dataclass, field, replace

from localinfer.errors import LocalinferError
from localinfer.quant.formats.types import block_size, row_bytes, tensor_type
from tests.proof.fuzz.file_set import Stretch

STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT_KEY = b"general.alignment"
_DEFAULT_ALIGNMENT = 32
_MOST_RECORDS = 1 << 16


@dataclass(frozen=True)
class Field:
    """A number of the header: what it says ("count", "length", "type", "size", "offset", "version"), and its place."""

    kind: str
    start: int
    width: int


@dataclass(frozen=True)
class Elements:
    """An array: bytes of each element, those of strings without their lengths."""

    type: int
    items: tuple[bytes, ...]


@dataclass(frozen=True)
class Entry:
    """A key with its value: bytes of a number or string, or an array."""

    key: bytes
    type: int
    value: bytes | Elements


@dataclass(frozen=True)
class Tensor:
    """A tensor: sizes with the fastest first; offset None for the next free place; its data, padding included."""

    name: bytes
    sizes: tuple[int, ...]
    type: int
    offset: int | None
    data: Stretch | None

    def refitted(self, **changes: object) -> "Tensor":
        """With other sizes or another type, and as much data as that takes, if such a tensor can be."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        num_bytes = stored_bytes(changed)
        if num_bytes is None or self.data is None:
            return changed
        return replace(changed, data=Stretch(num_bytes, self.data.pattern))


@dataclass(frozen=True)
class Document:
    """A file. Without offsets of their own, tensors lie one after the other."""

    version: int = 3
    entries: tuple[Entry, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    rest: tuple[Stretch, ...] = field(default=())

    @property
    def alignment(self) -> int:
        """As the file says, or as it is without a word."""
        for entry in self.entries:
            if entry.key == ALIGNMENT_KEY and isinstance(entry.value, bytes) and entry.type in SIZES:
                value = int.from_bytes(entry.value, "little")
                return value if 0 < value <= 1 << 16 else _DEFAULT_ALIGNMENT
        return _DEFAULT_ALIGNMENT

    def value(self, key: str) -> Entry | None:
        """The entry of a key."""
        return next((entry for entry in self.entries if entry.key == key.encode()), None)

    def write(self) -> list[Stretch]:
        """The file: its header, then the data of each tensor."""
        head = [b"GGUF", struct.pack("<IQQ", self.version & 0xFFFFFFFF, len(self.tensors), len(self.entries))]
        head += [_string(entry.key) + struct.pack("<I", entry.type) + value_bytes(entry) for entry in self.entries]
        alignment, position, stretches = self.alignment, 0, []
        for tensor in self.tensors:
            offset = position if tensor.offset is None else tensor.offset
            sizes = struct.pack(f"<{len(tensor.sizes)}Q", *(size % (1 << 64) for size in tensor.sizes))
            head += [_string(tensor.name), struct.pack("<I", len(tensor.sizes)), sizes]
            head.append(struct.pack("<IQ", tensor.type % (1 << 32), offset % (1 << 64)))
            if tensor.data is not None:
                padded = -(-tensor.data.num_bytes // alignment) * alignment
                stretches.append(Stretch(padded, tensor.data.pattern))
                position += padded
        header = b"".join(head)
        header += bytes(-len(header) % alignment)
        return [Stretch(len(header), header), *stretches, *self.rest]


def read_document(stretches: list[Stretch]) -> tuple[Document | None, list[Field]]:
    """What a file says, if its header can be walked, and every number met on the way."""
    walk = _Walk(stretches[0].content if stretches else b"")
    try:
        return walk.document(stretches[1:]), walk.fields
    except (struct.error, ValueError):
        return None, walk.fields


def stored_bytes(tensor: Tensor) -> int | None:
    """How many bytes a tensor takes, or None if there can be none of its type and sizes, or it is large."""
    try:
        kind = tensor_type(tensor.type)
        if not tensor.sizes or min(tensor.sizes) < 1 or tensor.sizes[0] % block_size(kind):
            return None
        total = row_bytes(kind, tensor.sizes[0])
    except LocalinferError:
        return None
    for size in tensor.sizes[1:]:
        total *= size
    return total if total <= 32 << 20 else None


def value_bytes(entry: Entry) -> bytes:
    """A value as it stands after its type."""
    if isinstance(entry.value, bytes):
        return _string(entry.value) if entry.type == STRING else entry.value
    array = entry.value
    head = struct.pack("<IQ", array.type, len(array.items))
    return head + b"".join(_string(item) if array.type == STRING else item for item in array.items)


def entry_from(key: str, encoded: bytes) -> Entry:
    """An entry of a value as our writer encodes it."""
    walk = _Walk(encoded)
    return walk.entry(key.encode())


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


class _Walk:
    def __init__(self, header: bytes) -> None:
        self.header = header
        self.position = 0
        self.fields: list[Field] = []

    def number(self, kind: str, width: int) -> int:
        if self.position + width > len(self.header):
            raise ValueError("the end")
        raw = self.take(width)
        self.fields.append(Field(kind, self.position - width, width))
        return int.from_bytes(raw, "little")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.header) - self.position:
            raise ValueError("the end")
        self.position += num_bytes
        return self.header[self.position - num_bytes : self.position]

    def string(self) -> bytes:
        return self.take(self.number("length", 8))

    def document(self, data: list[Stretch]) -> Document:
        if self.take(4) != b"GGUF":
            raise ValueError("no magic")
        version = self.number("version", 4)
        num_tensors, num_entries = self.number("count", 8), self.number("count", 8)
        if max(num_tensors, num_entries) > _MOST_RECORDS:
            raise ValueError("no counts")
        entries = tuple(self.entry(self.string()) for _ in range(num_entries))
        given = iter(data)
        tensors = tuple(self.tensor(next(given, None)) for _ in range(num_tensors))
        document = Document(version, entries, tensors, tuple(given))
        position, placed = 0, []
        for tensor in tensors:
            # Offsets that follow from the order are found anew when something changes.
            placed.append(replace(tensor, offset=None) if tensor.offset == position else tensor)
            position += (
                0 if tensor.data is None else -(-tensor.data.num_bytes // document.alignment) * document.alignment
            )
        return replace(document, tensors=tuple(placed))

    def entry(self, key: bytes) -> Entry:
        kind = self.number("type", 4)
        if kind in SIZES:
            return Entry(key, kind, self.take_value(SIZES[kind]))
        if kind == STRING:
            return Entry(key, kind, self.string())
        if kind != ARRAY:
            raise ValueError("no type")
        element, count = self.number("type", 4), self.number("count", 8)
        if element == STRING:
            if count * 8 > len(self.header):
                raise ValueError("no count")
            return Entry(key, kind, Elements(element, tuple(self.string() for _ in range(count))))
        if element not in SIZES:
            raise ValueError("no type")
        raw, size = self.take(count * SIZES[element]), SIZES[element]
        items = tuple(raw[start : start + size] for start in range(0, len(raw), size))
        return Entry(key, kind, Elements(element, items))

    def take_value(self, width: int) -> bytes:
        raw = self.take(width)
        self.fields.append(Field("value", self.position - width, width))
        return raw

    def tensor(self, data: Stretch | None) -> Tensor:
        name, num_sizes = self.string(), self.number("dimensions", 4)
        if num_sizes > 16:
            raise ValueError("no dimensions")
        sizes = tuple(self.number("size", 8) for _ in range(num_sizes))
        return Tensor(name, sizes, self.number("tensor type", 4), self.number("offset", 8), data)
