"""The end of standard input or of the parent process, watched from the first moment of a process.

Imports little: a program may be killed while the one that it started is still importing.
"""

import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable

OPTION = "--until-stdin-ends"
"""Of the command line that wants it."""

_LOOK_SECONDS = 0.2
_PIECE_BYTES = 512


class ParentWatcher:
    """Ends the process, exit code 0, when standard input or the parent has ended, until `tell` names another way.

    parent: the number of the process that started this one, when the watch began; 0 if it had ended.
    """

    def __init__(self, on_end: Callable[[], object] = lambda: os._exit(0)) -> None:
        self.parent = _parent()
        self._lock = threading.Lock()
        self._on_end = on_end
        self._has_ended = False
        for name, work in (("stdin", self._watch_input), ("parent", self._watch_parent)):
            threading.Thread(target=work, name=f"localinfer-{name}", daemon=True).start()

    def tell(self, on_end: Callable[[], object]) -> None:
        """Call this at the end instead; at once if that has come."""
        with self._lock:
            self._on_end = on_end
            has_ended = self._has_ended
        if has_ended:
            on_end()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            on_end = self._on_end
        on_end()

    def _watch_input(self) -> None:
        if not input_can_end():
            return
        # Not through `sys.stdin`: its lock, held by a blocked thread, would break the interpreter's shutdown.
        with contextlib.suppress(OSError):
            while _has_more():
                pass
        self._end()

    def _watch_parent(self) -> None:
        """Wait for the process that started this one, as where standard input is that one's own and stays open."""
        if sys.platform == "win32":
            # Not tested. The number of a parent stays that of one that has ended.
            import psutil

            with contextlib.suppress(psutil.Error):
                if self.parent:
                    psutil.Process(self.parent).wait()
        else:
            # Not the signal that Linux sends when a parent ends: it comes when a thread does, the one that started us.
            is_orphan = _is_orphan(self.parent)
            while os.getppid() == self.parent and not is_orphan:
                time.sleep(_LOOK_SECONDS)
        self._end()


def _parent() -> int:
    if sys.platform == "win32":
        from localinfer.system.windows import starting_process

        return starting_process()
    return os.getppid()


def input_can_end() -> bool:
    """True if standard input is a pipe, a socket or a terminal, whose end says that another process has ended.

    A file and /dev/null, which some programs give their children, are at their end from the first moment.
    """
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(0)


def _is_orphan(parent: int) -> bool:
    """True if this process was adopted by its parent because the one that started it had ended already.

    It is in the session of the process that started it, or leads one of its own. Where the process that adopts orphans
    is in the same session, as the first process of a container may be, nothing tells the two apart.
    """
    try:
        session = os.getsid(0)
        return session != os.getpid() and os.getsid(parent) != session
    except OSError:
        return False


def _has_more() -> bool:
    """Wait for standard input, and return True if it continues, as it does where memory for what came is short."""
    try:
        return bool(os.read(0, _PIECE_BYTES))
    except MemoryError:
        return True
