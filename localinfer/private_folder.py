"""Folders that only this user can read or write: what lies there holds pieces of conversations."""

import os
import stat
from pathlib import Path

from localinfer.kernels.user_folders import user_folder


def user_cache_folder() -> Path | None:
    """Where localinfer keeps what can be made again, for this user.

    None without a home folder.
    """
    return user_folder("cache")


def make_private(folder: Path) -> str | None:
    """Make `folder` with mode 0700 if it is not there; return why it cannot be used, or None if it can.

    A folder that another user owns or can write is refused; one that others can read is closed to them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is not a folder"
        if hasattr(os, "getuid"):
            if status.st_uid != os.getuid():
                return f"{folder} belongs to another user"
            if status.st_mode & 0o022:
                return f"{folder} can be written by other users"
            if status.st_mode & 0o077:
                folder.chmod(0o700)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror or error}"
    return None
