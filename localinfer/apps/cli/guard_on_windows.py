"""The process of `localinfer.apps.cli.guard` as Windows has it: it waits in threads, for there is no `poll` for pipes.

Ctrl-C and Ctrl-Break come to every process of a console, so also to this one, and need not be told by the server. Run
as a script by itself, it imports nothing heavy. What asks the system has not been run there.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

READY = 0
END = int(signal.SIGTERM)
"""The bytes that a server writes, as in `guard`."""

_LOOK_SECONDS = 0.2
"""A thread that waits for a queue answers no signal meanwhile."""
_SYNCHRONIZE, _TERMINATE = 0x0010_0000, 0x0001
_FOREVER = 0xFFFF_FFFF


def main(words: list[str]) -> None:
    """Watch until the server is gone, and end it if it was to end and has not in time.

    words: the server's number; seconds while it loads; seconds once it is ready; the number of the server's parent, to
    watch it, or "0"; files to be removed when the server is gone.
    """
    said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for name in ("SIGINT", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: said.put(bytes([END])))
    wait, parent = None, int(words[3])
    # Opened at once: the number of a process that has ended may be given to another.
    end = opened(int(words[0]))[1]
    if parent:
        wait = opened(parent)[0]
    threading.Thread(target=_read, args=(said,), daemon=True).start()
    if wait is not None:
        threading.Thread(target=_tell_after, args=(wait, said), daemon=True).start()
    watch(said, end, float(words[1]), float(words[2]))
    for path in words[4:]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def watch(said: "queue.SimpleQueue[bytes]", end: Callable[[], object], loading: float, ready: float) -> None:
    """Return when the server has closed its pipe; call `end` where it is asked to end and does not in time."""
    seconds, asked, has_ended = loading, None, False
    while True:
        if asked is not None and not has_ended and time.monotonic() >= asked + seconds:
            has_ended = True
            end()
        try:
            data = said.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            continue
        if not data:
            return
        if READY in data:
            seconds = ready
        if END in data and asked is None:
            asked = time.monotonic()


def opened(number: int) -> tuple[Callable[[], object] | None, Callable[[], object]]:
    """Functions that wait for a process, None where it is not there, and that end it."""
    if sys.platform != "win32":
        return None, lambda: os.kill(number, signal.SIGKILL)
    import ctypes
    from ctypes import wintypes

    kernel = ctypes.WinDLL("kernel32")
    kernel.OpenProcess.restype = wintypes.HANDLE
    handle = kernel.OpenProcess(_SYNCHRONIZE | _TERMINATE, False, number) or kernel.OpenProcess(
        _SYNCHRONIZE, False, number
    )
    if not handle:
        return None, lambda: None
    process = wintypes.HANDLE(handle)
    return lambda: kernel.WaitForSingleObject(process, _FOREVER), lambda: kernel.TerminateProcess(process, 1)


def _read(said: "queue.SimpleQueue[bytes]") -> None:
    data = b"\0"
    while data:
        try:
            data = os.read(0, 64)
        except OSError:
            data = b""
        said.put(data)


def _tell_after(wait: Callable[[], object], said: "queue.SimpleQueue[bytes]") -> None:
    wait()
    said.put(bytes([END]))


if __name__ == "__main__":
    main(sys.argv[1:])
