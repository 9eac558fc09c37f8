"""The step lock: one thread at a time takes a step for all requests, and no thread exists only to do so.

A thread that wants a token takes the lock if it is free; the others wait, each on a lock of its own. A thread that
releases the lock wakes those whose requests have news, and hands the lock to the first that still has none: one that
wants the model exclusively between two steps, or the reader of a request, which then continues with the steps of all.
So a lone thread switches to no other, and none waits for a thread that is busy elsewhere.

Nothing here blocks but `exclusive` and `acquire_or_wait`, and the garbage collector may acquire and release the lock in
the middle of any line: what happens at once rests on single operations of deques and on locks that are only tried.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localinfer.engine.request import Request


class Waiter:
    """A thread that waits for news, or for the lock; it gets one of them, and the first thread to claim it decides.

    request: what it reads; None for one that wants the model exclusively.
    """

    __slots__ = ("_claim", "_wake", "has_lock", "request")

    def __init__(self, request: "Request | None") -> None:
        self.request = request
        self.has_lock = False
        self._claim = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()

    def claim(self) -> bool:
        """Whether the caller may decide; True for the first only."""
        return self._claim.acquire(blocking=False)

    def wake(self) -> None:
        """End the wait; after `claim`."""
        self._wake.release()

    def wait(self) -> None:
        """Wait to be woken."""
        self._wake.acquire()


class StepLock:
    """The lock, and the threads that wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: deque[Waiter] = deque()
        self.try_acquire: Callable[[], bool] = functools.partial(self._lock.acquire, False)
        """Take the lock if it is free. Every token of a lone request begins with it, so it is no method."""

    def acquire_or_wait(self, request: "Request | None") -> bool:
        """Take the lock, or wait for it or for news; return whether the caller has the lock now."""
        if self.try_acquire():
            return True
        waiter = Waiter(request)
        if request is not None:
            request.waiter = waiter
        self._waiters.append(waiter)
        # The lock may have become free, or the news come, before this one was in line.
        if self.try_acquire():
            waiter.claim()
            return True
        if request is not None and request.has_news() and waiter.claim():
            return False
        try:
            waiter.wait()
        except BaseException:
            if not waiter.claim():
                waiter.wait()
            if waiter.has_lock:
                self.release()
            raise
        return waiter.has_lock

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Hold the lock for a block, before the next step."""
        has_lock = self.acquire_or_wait(None)
        assert has_lock, "it waits for nothing else"
        try:
            yield
        finally:
            self.release()

    def hand_to_exclusive(self) -> bool:
        """Between two steps of one thread: wake readers with news, and hand the lock to one that wants it exclusively.

        Returns whether the caller still has the lock.
        """
        return not (self._waiters and self._hand_off(only_exclusive=True))

    def release(self) -> None:
        """Wake readers with news, and hand the lock to the first thread that still waits."""
        while True:
            if self._waiters and self._hand_off(only_exclusive=False):
                return
            self._lock.release()
            # A thread may have come between the look and the release.
            if not self._waiters or not self.try_acquire():
                return

    def _hand_off(self, *, only_exclusive: bool) -> bool:
        """Wake all readers with news, and hand the lock to the first of the others; return whether there was one."""
        successor = None
        for waiter in self._waiters.copy():
            request = waiter.request
            if request is not None and request.has_news():
                if waiter.claim():
                    waiter.wake()
            elif successor is None and (request is None or not only_exclusive):
                successor = waiter if waiter.claim() else None
            else:
                continue
            self._waiters.remove(waiter)
        if successor is not None:
            successor.has_lock = True
            successor.wake()
        return successor is not None
