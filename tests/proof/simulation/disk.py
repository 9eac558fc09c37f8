"""A file system in memory under the product's: faults, kills, power cuts, and files that were left open.

Everything is drawn from `Disk.random`, which a simulation may replace before each of its steps. Paths outside of
`Disk.root` are the real file system's. One thread, and any number of simulated processes, of which one at a time calls.
"""

import copy
import errno
import heapq
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Self
from unittest import mock

from tests.proof.simulation.clock import Clock
from tests.proof.simulation.disk_calls import Calls, Descriptor, Locks, OpenFile
from tests.proof.simulation.disk_files import File, Folder, Node, lose_power, walk

_RESOLUTION_NS = 4_000_000
"""Times of files are those of the last tick of the kernel."""
_PACKAGES = ("system", "storage", "engine", "generation")


class Killed(BaseException):
    """The process has ended: nothing of it runs any more, and no handler may go on."""


@dataclass
class Faults:
    """Probabilities that a call goes wrong.

    torn_write: only a part is written, sometimes with an error. bit_flip: in what one call reads. short_read: fewer
    bytes than there are. full_disk: of a call that needs space. permission_lost: of a call that names a file.
    failed_read, failed_sync: an error of the device; after that of a sync nothing new is durable.
    """

    torn_write: float = 0.0
    bit_flip: float = 0.0
    short_read: float = 0.0
    full_disk: float = 0.0
    permission_lost: float = 0.0
    failed_read: float = 0.0
    failed_sync: float = 0.0


@dataclass(eq=False)
class Process:
    """One that calls. kill_in: operations until it is killed."""

    name: str
    is_dead: bool = False
    kill_in: int | None = None


@dataclass
class _State:
    """What a snapshot of a disk is."""

    top: Folder
    free_numbers: list[int] = field(default_factory=list)
    next_number: int = 2


