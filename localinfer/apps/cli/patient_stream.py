"""Text for a pipe that may be full because nobody reads it: a thread writes, and who prints never waits."""

import io
import os
import threading
from collections import deque

_MOST_BYTES = 1 << 20
"""Of lines that wait to be written; more are dropped, and counted."""
_DRAIN_SECONDS = 0.2
_PIECE_BYTES = 4096
"""What a pipe takes in one piece."""


class PatientStream(io.TextIOBase):
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
                self._put(f"warning: {self._num_dropped} bytes of messages were dropped: nobody read them\n".encode())
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
