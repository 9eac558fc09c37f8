"""The files of the cache folders, and their byte budget: the least recently used are deleted first."""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from localinfer.system import disk
from localinfer.system.files import abandoned_ns

DESCRIPTION = "about.json"
"""The file in the folder of a fingerprint that describes it."""

WEIGHTS_FOLDER = "weights"
"""The folder with cached hashes of model files."""

CHATS_FOLDER = "chats"
"""The folder of a fingerprint with its answered chats."""

_FOLDER = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]")
_KEY = "[0-9a-f]{32}"
_FILE = re.compile(
    rf"{re.escape(DESCRIPTION)}|{_KEY}|{_KEY}\.(?:chat|layout)|{_KEY}-{_KEY}\.(?:page|window|state|embedding)"
    r"|(?:tmp\w+|\.[0-9a-f]{12})\.tmp"
).fullmatch


class KeptFile(NamedTuple):
    """A file of the cache folder: its last use in nanoseconds, and its size."""

    used_ns: int
    path: str
    num_bytes: int


class DiskBudget:
    """The byte budget of a folder that several processes write.

    Between measurements only its own writes are counted, so the folder may exceed the budget by a sixteenth for each
    process and kind of file. Not thread-safe. list_files: which files of the folder count; None for those of
    `stored_files`.
    """

    def __init__(
        self, folder: Path, max_bytes: int, list_files: "Callable[[Path], Iterable[KeptFile]] | None" = None
    ) -> None:
        self._folder = folder
        self._list_files = stored_files if list_files is None else list_files
        self._max_bytes = max_bytes
        self._slack_bytes = max_bytes // 16
        self._measured_bytes: int | None = None
        self._written_bytes = 0

    def note_written(self, num_bytes: int) -> None:
        """Count written bytes."""
        self._written_bytes += num_bytes

    def enforce(self) -> int:
        """Delete the least recently used files until the budget is met; return their bytes. Never raises OSError."""
        is_known = self._measured_bytes is not None and self._written_bytes <= self._slack_bytes
        if is_known and (self._measured_bytes or 0) + self._written_bytes <= self._max_bytes:
            return 0
        files = sorted(self._list_files(self._folder))
        total = sum(file.num_bytes for file in files)
        excess = total - (self._max_bytes - self._slack_bytes) if total > self._max_bytes else 0
        newest_ns = abandoned_ns()
        deleted = 0
        for file in files:
            # An unfinished file that is young is being written by another process.
            is_temporary = file.path.endswith(".tmp")
            is_spare = file.used_ns < newest_ns if is_temporary else deleted < excess
            if is_spare and _delete(file.path):
                deleted += file.num_bytes
        self._measured_bytes = total - deleted
        self._written_bytes = 0
        return deleted


def stored_files(folder: str | os.PathLike[str]) -> Iterator[KeptFile]:
    """Every localinfer file under a folder, recognised by its name; other files are ignored.

    Files that vanish or cannot be read meanwhile are left out.
    """
    for entry in _folders(folder):
        if _FOLDER.fullmatch(entry.name):
            for inner in _folders(entry.path):
                if inner.name == CHATS_FOLDER or _SHARD.fullmatch(inner.name):
                    yield from _files(inner.path)
            yield from _files(entry.path)
        elif entry.name == WEIGHTS_FOLDER:
            yield from _files(entry.path)


def described_folders(folder: Path) -> list[Path]:
    """The descriptions of the fingerprints in a cache folder, in the order of their names."""
    folders = [entry for entry in _folders(folder) if _FOLDER.fullmatch(entry.name)]
    return sorted(
        Path(file.path) for entry in folders for file in _files(entry.path) if file.path.endswith(DESCRIPTION)
    )


def newest_first(folder: Path, is_ours: Callable[[str], object]) -> list[KeptFile]:
    """The files directly in a folder whose names are ours, most recently used first."""
    return sorted(_files(str(folder), is_ours), reverse=True)


def clear(folder: Path) -> int:
    """Delete every file of `stored_files`, and return their bytes. Processes that use them get cache misses."""
    return sum(file.num_bytes for file in list(stored_files(folder)) if _delete(file.path))


def mark_used(paths: list[Path]) -> None:
    """Mark pages as used now, the first most recently, so that a sequence is deleted from its end."""
    now = time.time_ns()
    for index, path in enumerate(paths):
        with contextlib.suppress(OSError):
            used = now - index * 1000
            disk.set_time(path, used)


def _entries(folder: str | os.PathLike[str]) -> list[disk.Entry]:
    try:
        return disk.entries(folder)
    except OSError:
        return []


def _folders(folder: str | os.PathLike[str]) -> Iterator[disk.Entry]:
    """Folders in a folder, without links."""
    for entry in _entries(folder):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield entry


def _files(folder: str, is_ours: Callable[[str], object] = _FILE) -> Iterator[KeptFile]:
    for entry in _entries(folder):
        if not is_ours(entry.name):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield KeptFile(status.st_mtime_ns, entry.path, status.st_size)


def _delete(path: str) -> bool:
    """Delete one file; False if it does not exist, or is open on a system that forbids it."""
    try:
        disk.delete(path)
    except OSError:
        return False
    return True
