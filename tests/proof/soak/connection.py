"""One request over a socket, byte by byte, so that a client may leave, read slowly or send half of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

_READ_BYTES = 1 << 16


class StuckError(Exception):
    """Nothing came for longer than a request may wait."""


class CutError(Exception):
    """The connection ended before the answer did."""


class Answer(NamedTuple):
    """An answer: its status, and its body without framing."""

    status: int
    body: bytes


class Connection:
    """One connection for one request. patience: seconds without a byte after which it is stuck."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> None:
        self._reader, self._writer = reader, writer
        self._patience = patience
        self.received = b""

    def send(self, content: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(content)

    def end_sending(self) -> None:
        """Close the half of the connection that the server reads."""
        self._writer.write_eof()

    async def read_some(self, most: int = _READ_BYTES) -> bool:
        """Read what comes; False at the end. Raises: StuckError."""
        try:
            async with asyncio.timeout(self._patience):
                part = await self._reader.read(most)
        except TimeoutError:
            raise StuckError(f"nothing came for {self._patience:.0f} s after {self.received[-300:]!r}") from None
        except ConnectionError:
            part = b""
        self.received += part
        return bool(part)

    async def answer(self, *, at_once: int = _READ_BYTES, pause: float = 0.0) -> Answer:
        """The whole answer. Raises: StuckError, CutError."""
        while (found := parsed(self.received)) is None:
            if not await self.read_some(at_once):
                raise CutError(f"the connection ended after {self.received[-300:]!r}")
            if pause:
                await asyncio.sleep(pause)
        return found


@asynccontextmanager
async def connected(port: int, patience: float) -> AsyncIterator[Connection]:
    """A connection, which is closed at the end, whatever has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer, patience)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request_bytes(path: str, body: bytes) -> bytes:
    """A POST with JSON on a connection of its own."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def parsed(received: bytes) -> Answer | None:
    """The answer in bytes; None if it is not whole yet. Raises: CutError if it is no answer."""
    head, mark, rest = received.partition(b"\r\n\r\n")
    if not mark:
        return None
    lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    if status < 200:
        # To a client that may have left, the server writes what those that listen pass over.
        return parsed(rest)
    if fields.get("transfer-encoding") == "chunked":
        body = _unchunked(rest)
        return None if body is None else Answer(status, body)
    if "content-length" not in fields:
        raise CutError(f"an answer without a length: {head!r}")
    length = int(fields["content-length"])
    return Answer(status, rest[:length]) if len(rest) >= length else None


def _unchunked(content: bytes) -> bytes | None:
    body, place = [], 0
    while (end := content.find(b"\r\n", place)) >= 0:
        size = int(content[place:end], 16)
        if not size:
            return b"".join(body)
        body.append(content[end + 2 : end + 2 + size])
        place = end + 4 + size
    return None
