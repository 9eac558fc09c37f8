"""Keys typed while a program writes: kept for the next prompt as they were typed, and not shown in between."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

try:
    import termios
except ImportError:  # Windows: its console shows no key that is not read.
    HAS_TERMIOS = False
else:
    HAS_TERMIOS = True

_INPUT_MODES, _LOCAL_MODES = 0, 3
"""Places in what `termios.tcgetattr` returns."""
_PASTE_MARKS_ON, _PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"


@contextmanager
def keystrokes_held(keyboard: TextIO, screen: TextIO) -> Iterator[Callable[[], None]]:
    """Leave what is typed between prompts to the next prompt, key by key; Ctrl-C still interrupts.

    A terminal by itself shows what is typed in the midst of what a program prints, and turns Enter into a line feed,
    which a prompt of several lines cannot tell from Ctrl-J. Held from before the first prompt until after the last:
    each prompt puts back what it found. Where `keyboard` is no such terminal this does nothing.
    Yields what is to be called after each prompt: a paste then comes with marks around it, as prompts ask for while
    they read, and stays one message.
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
