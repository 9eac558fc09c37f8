"""File system calls of localinfer: the one module through which its own folders are read and written.

Each function is one call of the operating system, or the loop that Python's standard library has around it, and raises
what that raises, OSError. Nothing is remembered here. On Windows long paths get the prefix that they need there.
"""

import contextlib
import errno
import os
import stat
import sys
from io import FileIO
from typing import TypeAlias

if sys.platform == "win32":
    import _winapi
    import msvcrt

    from localinfer.system.windows import extended_path as _path

    def _open_shared(path: "AnyPath", access: int, disposition: int, flags: int) -> int:
        """A descriptor of a file with which others may do everything while it is open. Raises: OSError."""
        handle = _winapi.CreateFile(_path(path), access, _SHARE_ALL, 0, disposition, _NORMAL, 0)
        try:
            return msvcrt.open_osfhandle(handle, flags | _BASE_FLAGS)
        except BaseException:
            _winapi.CloseHandle(handle)
            raise
else:
    import fcntl
    from os import fspath as _path

AnyPath: TypeAlias = str | os.PathLike[str]
Entry: TypeAlias = "os.DirEntry[str]"

_BASE_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_IN_PLACE_FLAGS = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)

_SHARE_ALL = 7
"""Others may read, write, delete and rename a file of Windows while it is open; Python's own `open` allows no more than
the first two."""
_NORMAL = 0x80
_CREATE_NEW, _OPEN_ALWAYS = 1, 4
_GENERIC_READ, _GENERIC_WRITE = 0x8000_0000, 0x4000_0000

_NOT_KNOWN = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
"""Of file systems that lack a call, as those on a network may."""


def status(path: AnyPath, *, follow_links: bool = True) -> os.stat_result:
    """The attributes of what is at a path."""
    return os.stat(_path(path), follow_symlinks=follow_links)


def exists(path: AnyPath) -> bool:
    """True if something is at a path."""
    try:
        os.stat(_path(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_folder(path: AnyPath) -> bool:
    """True if a folder is at a path; False where that cannot be seen."""
    try:
        return stat.S_ISDIR(os.stat(_path(path)).st_mode)
    except (OSError, ValueError):
        return False


def entries(folder: AnyPath) -> list[Entry]:
    """Entries of a folder, in no order."""
    with os.scandir(_path(folder)) as found:
        return list(found)


def real_path(path: AnyPath) -> str:
    """An absolute path without links, as far as it exists."""
    return os.path.realpath(path)


def open_to_read(path: AnyPath) -> FileIO:
    """Open a file for reading, unbuffered, without blocking on a pipe."""
    return FileIO(os.open(_path(path), _BASE_FLAGS | _READ_FLAGS), "rb")


def create(path: AnyPath, mode: int) -> FileIO:
    """Make a new file, opened for writing, unbuffered, which can be renamed and deleted while it is open.

    Raises: FileExistsError if the name is taken.
    """
    if sys.platform == "win32":
        return FileIO(_open_shared(path, _GENERIC_WRITE, _CREATE_NEW, os.O_WRONLY), "wb")
    return FileIO(os.open(_path(path), _BASE_FLAGS | _NEW_FLAGS, mode), "wb")


def path_with_room(path: AnyPath, characters: int) -> str:
    """A path below which others of so many more characters can be used."""
    if sys.platform == "win32":
        return _path(path, characters)
    return _path(path)


def open_to_write(path: AnyPath, *, truncate: bool = False) -> FileIO:
    """Open an existing file for writing in place, unbuffered."""
    flags = os.O_WRONLY | (os.O_TRUNC if truncate else 0)
    return FileIO(os.open(_path(path), _BASE_FLAGS | flags), "wb")


def open_stream(path: AnyPath) -> FileIO:
    """Open a pipe or a device for writing. Raises: OSError with ENXIO if no program reads the pipe."""
    descriptor = os.open(path, _BASE_FLAGS | _IN_PLACE_FLAGS)
    # Windows has no such flag, and refuses the call for what is no pipe, as NUL.
    if sys.platform != "win32":
        os.set_blocking(descriptor, True)
    return FileIO(descriptor, "wb")


def status_of(file: FileIO) -> os.stat_result:
    """The attributes of an open file."""
    return os.fstat(file.fileno())


def sync(file: FileIO) -> None:
    """Return when the contents of an open file would outlive a power cut."""
    _sync(file.fileno())


def sync_folder(folder: AnyPath) -> None:
    """Return when the names in a folder would outlive a power cut; does nothing where a folder cannot be synced."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | _BASE_FLAGS)
    try:
        _sync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Let the disk itself write what it has of a file: macOS's `fsync` leaves that in the disk's own memory."""
    if sys.platform != "win32" and hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _NOT_KNOWN:
                raise
    os.fsync(descriptor)


def replace(path: AnyPath, target: AnyPath) -> None:
    """Rename a file, in place of one that is there."""
    os.replace(_path(path), _path(target))


def delete(path: AnyPath) -> None:
    """Delete a file."""
    os.unlink(_path(path))


def delete_folder(path: AnyPath) -> None:
    """Delete an empty folder."""
    os.rmdir(_path(path))


def make_folder(path: AnyPath, mode: int = 0o700) -> list[str]:
    """Make a folder, and those above it, unless they exist; return the new ones, from the top.

    mode: of the last; those above it get the user's default. Raises: FileExistsError if it is there and no folder.
    """
    path = _path(path)
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above == path:
            raise
        made = make_folder(above, 0o777)
        # Once more only: a system's own folders take no others, and say that they are missing.
        try:
            os.mkdir(path, mode)
        except OSError:
            # Another thread may have made it meanwhile.
            if not is_folder(path):
                raise
            return made
        return [*made, path]
    except OSError:
        if not is_folder(path):
            raise
        return []
    return [path]


def set_mode(path: AnyPath, mode: int) -> None:
    """Change the permissions of what is at a path."""
    os.chmod(_path(path), mode)


def set_time(path: AnyPath, time_ns: int) -> None:
    """Set when a file was last used and changed."""
    os.utime(_path(path), ns=(time_ns, time_ns))


def copy_access(file: FileIO, status: os.stat_result) -> None:
    """Give an open file the mode of another and, if the system allows, its owner."""
    if not hasattr(os, "fchmod"):
        return
    if sys.platform != "win32" and hasattr(os, "fchown"):
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
    os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode) & 0o777)


def may_write(folder: AnyPath) -> bool:
    """True if this process may make files in a folder."""
    return os.access(_path(folder), os.W_OK | os.X_OK)


def open_lock(path: AnyPath) -> FileIO:
    """Open the file of a lock, which is made if it is missing; closing it releases the lock. Others may delete it."""
    if sys.platform == "win32":
        return FileIO(_open_shared(path, _GENERIC_READ | _GENERIC_WRITE, _OPEN_ALWAYS, os.O_RDWR), "r+b")
    return FileIO(os.open(_path(path), os.O_RDWR | os.O_CREAT | _BASE_FLAGS, 0o600), "r+b")


def try_lock(file: FileIO, *, if_unsupported: bool = True) -> bool:
    """Take the lock of an open file; False if another has it, `if_unsupported` where the system has no locks."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        # Some network file systems cannot lock.
        return if_unsupported
    return True
