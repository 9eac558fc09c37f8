"""Turns at the model: one thread at a time takes a step for all, and no thread exists only to do so.

Whoever wants a token and finds nobody at work takes the turn; the others wait, each on a lock of its own. Whoever ends
a turn wakes those it has worked for, and hands the turn itself to the first who still has nothing: a guest, who wants
the model for itself between two steps, or the reader of a generation, who then goes on with the steps of all. So one
thread alone switches to no other, and nobody waits for a thread that is busy elsewhere.

Nothing here blocks but `take` and `take_or_wait`, and a turn may be taken and ended by the garbage collector in the
midst of any line: what happens at once rests on single operations of deques and on locks that are only tried.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol


class Reader(Protocol):
    """Somebody a turn may have worked for; `generation.Request` is one."""

    waiter: "Waiter | None"

    def has_news(self) -> bool:
        """Whether there is no need to wait any longer."""
        ...


class Waiter:
    """A thread that waits for news, or for the turn; it gets one of them, and who claims it first decides which."""

    __slots__ = ("_claim", "_wake", "has_turn", "reader")

    def __init__(self, reader: Reader | None) -> None:
        self.reader = reader
        self.has_turn = False
        self._claim = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()

    def claim(self) -> bool:
        """Whether the caller may decide; only the first who asks."""
        return self._claim.acquire(blocking=False)

    def wake(self) -> None:
        """End the wait; by who has claimed it."""
        self._wake.release()

    def wait(self) -> None:
        """Wait to be woken."""
        self._wake.acquire()


class StepLock:
    """Who is at work, and who waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: deque[Waiter] = deque()
        self.try_take: Callable[[], bool] = functools.partial(self._lock.acquire, False)
        """Take the turn if it is free. Every token of a lone generation begins with it, so it is no method."""

    def take_or_wait(self, reader: Reader | None) -> bool:
        """Take the turn, or wait for it or for news; return whether the caller has the turn now."""
        if self.try_take():
            return True
        waiter = Waiter(reader)
        if reader is not None:
            reader.waiter = waiter
        self._waiters.append(waiter)
        # The turn may have ended, or the news come, before this one was in line.
        if self.try_take():
            waiter.claim()
            return True
        if reader is not None and reader.has_news() and waiter.claim():
            return False
        try:
            waiter.wait()
        except BaseException:
            if not waiter.claim():
                waiter.wait()
            if waiter.has_turn:
                self.end()
            raise
        return waiter.has_turn

    @contextmanager
    def take(self) -> Generator[None]:
        """Have the turn to oneself for a block; every guest comes before the next step."""
        taken = self.take_or_wait(None)
        assert taken, "a guest waits for nothing else"
        try:
            yield
        finally:
            self.end()

    def pause(self) -> bool:
        """Between two steps of one who goes on: wake who has news and let a guest in.

        Returns whether the caller still has the turn.
        """
        if self._waiters and (heir := self._serve(only_guests=True)) is not None:
            heir.has_turn = True
            heir.wake()
            return False
        return True

    def end(self) -> None:
        """End the turn: wake who has news, and hand it to the first who waits on."""
        while True:
            if self._waiters and (heir := self._serve(only_guests=False)) is not None:
                heir.has_turn = True
                heir.wake()
                return
            self._lock.release()
            # Somebody may have come between the look and the release.
            if not self._waiters or not self.try_take():
                return

    def _serve(self, *, only_guests: bool) -> Waiter | None:
        """Wake everybody with news and claim the first of the others, or of the guests. The caller has the turn."""
        heir = None
        for waiter in self._waiters.copy():
            reader = waiter.reader
            if reader is not None and reader.has_news():
                if waiter.claim():
                    waiter.wake()
            elif heir is None and (reader is None or not only_guests):
                heir = waiter if waiter.claim() else None
            else:
                continue
            self._waiters.remove(waiter)
        return heir
