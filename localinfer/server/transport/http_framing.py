"""How the bytes of a connection are framed as requests: a strict reader before the lenient one.

HTTP libraries forgive line ends and folded lines in different ways. Where this server and a program before it would see
the end of a request at different places, one could hide a request in another (RFC 9112, sections 2.2, 5.2 and 11.2). So
whatever has two readings is refused: a line feed without a carriage return, a carriage return without a line feed, and
a line that goes on in the next, in heads, in the lines of chunks, and after the last chunk.
"""

import re
from enum import Enum, auto

_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?")


class _Part(Enum):
    """What the next byte belongs to."""

    HEAD = auto()
    CONTENT = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILER = auto()


class FramingCheck:
    """Follows the bytes of one connection, however packets split them. What else is wrong with them is not its matter.

    has_fault: whether a byte was found that may be read in two ways; nothing after it counts.
    """

    def __init__(self) -> None:
        self.has_fault = False
        self._part = _Part.HEAD
        self._line = bytearray()
        self._left = 0
        self._start_head()

    def feed(self, data: bytes) -> int:
        """Take the next bytes and return how many of them are in order: all, or those before the first at fault."""
        position = 0
        while position < len(data) and not self.has_fault:
            if self._part in (_Part.CONTENT, _Part.CHUNK_DATA):
                taken = min(self._left, len(data) - position)
                self._left -= taken
                position += taken
                if not self._left:
                    self._end_data()
                continue
            end = data.find(b"\n", position) + 1
            piece = data[position : end or len(data)]
            if self._is_faulty(piece):
                self.has_fault = True
                break
            position += len(piece)
            self._line += piece
            if end:
                line = bytes(self._line[:-2])
                self._line.clear()
                self._end_line(line)
        return position

    def _is_faulty(self, piece: bytes) -> bool:
        """Whether a line may not go on like this."""
        if self._line[-1:] == b"\r":
            return piece != b"\n"
        if not self._line and piece[:1] in (b" ", b"\t") and self._part in (_Part.HEAD, _Part.TRAILER):
            return True
        if piece.endswith(b"\n"):
            return not piece.endswith(b"\r\n") or piece.count(b"\r") > 1
        return b"\r" in piece[:-1]

    def _start_head(self) -> None:
        self._part = _Part.HEAD
        self._has_chunks = False
        self._length = 0

    def _end_data(self) -> None:
        if self._part is _Part.CHUNK_DATA:
            self._part = _Part.CHUNK_END
        else:
            self._start_head()

    def _end_line(self, line: bytes) -> None:
        match self._part:
            case _Part.HEAD if line:
                self._read_header(line)
            case _Part.HEAD:
                if self._has_chunks:
                    self._part = _Part.CHUNK_SIZE
                elif self._length:
                    self._part, self._left = _Part.CONTENT, self._length
                else:
                    self._start_head()
            case _Part.CHUNK_SIZE:
                # A size that is none is left to the parser, which ends the connection.
                found = _CHUNK_SIZE.fullmatch(line)
                self._left = 0 if found is None else int(found[1], 16)
                if found is not None:
                    self._part = _Part.CHUNK_DATA if self._left else _Part.TRAILER
            case _Part.CHUNK_END:
                self._part = _Part.CHUNK_SIZE
            case _Part.TRAILER if not line:
                self._start_head()

    def _read_header(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        match name.lower():
            case b"content-length":
                self._length = int(value) if value.strip().isdigit() and len(value) < 24 else 0
            case b"transfer-encoding":
                self._has_chunks = True
