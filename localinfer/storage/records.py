"""Records on disk: small files of one folder, each written whole, that any number of processes may share.

Saved conversations, a server's responses and conversations, answered chats and pulled models are kept in such folders.
A record is written under a temporary name and renamed, so that whatever ends the process, it is that of one write.

A sealed record is a line, then the content. The line has the SHA-256 of the content in hex; from version 2 on a space
and the version follow. A record of a later version is neither read nor deleted.
"""

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from localinfer.storage.budget import DiskBudget, KeptFile, newest_first
from localinfer.system import disk
from localinfer.system.files import delete_abandoned, is_temporary, read_bounded, write_all, write_atomically

LOCK = ".lock"
_RETRY_SECONDS = 0.01


class TornRecordError(ValueError):
    """The content of a record is not what was written."""


class NewerRecordError(ValueError):
    """A record was written by a later version."""


class RecordStore:
    """The records in one folder, which is made when the first is written. `read`, `write` and `delete` raise OSError.

    names: of the records that `files` lists and the budget counts. most_bytes: of a record that is read. max_bytes: of
    all, beyond which the least recently used are deleted; most_files: likewise their number. is_sealed: records have
    checksums; of a kind that had none before, those that begin with `unsealed` are read too. is_durable: a write
    outlives a power cut.
    """

    def __init__(
        self,
        folder: Path,
        *,
        names: str = ".*",
        most_bytes: int,
        max_bytes: int | None = None,
        most_files: int | None = None,
        is_sealed: bool = False,
        unsealed: bytes | None = None,
        is_durable: bool = False,
    ) -> None:
        self.folder = folder
        self._is_record = re.compile(names).fullmatch
        self._most_bytes = most_bytes
        self._most_files = most_files
        self._is_sealed = is_sealed
        self._unsealed = unsealed
        self._is_durable = is_durable
        self._budget = None if max_bytes is None else DiskBudget(folder, max_bytes, lambda _: self._listed())

    def names(self) -> list[str]:
        """Everything in the folder that is no lock and not being written, sorted; nothing where there is no folder."""
        try:
            found = sorted(entry.name for entry in disk.entries(self.folder))
        except FileNotFoundError:
            return []
        return [name for name in found if not name.endswith(LOCK) and not is_temporary(name)]

    def files(self) -> list[KeptFile]:
        """The records, the last used first; nothing where the folder cannot be read."""
        return [file for file in self._listed() if not file.path.endswith(".tmp")]

    def read(self, name: str) -> bytes:
        """The content of a record. Raises: TornRecordError, NewerRecordError."""
        data = read_bounded(self.folder / name, self._most_bytes)
        if not self._is_sealed:
            return data
        line, _, content = data.partition(b"\n")
        checksum, _, version = line.partition(b" ")
        if checksum == _checksum(content):
            if version:
                shown = version[:20].decode("ascii", "backslashreplace")
                raise NewerRecordError(f"it has version {shown}, and this localinfer reads 1")
            return content
        if self._unsealed is not None and data.startswith(self._unsealed):
            return data
        raise TornRecordError("it does not match its checksum")

    def write(self, name: str, content: bytes) -> None:
        """Write a record over a former one, which an error leaves unchanged, and keep to the budget."""
        path = self.folder / name
        data = _checksum(content) + b"\n" + content if self._is_sealed else content

        def fill(file: FileIO) -> None:
            write_all(file, data)
            if self._is_durable:
                disk.sync(file)

        try:
            write_atomically(path, fill)
        except FileNotFoundError:
            # The folder is new, or another program deleted it.
            disk.make_folder(self.folder)
            write_atomically(path, fill)
        if self._is_durable:
            disk.sync_folder(self.folder)
        if self._budget is not None:
            self._budget.note_written(len(data))
            self._budget.enforce()
        if self._most_files is not None:
            for file in self.files()[self._most_files :]:
                with contextlib.suppress(OSError):
                    disk.delete(file.path)

    def delete(self, name: str) -> None:
        """Delete a record, durably where writes are."""
        disk.delete(self.folder / name)
        if self._is_durable:
            disk.sync_folder(self.folder)

    def discard(self, name: str) -> None:
        """Delete a record if there is one, and the system allows it."""
        with contextlib.suppress(OSError):
            disk.delete(self.folder / name)

    def delete_unfinished(self, *, is_locked: bool) -> None:
        """Delete what killed writers left, without the lock of all writers only what is old. Raises: OSError."""
        if not is_locked:
            delete_abandoned(self.folder)
            return
        for entry in disk.entries(self.folder):
            if is_temporary(entry.name):
                disk.delete(entry.path)

    @contextmanager
    def locked(self, name: str = LOCK, *, seconds: float | None) -> Iterator[bool]:
        """Hold a lock of the folder; False if another program has held it for `seconds`, None waits for ever.

        Raises: OSError if the file of the lock cannot be opened.
        """
        with disk.open_lock(self.folder / name) as lock:
            deadline = float("inf") if seconds is None else time.monotonic() + seconds
            while not disk.try_lock(lock):
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(_RETRY_SECONDS)
            yield True

    def _listed(self) -> list[KeptFile]:
        return newest_first(self.folder, lambda name: self._is_record(name) is not None or is_temporary(name))


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