class Disk:
    """An empty file system below `root`, and what tests see and do of it.

    before_operation: called before each. faults: may be changed at any time. capacity: bytes of all files together,
    None without an end. process: the one that calls now. forgotten: paths of files that were not closed before they
    were collected.
    """

    def __init__(self, random: Random, clock: Clock, root: str = "/simulated") -> None:
        self.random = random
        self.clock = clock
        self.root = Path(root)
        self._root = str(self.root)
        self._num_root = len(self._root)
        self.faults = Faults()
        self.capacity: int | None = None
        self.num_operations = 0
        self.forgotten: list[str] = []
        self.process = Process("first")
        self._processes = [self.process]
        self._open: dict[int, Descriptor] = {}
        self.before_operation: Callable[[], None] = lambda: None
        self._next_descriptor = 1 << 20
        self._num_names = 0
        self._state = _State(Folder(1, 0o755, clock.time_ns()))

    # What a simulation does.

    def start_process(self, name: str) -> Process:
        """Another process, which calls inside of `running`."""
        process = Process(name)
        self._processes.append(process)
        return process

    @contextmanager
    def running(self, process: Process) -> Iterator[None]:
        """Have a process call meanwhile."""
        former, self.process = self.process, process
        try:
            yield
        finally:
            self.process = former

    def kill_after(self, operations: int) -> None:
        """Kill the process that calls now in its operation after so many; each one later raises `Killed` too."""
        self.process.kill_in = operations

    def end(self, process: Process) -> None:
        """End a process as `kill -9` does: its files are closed and its locks released."""
        process.is_dead = True
        for file in [file for file in self._open.values() if file.process is process]:
            self.close(file)

    def restart(self, power_cut: bool) -> None:
        """End every process, after a power cut with the loss of what was not synced; another process calls from now."""
        for process in self._processes:
            self.end(process)
        if power_cut:
            lose_power(self._state.top, self.random)
            nodes = dict(self._nodes())
            self._state.free_numbers, self._state.next_number = [], 2 + len(nodes)
        self.process = Process("restarted")
        self._processes = [self.process]

    def snapshot(self) -> object:
        """All files as they are now, for `restore`."""
        return copy.deepcopy(self._state)

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot; every process has ended."""
        assert isinstance(snapshot, _State), "of this disk"
        self.restart(power_cut=False)
        self._state = copy.deepcopy(snapshot)

    @property
    def open_files(self) -> list[str]:
        """The paths of the files that are open."""
        return [file.path for file in self._open.values()]

    @property
    def files(self) -> dict[str, bytes]:
        """The contents of every regular file by its path."""
        return {path: bytes(node.data) for path, node in self._nodes() if isinstance(node, File)}

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(node.num_bytes for _, node in self._nodes() if isinstance(node, File))

    def sync_names(self) -> None:
        """Have the system make names durable before what is in their files, as it does now and then."""
        self._state.top.sync()
        for _, node in self._nodes():
            if isinstance(node, Folder):
                node.sync()

    def flip_bit(self, path: str) -> None:
        """Damage a file where it lies."""
        node = self.find(path)
        if isinstance(node, File) and node.data:
            bit = self.random.randrange(8 * len(node.data))
            node.data[bit // 8] ^= 1 << bit % 8

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put disk, clock and names of temporary files under the product's modules."""
        from localinfer.storage import conversations, prompt_cache, response_store, sessions
        from localinfer.system import disk, files

        assert all((conversations, response_store)), "imported, so that they get this clock"
        patches = [
            mock.patch.object(disk, "os", Calls(self)),
            mock.patch.object(disk, "FileIO", self.file_of),
            mock.patch.object(disk, "fcntl", Locks(self)),
            mock.patch.object(files, "secrets", self),
            mock.patch.object(conversations, "secrets", self),
            mock.patch.object(conversations, "datetime", _datetime_of(self.clock)),
            mock.patch.object(prompt_cache, "atexit", mock.Mock()),
            mock.patch.object(prompt_cache, "num_io_threads", lambda: 1),
            mock.patch.object(sessions, "num_io_threads", lambda: 1),
        ]
        patches += [mock.patch.object(module, "time", self.clock) for module in _modules_with_time()]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()

    def token_hex(self, num_bytes: int) -> str:
        """Names that no other file has, in place of `secrets.token_hex`."""
        self._num_names += 1
        return f"{self._num_names:0{2 * num_bytes}x}"

    # What the calls ask.

    def operate(self, path: str | None = None, *, needs_space: bool = False, process: Process | None = None) -> bool:
        """Count one operation, and raise what goes wrong at it; return whether the process ends in it.

        Then the caller does a part of it, and calls `die`.
        """
        self.before_operation()
        process = process or self.process
        if process.is_dead:
            raise Killed(process.name)
        self.num_operations += 1
        if process.kill_in is not None:
            process.kill_in -= 1
            if process.kill_in < 0:
                return True
        faults = self.faults
        if path is not None and faults.permission_lost and self.random.random() < faults.permission_lost:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if needs_space and faults.full_disk and self.random.random() < faults.full_disk:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return False

    def die(self, process: Process | None = None) -> None:
        """End a process and raise `Killed`."""
        process = process or self.process
        self.end(process)
        raise Killed(process.name)

    def call(self, path: str, *, needs_space: bool = False) -> None:
        """Count an operation that happens whole or not at all."""
        if self.operate(path, needs_space=needs_space):
            self.die()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more can be written."""
        return self.capacity is None or self.num_bytes + num_bytes <= self.capacity

    def find(self, path: str) -> Node:
        """What is at a path. Raises: FileNotFoundError, NotADirectoryError."""
        node: Node = self._state.top
        for name in _parts(os.fspath(path)[self._num_root :]):
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            found = node.names.get(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = found
        return node

    def folder_of(self, path: str) -> tuple[Folder, str]:
        """The folder that a path is in, and its name there. Raises: FileNotFoundError, NotADirectoryError."""
        folder = self.find(os.path.dirname(path))
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return folder, os.path.basename(path)

    def new(self, make: Callable[[int, int, int], Any], mode: int) -> Any:
        """A new file or folder, with the lowest number that is free."""
        state = self._state
        if state.free_numbers:
            number = heapq.heappop(state.free_numbers)
        else:
            number, state.next_number = state.next_number, state.next_number + 1
        return make(number, mode, self.now_ns())

    def now_ns(self) -> int:
        """What a file gets as its time."""
        return self.clock.time_ns() // _RESOLUTION_NS * _RESOLUTION_NS

    def name(self, folder: Folder, changes: "dict[str, Node | None]") -> None:
        """Change the names of a folder at once."""
        former = [folder.names[name] for name in changes if name in folder.names]
        folder.change(changes)
        folder.changed_ns = self.now_ns()
        for node in changes.values():
            if node is not None:
                node.num_names += 1
        for node in former:
            node.num_names -= 1
            self._free(node)

    def open(self, node: Node, path: str, flags: int) -> int:
        """A descriptor of a file or a folder."""
        self._next_descriptor += 1
        node.num_open += 1
        self._open[self._next_descriptor] = Descriptor(self._next_descriptor, node, path, self.process, flags)
        return self._next_descriptor

    def file_of(self, descriptor: int, mode: str) -> Any:
        """In place of `FileIO`."""
        if descriptor in self._open:
            return OpenFile(self, self._open[descriptor])
        from io import FileIO

        return FileIO(descriptor, mode)

    def open_file(self, descriptor: int) -> Descriptor | None:
        """The open file of a descriptor; None for one of the real file system."""
        return self._open.get(descriptor)

    def close(self, file: Descriptor) -> None:
        """Forget a descriptor; the last one of a deleted file frees it."""
        if self._open.pop(file.number, None) is None:
            return
        node = file.node
        node.num_open -= 1
        if isinstance(node, File) and node.locked_by is file:
            node.locked_by = None
        self._free(node)

    def _free(self, node: Node) -> None:
        if not node.num_names and not node.num_open:
            heapq.heappush(self._state.free_numbers, node.number)

    def is_here(self, path: Any) -> bool:
        """Whether a path is on this disk."""
        if isinstance(path, int):
            return path in self._open
        text = os.fspath(path)
        return text.startswith(self._root) and text[self._num_root : self._num_root + 1] in ("", "/")

    def _nodes(self) -> Iterator[tuple[str, Node]]:
        return walk(self._state.top, str(self.root))


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in ("", "."))


def _datetime_of(clock: Clock) -> type[datetime]:
    """The class, with the clock's time as now."""

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(clock.time(), tz)

    return Datetime


def _modules_with_time() -> list[Any]:
    """The modules of the product that read the clock."""
    import time

    prefixes = tuple(f"localinfer.{package}." for package in _PACKAGES)
    names = [name for name in sys.modules if name.startswith(prefixes)]
    return [sys.modules[name] for name in names if getattr(sys.modules[name], "time", None) is time]
