"""Pictures and sounds among the parts of messages: as callers give them, as plain data, and as markers in text.

A conversation is rendered, compared and cached as text. So each picture or sound becomes a marker in its message, which
names its bytes by their digest: the same picture is the same text, another one is another. Behind the template, the
marker is replaced by what the model reads in its place.
"""

import base64
import hashlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from localinfer.arguments import shown
from localinfer.errors import MessageError
from localinfer.system.extras import require

MediaKind = Literal["image", "audio"]
CAPABILITIES: Mapping[MediaKind, str] = {"image": "vision", "audio": "audio"}
"""By kind the task of a model that reads it."""

Segments = Sequence[tuple[str, bool]]
"""Texts in a row, each with whether the template wrote it, so that control tokens may be read in it."""

_MARKER = re.compile(r"<__(?:image|audio)_[0-9a-f]{64}(?:_\d{1,9})?__>")
_NUMBER = re.compile(r"(?<=[0-9a-f]{64})_(\d+)__>")
_TYPES: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Kind by the type of a part."""
_MEMBERS = ("data", "path", "url", "image", "audio", "image_url", "audio_url", "input_audio")
"""Members that may hold a picture or sound, the first that is there wins."""
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.ASCII | re.IGNORECASE)
_WAYS = (
    'give {"type": "image", "image": ...} with a path, the bytes of a file, a PIL image or an array [height, width, '
    '3], or {"type": "audio", "audio": ...} with a path or the bytes of a file'
)
_MOST_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class MediaSource:
    """One picture or sound of a message, as the bytes of its file."""

    kind: MediaKind
    data: bytes = field(repr=False)
    path: str = field(compare=False)
    """The part that it came as, such as "messages[2].content[0]"."""
    name: str = field(default="", compare=False)
    """The name of its file, where it had one."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def marker(self) -> str:
        """The text that stands for it in a rendered conversation."""
        return f"<__{self.kind}_{self.digest}__>"

    def as_part(self) -> dict[str, str]:
        """The part as plain data that JSON can hold, which `read_media_part` reads again."""
        named = {"name": self.name} if self.name else {}
        return {"type": self.kind, **named, "data": base64.b64encode(self.data).decode("ascii")}


def read_media_part(part: object, path: str) -> MediaSource | None:
    """Read a part of a message that is a picture or sound; None for a part of another type.

    Files are read here, so that a later change of them changes nothing. Raises: MessageError.
    """
    if isinstance(part, MediaSource):
        return part
    kind = _TYPES.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if kind is None:
        return None
    assert isinstance(part, Mapping)
    name = next((name for name in _MEMBERS if part.get(name) is not None), None)
    if name is None:
        raise MessageError(f"{path} is of type {part['type']!r} and holds nothing; {_WAYS}", path)
    value = part[name]
    if isinstance(value, Mapping):
        # OpenAI's {"image_url": {"url": ...}} and {"input_audio": {"data": ...}}.
        name = "url" if "url" in value else "data"
        value = value.get(name)
    named = part.get("name")
    if isinstance(value, str | os.PathLike) and name != "data" and not is_data_url(str(value)):
        named = named or Path(value).name
    return MediaSource(kind, _bytes_of(value, kind, name, path), path, named if isinstance(named, str) else "")


def split_at_markers(text: str) -> list[str]:
    """Cut a text before and after each marker; joined, the pieces are the text."""
    pieces, position = [], 0
    for match in _MARKER.finditer(text):
        pieces += [text[position : match.start()], match[0]]
        position = match.end()
    return [piece for piece in (*pieces, text[position:]) if piece]


def kind_of(marker: str) -> MediaKind:
    """The kind of what a marker stands for."""
    return "image" if marker.startswith("<__image_") else "audio"


def numbered(text: str, kind: MediaKind, first: int) -> tuple[str, int]:
    """A text with the number of each marker of a kind in it, from `first` on, but for number 0; the next number."""
    pieces = []
    for piece in split_at_markers(text):
        if is_marker(piece) and kind_of(piece) == kind:
            pieces.append(piece.removesuffix("__>") + f"_{first}__>" if first else piece)
            first += 1
        else:
            pieces.append(piece)
    return "".join(pieces), first


def split_number(marker: str) -> tuple[str, int]:
    """A marker without its number, and that; 0 where it has none."""
    found = _NUMBER.search(marker)
    return (marker, 0) if found is None else (f"{marker[: found.start()]}__>", int(found[1]))


def is_marker(text: str) -> bool:
    """True for the marker of a picture or sound, and nothing else."""
    return _MARKER.fullmatch(text) is not None


def cut_segments(segments: Segments, start: int, end: int) -> Segments:
    """Return the characters from `start` to `end` of segments."""
    kept, position = [], 0
    for text, is_open in segments:
        part = text[max(0, start - position) : max(0, end - position)]
        if part:
            kept.append((part, is_open))
        position += len(text)
    return kept


