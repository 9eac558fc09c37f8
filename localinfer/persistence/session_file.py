"""One conversation as one file, to be kept, copied and loaded again by hand.

| bytes | what |
|---|---|
| 8 | `LOCALSES` |
| 4 | version (little-endian uint32) |
| 8 | length of the JSON text (little-endian uint64) |
| | JSON: fingerprint, token ids, tokens per page, bytes per page, bytes and number of windowed parts |
| 32 x buffers | checksum of each page and each windowed part |
| 32 | checksum of everything up to here |
| | the pages, as they lie in memory, then the windowed parts of the last of them |

Nothing of a file is used before all of it is proven. It is plain data: reading it runs no code.
"""

import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from localinfer.closing import Closing
from localinfer.errors import SessionFileError, SessionMismatchError
from localinfer.files import OutputFile
from localinfer.persistence.page_file import (
    CHECKSUM_BYTES,
    PageFormat,
    TokenIds,
    checksum,
    read_all,
)
from localinfer.worker_threads import num_io_threads

MAGIC = b"LOCALSES"
FORMAT_VERSION = 2
_FIXED = struct.Struct("<8sIQ")
_MAX_JSON_BYTES = 64 << 20
_PAGES_AHEAD = 8
"""Pages whose checksums are computed while others are read or written."""


