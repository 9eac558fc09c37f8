"""Threads that generate texts, kept for the next when theirs is done: starting one would hold the event loop up."""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

_Job = Callable[[], None]


class ReplyThreads:
    """As many threads as ever worked at one time. None keeps the interpreter from ending."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Job | None]] = deque()
        self._is_closed = False

    def run(self, job: _Job) -> None:
        """Have a job done at once; it must not raise."""
        try:
            self._idle.pop().put(job)
        except IndexError:
            threading.Thread(target=self._work, args=(job,), name="localinfer-reply", daemon=True).start()

    def close(self) -> None:
        """Let idle threads end, and the others after their job."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _work(self, job: _Job | None) -> None:
        jobs: SimpleQueue[_Job | None] = SimpleQueue()
        while job is not None:
            job()
            # Whoever is idle must not keep what the job held.
            job = None
            self._idle.append(jobs)
            if self._is_closed:
                self.close()
            job = jobs.get()
