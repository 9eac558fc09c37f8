"""Between threads that generate and the event loop: the threads, their events, the first-byte barrier."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
_Job = Callable[[], None]
_BARRIER_SECONDS = 0.015
"""How long a prompt waits for other requests at most, such as one that takes long to be checked."""


class ReplyThreads:
    """As many threads as ever worked at one time, kept for the next job: starting one would hold the event loop up.

    None keeps the interpreter from ending.
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Job | None]] = deque()
        self._is_closed = False

    @property
    def num_idle(self) -> int:
        """How many threads wait for a job."""
        return len(self._idle)

    def run(self, job: _Job) -> None:
        """Have a job done at once; it must not raise."""
        try:
            self._idle.pop().put(job)
        except IndexError:
            threading.Thread(target=self._work, args=(job,), name="localinfer-reply", daemon=True).start()

    def close(self) -> None:
        """End idle threads now, and the others after their job."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _work(self, job: _Job | None) -> None:
        jobs: SimpleQueue[_Job | None] = SimpleQueue()
        while job is not None:
            job()
            # An idle thread must not keep what the job held.
            job = None
            self._idle.append(jobs)
            if self._is_closed:
                self.close()
            job = jobs.get()


class LoopNotifier:
    """Puts items of threads into queues of an event loop, which is woken once for all that have come, until it looked.

    A step of the engine has items for all requests that share it. Waking the loop costs a system call in the thread,
    which must then reacquire the interpreter's lock, and a round of the loop. Made on that loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._is_notified = False

    def put(self, queue: asyncio.Queue[Item], item: Item) -> None:
        """Put an item into a queue, unless the loop was closed. Any thread."""
        self._items.append((queue, item))
        if not self._is_notified:
            self._is_notified = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed: the server ended while a thread still worked.
                self._items.clear()

    def _deliver(self) -> None:
        self._is_notified = False
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class FirstByteBarrier:
    """Requests without an answer yet: a thread about to compute a prompt lets their first bytes out before.

    A step takes every core. Requests that come at one time would be read, checked and answered between its threads,
    each in slices of some milliseconds; so they share their first step instead, and it begins when all have their first
    bytes. Any thread may call.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        """A request has come."""
        with self._changed:
            self._num_open += 1

    def end(self) -> None:
        """Its first bytes are out, or never will be."""
        with self._changed:
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def wait(self) -> bool:
        """Return when no request is being opened, or after a while; whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, _BARRIER_SECONDS)
