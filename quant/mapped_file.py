"""A file mapped read-only into memory, which never hands out bytes beyond its end."""

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, CorruptFileError, ModelFileError


class MappedFile:
    """One regular file, open and mapped until `close`.

    Touching a mapped page past the end of a file that shrank kills the process, so every access
    first asks the operating system for the file's present size (about a microsecond).

    Raises: ModelFileError if the path cannot be opened, CorruptFileError if the file is empty.
    """

    path: Path
    num_bytes: int

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        try:
            # Opening a named pipe would wait for its writer, so look before opening.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise ModelFileError(f"{self.path} is not a regular file; wanted a model file")
            with open(self.path, "rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                if self.num_bytes == 0:
                    raise CorruptFileError(f"{self.path} is empty (0 bytes); wanted a model file: download it again")
                self._map = mmap.mmap(file.fileno(), self.num_bytes, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelFileError(f"{self.path} does not exist; check the path") from error
        except (OSError, ValueError, OverflowError) as error:
            raise ModelFileError(f"{self.path} cannot be opened: {error}") from error

    @property
    def buffer(self) -> mmap.mmap:
        """The map itself, after checking that it is open and that the file still backs it."""
        if self._map is None:
            raise ClosedError(f"{self.path} was closed; open the model again")
        present = self._map.size()
        if present < self.num_bytes:
            raise CorruptFileError(
                f"{self.path} shrank from {self.num_bytes} to {present} bytes while it was open; "
                "restore the file and load the model again"
            )
        return self._map

    def read(self, start: int, end: int) -> bytes:
        """Copy the bytes from `start` up to `end`, which must lie inside the file."""
        assert 0 <= start <= end <= self.num_bytes, "a caller reads past the end of a mapped file"
        return self.buffer[start:end]

    def view(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return uint8[end - start], a read-only view that keeps the map alive."""
        assert 0 <= start <= end <= self.num_bytes, "a caller reads past the end of a mapped file"
        return np.frombuffer(self.buffer, dtype=np.uint8, count=end - start, offset=start)

    def forget(self, start: int, end: int) -> None:
        """Let the system drop the memory behind these bytes; reading them again reads the file again."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Refuse further access, and unmap as soon as no view is left. Safe to call twice."""
        if self._map is not None:
            mapped, self._map = self._map, None
            try:
                mapped.close()
            except BufferError:
                return  # a view still points into the map; the last one to go unmaps it
