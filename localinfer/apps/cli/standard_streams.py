"""Standard streams of commands: missing ones, full pipes, and the line of --ready-json."""

import io
import json
import os
import re
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from localinfer.system.parent_watch import OPTION
from localinfer.types import Closing

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing_streams() -> None:
    """Connect every standard stream that is missing to the null device.

    Output is discarded then, and standard input is empty. A file that is opened later cannot get the number of a closed
    stream, through which it would be written to.
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


_MOST_BYTES = 1 << 20
"""Of text that waits to be written; more is dropped, and counted."""
_DRAIN_SECONDS = 0.2
_PIECE_BYTES = 4096
"""A pipe takes so much in one piece."""


class NonBlockingWriter(io.TextIOBase):
    """A text stream over a descriptor, which stays open when it is closed.

    Text that finds no room is dropped; the next that does begins with a line that says how much was. Errors of writing,
    such as a pipe without a reader, drop everything.
    """

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._num_waiting = self._num_dropped = 0
        self._is_broken = self._is_ended = False
        self._changed = threading.Condition(threading.RLock())
        threading.Thread(target=self._write_on, name="localinfer-stream", daemon=True).start()

    def write(self, text: str) -> int:
        """Have a text written, in the order of the calls; returns its length in characters."""
        data = text.encode("utf-8", "replace")
        with self._changed:
            if self._is_broken or self._num_waiting + len(data) > _MOST_BYTES:
                self._num_dropped += len(data)
                return len(text)
            if self._num_dropped and data.strip():
                self._put(f"warning: {self._num_dropped} bytes of messages were dropped: they were not read\n".encode())
                self._num_dropped = 0
            self._put(data)
        return len(text)

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_waiting += len(data)
        self._changed.notify_all()

    def drain(self, seconds: float = _DRAIN_SECONDS) -> bool:
        """Wait until everything is written, for a moment at most; return whether it is, or never can be."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_waiting or self._is_broken, seconds)

    def close(self) -> None:
        """Write what waits, for a moment at most, and end; may be called again."""
        if not self.closed:
            self.drain()
            with self._changed:
                self._is_ended = True
                self._changed.notify_all()
        super().close()

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    def isatty(self) -> bool:
        """A pipe is no terminal."""
        return False

    def writable(self) -> bool:
        """Text can be written."""
        return True

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ended)
                if not self._waiting:
                    return
                data = self._waiting[0]
            try:
                for first in range(0, len(data), _PIECE_BYTES):
                    piece = data[first : first + _PIECE_BYTES]
                    while piece:
                        piece = piece[os.write(self._descriptor, piece) :]
            except OSError:
                with self._changed:
                    self._is_broken = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._waiting.popleft()
                self._num_waiting -= len(data)
                self._changed.notify_all()


READY_JSON = "--ready-json"

_WAY_OUT = (re.compile("; "), re.compile(" (?=(?:See|Type) `)"), re.compile(r"(?<=\.) (?=The )"))
"""Separators of a fault and its way out; the first that is found counts."""


class ReadyLine(Closing):
    """Standard output, kept for one line; whatever else is printed there goes to standard error.

    The line tells that requests are answered, or what is wrong; a second one is not written. A pipe that is closed or
    full stops nothing. Closing this gives standard output back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_told = self._is_closed = False
        self._own: int | None = None
        with suppress(OSError):
            _flush(sys.stdout)
            self._own = os.dup(1)
        try:
            os.dup2(2, 1)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)

    def tell_ready(self, **facts: Any) -> None:
        """Write where requests are answered."""
        # A list of many models may be more than a pipe has room for.
        threading.Thread(target=self._tell, args=(facts,), name="localinfer-ready", daemon=True).start()

    def tell_error(self, kind: str, message: str) -> None:
        """Write what is wrong; kind: the name of the error's class. The end of the message is the way out."""
        found = next((end for form in _WAY_OUT if (end := form.search(message))), None)
        what, way_out = (message, None) if found is None else (message[: found.start()], message[found.end() :])
        self._tell({"error": {"type": kind, "message": what, "way_out": way_out}})

    def close(self) -> None:
        """Give standard output back; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            _flush(sys.stdout)
            if self._own is not None:
                os.dup2(self._own, 1)

    def _tell(self, facts: dict[str, Any]) -> None:
        from localinfer.kernels.versions import installed_version

        with self._lock:
            is_told, self._is_told = self._is_told, True
        if is_told or self._own is None:
            return
        line = json.dumps({"version": installed_version("localinfer"), **facts}) + "\n"
        with suppress(OSError):
            data = line.encode()
            while data:
                data = data[os.write(self._own, data) :]


@contextmanager
def sidecar_streams(words: Sequence[str]) -> Iterator[ReadyLine | None]:
    """The standard streams of a server that another program has started; the ready line if it is wanted.

    Messages to a pipe without a reader do not block the server. words: of the command line. An unexpected error is
    reported by the ready line too, and raised again.
    """
    is_server = words[:1] == ["serve"]
    stderr = sys.stderr
    writer = NonBlockingWriter(stderr.fileno()) if is_server and _is_sidecar(words) and _is_pipe(stderr) else None
    ready = ReadyLine() if is_server and READY_JSON in words else None
    if writer is not None:
        sys.stderr = writer
    try:
        yield ready
    except Exception as error:
        if ready is not None:
            ready.tell_error("InternalError", f"{type(error).__name__}: {error}; please report what stderr has")
        raise
    finally:
        if ready is not None:
            ready.close()
        if writer is not None:
            writer.drain()
            sys.stderr = stderr


def drain_stderr() -> None:
    """Write what waits to be written to standard error, before the process is ended."""
    if isinstance(sys.stderr, NonBlockingWriter):
        sys.stderr.drain()


def _is_sidecar(words: Sequence[str]) -> bool:
    return READY_JSON in words or OPTION in words


def _is_pipe(stream: TextIO | None) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()
