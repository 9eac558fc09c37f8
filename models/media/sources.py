"""Bytes of pictures and sounds that a caller names: paths, bytes and open files, within a limit."""

import io
import os
import stat
from typing import Any, BinaryIO, Literal

from localinfer.errors import RequestError

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO
"""A path, the bytes themselves, or a file that is open for reading them."""
Field = Literal["image", "audio"]
"""Members of a request."""

_NOUNS: dict[Field, str] = {"image": "picture", "audio": "sound"}
_LONGEST_NAME = 200


def read_bytes(source: Source, field: Field, max_bytes: int) -> bytes:
    """Read all bytes of a picture or sound. Raises: RequestError for one that is missing, empty or too large."""
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source) if len(source) <= max_bytes else _refuse_size(field, len(source), max_bytes)
    elif isinstance(source, str | os.PathLike):
        data = _read_path(source, field, max_bytes)
    elif hasattr(source, "read"):
        data = _read_open(source, field, max_bytes)
    else:
        raise RequestError(
            f"the {_NOUNS[field]} is of type {type(source).__name__}; wanted a path, bytes, an open file, an array or, "
            "of pictures, an image of Pillow",
            field=field,
        )
    if not data:
        raise RequestError(f"the {_NOUNS[field]} has no bytes; wanted a file of a common format", field=field)
    return data


def _read_path(path: str | os.PathLike[str], field: Field, max_bytes: int) -> bytes:
    name = _shown(path)
    if isinstance(path, str) and path.partition(":")[0].lower() in ("http", "https", "data"):
        raise RequestError(
            f"the {_NOUNS[field]} is the address {name}; wanted a path or bytes: read it first, and give its bytes",
            field=field,
        )
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise RequestError(f"{name} is no file of bytes; wanted a {_NOUNS[field]}: check the path", field=field)
        if found.st_size > max_bytes:
            _refuse_size(field, found.st_size, max_bytes)
        with open(path, "rb") as file:
            return _read_open(file, field, max_bytes)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError(
            f"{name} cannot be read ({reason}); wanted a {_NOUNS[field]}: check the path", field=field
        ) from None


def _read_open(file: Any, field: Field, max_bytes: int) -> bytes:
    """The rest of an open file."""
    parts, left = io.BytesIO(), max_bytes + 1
    while left > 0:
        part = file.read(left)
        if not isinstance(part, bytes | bytearray):
            raise RequestError(
                f"the open file of the {_NOUNS[field]} gives {type(part).__name__}; wanted bytes: open it in mode 'rb'",
                field=field,
            )
        if not part:
            return parts.getvalue()
        parts.write(part)
        left -= len(part)
    return _refuse_size(field, max_bytes + 1, max_bytes)


def _refuse_size(field: Field, found: int, max_bytes: int) -> bytes:
    raise RequestError(
        f"the {_NOUNS[field]} has {found} bytes or more; wanted at most {max_bytes}: make it less, or raise the limit",
        field=field,
    )


def _shown(path: str | os.PathLike[str]) -> str:
    """A path in an error: quoted, and not longer than a line."""
    text = ascii(os.fspath(path))
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."
