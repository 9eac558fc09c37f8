"""A small process beside `localinfer serve` that kills it when it was asked to end and has not.

A signal, the end of standard input or of the parent are answered by Python code of the server, which waits while
native code holds the interpreter's lock, as when a mapped file is read from a disk that does not answer. This file is
run as a script by itself, imports nothing heavy, and reads a pipe whose other end only the server has: signals that
come to the server are written into it by C code (`signal.set_wakeup_fd`), and its end is the server's.
"""

import contextlib
import os
import select
import signal
import sys
import time

READY = 0
"""The byte that says that the server answers requests, which it may finish."""
END = int(signal.SIGTERM)
"""The byte that says that it is to end; the same as that of the signal."""

_ASKS = (END, int(signal.SIGINT))
_LOOK_SECONDS = 0.2


def main(words: list[str]) -> None:
    """Watch until the server is gone, and kill it if it was to end and has not in time.

    words: descriptor of the pipe; seconds while it loads; seconds once it is ready; the number of the server's parent,
    to watch it and standard input, or "0"; files to be removed when the server is gone.
    """
    pipe, loading, ready, parent = int(words[0]), float(words[1]), float(words[2]), int(words[3])
    # A server that went before this line has closed the pipe.
    server = os.getppid()
    seconds, asked = loading, None
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    input_end: int | None = getattr(select, "POLLRDHUP", None)
    if parent and input_end is not None:
        poll.register(0, input_end)
    watched = _open_process(parent)
    if watched is not None:
        poll.register(watched, select.POLLIN)
    must_look = bool(parent) and (watched is None or input_end is None)
    is_terminal = must_look and os.isatty(0)
    while True:
        left = None if asked is None else max(0.0, asked + seconds - time.monotonic())
        if left == 0.0 and os.getppid() == server:
            os.kill(server, signal.SIGKILL)
            left = _LOOK_SECONDS
        if left is None and must_look:
            left = _LOOK_SECONDS
        for descriptor, _ in poll.poll(None if left is None else 1e3 * left):
            if descriptor != pipe:
                poll.unregister(descriptor)
                asked = time.monotonic() if asked is None else asked
                continue
            said = os.read(pipe, 64)
            if not said:
                _remove(words[4:])
                return
            if asked is None and any(byte in _ASKS for byte in said):
                asked = time.monotonic()
            if READY in said:
                seconds = ready
        if must_look and asked is None:
            has_ended = input_end is None and input_has_ended(is_terminal)
            if has_ended or watched is None and not _is_alive(parent):
                asked = time.monotonic()


def input_has_ended(was_terminal: bool) -> bool:
    """True if standard input is at its end now.

    For systems whose `poll` does not wait for that alone, as macOS's: it reports an end only to those who ask for what
    can be read too, returns at once while something can be, and refuses devices.
    """
    look = select.poll()
    look.register(0, select.POLLHUP)
    events = dict(look.poll(0)).get(0, 0)
    if events & select.POLLNVAL:
        return was_terminal and not os.isatty(0)
    return bool(events & (select.POLLHUP | select.POLLERR))


def _open_process(number: int) -> int | None:
    """A descriptor that can be read when the process has ended, where the system has such."""
    if number and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(number)
    return None


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _remove(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1:])
