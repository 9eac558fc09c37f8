"""Writing behind: sequences that went idle are written in steps of a few pages, by a thread or by whom asks for a step.

The thread exists only while there is something to write.
"""

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from localinfer.engine.cache.salt import NO_SALT
from localinfer.storage.store import common_length, finished
from localinfer.types import TokenIds

_MOST_DELAYS = 4
"""How many idle times a sequence waits at most while others go idle after it."""

Steps: TypeAlias = Generator[None, None, None]


class IdleSequence(NamedTuple):
    """A text that is not computed any more, and the salt that keeps it apart."""

    token_ids: TokenIds
    salt: bytes = NO_SALT


class Saving(Protocol):
    """The steps in which some sequences are written: few pages each, or, not behind, all that is there."""

    def __call__(self, pending: Sequence[IdleSequence], *, is_behind: bool) -> Steps: ...


class WriteBehind:
    """The queue of sequences to be written. Thread-safe.

    saving: its steps are taken under a lock, so that they never overlap. idle_seconds: idle time after a sequence's
    last token before it is written. has_thread: False leaves it to the callers of `write_next`.
    """

    def __init__(self, saving: Saving, idle_seconds: float, *, has_thread: bool) -> None:
        self._saving = saving
        self.idle_seconds = idle_seconds
        self._has_thread = has_thread
        self._wake = threading.Condition()
        self._pending: list[IdleSequence] = []
        self._due = self._latest = 0.0
        self._is_closing = False
        self._writer: threading.Thread | None = None
        # Lock order: before the engine's lock, which copying pages acquires.
        self._writing = threading.Lock()
        self._steps: Steps | None = None

    def add(self, sequence: IdleSequence) -> None:
        """Write a sequence once it has been idle for a moment, in place of its beginnings that wait."""
        with self._wake:
            if self._is_closing:
                return
            kept = [one for one in self._pending if not _begins(sequence, one)]
            now = time.monotonic()
            if not self._pending:
                self._latest = now + _MOST_DELAYS * self.idle_seconds
            self._pending = [*kept, sequence]
            # Sequences that go idle all the time, as those before each context shift, must not put it off for ever.
            self._due = min(now + self.idle_seconds, self._latest)
            if self._writer is None and self._has_thread:
                self._writer = threading.Thread(target=self._write, name="localinfer-write-behind", daemon=True)
                self._writer.start()

    def write_next(self) -> bool:
        """Write the next few pages of what is due; False if nothing is."""
        with self._writing:
            if self._steps is None:
                with self._wake:
                    if not self._pending or time.monotonic() < self._due:
                        return False
                    pending, self._pending = self._pending, []
                self._steps = self._saving(pending, is_behind=True)
            self._step()
            return True

    def write_now(self, sequence: IdleSequence) -> None:
        """Finish what was begun, then write this sequence, in steps too; return when it is written."""
        with self._writing:
            while self._steps is not None:
                self._step()
            with self._wake:
                self._pending = [one for one in self._pending if not _begins(sequence, one)]
            finished(self._saving([sequence], is_behind=True))

    def write_all(self) -> None:
        """Finish what was begun, then write everything pending."""
        with self._writing:
            while self._steps is not None:
                self._step()
            with self._wake:
                pending, self._pending = self._pending, []
            finished(self._saving(pending, is_behind=False))

    def stop(self) -> None:
        """Take nothing more, and end the thread after its step; what is pending is left to `write_all`."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread, which was stopped; False if it has not ended in this time."""
        with self._wake:
            writer = self._writer
        if writer is not None:
            writer.join(seconds)
        return writer is None or not writer.is_alive()

    def _step(self) -> None:
        """Take a step; the steps are over at their end, and after an exception."""
        assert self._steps is not None, "there is something to do"
        steps, self._steps = self._steps, None
        with contextlib.suppress(StopIteration):
            next(steps)
            self._steps = steps

    def _write(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._is_closing and (rest := self._due - time.monotonic()) > 0:
                        self._wake.wait(rest)
                while not self._is_closing and self.write_next():
                    pass
                with self._wake:
                    if self._is_closing or not self._pending:
                        self._writer = None
                        return
        finally:
            with self._wake:
                if self._writer is threading.current_thread():
                    self._writer = None


def _begins(sequence: IdleSequence, beginning: IdleSequence) -> bool:
    """Whether a text is the beginning of another of the same salt."""
    size = beginning.token_ids.size
    return sequence.salt == beginning.salt and common_length(beginning.token_ids, sequence.token_ids) == size
