"""Shut a server's process down: by a signal, with standard input or with its parent, and always in time."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

from localinfer.apps.cli import guard, guard_on_windows
from localinfer.system.parent_watch import ParentWatcher
from localinfer.types import Closing

_LOADING_SECONDS = 1.2
"""From being asked to the end while no request is answered yet: only a load has to be given up."""
_GUARD_SECONDS = 0.4
"""Time that the guard waits longer than this process itself."""


class ShutdownController(Closing):
    """Ends a server when it is asked to, and the whole process if that takes too long.

    Running threads are abandoned then: compiled code cannot be interrupted, and a thread may wait for a disk. Files
    are written whole or not at all, so nothing on disk is lost.

    seconds: from being asked to the end once requests are answered; less while a model loads.
    owns_process: True if the process may be ended; False in a program that calls the command, where the server is only
    asked. watch: asks when standard input ends, or the process that started this one.
    remove: files of this process alone, removed when it was killed.
    """

    def __init__(
        self, seconds: float, *, owns_process: bool, watch: ParentWatcher | None = None, remove: Sequence[Path] = ()
    ) -> None:
        self._seconds = seconds
        self._limit = min(seconds, _LOADING_SECONDS)
        self.owns_process = owns_process
        self._remove = remove
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._lock = threading.Lock()
        self._was_asked = self._is_closed = False
        self._stop: Callable[[], object] | None = None
        self._leave: Callable[[], object] = _nothing
        self._former_wakeup: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe: tuple[int, int] | None = None
        if owns_process and not getattr(sys, "frozen", False):
            with contextlib.suppress(OSError):
                self._start_guard(0 if watch is None else watch.parent)
        threading.Thread(target=self._end_when_asked, name="localinfer-end", daemon=True).start()
        if watch is not None:
            watch.tell(self.ask)

    def attach(self, stop: Callable[[], object], leave: Callable[[], object]) -> None:
        """From now on call `stop` when asked to end, and `leave` before the process is ended."""
        with self._lock:
            self._stop, self._leave = stop, leave
        if self._was_asked:
            stop()
        is_main = threading.current_thread() is threading.main_thread()
        # The event loop of Windows has its own use for that, and the guard hears the console itself.
        if self._pipe is not None and is_main and sys.platform != "win32":
            self._former_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def serve(self) -> None:
        """Requests are answered from now on, and those that run may be finished."""
        self._limit = self._seconds
        self._tell_guard(guard.READY)

    def ask(self) -> None:
        """Ask for the end. Any thread, and signal handlers: one may interrupt another in it."""
        self._asked.put(True)

    def end(self, *, must: bool = False) -> None:
        """End the process, with exit code 0; in another program only if it must be.

        The interpreter's own exit would wait for the threads of every pool, and for a kernel that is being compiled.
        """
        if self.owns_process or must:
            self._exit()

    def close(self) -> None:
        """Watch no longer; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._asked.put(False)
        if self._former_wakeup is not None:
            signal.set_wakeup_fd(self._former_wakeup)
        if self._pipe is not None:
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = None
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_GUARD_SECONDS)

    def _start_guard(self, parent: int) -> None:
        # The end that is read stays open here too: should the guard be killed, writing must not fail.
        self._pipe = reading, writing = os.pipe()
        limits = [str(seconds + _GUARD_SECONDS) for seconds in (self._limit, self._seconds)]
        words = [*limits, str(parent), *map(os.fspath, self._remove)]
        if sys.platform == "win32":
            self._guard = _start_on_windows([str(os.getpid()), *words], reading)
            return
        os.set_blocking(writing, False)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(reading), *words],
            stdin=None if parent else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(reading,),
            # Ctrl-C on a terminal is sent to all processes of its group.
            start_new_session=True,
        )

    def _tell_guard(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            if self._pipe is not None:
                os.write(self._pipe[1], bytes([byte]))

    def _end_when_asked(self) -> None:
        if not self._asked.get():
            return
        asked = time.monotonic()
        self._tell_guard(guard.END)
        if self.owns_process:
            # A collection in this thread may destroy LLVM's objects, and wait for a kernel that is being compiled.
            gc.disable()
        with self._lock:
            self._was_asked = True
            stop = self._stop
        if stop is not None:
            stop()
        if not self.owns_process:
            return
        # Without anything to stop nothing was opened yet that has to be closed.
        while stop is not None and (left := asked + self._limit - time.monotonic()) > 0:
            time.sleep(left)
        if not self._is_closed:
            self._exit()

    def _exit(self) -> NoReturn:
        with contextlib.suppress(Exception):
            self._leave()
        for path in self._remove:
            with contextlib.suppress(OSError):
                path.unlink()
        os._exit(0)


def _start_on_windows(words: Sequence[str], reading: int) -> "subprocess.Popen[bytes]":
    """Not tested. Ctrl-C comes to all processes of the server's console; where it has none, a new one would be seen."""
    flags = 0
    if sys.platform == "win32":
        import ctypes

        if not ctypes.WinDLL("kernel32").GetConsoleCP():
            flags = subprocess.CREATE_NO_WINDOW
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard_on_windows.__file__, *words],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        creationflags=flags,
    )


def _nothing() -> None:
    pass
