"""A client that sends any bytes, reads the answers as HTTP has them, and leaves when it is told to."""

import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_PIECE = 1 << 16


@dataclass
class Answer:
    """One answer. is_cut: the connection ended before it did."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_cut: bool = False


class Conversation:
    """One connection to a port of this machine, for a `with` block.

    cuts: how many bytes each packet has, again from the start after the last. leaves: after how many bytes of answers
    it closes, None for never. fault: why what came is no row of answers.
    """

    def __init__(self, port: int, cuts: list[int], leaves: int | None) -> None:
        self.answers: list[Answer] = []
        self.received = bytearray()
        self.fault: str | None = None
        self._port, self._cuts, self._leaves = port, cuts, leaves
        self._read = 0
        self._num_packets = 0
        self._is_over = False

    def __enter__(self) -> Self:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._leaves is not None and self._leaves % 2 == 0:
            # With a reset, as a program does that ends.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes; those that the server does not take any more are dropped."""
        try:
            while data and not self._is_over:
                size = self._cuts[self._num_packets % len(self._cuts)] if self._cuts else len(data)
                self._num_packets += 1
                self._socket.sendall(data[:size])
                data = data[size:]
                if self._num_packets > 400:
                    self._cuts = []
        except OSError:
            self._is_over = True

    def read_answers(self, num_more: int, seconds: float = 1.5) -> None:
        """Wait for so many more answers."""
        wanted = len(self.answers) + num_more
        self._receive(seconds, lambda: len(self.answers) >= wanted)

    def finish(self, seconds: float) -> None:
        """Send no more, and read to the end."""
        if self._leaves is None:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._is_over = True
        has_ended = self._receive(seconds, lambda: False)
        if self._leaves is None and not has_ended:
            self.fault = f"no answer, and no end, in {seconds:g} s"
        self._parse(is_over=True)

    def _receive(self, seconds: float, is_enough: "object") -> bool:
        """Read until it is enough, or the client leaves; return whether the server has ended the connection."""
        assert callable(is_enough)
        deadline = time.monotonic() + seconds
        while not is_enough():
            if self._leaves is not None and len(self.received) >= self._leaves:
                self._is_over = True
                return False
            self._socket.settimeout(
                max(0.001, min(deadline - time.monotonic(), 2.0 if self._leaves is not None else 60))
            )
            try:
                piece = self._socket.recv(_PIECE)
            except TimeoutError:
                return False
            except OSError:
                return True
            if not piece:
                return True
            self.received += piece
            self._parse()
        return False

    def _parse(self, *, is_over: bool = False) -> None:
        """Take whole answers off what was received."""
        while self.fault is None and self._read < len(self.received):
            head_end = self.received.find(b"\r\n\r\n", self._read)
            if head_end < 0:
                if not b"HTTP/1.1 ".startswith(self.received[self._read : self._read + 9]):
                    self.fault = "an answer does not begin as one"
                return
            first, *lines = self.received[self._read : head_end].decode("latin-1").split("\r\n")
            words = first.split(" ")
            if words[0] != "HTTP/1.1" or len(words) < 2 or not words[1].isdigit():
                self.fault = f"an answer begins with {first!r}"
                return
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            status = int(words[1])
            if 100 <= status < 200:
                self._read = head_end + 4
                continue
            found = self._body(head_end + 4, status, headers, is_over)
            if found is None:
                return
            body, end, is_cut = found
            self.answers.append(Answer(status, headers, body, is_cut))
            self._read = end

    def _body(self, start: int, status: int, headers: dict[str, str], is_over: bool) -> tuple[bytes, int, bool] | None:
        """A body, where it ends, and whether it was cut off; None where more has to come."""
        data = self.received
        if status in (204, 304):
            return b"", start, False
        if headers.get("transfer-encoding") == "chunked":
            return self._chunks(start, is_over)
        size = int(headers["content-length"]) if "content-length" in headers else None
        is_there = size is not None and len(data) >= start + size
        # To HEAD nothing but the head comes.
        if size is not None and not is_there and data[start : start + 9] == b"HTTP/1.1 ":
            return b"", start, True
        if is_there and size is not None:
            if data[start : start + 9] == b"HTTP/1.1 ":
                return b"", start, True
            return bytes(data[start : start + size]), start + size, False
        return (bytes(data[start:]), len(data), size is not None) if is_over else None

    def _chunks(self, start: int, is_over: bool) -> tuple[bytes, int, bool] | None:
        body, place = bytearray(), start
        while (line_end := self.received.find(b"\r\n", place)) >= 0:
            text = bytes(self.received[place:line_end])
            if text.startswith(b"HTTP/1.1 ") and place == start:
                return b"", start, True
            try:
                size = int(text, 16)
            except ValueError:
                self.fault = f"a chunk has the size {text!r}"
                return None
            end = line_end + 2 + size
            if len(self.received) < end + 2:
                break
            body += self.received[line_end + 2 : end]
            place = end + 2
            if size == 0:
                return bytes(body), place, False
        return (bytes(body), len(self.received), True) if is_over else None
