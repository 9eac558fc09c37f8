"""Folders of compiled kernels that nobody has used for long are removed: every version and setting leaves one."""

import contextlib
import os
import shutil
import time
from pathlib import Path

KEPT_SECONDS = 90 * 24 * 3600
NOTED_SECONDS = 24 * 3600
"""How often the use of a folder is noted, and others are looked at."""

_STAMP = "last-used"
"""A file in each folder, whose time is that of its last use."""


def note_use(folder: Path) -> None:
    """Note that a folder is in use, and remove those beside it that were last used KEPT_SECONDS ago.

    folder: private, in a private folder that holds nothing else. Errors of the disk are ignored.
    """
    now = time.time()
    stamp = folder / _STAMP
    with contextlib.suppress(OSError):
        if stamp.exists() and abs(now - stamp.stat().st_mtime) < NOTED_SECONDS:
            return
        stamp.touch()
        # A clock that was set forward for a moment must not leave a time that is never reached.
        os.utime(stamp, (now, now))
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and not other.is_symlink() and _last_use(other) < now - KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _last_use(folder: Path) -> float:
    """When a kernel was last stored in a folder, or its use was noted."""
    times = [folder.stat().st_mtime]
    with contextlib.suppress(FileNotFoundError):
        times.append((folder / _STAMP).stat().st_mtime)
    return max(times)
