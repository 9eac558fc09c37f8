"""One page of keys and values as a file, with its key and a checksum.

A file has a header, then the page's bytes as in memory:

| bytes | what |
|---|---|
| 8 | `LOCALKV` and a zero; `LOCALKW` for a sliding-window block, `LOCALKS` for recurrent states after these tokens |
| 4 x 3 | version, tokens computed, capacity of a page in tokens (little-endian uint32) |
| 8 | bytes of the page (little-endian uint64) |
| 32 | key of the page before it |
| 4 x capacity | ids of the tokens computed, then zeros (little-endian int32) |
| 32 | checksum of the header up to here and of the page |

The key of a page is the SHA-256 of the previous page's key and of its own token ids; the key before the first page is
the fingerprint of everything else that the bytes depend on, or of a salted text the SHA-256 of that and of its salt. So
a key identifies a whole prefix, and sequences with a common prefix share files.
"""

import functools
import hashlib
import stat
import struct
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path

import numpy as np

from localinfer.kernels.cpu.weights import fold
from localinfer.system import disk
from localinfer.system.files import open_regular, write_all, write_atomically
from localinfer.types import TokenIds

MAGIC = b"LOCALKV\0"
WINDOWED_MAGIC = b"LOCALKW\0"
STATE_MAGIC = b"LOCALKS\0"
FORMAT_VERSION = 1
KEY_BYTES = 32
CHECKSUM_BYTES = 32
_FIXED = struct.Struct(f"<8sIIIQ{KEY_BYTES}s")


class Rejection(Enum):
    """Why a file was not used; the value completes the sentence "the file ..."."""

    MISSING = "no longer exists"
    TORN = "has the wrong length"
    ALTERED = "does not match its checksum"
    FOREIGN = "does not match its name"
    UNREADABLE = "cannot be read"


def checksum(header: bytes, data: memoryview | bytes = b"") -> bytes:
    """A 32-byte checksum of a header and of data, whose length is a multiple of 8 bytes.

    The data are folded first, at memory bandwidth. It detects damage, not forgery: a process that can write to this
    user's private folder is trusted.
    """
    return hashlib.sha256(fold(data) + header).digest()


@dataclass(frozen=True)
class PageFormat:
    """Sizes of a page and of its file: `page_tokens` tokens in `page_bytes` bytes.

    magic: the first bytes of the file: pages, sliding-window blocks and states of the same tokens differ in it.
    """

    page_tokens: int
    page_bytes: int
    magic: bytes = MAGIC

    @property
    def header_bytes(self) -> int:
        """Bytes before the page."""
        return _FIXED.size + 4 * self.page_tokens + CHECKSUM_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of a file."""
        return self.header_bytes + self.page_bytes


@dataclass(frozen=True, eq=False)
class PageRecord:
    """The identity of a page: the key of the prefix before it, and its token ids, int32[1..page_tokens]."""

    parent: bytes
    token_ids: TokenIds

    @functools.cached_property
    def key(self) -> bytes:
        """Key of the prefix up to this page's last token."""
        return hashlib.sha256(self.parent + self.token_ids.astype("<i4").tobytes()).digest()

    def is_same(self, other: "PageRecord") -> bool:
        """Whether both have the same tokens after the same prefix."""
        return self.parent == other.parent and np.array_equal(self.token_ids, other.token_ids)


def write_page(path: Path, form: PageFormat, record: PageRecord, page: memoryview) -> None:
    """Write the file at `path` atomically, readable by its owner only.

    `page` must not change meanwhile. Safe beside other processes that write the same path: the contents are equal.
    Raises: OSError; then nothing is left behind.
    """
    header = _header(form, record)
    digest = checksum(header, page)

    def write(file: FileIO) -> None:
        for part in (header + digest, page):
            write_all(file, part)

    write_atomically(path, write)


def read_page(path: Path, form: PageFormat, wanted: PageRecord, page: memoryview) -> Rejection | None:
    """Read the file at `path` into `page`, and check that it is intact and of `wanted`; else return the reason.

    After a rejection the bytes of `page` are undefined.
    """
    header = _read(path, form, page)
    if isinstance(header, Rejection):
        return header
    found = _parse(form, header)
    if isinstance(found, Rejection):
        return found
    if checksum(header[:-CHECKSUM_BYTES], page) != header[-CHECKSUM_BYTES:]:
        return Rejection.ALTERED
    return None if found.is_same(wanted) else Rejection.FOREIGN


def read_record(path: Path, form: PageFormat) -> PageRecord | Rejection:
    """Read only the identity that a file claims; only `read_page` verifies it."""
    header = _read(path, form)
    return header if isinstance(header, Rejection) else _parse(form, header)


def check_file(path: Path, num_bytes: int) -> Rejection | None:
    """Check that a regular file of this length is at `path`, without opening it."""
    try:
        status = disk.status(path)
    except FileNotFoundError:
        return Rejection.MISSING
    except OSError:
        return Rejection.UNREADABLE
    if not stat.S_ISREG(status.st_mode):
        return Rejection.UNREADABLE
    return None if status.st_size == num_bytes else Rejection.TORN


def read_all(file: FileIO, data: memoryview) -> bool:
    """Fill `data`, in as many reads as needed; False if the file ends before. Raises: OSError."""
    while data:
        count = file.readinto(data)
        if not count:
            return False
        data = data[count:]
    return True


def _read(path: Path, form: PageFormat, page: memoryview | None = None) -> bytes | Rejection:
    """Read the header, and the page if there is a buffer for it."""
    try:
        with open_regular(path) as file:
            # Check the size before allocating memory for it.
            if disk.status_of(file).st_size != form.file_bytes:
                return Rejection.TORN
            header = bytearray(form.header_bytes)
            if not (read_all(file, memoryview(header)) and (page is None or read_all(file, page))):
                return Rejection.TORN
    except FileNotFoundError:
        return Rejection.MISSING
    except OSError:
        return Rejection.UNREADABLE
    return bytes(header)


def _header(form: PageFormat, record: PageRecord) -> bytes:
    num_tokens = record.token_ids.size
    assert 0 < num_tokens <= form.page_tokens, "a page holds at least one token"
    token_ids = np.zeros(form.page_tokens, "<i4")
    token_ids[:num_tokens] = record.token_ids
    fixed = _FIXED.pack(form.magic, FORMAT_VERSION, num_tokens, form.page_tokens, form.page_bytes, record.parent)
    return fixed + token_ids.tobytes()


def _parse(form: PageFormat, header: bytes) -> PageRecord | Rejection:
    magic, version, num_tokens, page_tokens, page_bytes, parent = _FIXED.unpack_from(header)
    if (magic, version, page_tokens, page_bytes) != (form.magic, FORMAT_VERSION, form.page_tokens, form.page_bytes):
        return Rejection.FOREIGN
    if not 0 < num_tokens <= page_tokens:
        return Rejection.FOREIGN
    token_ids = np.frombuffer(header, "<i4", num_tokens, _FIXED.size).astype(np.int32)
    return PageRecord(parent, token_ids)
