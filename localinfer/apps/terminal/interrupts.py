"""Ctrl-C while a reply comes: the first one stops the reply, a second one within a moment leaves the chat."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from localinfer.system import interruption

MOMENT_SECONDS = 1.5
"""A second Ctrl-C within it leaves."""


class Interrupts:
    """Remembers when Ctrl-C was pressed, in replies and at prompts.

    leaves: it was pressed twice within a moment.
    """

    def __init__(self) -> None:
        self.leaves = False
        self._pressed_at = float("-inf")
        self._is_stopping = False

    def press(self) -> bool:
        """Ctrl-C was pressed; return whether it was the second within a moment."""
        now = time.monotonic()
        self.leaves = self.leaves or now - self._pressed_at <= MOMENT_SECONDS
        self._pressed_at = now
        return self.leaves

    @property
    def was_just_pressed(self) -> bool:
        """Whether a Ctrl-C now would be the second within a moment."""
        return time.monotonic() - self._pressed_at <= MOMENT_SECONDS

    @contextmanager
    def during_reply(self) -> Iterator[None]:
        """Have the first Ctrl-C of the block raise KeyboardInterrupt, once, so that what stops is not stopped again.

        One that follows is only counted; a third one raises as well, should stopping take too long.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = signal.getsignal(signal.SIGINT)
        if not interruption.raises_interrupts():
            # The process was told to ignore it, or somebody else answers.
            yield
            return
        self._is_stopping = False
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            try:
                yield
            finally:
                # From here on only counted: what follows restores the terminal.
                self._is_stopping = True
        finally:
            signal.signal(signal.SIGINT, former)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        was_leaving, was_stopping = self.leaves, self._is_stopping
        self._is_stopping = True
        self.press()
        if not was_stopping or was_leaving:
            raise KeyboardInterrupt
