"""Lines of standard input for an event loop, read by a thread that keeps neither Ctrl-C nor the interpreter waiting."""

import asyncio
import os
import threading
from functools import partial

from localinfer.system.event_loop import LoopCalls

_BYTES_AT_ONCE = 1 << 16


class InputLines:
    """Iterates the lines of a file descriptor. Made and iterated on an event loop.

    The package's own reader waits in a thread that cannot be left behind: who started the command on a terminal could
    not end it. Python's buffered files are not used, as the lock of one that is being read stops the interpreter's end.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._calls = LoopCalls.of_running_loop()
        threading.Thread(target=self._read, args=(descriptor,), name="localinfer-input", daemon=True).start()

    def __aiter__(self) -> "InputLines":
        return self

    async def __anext__(self) -> str:
        line = await self._lines.get()
        if line is None:
            raise StopAsyncIteration
        return line

    def _read(self, descriptor: int) -> None:
        rest = bytearray()
        while piece := _piece(descriptor):
            rest += piece
            if b"\n" not in piece:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._put(line.decode("utf-8", "replace"))
        if rest:
            self._put(rest.decode("utf-8", "replace"))
        self._put(None)

    def _put(self, line: str | None) -> None:
        self._calls.add(partial(self._lines.put_nowait, line))


def _piece(descriptor: int) -> bytes:
    """What comes next; nothing at the end, and where nothing can be read."""
    try:
        return os.read(descriptor, _BYTES_AT_ONCE)
    except OSError:
        return b""
