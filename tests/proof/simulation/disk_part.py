"""What the parts of the simulation of what is kept share: processes, folders, and what a violation is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.proof.simulation.disk import Disk, Process


class Violation(AssertionError):
    """Something that was promised of what is kept does not hold."""


def demand(holds: object, said: str) -> None:
    """Raise `Violation` unless something holds."""
    if not holds:
        raise Violation(said)


@dataclass(eq=False)
class Member:
    """A simulated process, with the product's objects that each part made for it."""

    number: int
    process: Process
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass
class Setting:
    """What a run is like. max_bytes: budget of the prompt cache and of the responses. is_roomy: it is never reached."""

    num_members: int
    max_bytes: int
    is_roomy: bool


Operation = Callable[[Member, Random], None]


class Part:
    """One kind of what is kept, and the model of what it must be.

    operations: by name, and how often each; those in `unchecked` read what no checksum protects, so that no bit may
    flip meanwhile; those in `alone` are never beside others.
    """

    name = ""

    def __init__(self, disk: Disk, setting: Setting) -> None:
        self.disk, self.setting = disk, setting
        self.operations: dict[str, tuple[int, Operation]] = {}
        self.unchecked: frozenset[str] = frozenset()
        self.alone: frozenset[str] = frozenset()

    @property
    def folder(self) -> Path:
        """Where it keeps its files."""
        return self.disk.root / self.name

    def open(self, member: Member) -> None:
        """Make a process's objects."""

    def has_lost_power(self) -> None:
        """Expect only what outlives a power cut."""

    def has_been_killed(self, member: Member) -> None:
        """Expect only what outlives a kill of a process."""

    def has_failed(self, operation: str) -> None:
        """Expect only what remains after faults of the disk in an operation."""

    def check(self) -> None:
        """Look at what is on the disk, without operations. Raises: Violation."""

    def check_rests(self, member: Member) -> None:
        """Look, after hours without writers, whether anything remains of unfinished writes. Raises: Violation."""
