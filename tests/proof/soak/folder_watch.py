"""A folder whose changes are waited for one by one, so that a process can be killed right after one of its writes."""

import contextlib
import ctypes
import os
import select
import struct
import sys
import time
from pathlib import Path

from localinfer.types import Closing

_MODIFY, _MOVED_TO, _CREATE, _DELETE, _IS_FOLDER = 0x2, 0x80, 0x100, 0x200, 0x40000000
_CHANGES = _MODIFY | _MOVED_TO | _CREATE | _DELETE
_HEAD = struct.Struct("iIII")


class FolderWatch(Closing):
    """Counts creations, writes, renames and deletions below a folder, those that inotify(7) tells of; Linux only."""

    def __init__(self, folder: Path) -> None:
        self.num_changes = 0
        self._paths: dict[int, str] = {}
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._descriptor = -1
        if self._libc is not None:
            self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._add(str(folder))

    @property
    def can_watch(self) -> bool:
        """Whether this system tells of changes."""
        return self._descriptor >= 0

    def wait(self, until: float, num_changes: int | None = None) -> bool:
        """Wait until so many changes were seen, or a moment of `time.monotonic`; return whether they were."""
        while num_changes is None or self.num_changes < num_changes:
            left = until - time.monotonic()
            if left <= 0:
                return False
            ready = select.select([self._descriptor], [], [], left)[0] if self.can_watch else time.sleep(left)
            if ready:
                self._read()
        return True

    def take(self) -> None:
        """Count the changes of until now."""
        while self.can_watch and select.select([self._descriptor], [], [], 0.0)[0]:
            self._read()

    def close(self) -> None:
        """Stop watching."""
        if self.can_watch:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        content = os.read(self._descriptor, 1 << 16)
        place = 0
        while place < len(content):
            number, mask, _, length = _HEAD.unpack_from(content, place)
            place += _HEAD.size + length
            name = content[place - length : place].rstrip(b"\0").decode(errors="surrogateescape")
            self.num_changes += 1
            if mask & _IS_FOLDER and mask & (_CREATE | _MOVED_TO) and number in self._paths:
                self._add(os.path.join(self._paths[number], name), is_new=True)

    def _add(self, folder: str, *, is_new: bool = False) -> None:
        """Watch a folder and those below it; of a new one what it holds already is counted."""
        assert self._libc is not None, "it watches"
        number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _CHANGES)
        if number < 0:
            return
        self._paths[number] = folder
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                self.num_changes += is_new
                if entry.is_dir(follow_symlinks=False):
                    self._add(entry.path, is_new=is_new)
