"""A clock that stands still until it is told to go on; it has the names of the module `time`."""

import threading
import time
from collections.abc import Callable


class Clock:
    """Monotonic time and the wall clock's, in seconds; `jump` moves the wall clock alone, back as well.

    before_sleep: called by `sleep`, before time passes. Threads that were there before sleep in real time.
    """

    def __init__(self, started: float = 1_800_000_000.0) -> None:
        self.before_sleep: Callable[[], None] = lambda: None
        self._others = set(threading.enumerate()) - {threading.current_thread()}
        self._monotonic_ns = 1_000_000_000
        self._wall_ns = int(started * 1e9) - self._monotonic_ns

    def monotonic(self) -> float:
        """Seconds that have passed."""
        return self._monotonic_ns / 1e9

    def perf_counter(self) -> float:
        """Seconds that have passed."""
        return self._monotonic_ns / 1e9

    def time(self) -> float:
        """Seconds since 1970."""
        return (self._monotonic_ns + self._wall_ns) / 1e9

    def time_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._monotonic_ns + self._wall_ns

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        if threading.current_thread() in self._others:
            time.sleep(seconds)
            return
        self.before_sleep()
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, "monotonic time never goes back"
        self._monotonic_ns += int(seconds * 1e9)

    def jump(self, seconds: float) -> None:
        """Move the wall clock, forwards or back."""
        self._wall_ns += int(seconds * 1e9)
