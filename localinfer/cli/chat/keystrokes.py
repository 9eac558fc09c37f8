"""Keys typed while a program writes: kept for the next prompt, and not echoed in between."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

try:
    import termios
except ImportError:  # Windows: its console does not echo unread keys.
    HAS_TERMIOS = False
else:
    HAS_TERMIOS = True

_INPUT_MODES, _LOCAL_MODES = 0, 3
"""Indices into the result of `termios.tcgetattr`."""
_PASTE_MARKS_ON, _PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"


@contextmanager
def keystrokes_held(keyboard: TextIO, screen: TextIO) -> Iterator[Callable[[], None]]:
    """Keep keys typed between prompts for the next prompt; Ctrl-C still interrupts.

    By default a terminal echoes typed keys into the program's output, and turns Enter into a line feed, which a
    multi-line prompt cannot tell from Ctrl-J. Use it around all prompts: each restores the modes it found. Does nothing
    where `keyboard` is not such a terminal.
    Yields a function to call after each prompt: it switches bracketed paste on again, so that a paste between prompts
    stays one message.
    Source: POSIX.1-2017, chapter 11, "General Terminal Interface".
    """
    if not HAS_TERMIOS or not keyboard.isatty():
        yield _do_nothing
        return
    try:
        descriptor = keyboard.fileno()
        former = termios.tcgetattr(descriptor)
    except (OSError, termios.error):
        yield _do_nothing
        return
    held = list(former)
    held[_INPUT_MODES] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    held[_LOCAL_MODES] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN)
    termios.tcsetattr(descriptor, termios.TCSANOW, held)
    try:
        yield lambda: _write(screen, _PASTE_MARKS_ON)
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, former)
        _write(screen, _PASTE_MARKS_OFF)


def _do_nothing() -> None:
    pass


def _write(screen: TextIO, sequence: str) -> None:
    if os.environ.get("TERM") != "dumb":
        screen.write(sequence)
        screen.flush()
