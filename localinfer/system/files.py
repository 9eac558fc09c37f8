"""Atomic writes, bounded reads of cache files, and worker threads.

A file is written under a temporary name and renamed when complete. localinfer's own files are in private folders
(`write_atomically`). A path given by a user (`OutputFile`) may be a link, whose target is replaced; a file, which keeps
its mode; a pipe or a character device, such as /dev/stdout and /dev/null, which is written in place; anything else is
refused.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO, RawIOBase
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, TypeVar

from localinfer.closing import Closing
from localinfer.errors import LocalinferError, RequestError

T = TypeVar("T")

_BASE_FLAGS = os.O_WRONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_NEW_FLAGS = _BASE_FLAGS | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_IN_PLACE_FLAGS = _BASE_FLAGS | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_MAX_NAME_TRIES = 100

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
    descriptor, temporary = _create_beside(path, 0o600)
    try:
        with FileIO(descriptor, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file of a cache folder for reading, unbuffered, without blocking on a pipe.

    Raises: OSError, also if it is not a regular file.
    """
    file = FileIO(os.open(path, _READ_FLAGS), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return file


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a whole file of a cache folder. Raises: OSError, also if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise OSError(errno.EFBIG, f"{path} has {num_bytes:,} bytes, more than the {max_bytes:,} allowed")
        parts = []
        while num_bytes > 0 and (part := file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


class OutputFile:
    """A file named by the user, written in order; a context manager.

    At the end of the block it is synced and renamed into place, through links; after an error an older file is
    unchanged, and nothing else is left. An older file's mode is kept and, if the system allows, its owner; a new one
    has the user's default mode. Pipes and character devices are written in place.

    is_private: a new file is readable by its owner only. error: the exception class to raise.
    Raises: `error` for a folder, a read-only file, a socket or a block device, a folder that is missing or cannot be
        written, a full disk.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, is_private: bool = False, error: type[LocalinferError] = RequestError
    ) -> None:
        self.path = os.fspath(path)
        self._is_private, self._error = is_private, error
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
                descriptor = _open_in_place(place)
            else:
                is_closed = self._is_private or place.status is not None
                descriptor, self._temporary = _create_beside(Path(place.path), 0o600 if is_closed else 0o666)
            self._file = open(descriptor, "wb")  # noqa: SIM115 - closed in __exit__
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
        assert self._file is not None and self._place is not None, "an output file is left after it was entered"
        self._file.flush()
        if self._temporary is not None:
            if self._place.status is not None:
                _copy_access(self._file.fileno(), self._place.status)
            os.fsync(self._file.fileno())
        self._file.close()
        if self._temporary is not None:
            os.replace(self._temporary, self._place.path)

    def _discard(self) -> None:
        if self._file is not None:
            # Closing flushes the buffer, which fails again if the disk is full.
            with contextlib.suppress(OSError):
                self._file.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

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
        status = os.stat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"the folder {folder} may not be written")
    except (OSError, ValueError) as found:
        raise error(unwritable(path, found)) from found


def is_written_in_place(path: str | os.PathLike[str]) -> bool:
    """Whether `OutputFile` writes into `path`, a pipe or a device, instead of replacing it."""
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
    real = os.path.realpath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        folder = os.path.dirname(real)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}") from None
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
    os.close(os.open(path, _BASE_FLAGS))
    if not _is_file(real, status):
        # An open file that was deleted has a name under /dev/fd only.
        return _Place(path, status, is_in_place=True)
    return _Place(real, status, is_in_place=False)


def _is_file(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def _open_in_place(place: _Place) -> int:
    assert place.status is not None, "it is there"
    if stat.S_ISREG(place.status.st_mode):
        return os.open(place.path, _BASE_FLAGS | os.O_TRUNC)
    try:
        # Opening a pipe without a reader would block.
        descriptor = os.open(place.path, _IN_PLACE_FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no program reads this pipe") from error
        raise
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    return descriptor


def _create_beside(path: Path, mode: int) -> tuple[int, str]:
    """Create an empty file in the folder of `path`: its descriptor and its name."""
    for _ in range(_MAX_NAME_TRIES):
        # A short name, because `path` may have the maximum length.
        temporary = os.path.join(os.path.dirname(path), f".{secrets.token_hex(6)}.tmp")
        with contextlib.suppress(FileExistsError):
            return os.open(temporary, _NEW_FLAGS, mode), temporary
    raise FileExistsError(errno.EEXIST, "no free name for a temporary file")


def _copy_access(descriptor: int, status: os.stat_result) -> None:
    """Copy the mode of the replaced file to the new one, and its owner if the system allows."""
    if not hasattr(os, "fchmod"):
        return
    if hasattr(os, "fchown"):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o777)


def num_io_threads() -> int:
    """Threads for I/O: one per core, and one for those that wait."""
    return min(8, (os.cpu_count() or 1) + 1)


class WorkerThreads(Closing):
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
    with WorkerThreads(min(threads, len(jobs))) as workers:
        futures = [workers.begin(job) for job in jobs]
    return [future.result() for future in futures]
