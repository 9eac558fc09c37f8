"""SIGHUP, which has two meanings: read the configuration again, and the terminal is gone.

Service managers and people send it for the first; the system sends it for the second, to what was started in a window
that somebody closes. A server that stayed then would hold its memory with nobody there to see it.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from localinfer.types import Closing

_TERMINAL = "/dev/tty"
"""The controlling terminal of whoever opens it; without one that fails."""


class HangupHandler(Closing):
    """Answers SIGHUP until it is closed: `end` where the terminal that this process was started in is gone, else
    `reload`.

    What was started to outlive its terminal (nohup) only reloads. Nothing happens on systems without the signal, and in
    threads that cannot take signals. Both are called in the signal's handler.
    """

    def __init__(self, reload: Callable[[], object], end: Callable[[], object]) -> None:
        self._reload = reload
        self._end = end
        self._is_closed = not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread()
        if not self._is_closed:
            self._has_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            self._former = signal.signal(signal.SIGHUP, self._handle)

    def close(self) -> None:
        """Let the signal have its former effect; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            signal.signal(signal.SIGHUP, self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._has_terminal and not _has_terminal():
            self._end()
        else:
            self._reload()


def _has_terminal() -> bool:
    try:
        os.close(os.open(_TERMINAL, os.O_RDONLY | getattr(os, "O_NOCTTY", 0)))
    except OSError:
        return False
    return True
