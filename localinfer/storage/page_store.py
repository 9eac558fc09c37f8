"""Pages of keys and values, and snapshots of states, as files: found by token ids, verified when read, evicted by use.

A file has a header, then the page's bytes as in memory:

| bytes | what |
|---|---|
| 8 | `LOCALKV`, a zero; `LOCALKW`: sliding-window block, `LOCALKS`: recurrent states after it, `LOCALKE`: embeddings |
| 4 x 3 | version, tokens computed, capacity of a page in tokens (little-endian uint32) |
| 8 | bytes of the page (little-endian uint64) |
| 32 | key of the page before it |
| 4 x capacity | ids of the tokens computed, then zeros (little-endian int32) |
| 32 | checksum of the header up to here and of the page |

The key of a page is the SHA-256 of the previous page's key and of its own token ids, and of the contents that ids of
short pictures stand for, which the checksum covers too (`ShortRuns`); the key before the first page is
the fingerprint of everything else that the bytes depend on, or of a salted text the SHA-256 of that and of its salt. So
a key identifies a whole prefix. A file is named by the key of the prefix before it and by its own: a prompt finds its
pages without an index, sequences with a common prefix share files, and any number of processes may use one folder, as
writes are atomic and equal names have equal bytes. The folder is only a cache: an invalid file is deleted and computed
again. The file of a snapshot of recurrent states is like that of a page that ends where the snapshot was taken, with
the states instead of keys and values.
"""

import contextlib
import copy
import functools
import hashlib
import logging
import stat
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT, common_length
from localinfer.kernels.cpu.weights import fold
from localinfer.storage.budget import DiskBudget, mark_used
from localinfer.system import disk
from localinfer.system.files import IOThreads, open_regular, run_all, write_all, write_atomically
from localinfer.types import TokenIds

MAGIC = b"LOCALKV\0"
WINDOWED_MAGIC = b"LOCALKW\0"
STATE_MAGIC = b"LOCALKS\0"
EMBEDDING_MAGIC = b"LOCALKE\0"
FORMAT_VERSION = 1
KEY_BYTES = 32
CHECKSUM_BYTES = 32
_FIXED = struct.Struct(f"<8sIIIQ{KEY_BYTES}s")


class Rejection(Enum):
    """Reason why a file was not used; the value completes the sentence "the file ..."."""

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
    """The identity of a page: the key of the prefix before it, its token ids, int32[1..page_tokens], and the contents
    that some of them stand for, which a file does not say."""

    parent: bytes
    token_ids: TokenIds
    contents: bytes = b""

    @functools.cached_property
    def key(self) -> bytes:
        """Key of the prefix up to this page's last token."""
        return hashlib.sha256(self.parent + self.token_ids.astype("<i4").tobytes() + self.contents).digest()

    def is_same(self, other: "PageRecord") -> bool:
        """Return True if both have the same tokens after the same prefix."""
        return self.parent == other.parent and np.array_equal(self.token_ids, other.token_ids)


def write_page(path: Path, form: PageFormat, record: PageRecord, page: memoryview) -> None:
    """Write the file at `path` atomically, readable by its owner only.

    `page` must not change meanwhile. Safe beside other processes that write the same path: the contents are equal.
    Raises: OSError; then nothing is left behind.
    """
    header = _header(form, record)
    digest = checksum(header + record.contents, page)

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
    if checksum(header[:-CHECKSUM_BYTES] + wanted.contents, page) != header[-CHECKSUM_BYTES:]:
        return Rejection.ALTERED
    return None if found.is_same(wanted) else Rejection.FOREIGN


def read_record(path: Path, form: PageFormat) -> PageRecord | Rejection:
    """Read only the identity that a file claims, without contents; only `read_page` verifies it."""
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


logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_SIBLINGS = 1024
"""Files after one prefix that are searched for the longest common prefix: at most 10 milliseconds."""


Contents = Callable[[TokenIds, bytes], bytes]
"""The contents that ids of a page stand for, by their salt; see `ShortRuns.contents`."""


def no_contents(token_ids: TokenIds, salt: bytes) -> bytes:
    """None: ids stand for themselves."""
    return b""


class FileKind(Enum):
    """Kinds of files of a tier: the value is the end of their names, and their first bytes."""

    PAGE = (".page", MAGIC)
    WINDOW = (".window", WINDOWED_MAGIC)
    STATE = (".state", STATE_MAGIC)
    EMBEDDING = (".embedding", EMBEDDING_MAGIC)


