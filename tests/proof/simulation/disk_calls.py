"""The calls of a simulated disk, in place of `os`, `FileIO` and `fcntl` in the module of the product that has them."""

import errno
import io
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.proof.simulation.disk_files import File, Folder, Node

if TYPE_CHECKING:
    from tests.proof.simulation.disk import Disk, Process

_DEVICE = 77
_UMASK = 0o022


@dataclass(eq=False)
class Descriptor:
    """An entry of the table of open files."""

    number: int
    node: Node
    path: str
    process: "Process"
    flags: int


class OpenFile(io.RawIOBase):
    """What has a descriptor of a simulated disk in place of `FileIO`."""

    def __init__(self, disk: "Disk", descriptor: Descriptor) -> None:
        super().__init__()
        self._disk, self._descriptor, self._flags, self._at = disk, descriptor, descriptor.flags, 0
        self.node, self.path, self.process = descriptor.node, descriptor.path, descriptor.process

    def fileno(self) -> int:
        return self._descriptor.number

    def readable(self) -> bool:
        return not self._flags & os.O_WRONLY

    def writable(self) -> bool:
        return bool(self._flags & (os.O_WRONLY | os.O_RDWR))

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, self.node.num_bytes)[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        disk, view = self._disk, memoryview(buffer).cast("B")
        if disk.operate(process=self.process):
            disk.die(self.process)
        if isinstance(self.node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        faults, random = disk.faults, disk.random
        if faults.failed_read and random.random() < faults.failed_read:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = max(0, min(len(view), len(self.node.data) - self._at))
        if count > 1 and faults.short_read and random.random() < faults.short_read:
            count = random.randint(1, count - 1)
        view[:count] = self.node.data[self._at : self._at + count]
        if count and faults.bit_flip and random.random() < faults.bit_flip:
            view[random.randrange(count)] ^= 1 << random.randrange(8)
        self._at += count
        return count

    def write(self, data: Any) -> int:
        disk, view = self._disk, memoryview(data).cast("B")
        is_last = disk.operate(needs_space=True, process=self.process)
        assert isinstance(self.node, File), "folders are not opened for writing"
        count, random = len(view), disk.random
        is_torn = is_last or bool(disk.faults.torn_write and random.random() < disk.faults.torn_write)
        if is_torn:
            count = random.randint(0, max(0, count - 1))
        is_full = not disk.has_room(count)
        count = 0 if is_full else count
        end = self._at + count
        self.node.data[len(self.node.data) :] = bytes(max(0, self._at - len(self.node.data)))
        self.node.data[self._at : end] = view[:count]
        self.node.changed_ns = disk.now_ns()
        self._at = end
        if is_last:
            disk.die(self.process)
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_torn and (not count or random.random() < 0.5):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._descriptor)

    def __del__(self) -> None:
        # Nobody has closed it, while its process runs.
        if not self.closed and not self.process.is_dead:
            self._disk.forgotten.append(self.path)
        self.close()


class Entry:
    """What a folder holds, with what `os.DirEntry` has."""

    def __init__(self, calls: "Calls", folder: str, name: str, node: Node) -> None:
        self._calls, self._node = calls, node
        self.name, self.path = name, f"{folder}/{name}"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return isinstance(self._node, Folder)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return isinstance(self._node, File)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._calls.stat(self.path)


class Calls:
    """In place of the module `os`; what it does not have is the real module's."""

    def __init__(self, disk: "Disk") -> None:
        self._disk = disk
        self.path = _Paths(disk)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def stat(self, path: Any, *, follow_symlinks: bool = True) -> os.stat_result:
        if not self._disk.is_here(path):
            return os.stat(path, follow_symlinks=follow_symlinks)
        self._disk.call(os.fspath(path))
        return _status(self._disk.find(os.fspath(path)))

    def fstat(self, descriptor: int) -> os.stat_result:
        file = self._disk.open_file(descriptor)
        return os.fstat(descriptor) if file is None else _status(file.node)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        disk = self._disk
        if not disk.is_here(path):
            return os.open(path, flags, mode)
        path = os.fspath(path)
        is_writing = bool(flags & (os.O_WRONLY | os.O_RDWR))
        disk.call(path, needs_space=bool(flags & os.O_CREAT))
        try:
            node = disk.find(path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            folder, name = disk.folder_of(path)
            node = disk.new(File, mode & ~_UMASK)
            disk.name(folder, {name: node})
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if isinstance(node, Folder) and is_writing:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if isinstance(node, File) and flags & os.O_TRUNC:
            node.data.clear()
        return disk.open(node, path, flags)

    def close(self, descriptor: int) -> None:
        file = self._disk.open_file(descriptor)
        if file is None:
            os.close(descriptor)
        else:
            self._disk.close(file)

    def fsync(self, descriptor: int) -> None:
        disk, file = self._disk, self._disk.open_file(descriptor)
        if file is None:
            os.fsync(descriptor)
            return
        if disk.operate(process=file.process):
            disk.die(file.process)
        if disk.faults.failed_sync and disk.random.random() < disk.faults.failed_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file.node.sync()

    def replace(self, path: Any, target: Any) -> None:
        disk = self._disk
        if not disk.is_here(path):
            os.replace(path, target)
            return
        path, target = os.fspath(path), os.fspath(target)
        disk.call(target)
        node = disk.find(path)
        (old, old_name), (new, new_name) = disk.folder_of(path), disk.folder_of(target)
        assert old is new, "a file is renamed in its folder"
        if isinstance(old.names.get(new_name), Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        disk.name(old, {old_name: None, new_name: node})

    def unlink(self, path: Any) -> None:
        if not self._disk.is_here(path):
            os.unlink(path)
            return
        path = os.fspath(path)
        self._disk.call(path)
        if isinstance(self._disk.find(path), Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        folder, name = self._disk.folder_of(path)
        self._disk.name(folder, {name: None})

    def rmdir(self, path: Any) -> None:
        if not self._disk.is_here(path):
            os.rmdir(path)
            return
        path = os.fspath(path)
        self._disk.call(path)
        node = self._disk.find(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if node.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        folder, name = self._disk.folder_of(path)
        self._disk.name(folder, {name: None})

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        disk = self._disk
        if not disk.is_here(path):
            os.mkdir(path, mode)
            return
        path = os.fspath(path)
        if path == str(disk.root):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        disk.call(path, needs_space=True)
        folder, name = disk.folder_of(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        disk.name(folder, {name: disk.new(Folder, mode & ~_UMASK)})

    def chmod(self, path: Any, mode: int) -> None:
        if not self._disk.is_here(path):
            os.chmod(path, mode)
            return
        self._disk.call(os.fspath(path))
        self._disk.find(os.fspath(path)).mode = mode

    def utime(self, path: Any, *, ns: tuple[int, int]) -> None:
        if not self._disk.is_here(path):
            os.utime(path, ns=ns)
            return
        self._disk.call(os.fspath(path))
        self._disk.find(os.fspath(path)).changed_ns = ns[1]

    def access(self, path: Any, mode: int) -> bool:
        if not self._disk.is_here(path):
            return os.access(path, mode)
        self._disk.call(os.fspath(path))
        self._disk.find(os.fspath(path))
        return True

    def fchmod(self, descriptor: int, mode: int) -> None:
        file = self._disk.open_file(descriptor)
        if file is None:
            os.fchmod(descriptor, mode)
        else:
            file.node.mode = mode

    def fchown(self, descriptor: int, user: int, group: int) -> None:
        if self._disk.open_file(descriptor) is None:
            os.fchown(descriptor, user, group)

    @contextmanager
    def scandir(self, path: Any) -> Iterator[Any]:
        disk = self._disk
        if not disk.is_here(path):
            with os.scandir(path) as entries:
                yield entries
            return
        path = os.fspath(path)
        disk.call(path)
        folder = disk.find(path)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        names = sorted(folder.names)
        disk.random.shuffle(names)
        yield [Entry(self, path, name, folder.names[name]) for name in names]


class Locks:
    """In place of the module `fcntl`."""

    LOCK_EX, LOCK_NB = 2, 4

    def __init__(self, disk: "Disk") -> None:
        self._disk = disk

    def flock(self, descriptor: int, operation: int) -> None:
        file = self._disk.open_file(descriptor)
        if file is None:
            import fcntl

            fcntl.flock(descriptor, operation)
            return
        assert isinstance(file.node, File), "a lock is a file"
        if file.node.locked_by not in (None, file):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        file.node.locked_by = file


class _Paths:
    """In place of `os.path`."""

    def __init__(self, disk: "Disk") -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os.path, name)

    def realpath(self, path: Any) -> str:
        """A simulated disk has no links."""
        return posixpath.normpath(os.fspath(path)) if self._disk.is_here(path) else os.path.realpath(path)


def _status(node: Node) -> os.stat_result:
    seconds = node.changed_ns // 1_000_000_000
    mode = node.kind | stat.S_IMODE(node.mode)
    times = (seconds, seconds, seconds)
    user, group = os.getuid(), os.getgid()
    plain = (mode, node.number, _DEVICE, max(1, node.num_names), user, group, node.num_bytes, *times)
    floats = (node.changed_ns / 1e9,) * 3
    return os.stat_result((*plain, *floats, node.changed_ns, node.changed_ns, node.changed_ns))
