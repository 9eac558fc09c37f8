"""Build GGUF files byte by byte, so that tests can lie in any field."""

import struct
from collections.abc import Sequence


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def entry(key: str | bytes, type_id: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<i", type_id) + payload


def array(element_type: int, payload: bytes, count: int) -> bytes:
    return struct.pack("<i", element_type) + u64(count) + payload


def tensor(
    name: str | bytes,
    sizes: Sequence[int],
    type_id: int = 0,
    offset: int = 0,
    num_dimensions: int | None = None,
) -> bytes:
    """One tensor record; `sizes` in file order, columns first."""
    count = len(sizes) if num_dimensions is None else num_dimensions
    axes = b"".join(u64(size) for size in sizes)
    return text(name) + u32(count) + axes + struct.pack("<i", type_id) + u64(offset)


def gguf(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file: true counts unless told otherwise, data at the next multiple of alignment."""
    header = magic + u32(version)
    header += u64(len(tensors) if num_tensors is None else num_tensors)
    header += u64(len(keys) if num_keys is None else num_keys)
    header += b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data