@dataclass(frozen=True)
class SessionContent:
    """What a session file says of itself: token ids int32[1..], and the parts of the fingerprint by name.

    windowed_bytes, num_windowed: size of a windowed part, and how many pages at the end are kept with theirs.
    """

    fingerprint: Mapping[str, str]
    token_ids: TokenIds
    form: PageFormat
    windowed_bytes: int = 0
    num_windowed: int = 0

    @property
    def num_pages(self) -> int:
        """Pages the tokens take."""
        return -(-self.token_ids.size // self.form.page_tokens)

    @property
    def num_buffers(self) -> int:
        """Pages and windowed parts."""
        return self.num_pages + self.num_windowed

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_pages * self.form.page_bytes + self.num_windowed * self.windowed_bytes


def write_session(path: Path, content: SessionContent, pages: Sequence[memoryview]) -> int:
    """Write a conversation, one buffer of `page_bytes` per page begun, then those of windowed parts; return the file's
    bytes.

    The file is there whole or not at all; a new one is readable by its owner only. Raises: SessionFileError.
    """
    assert len(pages) == content.num_buffers, "one buffer per page begun and per windowed part"
    start = _start(content)
    with OutputFile(path, is_private=True, error=SessionFileError) as file:
        # Before the pages, for a pipe takes what comes in order.
        with ThreadPoolExecutor(num_io_threads(), "localinfer-checksum") as executor:
            header = start + b"".join(_ahead(executor, pages))
        file.write(header + checksum(header))
        for page in pages:
            file.write(page)
    return len(header) + CHECKSUM_BYTES + content.num_bytes


class SessionReader(Closing):
    """An open session file whose header is proven; a context manager.

    Raises: SessionFileError if there is no such file, it is no session, or its header is damaged.
    """

    content: SessionContent

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Opening a named pipe would wait for its writer, so look before opening.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise SessionFileError(f"{self.path} is not a regular file; give a file that save_session wrote")
            self._file = FileIO(self.path, "rb")
        except FileNotFoundError:
            raise SessionFileError(f"{self.path} does not exist; give a file that save_session wrote") from None
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._read_header()
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except BaseException:
            self.close()
            raise

    def check_fingerprint(self, wanted: Mapping[str, str]) -> None:
        """Raise SessionMismatchError, naming each part that differs, unless the session is of this fingerprint."""
        found = self.content.fingerprint
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        if names:
            differences = "; ".join(
                f"{name}: {found.get(name, 'not named')} in the file, {wanted.get(name, 'not named')} here"
                for name in names
            )
            raise SessionMismatchError(
                f"{self.path} was saved with another model, setting or version ({differences}); load the model it was "
                "saved with, in the same way, or send the conversation again"
            )

    def read_pages(self, pages: Sequence[memoryview]) -> None:
        """Read every page, and then every windowed part, into a buffer of its size, and prove them.

        Raises: SessionFileError; then the buffers hold anything.
        """
        assert len(pages) == self.content.num_buffers, "one buffer per page and windowed part"
        try:
            self._file.seek(self._header_bytes)
            with ThreadPoolExecutor(num_io_threads(), "localinfer-checksum") as executor:
                digests = list(_ahead(executor, self._reading(pages)))
        except OSError as error:
            raise self._unreadable(error) from error
        for index, (found, wanted) in enumerate(zip(digests, self._digests, strict=True)):
            if found != wanted:
                raise self._damaged(f"page {index} of {len(pages)} does not match its checksum")

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def _reading(self, pages: Sequence[memoryview]) -> Iterator[memoryview]:
        for page in pages:
            if not read_all(self._file, page):
                raise self._damaged("it ends inside a page")
            yield page

    def _read_header(self) -> None:
        num_bytes = self._num_bytes = os.fstat(self._file.fileno()).st_size
        fixed = self._take(_FIXED.size)
        magic, version, json_bytes = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise SessionFileError(f"{self.path} is not a saved session; give a file that save_session wrote")
        if version != FORMAT_VERSION:
            raise SessionMismatchError(
                f"{self.path} is a session of format {version}, and this version reads {FORMAT_VERSION}; send the "
                "conversation again"
            )
        if json_bytes > min(_MAX_JSON_BYTES, num_bytes):
            raise self._damaged("its first bytes make no sense")
        text = self._take(json_bytes)
        self.content = content = self._parse(text)
        digests = self._take(CHECKSUM_BYTES * content.num_buffers)
        if checksum(fixed + text + digests) != self._take(CHECKSUM_BYTES):
            raise self._damaged("its header does not match its checksum")
        self._digests = [digests[at : at + CHECKSUM_BYTES] for at in range(0, len(digests), CHECKSUM_BYTES)]
        self._header_bytes = self._file.tell()
        wanted = self._header_bytes + content.num_bytes
        if num_bytes != wanted:
            raise self._damaged(f"it has {num_bytes:,} bytes where {wanted:,} were written")

    def _take(self, count: int) -> bytes:
        if count > self._num_bytes - self._file.tell():
            raise self._damaged("it ends inside its header")
        data = bytearray(count)
        if not read_all(self._file, memoryview(data)):
            raise self._damaged("it ends inside its header")
        return bytes(data)

    def _parse(self, text: bytes) -> SessionContent:
        """Read the JSON, which is not proven yet: sizes are checked before anything is made of them."""
        try:
            fields = json.loads(text)
            fingerprint, token_ids = fields["fingerprint"], fields["token_ids"]
            page_tokens, page_bytes = fields["page_tokens"], fields["page_bytes"]
            windowed_bytes, num_windowed = fields["windowed_bytes"], fields["num_windowed"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._damaged("its description is not what save_session writes") from None
        is_sound = (
            isinstance(fingerprint, dict)
            and all(isinstance(value, str) for value in fingerprint.values())
            and isinstance(token_ids, list)
            and bool(token_ids)
            and all(type(value) is int and 0 <= value < 2**31 for value in token_ids)
            and all(type(value) is int and 0 <= value < 2**40 for value in (page_bytes, windowed_bytes, num_windowed))
            and type(page_tokens) is int
            and 0 < page_tokens < 2**40
            and num_windowed <= -(-len(token_ids) // page_tokens)
        )
        if not is_sound:
            raise self._damaged("its description is not what save_session writes")
        form = PageFormat(page_tokens, page_bytes)
        return SessionContent(fingerprint, np.array(token_ids, np.int32), form, windowed_bytes, num_windowed)

    def _damaged(self, found: str) -> SessionFileError:
        return SessionFileError(f"{self.path} is damaged: {found}; use another copy, or send the conversation again")

    def _unreadable(self, error: OSError) -> SessionFileError:
        return SessionFileError(f"{self.path} cannot be read: {error.strerror or error}")


def _start(content: SessionContent) -> bytes:
    fields = {
        "fingerprint": dict(content.fingerprint),
        "token_ids": content.token_ids.tolist(),
        "page_tokens": content.form.page_tokens,
        "page_bytes": content.form.page_bytes,
        "windowed_bytes": content.windowed_bytes,
        "num_windowed": content.num_windowed,
    }
    text = json.dumps(fields).encode()
    return _FIXED.pack(MAGIC, FORMAT_VERSION, len(text)) + text


def _ahead(executor: ThreadPoolExecutor, pages: Iterable[memoryview]) -> Iterator[bytes]:
    """Checksums of pages in order, computed by other threads some pages ahead of where they are taken."""
    futures = []
    for page in pages:
        futures.append(executor.submit(checksum, b"", page))
        if len(futures) > _PAGES_AHEAD:
            yield futures.pop(0).result()
    for future in futures:
        yield future.result()
