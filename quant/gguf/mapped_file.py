"""A file mapped read-only into memory, which never returns bytes beyond its end, nor of another version of it."""

import contextlib
import errno
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, CorruptFileError, ModelFileError
from localinfer.kernels.address_space import shortage
from localinfer.types import Closing, Record


class MappedFile(Closing):
    """One regular file, open and mapped until `close`.

    Touching a mapped page past the end of a file that shrank kills the process, and a file that is written meanwhile
    gives bytes of two versions. So every access first asks the operating system whether the file is what it was (about
    a microsecond), and what is read long after the file was opened is copied by `read_into`, which no change can kill.

    Raises: ModelFileError if the path cannot be opened, CorruptFileError if the file is empty, OutOfMemoryError if its
    size is more than this process may map.
    """

    path: Path
    num_bytes: int

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._place = os.path.abspath(path)
        self._map: mmap.mmap | None = None
        self._reading = threading.Lock()
        try:
            # Opening a named pipe would wait for its writer, so look before opening.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise ModelFileError(f"{self.path} is not a regular file; wanted a model file")
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
            # Closed with the last reference at the latest, like a map.
            self._close_file = weakref.finalize(self, os.close, descriptor)
            self._file = FileIO(descriptor, "rb", closefd=False)
            try:
                self._status = os.fstat(self._file.fileno())
                self.num_bytes = self._status.st_size
                if self.num_bytes == 0:
                    raise CorruptFileError(f"{self.path} is empty (0 bytes); wanted a model file: download it again")
                self._map = mmap.mmap(self._file.fileno(), self.num_bytes, access=mmap.ACCESS_READ)
            except BaseException:
                self._close_file()
                raise
        except FileNotFoundError as error:
            raise ModelFileError(f"{self.path} does not exist; check the path") from error
        except (OSError, ValueError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise shortage(self.num_bytes, f"mapping {self.path}") from error
            raise ModelFileError(f"{self.path} cannot be opened: {error}") from error

    @property
    def buffer(self) -> mmap.mmap:
        """The map itself, after checking that it is open and that the file behind it is what it was."""
        if self._map is None:
            raise ClosedError(f"{self.path} was closed; open the model again")
        self._check_unchanged()
        return self._map

    @property
    def descriptor(self) -> int:
        """The system's number of the open file, valid until `close`."""
        return self._file.fileno()

    def check_unchanged(self) -> None:
        """Raise CorruptFileError if the file was changed since it was opened, ClosedError once it is closed."""
        self.read_into([])

    @property
    def has_changed(self) -> bool:
        """True if the file was written since it was opened, or another one has its name; False once it is closed."""
        with self._reading:
            if self._map is None:
                return False
            opened = os.fstat(self._file.fileno())
        if not _is_same(opened, self._status):
            return True
        try:
            return not os.path.samestat(os.stat(self._place), self._status)
        except OSError:
            # Moved or deleted: what is open is what it was.
            return False

    def read(self, start: int, end: int) -> bytes:
        """Copy the bytes from `start` up to `end`, which must lie inside the file; errors as `read_into`."""
        assert 0 <= start <= end <= self.num_bytes, "a caller reads past the end of a mapped file"
        copied = bytearray(end - start)
        self.read_into([(start, memoryview(copied))])
        return bytes(copied)

    def view(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return uint8[end - start], a read-only view that keeps the map alive."""
        assert 0 <= start <= end <= self.num_bytes, "a caller reads past the end of a mapped file"
        return np.frombuffer(self.buffer, dtype=np.uint8, count=end - start, offset=start)

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Copy bytes without the map: from where each part says, as many as it holds. Threads may call.

        Raises: CorruptFileError if the file was changed since it was opened, ClosedError; the parts then hold anything.
        """
        with self._reading:
            if self._map is None:
                raise ClosedError(f"{self.path} was closed; open the model again")
            try:
                is_whole = all([self._read_part(start, out) for start, out in parts])
            except OSError as error:
                raise CorruptFileError(
                    f"{self.path} cannot be read any more: {error.strerror or error}; load the model again"
                ) from error
            # After reading: what was there before a write is what was meant.
            self._check_unchanged()
        if not is_whole:
            raise CorruptFileError(f"{self.path} ended too early while it was read; {_WAY_OUT}")

    def _read_part(self, start: int, out: memoryview) -> bool:
        assert 0 <= start <= start + len(out) <= self.num_bytes, "a caller reads past the end of a mapped file"
        while out:
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [out], start)
            else:
                self._file.seek(start)
                count = self._file.readinto(out)
            if not count:
                return False
            out, start = out[count:], start + count
        return True

    def forget(self, start: int, end: int) -> None:
        """Let the system drop the memory behind these bytes; reading them again reads the file again."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Refuse further access, and unmap as soon as no view is left. Safe to call twice."""
        if self._map is not None:
            with self._reading:
                mapped, self._map = self._map, None
                self._close_file()
            try:
                mapped.close()
            except BufferError:
                return  # a view still points into the map; the last one to go unmaps it

    def _check_unchanged(self) -> None:
        status = os.fstat(self._file.fileno())
        if status.st_size < self.num_bytes:
            raise CorruptFileError(
                f"{self.path} shrank from {self.num_bytes} to {status.st_size} bytes while it was open; {_WAY_OUT}"
            )
        if not _is_same(status, self._status):
            raise CorruptFileError(f"{self.path} was written while it was open; {_WAY_OUT}")


_WAY_OUT = "restore the file and load the model again"


def _is_same(status: os.stat_result, before: os.stat_result) -> bool:
    return (status.st_size, status.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


class FileStretch(Record):
    """Bytes `start` to `end` of a file: a tensor, as it lies there."""

    file: MappedFile
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Copy bytes from where each part says, counted from the stretch's start; see `MappedFile.read_into`."""
        assert all(0 <= first <= first + len(out) <= self.num_bytes for first, out in parts), "outside of a tensor"
        self.file.read_into([(self.start + first, out) for first, out in parts])


class MappedFiles(Closing):
    """The files of one model, mapped together; `num_bytes` is what they take on disk."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self.files = tuple(files)
        self.paths = tuple(file.path for file in files)
        self.num_bytes = sum(file.num_bytes for file in files)

    @property
    def has_changed(self) -> bool:
        """True if one of the files was written since it was opened, or another one has its name."""
        return any(file.has_changed for file in self.files)

    def close(self) -> None:
        """Refuse further access and unmap what no view still uses. Safe to call twice."""
        for file in self.files:
            file.close()
