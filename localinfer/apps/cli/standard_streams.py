"""Standard streams for a program that was started without them: by a window system, by `pythonw`, by a service."""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing_streams() -> None:
    """Connect every standard stream that is missing to the null device.

    What is printed goes nowhere then, and standard input is empty. A file that is opened later cannot come into the
    place of a closed stream, where it would be written to.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))