def joined_parts(parts: Sequence[str | MediaSource], role: str) -> str:
    """The parts of a message as one text: lines of their own, but in a reply, whose parts are pieces of one text.

    A marker stands where its picture or sound does, without a line end before or behind it, as runtimes of GGUF files
    put it.
    """
    separator = "" if role == "assistant" else "\n"
    text = ""
    for index, part in enumerate(parts):
        if isinstance(part, MediaSource):
            text += part.marker
        else:
            follows_text = index > 0 and not isinstance(parts[index - 1], MediaSource)
            text += separator * follows_text + part
    return text


def part_text(part: object) -> str | None:
    """The text of a part of text, as chats have it; None for another part."""
    if not isinstance(part, Mapping) or part.get("type", "text") not in ("text", "input_text"):
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def parts_content(parts: Sequence[str | MediaSource], role: str) -> str | list[Any]:
    """The content of a message of these parts: their text; with pictures or sounds, the list of parts."""
    if not any(isinstance(part, MediaSource) for part in parts):
        return joined_parts(parts, role)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def flattened(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """Messages whose content is text with markers, and the pictures and sounds that these stand for, in order.

    Raises: MessageError for a text that spells a marker, and would stand for a picture that it does not have.
    """
    sources: list[MediaSource] = []
    flat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        check_spells_none(message, f"messages[{index}]")
        content = message.get("content")
        if isinstance(content, list):
            sources += [part for part in content if isinstance(part, MediaSource)]
            parts = [part if isinstance(part, MediaSource) else part["text"] for part in content]
            message = {**message, "content": joined_parts(parts, message["role"])}
        flat.append(dict(message))
    return flat, sources


def check_spells_none(value: object, path: str) -> None:
    """Raise MessageError for a text, at any depth of a value, that spells a marker."""
    if isinstance(value, str):
        found = _MARKER.search(value)
        if found is not None:
            raise MessageError(
                f"{path} holds the text {found[0][:20]}..., which stands for a picture or sound here; leave it out",
                path,
            )
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            check_spells_none(inner, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_spells_none(inner, f"{path}[{index}]")


def is_data_url(text: str) -> bool:
    """True for a `data:` URL of base64."""
    return _DATA_URL.match(text) is not None


def decode_base64(text: str) -> bytes:
    """The bytes of base64, or of a `data:` URL of it. Raises: ValueError."""
    found = _DATA_URL.match(text)
    return base64.b64decode(text[found.end() if found else 0 :], validate=True)


def _bytes_of(value: object, kind: MediaKind, name: str, path: str) -> bytes:
    place = f"{path}.{name}"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and (name == "data" or is_data_url(value)):
        return _decoded(value, place, path)
    if isinstance(value, str) and re.match(r"(?i)[a-z][a-z0-9+.-]+://", value):
        raise MessageError(
            f"{place} is the address {value!r:.80}, and nothing is fetched here; {_WAYS}, or a data: URL", path
        )
    if isinstance(value, str | os.PathLike):
        return _file_bytes(Path(value), place, path)
    if kind == "image":
        return _encoded_picture(value, place, path)
    raise MessageError(f"{place} is {shown(value)}; {_WAYS}", path)


def _decoded(text: str, place: str, path: str) -> bytes:
    try:
        return decode_base64(text)
    except ValueError:
        raise MessageError(f"{place} is no base64, as {text[:30]!r}...; {_WAYS}, or a data: URL", path) from None


def _file_bytes(file: Path, place: str, path: str) -> bytes:
    try:
        size = file.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise MessageError(f"{place}: {file} has {size:,} bytes; at most {_MOST_FILE_BYTES:,} are read", path)
        return file.read_bytes()
    except OSError as error:
        raise MessageError(f"{place}: {file} cannot be read ({error.strerror or error}); {_WAYS}", path) from None


def _encoded_picture(value: object, place: str, path: str) -> bytes:
    """The bytes of a lossless file of a PIL image, or of an array uint8[height, width, 3 or 4] or [height, width]."""
    if not (hasattr(value, "save") or hasattr(value, "__array__")):
        raise MessageError(f"{place} is {shown(value)}; {_WAYS}", path)
    require("media", "reading pictures", ("PIL",))
    from PIL import Image

    image = value
    if not hasattr(value, "save"):
        import numpy as np

        array = np.asarray(value)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
            raise MessageError(
                f"{place} is an array of shape {list(array.shape)} and type {array.dtype}; wanted uint8 "
                "[height, width, 3] with red, green and blue from 0 to 255",
                path,
            )
        image = Image.fromarray(array)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)  # type: ignore[attr-defined]
    return buffer.getvalue()
