"""Files as one short input: each a row of stretches, and each stretch a pattern that is repeated to its length.

Weights of megabytes are some hundred bytes this way, so that inputs are mutated, sent and kept cheaply. As bytes: the
magic, then for each file the length of its name (two bytes), the name, the number of stretches (four), and for each
stretch its length (eight), the length of its pattern (four), and the pattern.
"""

import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAGIC = b"files:1\n"
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Stretch:
    """num_bytes of a pattern that is repeated."""

    num_bytes: int
    pattern: bytes

    @property
    def content(self) -> bytes:
        """All of it."""
        if not self.pattern:
            return bytes(self.num_bytes)
        return (self.pattern * (self.num_bytes // len(self.pattern) + 1))[: self.num_bytes]


Files = dict[str, list[Stretch]]
"""Stretches by the name of their file."""


class NoFileSetError(ValueError):
    """The bytes are no files."""


def whole(content: bytes) -> list[Stretch]:
    """A file of these bytes."""
    return [Stretch(len(content), content)]


def pack(files: Files) -> bytes:
    """The files as bytes."""
    parts = [MAGIC]
    for name, stretches in files.items():
        raw = name.encode()
        parts += [struct.pack("<H", len(raw)), raw, struct.pack("<I", len(stretches))]
        for stretch in stretches:
            parts += [struct.pack("<QI", stretch.num_bytes, len(stretch.pattern)), stretch.pattern]
    return b"".join(parts)


def unpack(data: bytes) -> Files:
    """The files in bytes. Raises: NoFileSetError."""
    if not data.startswith(MAGIC):
        raise NoFileSetError("no magic")
    files: Files = {}
    position, total = len(MAGIC), 0
    try:
        while position < len(data):
            (size,) = struct.unpack_from("<H", data, position)
            name = data[position + 2 : position + 2 + size].decode()
            (count,) = struct.unpack_from("<I", data, position + 2 + size)
            position += 6 + size
            stretches = []
            for _ in range(count):
                num_bytes, length = struct.unpack_from("<QI", data, position)
                position += 12
                stretches.append(Stretch(num_bytes, data[position : position + length]))
                position, total = position + length, total + num_bytes
            files[name] = stretches
    except (struct.error, UnicodeDecodeError) as error:
        raise NoFileSetError(str(error)) from None
    names = [PurePosixPath(name) for name in files]
    if position != len(data) or total > MOST_BYTES or any(len(name.parts) != 1 or "\0" in str(name) for name in names):
        raise NoFileSetError("too long, or a name that is none")
    return files


def total_bytes(data: bytes) -> int:
    """How large the files are that an input stands for."""
    try:
        return sum(stretch.num_bytes for stretches in unpack(data).values() for stretch in stretches)
    except NoFileSetError:
        return len(data)


def write_files(files: Files, folder: Path) -> None:
    """Write them into a folder."""
    for name, stretches in files.items():
        with (folder / name).open("wb") as file:
            for stretch in stretches:
                file.write(stretch.content)


def cut(stretches: list[Stretch], num_bytes: int) -> list[Stretch]:
    """The first bytes of a file."""
    kept, left = [], num_bytes
    for stretch in stretches:
        kept.append(Stretch(min(left, stretch.num_bytes), stretch.pattern))
        left -= kept[-1].num_bytes
        if not left:
            break
    return kept