_PAGES_AT_ONCE = 16
_BYTES_AT_ONCE = 4 << 20

PageSource = Callable[[Sequence[int]], Sequence[memoryview] | None]
"""Returns pages of a sequence by their indices, each a buffer of `page_bytes` that is unchanged until the second call
from now; None if they are no longer cached, which ends the save."""


@dataclass(frozen=True)
class FoundPage:
    """A file that, if valid, has the next `num_tokens` tokens of a sequence."""

    path: Path
    record: PageRecord
    num_tokens: int


@dataclass(frozen=True)
class Found:
    """Pages that continue a prompt, in order, from page `first_page` on; all but the last are full.

    num_tokens: of the prompt, from its beginning, that would then be cached. problem: why the next file was rejected,
    if there is one.
    """

    first_page: int
    num_tokens: int
    pages: tuple[FoundPage, ...] = ()
    problem: Rejection | None = None


@dataclass(frozen=True)
class Restored:
    """Number of leading tokens of a prompt that are cached after a restore, and why the next file was rejected."""

    num_tokens: int
    problem: Rejection | None


@dataclass(frozen=True)
class Saved:
    """The result of a save: pages written, pages that existed, and why it ended early, or None."""

    num_written: int
    num_present: int
    failure: str | None = None


@dataclass
class DiskCounters:
    """Counters of a tier since it was opened. `rejected` counts files by reason. last_failure: why the last save ended
    early, None if it did not."""

    pages_read: int = 0
    pages_written: int = 0
    bytes_deleted: int = 0
    failed_saves: int = 0
    rejected: Counter[Rejection] = field(default_factory=Counter)
    last_failure: str | None = None


