"""Files and folders of a simulated disk: what was written, and what of it would outlive a power cut."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

_SECTOR_BYTES = 64
"""What a power cut tears a file at; less than a real disk's, because the files of a simulation are small."""


@dataclass(eq=False)
class File:
    """A regular file. durable: its contents when it was last synced; None before the first time."""

    number: int
    mode: int
    changed_ns: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None
    num_open: int = 0
    num_names: int = 0
    locked_by: object = None

    @property
    def kind(self) -> int:
        """The kind of file, as a part of `st_mode`."""
        return stat.S_IFREG

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return len(self.data)

    def sync(self) -> None:
        """Make the contents durable."""
        self.durable = bytes(self.data)

    def lose_power(self, random: Random) -> None:
        """Keep what was synced; of what was written since, all, some sectors or nothing."""
        kept, written = self.durable or b"", bytes(self.data)
        if kept != written:
            fate = random.random()
            if fate < 0.3:
                self.data = bytearray(kept)
            elif fate < 0.8:
                self.data = bytearray(_torn(kept, written, random))
        self.durable = bytes(self.data)
        self.num_open, self.locked_by = 0, None


@dataclass(eq=False)
class Folder:
    """A folder. durable: its names when it was last synced; log: the changes since, each of which happens whole."""

    number: int
    mode: int
    changed_ns: int
    names: "dict[str, Node]" = field(default_factory=dict)
    durable: "dict[str, Node]" = field(default_factory=dict)
    log: "list[dict[str, Node | None]]" = field(default_factory=list)
    num_open: int = 0
    num_names: int = 0

    @property
    def kind(self) -> int:
        """The kind of file, as a part of `st_mode`."""
        return stat.S_IFDIR

    @property
    def num_bytes(self) -> int:
        """What `st_size` says of a folder."""
        return 4096

    def change(self, changes: "dict[str, Node | None]") -> None:
        """Name files, or take their names (None), at once."""
        self.log.append(changes)
        _apply(self.names, changes)

    def sync(self) -> None:
        """Make the names durable."""
        self.durable = dict(self.names)
        self.log.clear()

    def lose_power(self, random: Random) -> None:
        """Keep the names that were synced, and of the changes since the first ones, or any: no standard orders them."""
        names = dict(self.durable)
        if random.random() < 0.5:
            kept = self.log[: random.randint(0, len(self.log))]
        else:
            kept = [changes for changes in self.log if random.random() < 0.5]
        for changes in kept:
            _apply(names, changes)
        self.names = names
        self.sync()
        self.num_open = 0


Node: TypeAlias = File | Folder


def walk(folder: Folder, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every file and folder below a folder, with its path; a folder comes before what it holds."""
    for name, node in list(folder.names.items()):
        yield f"{path}/{name}", node
        if isinstance(node, Folder):
            yield from walk(node, f"{path}/{name}")


def lose_power(root: Folder, random: Random) -> None:
    """Leave of a tree what a power cut does."""
    root.lose_power(random)
    reached: set[Node] = set()
    for number, (_, node) in enumerate(walk_once(root, random, reached), start=2):
        node.number = number
    for node in reached:
        node.num_names = 0
    for folder in [root, *(node for node in reached if isinstance(node, Folder))]:
        for node in folder.names.values():
            node.num_names += 1


def walk_once(folder: Folder, random: Random, reached: "set[Node]") -> "Iterator[tuple[Folder, Node]]":
    """Every node below a folder once, after it has lost power; a lost name of a renamed file may leave two."""
    for node in list(folder.names.values()):
        if node in reached:
            continue
        reached.add(node)
        node.lose_power(random)
        yield folder, node
        if isinstance(node, Folder):
            yield from walk_once(node, random, reached)


def _apply(names: "dict[str, Node]", changes: "dict[str, Node | None]") -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _torn(kept: bytes, written: bytes, random: Random) -> bytes:
    """Some sectors of what was written, in a file that has reached either length or one between."""
    size = random.choice((len(kept), len(written), random.randint(0, len(written))))
    data = bytearray(kept[:size].ljust(size, b"\0"))
    for start in range(0, size, _SECTOR_BYTES):
        if random.random() < 0.5:
            end = min(size, start + _SECTOR_BYTES)
            data[start:end] = written[start:end].ljust(end - start, b"\0")
    return bytes(data)
