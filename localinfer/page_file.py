"""One page of keys and values as a file, which proves by itself that it is whole and what it is of.

A file holds a header, then the page's bytes as they lie in memory:

| bytes | what |
|---|---|
| 8 | `LOCALKV` and a zero |
| 4 x 4 | version, checksum algorithm, tokens computed, tokens a page has room for (little-endian uint32) |
| 8 | bytes of the page (little-endian uint64) |
| 32 | key of the page before it |
| 4 x room | ids of the tokens computed, then zeros (little-endian int32) |
| 32 | checksum of the header up to here and of the page |

The key of a page is the SHA-256 of the key before it and of its own token ids; before the first comes the fingerprint
of everything else the bytes depend on. So a key stands for a whole history, and equal histories share files.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

MAGIC = b"LOCALKV\0"
FORMAT_VERSION = 1
KEY_BYTES = 32
CHECKSUM_BYTES = 32
_FIXED = struct.Struct(f"<8sIIIIQ{KEY_BYTES}s")


class Rejection(Enum):
    """Why a file was not used; the value completes the sentence "the file ..."."""

    MISSING = "is not there any more"
    TORN = "has the wrong length"
    ALTERED = "does not match its checksum"
    FOREIGN = "holds something else than its name says"
    UNREADABLE = "cannot be read"


class Checksum(Enum):
    """Algorithm of a file's checksum, by its number in the header. All give 32 bytes."""

    SHA256 = 1
    BLAKE2B = 2

    def digest(self, *parts: bytes | memoryview) -> bytes:
        """Checksum of the parts, one after the other. Releases the GIL for all but small parts."""
        digest = hashlib.sha256() if self is Checksum.SHA256 else hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()


@functools.cache
def fastest_checksum() -> Checksum:
    """The faster algorithm on this machine: SHA-256 where the CPU has instructions for it, twice as fast as BLAKE2b
    then, and half as fast otherwise."""
    sample = bytes(1 << 18)
    seconds: dict[Checksum, float] = {}
    for checksum in Checksum:
        starts = [time.perf_counter()]
        for _ in range(2):
            checksum.digest(sample)
            starts.append(time.perf_counter())
        seconds[checksum] = min(starts[1] - starts[0], starts[2] - starts[1])
    return min(seconds, key=lambda checksum: seconds[checksum])


def page_key(parent: bytes, token_ids: TokenIds) -> bytes:
    """Key of the page that holds these tokens after the history whose key is `parent`."""
    return hashlib.sha256(parent + token_ids.astype("<i4").tobytes()).digest()


def page_view(address: int, num_bytes: int) -> memoryview:
    """A page in memory as writable bytes; valid as long as whoever owns the address keeps it."""
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")


@dataclass(frozen=True)
class PageFormat:
    """Sizes of a page and of its file: room for `page_tokens` tokens in `page_bytes` bytes."""

    page_tokens: int
    page_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes before the page's own."""
        return _FIXED.size + 4 * self.page_tokens + CHECKSUM_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of a file."""
        return self.header_bytes + self.page_bytes


@dataclass(frozen=True, eq=False)
class PageRecord:
    """What a page is of: the key of the history before it, and its token ids, int32[1..page_tokens]."""

    parent: bytes
    token_ids: TokenIds

    @functools.cached_property
    def key(self) -> bytes:
        """Key of the history up to this page's last token."""
        return page_key(self.parent, self.token_ids)

    def is_same(self, other: "PageRecord") -> bool:
        """Whether both are of the same tokens after the same history."""
        return self.parent == other.parent and np.array_equal(self.token_ids, other.token_ids)


def write_page(path: Path, form: PageFormat, record: PageRecord, page: memoryview) -> None:
    """Write the file at `path` in one stroke: it is there whole or not at all, readable by its owner only.

    `page` must not change meanwhile. Safe beside other processes that write the same path, since they write the same.
    Raises: OSError, and then nothing is left behind.
    """
    checksum = fastest_checksum()
    header = _header(form, record, checksum)
    digest = checksum.digest(header, page)

    def write(file: FileIO) -> None:
        for part in (header + digest, page):
            write_all(file, part)

    write_atomically(path, write)