class DiskTier:
    """The pages of one fingerprint in a cache folder. Thread-safe; a save excludes other saves only.

    folder: private, and existing. fingerprint: 32-byte hash of everything but the token ids that a page's bytes depend
    on. max_bytes: budget of the whole folder, pages of other fingerprints included. threads: how many read and verify
    pages concurrently. kind: WINDOW for the pages' sliding-window blocks, whose files lie beside those of the pages.
    contents: of ids that do not say all of what they stand for. salt: of the texts whose pages it finds and writes; see
    `of_salt`.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        *,
        page_tokens: int,
        page_bytes: int,
        max_bytes: int,
        threads: int = 1,
        kind: FileKind = FileKind.PAGE,
        contents: Contents = no_contents,
    ) -> None:
        assert len(fingerprint) == KEY_BYTES, "a fingerprint is a SHA-256"
        self._suffix, magic = kind.value
        self.form = PageFormat(page_tokens, page_bytes, magic)
        self.folder = folder / fingerprint.hex()[:32]
        self.counters = DiskCounters()
        self.salt = NO_SALT
        self._fingerprint = self._first_key = fingerprint
        self._budget = DiskBudget(folder, max_bytes)
        self._is_too_small = self.form.file_bytes > max_bytes
        self._saving = threading.Lock()
        self._threads = threads
        self._contents = contents

    def of_salt(self, salt: bytes) -> Self:
        """This tier as texts of a salt see it: the key before their first page is of the salt too, so that they share
        no file with others, and a file says no more of the salt than of the fingerprint."""
        if salt == self.salt:
            return self
        made = copy.copy(self)
        made.salt = salt
        made._first_key = hashlib.sha256(self._fingerprint + salt).digest() if salt else self._fingerprint
        return made

    def find(self, token_ids: TokenIds, first_page: int = 0) -> Found:
        """Find the files that continue a prompt from page `first_page` on, exact to the token.

        Only names and lengths are checked, and headers of pages that the prompt shares in part.
        """
        pages: list[FoundPage] = []
        problem = None
        for index, record in enumerate(self._records(token_ids)):
            if index < first_page:
                continue
            path = self._path(record)
            problem = check_file(path, self.form.file_bytes)
            if problem is None:
                pages.append(FoundPage(path, record, record.token_ids.size))
                continue
            self._reject(path, problem)
            longest = self._longest_beginning(record)
            pages += [] if longest is None else [longest]
            break
        num_tokens = first_page * self.form.page_tokens + sum(page.num_tokens for page in pages)
        problem = None if problem is Rejection.MISSING else problem
        return Found(first_page, min(num_tokens, token_ids.size), tuple(pages), problem)

    def of_same_pages(self, found: Found) -> list[FoundPage | None]:
        """This tier's files of pages found by another tier, None where there is none."""
        paths = [self._path(page.record) for page in found.pages]
        return [
            FoundPage(path, page.record, page.num_tokens) if check_file(path, self.form.file_bytes) is None else None
            for path, page in zip(paths, found.pages, strict=True)
        ]

    def has_beginning(self, token_ids: TokenIds) -> bool:
        """Return True if a file claims to begin like the first page of these tokens; it is not verified."""
        first = next(self._records(token_ids), None)
        if first is None:
            return False
        shared = (common_length(record.token_ids, first.token_ids) for _, record in self._siblings(first))
        return 2 * max(shared, default=0) >= first.token_ids.size

    def restore(self, found: Found, pages: Sequence[memoryview]) -> Restored:
        """Read found pages into memory, one buffer of `page_bytes` each, and verify them.

        If a file is rejected, the contents of the buffers from that page on are undefined.
        """
        assert len(pages) == len(found.pages), "one buffer per page"
        problems = run_all(
            [
                functools.partial(read_page, page.path, self.form, page.record, buffer)
                for page, buffer in zip(found.pages, pages, strict=True)
            ],
            self._threads,
        )
        num_tokens = found.first_page * self.form.page_tokens
        for page, problem in zip(found.pages, problems, strict=True):
            if problem is not None:
                self._reject(page.path, problem)
                return Restored(num_tokens, problem)
            num_tokens += page.num_tokens
            self.counters.pages_read += 1
        return Restored(num_tokens, found.problem)

    def mark_used(self, found: Found) -> None:
        """Mark these pages as used now."""
        mark_used([page.path for page in found.pages])

    @property
    def pages_at_once(self) -> int:
        """Pages that a save reads at a time: few enough to be copied quickly."""
        return max(2, min(_PAGES_AT_ONCE, _BYTES_AT_ONCE // max(1, self.form.page_bytes)))

    def save(
        self,
        token_ids: TokenIds,
        read: PageSource,
        *,
        places: Sequence[int] | None = None,
        threads: int = 1,
        pages_at_once: int | None = None,
    ) -> Saved:
        """Write the missing pages of a sequence, in order, and enforce the budget.

        read: called with the indices of at most `pages_at_once` pages. places: indices, in order; None for all.
        threads: how many write. A failure of the disk ends the save early and is returned, never raised; pages written
        until then are kept.
        """
        steps = self.saving(token_ids, read, places=places, threads=threads, pages_at_once=pages_at_once)
        return finished(steps)

    def saving(
        self,
        token_ids: TokenIds,
        read: PageSource,
        *,
        places: Sequence[int] | None = None,
        threads: int = 1,
        pages_at_once: int | None = None,
    ) -> Generator[None, None, Saved]:
        """The steps of `save`: one for each call of `read`."""
        with self._saving:
            if self._is_too_small:
                return Saved(0, 0, "the disk budget is smaller than one page")
            records = list(self._records(token_ids))
            paths = [self._path(record) for record in records]
            places = range(len(records)) if places is None else places
            missing = [index for index in places if check_file(paths[index], self.form.file_bytes) is not None]
            last = len(records) - 1
            if missing and missing[-1] == last and records[last].token_ids.size < self.form.page_tokens:
                missing = missing[:-1] if self._has_longer(records[last]) else missing
            step = pages_at_once or self.pages_at_once
            reads = [missing[first : first + step] for first in range(0, len(missing), step)]
            reasons = yield from self._writing(reads, records, paths, read, threads)
            num_written = reasons.count(None)
            reason = next((one for one in reasons if one is not None), None)
            # Only a page whose prefix was on disk before can replace a shorter one.
            if num_written == len(missing) > 0:
                self._delete_shorter(records[missing[0]])
            used = [paths[index] for index in places]
            return self._finish_save(used, num_written, len(places) - len(missing), reason)

    def _finish_save(self, used: list[Path], num_written: int, num_present: int, reason: str | None) -> Saved:
        """Count what a save has done, and enforce the budget. reason: the disk's, why it ended early."""
        mark_used(used)
        self._budget.note_written(num_written * self.form.file_bytes)
        self.counters.bytes_deleted += self._budget.enforce()
        self.counters.pages_written += num_written
        self.counters.failed_saves += reason is not None
        failure = None if reason is None else f"{self.folder} cannot be written: {reason}"
        if failure is not None:
            # Warn once, until a save succeeds or fails for another reason.
            level = logging.INFO if reason == self.counters.last_failure else logging.WARNING
            logger.log(level, "a prompt was not cached on disk: %s", failure)
        self.counters.last_failure = reason
        return Saved(num_written, num_present, failure)

    def _writing(
        self,
        reads: Iterable[list[int]],
        records: list[PageRecord],
        paths: list[Path],
        read: PageSource,
        threads: int,
    ) -> Generator[None, None, list[str | None]]:
        """Write pages, while the next are read; the result is the error of each, or None."""
        results: list[str | None] = []
        begun: list[Future[str | None]] = []
        with IOThreads(threads) as workers:
            for some in reads:
                pages = read(some)
                results += [future.result() for future in begun]
                begun = []
                if pages is None or any(results):
                    break
                for index, page in zip(some, pages, strict=True):
                    begun.append(workers.begin(functools.partial(self._write, paths[index], records[index], page)))
                yield
        return results + [future.result() for future in begun]

    def _write(self, path: Path, record: PageRecord, page: memoryview) -> str | None:
        try:
            try:
                write_page(path, self.form, record, page)
            except FileNotFoundError:
                disk.make_folder(path.parent)
                write_page(path, self.form, record, page)
        except OSError as error:
            # On systems where an open file cannot be replaced, another process is reading the same bytes.
            if check_file(path, self.form.file_bytes) is not None:
                return error.strerror or str(error)
        return None

    def _records(self, token_ids: TokenIds) -> Iterator[PageRecord]:
        parent = self._first_key
        for start in range(0, token_ids.size, self.form.page_tokens):
            record = self._record(parent, token_ids[start : start + self.form.page_tokens])
            yield record
            parent = record.key

    def _record(self, parent: bytes, token_ids: TokenIds) -> PageRecord:
        return PageRecord(parent, token_ids, self._contents(token_ids, self.salt))

    def _path(self, record: PageRecord) -> Path:
        parent = record.parent.hex()
        return self.folder / parent[:1] / f"{parent[:32]}-{record.key.hex()[:32]}{self._suffix}"

    def _siblings(self, record: PageRecord) -> Iterator[tuple[Path, PageRecord]]:
        """Files after the same prefix, with the identities they claim; left out are damaged ones, and those by whose
        names their ids stand for other contents than here."""
        folder = self._path(record).parent
        start = f"{record.parent.hex()[:32]}-"
        try:
            names = [entry.name for entry in disk.entries(folder) if entry.name.startswith(start)]
        except OSError:
            return
        for name in [name for name in names if name.endswith(self._suffix)][:_MAX_SIBLINGS]:
            sibling = read_record(folder / name, self.form)
            if isinstance(sibling, PageRecord) and sibling.parent == record.parent:
                sibling = self._record(sibling.parent, sibling.token_ids)
                if self._path(sibling).name == name:
                    yield folder / name, sibling

    def _longest_beginning(self, record: PageRecord) -> FoundPage | None:
        """The file that shares the most leading tokens with a page that has no file."""
        found = [
            FoundPage(path, sibling, common_length(sibling.token_ids, record.token_ids))
            for path, sibling in self._siblings(record)
        ]
        longest = max(found, key=lambda page: page.num_tokens, default=None)
        return longest if longest is not None and longest.num_tokens else None

    def _has_longer(self, record: PageRecord) -> bool:
        """Return True if a file has these tokens and more."""
        size = record.token_ids.size
        return any(
            sibling.token_ids.size > size and np.array_equal(sibling.token_ids[:size], record.token_ids)
            for _, sibling in self._siblings(record)
        )

    def _delete_shorter(self, record: PageRecord) -> None:
        """Delete files that have only a prefix of a page that is now on disk."""
        for path, sibling in self._siblings(record):
            size = sibling.token_ids.size
            if size < record.token_ids.size and np.array_equal(sibling.token_ids, record.token_ids[:size]):
                with contextlib.suppress(OSError):
                    disk.delete(path)

    def _reject(self, path: Path, problem: Rejection) -> None:
        """Count an invalid file, and delete it."""
        if problem is Rejection.MISSING:
            return
        self.counters.rejected[problem] += 1
        logger.info("%s %s; it is computed again", path, problem.value)
        with contextlib.suppress(OSError):
            try:
                disk.delete(path)
            except OSError:
                # A folder, deleted only if empty.
                disk.delete_folder(path)


def finished(steps: Generator[None, None, T]) -> T:
    """Take all steps, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


_MOST_OTHERS = 4

SnapshotSource = Callable[[int], memoryview | None]
"""Returns the states at a position, a buffer of `state_bytes` that is unchanged until the next call; None if they are
no longer cached, which ends the save."""


class FoundSnapshot(NamedTuple):
    """A file that, if valid, has the states after `position` tokens of a sequence."""

    position: int
    path: Path
    record: PageRecord


class SnapshotTier(DiskTier):
    """The snapshots of one fingerprint in a cache folder; see `DiskTier`."""

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        *,
        page_tokens: int,
        state_bytes: int,
        max_bytes: int,
        contents: Contents = no_contents,
    ) -> None:
        super().__init__(
            folder,
            fingerprint,
            page_tokens=page_tokens,
            page_bytes=state_bytes,
            max_bytes=max_bytes,
            kind=FileKind.STATE,
            contents=contents,
        )

    def find_snapshots(self, token_ids: TokenIds, *, after: int) -> Iterator[FoundSnapshot]:
        """Files that claim to be of a prefix of these ids longer than `after`, the longest first."""
        by_parent = self._names_by_parent()
        size, records = self.form.page_tokens, list(self._records(token_ids))
        for index in range(len(records) - 1, after // size - 1, -1):
            wanted, found = records[index], []
            for name in by_parent.get(wanted.parent.hex()[:32], ()):
                path = self._path(wanted).parent / name
                record = read_record(path, self.form)
                if isinstance(record, Rejection):
                    self._reject(path, record)
                elif record.parent == wanted.parent and _is_prefix(record.token_ids, wanted.token_ids):
                    record = self._record(record.parent, record.token_ids)
                    if self._path(record) == path:
                        found.append(FoundSnapshot(index * size + record.token_ids.size, path, record))
            yield from (one for one in sorted(found, key=lambda one: -one.position) if one.position > after)

    def read_snapshot(self, found: FoundSnapshot, states: memoryview) -> bool:
        """Read a file into memory and verify it; if it is rejected, the buffer's contents are undefined."""
        problem = read_page(found.path, self.form, found.record, states)
        if problem is None:
            self.counters.pages_read += 1
            mark_used([found.path])
        else:
            self._reject(found.path, problem)
        return problem is None

    def save_snapshots(self, token_ids: TokenIds, positions: Sequence[int], read: SnapshotSource) -> Saved:
        """Write the missing ones of some snapshots of a sequence, and enforce the budget; see `DiskTier.save`."""
        return finished(self.saving_snapshots(token_ids, positions, read))

    def saving_snapshots(
        self, token_ids: TokenIds, positions: Sequence[int], read: SnapshotSource
    ) -> Generator[None, None, Saved]:
        """The steps of `save_snapshots`, one for each snapshot that is written."""
        with self._saving:
            if self._is_too_small:
                return Saved(0, 0, "the disk budget is smaller than one snapshot")
            records = list(self._records(token_ids))
            size = self.form.page_tokens
            paths: dict[int, Path] = {}
            num_written, reason = 0, None
            for position in sorted(positions, reverse=True):
                index, within = divmod(position - 1, size)
                record = self._record(records[index].parent, records[index].token_ids[: within + 1])
                path = self._path(record)
                if check_file(path, self.form.file_bytes) is not None:
                    states = read(position)
                    reason = None if states is None else self._write(path, record, states)
                    if states is None or reason is not None:
                        break
                    num_written += 1
                    yield
                paths[position] = path
            return self._finish_save(list(paths.values()), num_written, len(paths) - num_written, reason)

    def _names_by_parent(self) -> dict[str, list[str]]:
        """Names of all files of this tier, by the beginning of the key before them."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for shard in "0123456789abcdef":
            try:
                found = disk.entries(self.folder / shard)
            except OSError:
                continue
            for entry in found:
                if entry.name.endswith(self._suffix):
                    names[entry.name.partition("-")[0]].append(entry.name)
        return names


def chosen_positions(snapshots: Mapping[int, int], grid: Set[int]) -> tuple[int, ...]:
    """Of the snapshots of a text, slots by position, those worth a file.

    Those on the grid, which are few; of the others the first, which more texts share, and the last. Those of former
    turns were written at their time, and stay as long as the budget lets them.
    """
    others = [position for position in sorted(snapshots) if snapshots[position] not in grid]
    chosen = {position for position, slot in snapshots.items() if slot in grid}
    return tuple(sorted({*others[:1], *others[-_MOST_OTHERS:], *chosen}))


def _is_prefix(some: TokenIds, of: TokenIds) -> bool:
    return some.size <= of.size and np.array_equal(some, of[: some.size])
