"""The keyboard during a chat: its modes, and Ctrl-C while a reply comes."""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from localinfer.system import interruption
from localinfer.types import Closing

try:
    import termios
except ImportError:  # Windows: its console does not echo unread keys.
    HAS_TERMIOS = False
else:
    HAS_TERMIOS = True

_INPUT_MODES, _LOCAL_MODES, _CHARACTERS = 0, 3, 6
"""Indices into the result of `termios.tcgetattr`."""
_PASTE_MARKS_ON, _PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"
_PASTE_BEGIN, _PASTE_END = b"\x1b[200~", b"\x1b[201~"
_PASTE_SECONDS = 1.0
"""Without anything of a paste after which its end is lost."""
_MOST_BEFORE = 1 << 16
_SHOW_CURSOR = "\x1b[?25h"


class Keystrokes(Closing):
    """Keeps keys typed between prompts; Ctrl-C still interrupts.

    By default a terminal echoes typed keys into the program's output, and turns Enter into a line feed, which a
    multi-line prompt cannot tell from Ctrl-J. Use it around all prompts: each restores the modes it found. Does nothing
    where `keyboard` is not such a terminal; is_held says whether it is one. A context manager that restores the modes.
    Source: POSIX.1-2017, chapter 11, "General Terminal Interface".
    """

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        self._screen = screen
        self._former: list[Any] | None = None
        self.descriptor = -1
        if HAS_TERMIOS and keyboard.isatty():
            try:
                self.descriptor = keyboard.fileno()
                self._former = termios.tcgetattr(self.descriptor)
            except (OSError, termios.error):
                return
            self.hold()

    @property
    def is_held(self) -> bool:
        """True if the keyboard is a terminal whose modes can be set."""
        return self._former is not None

    def hold(self) -> None:
        """Set the chat's modes."""
        if self._former is None:
            return
        held = list(self._former)
        held[_CHARACTERS] = list(held[_CHARACTERS])
        held[_INPUT_MODES] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        held[_LOCAL_MODES] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN)
        # Ctrl-C would discard what was typed before it, and half of a drawing.
        held[_LOCAL_MODES] |= termios.NOFLSH
        held[_CHARACTERS][termios.VMIN], held[_CHARACTERS][termios.VTIME] = 1, 0
        termios.tcsetattr(self.descriptor, termios.TCSANOW, held)
        self.mark_pastes()

    def typed_before(self) -> str:
        """Read the text typed so far; Enter is a line feed in it before the chat's modes were set, and a return later.

        A marked paste that has begun is waited for.
        """
        received = b""
        try:
            while len(received) < _MOST_BEFORE:
                is_within_paste = received.rfind(_PASTE_BEGIN) > received.rfind(_PASTE_END)
                if not select.select([self.descriptor], [], [], _PASTE_SECONDS if is_within_paste else 0)[0]:
                    break
                part = os.read(self.descriptor, _MOST_BEFORE)
                received += part
                if not part:
                    break
        except OSError:
            pass
        return received.decode(errors="replace")

    def mark_pastes(self) -> None:
        """Have pastes marked, so that one of many lines is one message; each prompt ends by switching that off."""
        if self._former is not None:
            self._write(_PASTE_MARKS_ON)

    def release(self) -> None:
        """Restore the modes that were found."""
        if self._former is not None:
            termios.tcsetattr(self.descriptor, termios.TCSANOW, self._former)
            self._write(f"{_PASTE_MARKS_OFF}{_SHOW_CURSOR}")

    def suspend(self) -> None:
        """Stop the process, as Ctrl-Z does, with the modes that were found until it goes on."""
        if self._former is not None:
            self.release()
            signal.raise_signal(signal.SIGTSTP)
            # Here it continues, by `fg`.
            self.hold()

    def close(self) -> None:
        """Restore the modes that were found; may be called again."""
        self.release()
        self._former = None

    def _write(self, sequence: str) -> None:
        if os.environ.get("TERM") != "dumb":
            self._screen.write(sequence)
            self._screen.flush()


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
        """True if a Ctrl-C now would be the second within a moment."""
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