def read_page(path: Path, form: PageFormat, wanted: PageRecord, page: memoryview) -> Rejection | None:
    """Read the file at `path` into `page`, and prove that it is whole and is of `wanted`; else say what was wrong.

    After a rejection `page` holds anything.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = bytearray(form.header_bytes)
            if os.fstat(file.fileno()).st_size != form.file_bytes:
                return Rejection.TORN
            if not (read_all(file, memoryview(header)) and read_all(file, page)):
                return Rejection.TORN
    except FileNotFoundError:
        return Rejection.MISSING
    except OSError:
        return Rejection.UNREADABLE
    found = _parse(form, bytes(header))
    if isinstance(found, Rejection):
        return found
    record, checksum, digest = found
    if checksum.digest(memoryview(header)[:-CHECKSUM_BYTES], page) != digest:
        return Rejection.ALTERED
    return None if record.is_same(wanted) else Rejection.FOREIGN


def read_record(path: Path, form: PageFormat) -> PageRecord | Rejection:
    """Read only what a file says it is of, which is not proven before `read_page`."""
    try:
        with open(path, "rb", buffering=0) as file:
            header = bytearray(form.header_bytes)
            if os.fstat(file.fileno()).st_size != form.file_bytes or not read_all(file, memoryview(header)):
                return Rejection.TORN
    except FileNotFoundError:
        return Rejection.MISSING
    except OSError:
        return Rejection.UNREADABLE
    found = _parse(form, bytes(header))
    return found if isinstance(found, Rejection) else found[0]


def look_at(path: Path, num_bytes: int) -> Rejection | None:
    """Whether a regular file of this length is at `path`, by asking the system only."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return Rejection.MISSING
    except OSError:
        return Rejection.UNREADABLE
    if not stat.S_ISREG(status.st_mode):
        return Rejection.UNREADABLE
    return None if status.st_size == num_bytes else Rejection.TORN


def write_atomically(path: Path, write: Callable[[FileIO], None]) -> None:
    """Have `write` fill a new file that takes the name `path` when it is complete. Raises: OSError, leaving nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with FileIO(descriptor, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class Writable(Protocol):
    """An unbuffered file open for writing: it may write less than it is given."""

    def write(self, data: memoryview, /) -> int | None: ...


class Readable(Protocol):
    """An unbuffered file open for reading: it may read less than fits."""

    def readinto(self, data: memoryview, /) -> int | None: ...


def write_all(file: Writable, data: bytes | memoryview) -> None:
    """Write every byte, however little the system takes at a time. Raises: OSError."""
    view = memoryview(data)
    while view:
        count = file.write(view)
        if not count:
            raise OSError("the disk takes no more bytes, and does not say why")
        view = view[count:]


def read_all(file: Readable, data: memoryview) -> bool:
    """Fill `data`, however little the system gives at a time; False if the file ends before. Raises: OSError."""
    while data:
        count = file.readinto(data)
        if not count:
            return False
        data = data[count:]
    return True


def _header(form: PageFormat, record: PageRecord, checksum: Checksum) -> bytes:
    num_tokens = record.token_ids.size
    assert 0 < num_tokens <= form.page_tokens, "a page holds at least one token"
    token_ids = np.zeros(form.page_tokens, "<i4")
    token_ids[:num_tokens] = record.token_ids
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, checksum.value, num_tokens, form.page_tokens, form.page_bytes, record.parent
    )
    return fixed + token_ids.tobytes()


def _parse(form: PageFormat, header: bytes) -> tuple[PageRecord, Checksum, bytes] | Rejection:
    magic, version, algorithm, num_tokens, page_tokens, page_bytes, parent = _FIXED.unpack_from(header)
    if (magic, version, page_tokens, page_bytes) != (MAGIC, FORMAT_VERSION, form.page_tokens, form.page_bytes):
        return Rejection.FOREIGN
    if algorithm not in {checksum.value for checksum in Checksum} or not 0 < num_tokens <= page_tokens:
        return Rejection.FOREIGN
    token_ids = np.frombuffer(header, "<i4", num_tokens, _FIXED.size).astype(np.int32)
    return PageRecord(parent, token_ids), Checksum(algorithm), header[-CHECKSUM_BYTES:]
