"""What goes wrong in a simulated process, and when: errors of passes, memory that ends, Ctrl-C at any line."""

import linecache
import sys
from collections.abc import Callable
from types import FrameType

from localinfer.engine.cache.block_pool import PagePool, SlabAllocator
from localinfer.errors import OutOfMemoryError

_TRACED = (
    "localinfer/engine/cache/",
    "localinfer/engine/admission.py",
    "localinfer/engine/runner.py",
    "localinfer/engine/scheduler.py",
    "localinfer/engine/speculation/",
    "localinfer/engine/sampling/",
)
_UNTRACED = frozenset({"next_event", "exclusive", "_settle", "leave", "_wake", "_depart", "__del__"})
"""They take and release the lock of steps, by single operations between which no signal comes; and Python ignores what
is raised in finalizers, which have something to do only after Ctrl-C came already."""


_TIED = "append(event)"
"""A line of the runner that no signal can come before: they are handled after calls, and the line above has none."""


class SimulatedError(Exception):
    """What a program raises that fails."""


class Violation(AssertionError):
    """Something that must never happen did."""


class Faults:
    """Countdowns, each of which the next calls of its kind move on.

    program: passes that fail. memory: allocations of pages or slots that are refused. system: of memory from the system
    that fail. interrupt: places in a step until Ctrl-C; 0 for never. num_fired: faults that were met. took_memory:
    whether one was that leaves requests without memory, until that is noted.
    """

    def __init__(self) -> None:
        self.program = self.memory = self.system = self.interrupt = 0
        self.num_fired = 0
        self.took_memory = False
        self.was_interrupted = False

    def clear(self) -> None:
        """Nothing more goes wrong."""
        self.program = self.memory = self.system = self.interrupt = 0

    def at(self, place: str) -> None:
        """Raise what is due at a place of a step."""
        if self.interrupt:
            self.interrupt -= 1
            if not self.interrupt:
                self.num_fired += 1
                self.was_interrupted = True
                raise KeyboardInterrupt
        if self.program and place == "before a pass":
            self.program -= 1
            self.num_fired += 1
            raise SimulatedError("a pass that fails")

    def install(self, pool: PagePool) -> None:
        """Put the faults of memory under a pool."""
        acquire, take_slot = pool.acquire, pool.take_slot

        def refuse() -> None:
            self.at("before memory")
            if self.memory:
                self.memory -= 1
                self.num_fired += 1
                self.took_memory = True
                raise OutOfMemoryError("a simulated end of memory")

        def failing_acquire(count: int, windowed: object = None) -> object:
            refuse()
            return acquire(count, windowed)  # type: ignore[arg-type]

        def failing_take_slot(slots: object) -> int:
            refuse()
            return take_slot(slots)  # type: ignore[arg-type]

        pool.acquire = failing_acquire  # type: ignore[method-assign,assignment]
        pool.take_slot = failing_take_slot  # type: ignore[method-assign,assignment]
        for slabs in pool._kinds:
            slabs._allocate = self._failing_allocation(slabs)  # type: ignore[method-assign]

    def _failing_allocation(self, slabs: SlabAllocator) -> Callable[[int, int], int]:
        allocate = slabs._allocate

        def failing(slot: int, num_bytes: int) -> int:
            if self.system:
                self.system -= 1
                self.num_fired += 1
                self.took_memory = True
                raise MemoryError
            return allocate(slot, num_bytes)

        return failing


class LineInterrupt:
    """A context in which Ctrl-C comes after so many lines of the engine and the cache."""

    def __init__(self, lines: int) -> None:
        self._left = lines
        self.has_fired = False

    def __enter__(self) -> "LineInterrupt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> object:
        if event == "call":
            code = frame.f_code
            is_traced = code.co_name not in _UNTRACED and any(part in code.co_filename for part in _TRACED)
            return self._trace if is_traced else None
        self._left -= event == "line"
        if self._left <= 0 and not self.has_fired and not _is_tied(frame):
            self.has_fired = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._trace


def _is_tied(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == _TIED
