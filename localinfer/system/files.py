"""Atomic writes, bounded reads of cache files, and worker threads.

A file is written under a temporary name and renamed when complete. localinfer's own files are in private folders
(`write_atomically`). A path given by a user (`OutputFile`) may be a link, whose target is replaced; a file, which keeps
its mode; a pipe or a character device, such as /dev/stdout and /dev/null, which is written in place; anything else is
refused. Unfinished files of a killed process are deleted by the next that writes the same output, and in
localinfer's own folders by `delete_abandoned`.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO, RawIOBase
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, TypeVar

from localinfer.errors import LocalinferError, RequestError
from localinfer.system import disk
from localinfer.types import Closing

T = TypeVar("T")

_MAX_NAME_TRIES = 100
_TEMPORARY = re.compile(r"\.[0-9a-f]{12}\.tmp")
_TARGET_DIGITS = 6
_ABANDONED_SECONDS = 3600.0
"""Age from which an unfinished file of a folder that is ours belongs to a dead process."""

_WAYS_OUT = {
    errno.EISDIR: "give the name of a file in it",
    errno.ENOENT: "make it, or write elsewhere",
    errno.ENOTDIR: "write elsewhere",
    errno.EEXIST: "write to another file",
    errno.EACCES: "write elsewhere, or change who may write there",
    errno.EPERM: "write elsewhere, or change who may write there",
    errno.EROFS: "write elsewhere",
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EFBIG: "free some space, or write to another disk",
    errno.ENXIO: "start the program that reads it first",
}


def write_all(file: RawIOBase, data: bytes | memoryview) -> None:
    """Write every byte to an unbuffered file, in as many writes as needed. Raises: OSError."""
    view = memoryview(data)
    while view:
        count = file.write(view)
        if not count:
            raise OSError("the disk accepts no more bytes, without an error")
        view = view[count:]


def write_atomically(path: Path, write: Callable[[FileIO], None]) -> None:
    """Have `write` fill a new file, readable by its owner only, that is renamed to `path` when complete.

    For localinfer's own files in private folders. Raises: OSError; then nothing is left behind.
    """
    file, temporary = _create_beside(path, 0o600)
    try:
        with file:
            write(file)
        disk.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.delete(temporary)
        raise


def is_temporary(name: str) -> bool:
    """True if a file of this name was being written, by `write_atomically` or into an `OutputFile`."""
    return _TEMPORARY.fullmatch(name) is not None


def abandoned_ns() -> int:
    """An unfinished file of a folder that is ours, last written before this time, belongs to a dead process."""
    return time.time_ns() - int(_ABANDONED_SECONDS * 1e9)


def delete_abandoned(folder: Path) -> None:
    """Delete what processes that are long dead were writing in a folder of localinfer's own. Never raises OSError."""
    newest_ns = abandoned_ns()
    for path in _temporaries(folder):
        with contextlib.suppress(OSError):
            if disk.status(path, follow_links=False).st_mtime_ns < newest_ns:
                disk.delete(path)


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file of a cache folder for reading, unbuffered, without blocking on a pipe.

    Raises: OSError, also if it is not a regular file.
    """
    file = disk.open_to_read(path)
    try:
        if not stat.S_ISREG(disk.status_of(file).st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a regular file")
    except BaseException:
        file.close()
        raise
    return file


def text_of(path: Path) -> str:
    """Text of a small file of the system, without blanks around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a whole file of a cache folder. Raises: OSError, also if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        num_bytes = disk.status_of(file).st_size
        if num_bytes > max_bytes:
            raise OSError(errno.EFBIG, f"{path} has {num_bytes:,} bytes, more than the {max_bytes:,} allowed")
        parts = []
        while num_bytes > 0 and (part := file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


class OutputFile:
    """A file named by the user, written in order; a context manager.

    At the end of the block it is synced and renamed into place, through links, and the folder is synced, so that it
    outlives a power cut; after an error an older file is unchanged, and nothing else is left. An older file's mode is
    kept and, if the system allows, its owner; a new one has the user's default mode. Pipes and character devices are
    written in place.

    is_private: a new file is readable by its owner only. error: the exception class to raise.
    Raises: `error` for a folder, a read-only file, a socket or a block device, a folder that is missing or cannot be
        written, a full disk.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, is_private: bool = False, error: type[LocalinferError] = RequestError
    ) -> None:
        self.path = os.fspath(path)
        self._is_private, self._error = is_private, error
        self._raw: FileIO | None = None
        self._file: BinaryIO | None = None
        self._temporary: str | None = None
        self._place: _Place | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises: `error`."""
        assert self._file is not None, "an output file is used inside its with block"
        try:
            self._file.write(data)
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> Self:
        try:
            place = self._place = _find_place(self.path)
            if place.is_in_place:
                self._raw = _open_in_place(place)
            else:
                is_closed = self._is_private or place.status is not None
                mark = hashlib.sha256(os.path.basename(place.path).encode("utf-8", "surrogatepass")).hexdigest()
                _delete_unfinished(os.path.dirname(place.path), mark[:_TARGET_DIGITS])
                self._raw, self._temporary = _create_locked_beside(
                    Path(place.path), 0o600 if is_closed else 0o666, mark[:_TARGET_DIGITS]
                )
            self._file = io.BufferedWriter(self._raw)
        except (OSError, ValueError) as error:
            raise self._refused(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except OSError as refused:
            self._discard()
            raise self._refused(refused) from refused
        except BaseException:
            self._discard()
            raise

    def _finish(self) -> None:
        assert self._file is not None and self._raw is not None, "an output file is left after it was entered"
        assert self._place is not None, "and has a place since"
        self._file.flush()
        if self._temporary is not None:
            if self._place.status is not None:
                disk.copy_access(self._raw, self._place.status)
            disk.sync(self._raw)
        if self._temporary is None:
            self._file.close()
            return
        # Once it is closed its lock is gone, and another writer might take it for abandoned.
        try:
            disk.replace(self._temporary, self._place.path)
        except PermissionError:
            if sys.platform != "win32":
                raise
            # A file system that renames no open file.
            self._file.close()
            disk.replace(self._temporary, self._place.path)
        self._file.close()
        # A folder may be one that can be written and not read.
        with contextlib.suppress(PermissionError):
            disk.sync_folder(os.path.dirname(self._place.path))

    def _discard(self) -> None:
        if self._file is not None:
            # Closing flushes the buffer, which fails again if the disk is full.
            with contextlib.suppress(OSError):
                self._file.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                disk.delete(self._temporary)

    def _refused(self, error: OSError | ValueError) -> LocalinferError:
        return self._error(unwritable(self.path, error))


def check_output(
    path: str | os.PathLike[str],
    *,
    inputs: Iterable[str | os.PathLike[str]] = (),
    error: type[LocalinferError] = RequestError,
) -> None:
    """Raise `error` if `OutputFile` could not be opened: a check before long work.

    inputs: files that are read meanwhile, and must not be replaced.
    """
    try:
        place = _find_place(os.fspath(path))
        if place.status is not None and any(_is_file(os.fspath(one), place.status) for one in inputs):
            raise FileExistsError(errno.EEXIST, "it is also an input")
        if place.is_in_place:
            return
        folder = os.path.dirname(place.path)
        status = disk.status(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not disk.may_write(folder):
            raise PermissionError(errno.EACCES, f"the folder {folder} may not be written")
    except (OSError, ValueError) as found:
        raise error(unwritable(path, found)) from found


def is_written_in_place(path: str | os.PathLike[str]) -> bool:
    """True if `OutputFile` writes into `path`, a pipe or a device, instead of replacing it."""
    try:
        return _find_place(os.fspath(path)).is_in_place
    except (OSError, ValueError):
        return False


def unwritable(path: str | os.PathLike[str], error: OSError | ValueError) -> str:
    """The error message that a file cannot be written, with the reason and the way out."""
    code = error.errno if isinstance(error, OSError) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    way_out = _WAYS_OUT.get(code or 0, "give the name of a file in a folder that you can write")
    return f"{os.fspath(path)} cannot be written: {reason}; {way_out}"


class _Place(NamedTuple):
    """The target of an output. path: with links resolved. status: of the existing file, if any."""

    path: str
    status: os.stat_result | None
    is_in_place: bool


def _find_place(path: str) -> _Place:
    """Resolve and check a target. Raises: OSError, ValueError if it cannot be an output."""
    if not path:
        raise FileNotFoundError(errno.ENOENT, "the name is empty")
    if path.endswith(("/", os.sep)):
        raise IsADirectoryError(errno.EISDIR, "it names a folder")
    real = disk.real_path(path)
    try:
        status = disk.status(path)
    except FileNotFoundError:
        folder = os.path.dirname(real)
        if not disk.is_folder(folder):
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}") from None
        if sys.platform == "win32":
            from localinfer.system.windows import refused_name

            if (reason := refused_name(os.path.basename(path))) is not None:
                raise OSError(errno.EINVAL, reason) from None
        return _Place(real, None, is_in_place=False)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return _Place(path, status, is_in_place=True)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is a {'socket' if stat.S_ISSOCK(mode) else 'block device'}, not a file")
    if not mode & 0o222:
        raise PermissionError(errno.EACCES, "it is marked read-only")
    # Checks permissions, and changes nothing.
    disk.open_to_write(path).close()
    while not _is_file(real, status):
        again = disk.status(path)
        if os.path.samestat(again, status) and os.path.abspath(path) != real:
            # An open file that was deleted has a name under /dev/fd only.
            return _Place(path, status, is_in_place=True)
        # Another process has renamed a file to its path.
        status = again
    return _Place(real, status, is_in_place=False)


def _is_file(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(disk.status(path), status)
    except OSError:
        return False


def _open_in_place(place: _Place) -> FileIO:
    assert place.status is not None, "it is there"
    if stat.S_ISREG(place.status.st_mode):
        return disk.open_to_write(place.path, truncate=True)
    try:
        # Opening a pipe without a reader would block.
        return disk.open_stream(place.path)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no program reads this pipe") from error
        raise


def _create_beside(path: Path, mode: int, mark: str = "") -> tuple[FileIO, str]:
    """Create an empty file in the folder of `path`, opened for writing: the file and its name.

    mark: hexadecimal digits that the name begins with.
    """
    for _ in range(_MAX_NAME_TRIES):
        # A short name, because `path` may have the maximum length.
        name = f".{mark}{secrets.token_hex(6)[len(mark) :]}.tmp"
        temporary = os.path.join(os.path.dirname(path), name)
        with contextlib.suppress(FileExistsError):
            return disk.create(temporary, mode), temporary
    raise FileExistsError(errno.EEXIST, "no free name for a temporary file")


def _create_locked_beside(path: Path, mode: int, mark: str) -> tuple[FileIO, str]:
    """Like `_create_beside`; the file's lock is held until it is closed, by whatever ends the process."""
    while True:
        file, temporary = _create_beside(path, mode, mark)
        is_ours = False
        try:
            # Another writer may take it for abandoned before it is locked.
            is_ours = disk.try_lock(file) and disk.exists(temporary)
        finally:
            if not is_ours:
                file.close()
                with contextlib.suppress(OSError):
                    disk.delete(temporary)
        if is_ours:
            return file, temporary


def _delete_unfinished(folder: str, mark: str) -> None:
    """Delete what killed writers of an output left of it: files of its mark whose lock is free."""
    for path in _temporaries(folder, mark):
        with contextlib.suppress(OSError), disk.open_lock(path) as file:
            if disk.try_lock(file, if_unsupported=False):
                disk.delete(path)


def _temporaries(folder: str | os.PathLike[str], mark: str = "") -> Iterator[str]:
    """Unfinished files of a folder, by their names; none where it cannot be read."""
    with contextlib.suppress(OSError):
        for entry in disk.entries(folder):
            if is_temporary(entry.name) and entry.name.startswith(f".{mark}") and entry.is_file(follow_symlinks=False):
                yield entry.path


def num_io_threads() -> int:
    """Threads for I/O: one per core, and one for those that wait."""
    return min(8, (os.cpu_count() or 1) + 1)


class IOThreads(Closing):
    """Up to `threads` threads for work that releases the GIL; one of them is the caller's."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "localinfer-io") if threads > 1 else None

    def begin(self, job: Callable[[], T]) -> Future[T]:
        """Start a job, which is done when the block ends; with one thread it runs at once."""
        if self._executor is not None:
            try:
                return self._executor.submit(job)
            except RuntimeError:
                # At interpreter shutdown no more threads can be started.
                pass
        future: Future[T] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Wait for all jobs."""
        if self._executor is not None:
            self._executor.shutdown()


def run_all(jobs: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Run jobs and return their results in order; raises the first exception."""
    with IOThreads(min(threads, len(jobs))) as workers:
        futures = [workers.begin(job) for job in jobs]
    return [future.result() for future in futures]
