"""Requests that have no answer yet: who is about to compute a prompt lets their first bytes out before.

A step takes every core. Requests that come at one time would be read, checked and answered between its threads, each in
turns of some milliseconds; so they share their first step instead, and it begins when all have their first bytes.
"""

import threading

_PATIENCE_SECONDS = 0.015
"""What a prompt waits for others at most, such as one that takes long to be checked."""


class FirstByteBarrier:
    """How many requests are being opened. Any thread may call."""

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

    def wait(self) -> None:
        """Return when no request is being opened, or after a while."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open, _PATIENCE_SECONDS)
