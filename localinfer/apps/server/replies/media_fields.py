"""Pictures and sounds in the messages of each API, as the engine's `MediaSource`, or refused.

A part holds its bytes: base64, or a `data:` URL, which `transport.media_urls` makes of others where the server may.
Paths are never read for a client.
"""

import re
from collections.abc import Mapping
from typing import Any

from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import MESSAGE_PARTS
from localinfer.generation.chat.media_parts import MediaKind, MediaSource, decode_base64, is_data_url
from localinfer.models.media.sounds import is_sound

_SHAPES: Mapping[str, tuple[MediaKind, str, str]] = {
    "image_url": ("image", "image_url", "url detail"),
    "input_image": ("image", "image_url", ""),
    "image": ("image", "source", "type media_type data url"),
    "audio_url": ("audio", "audio_url", "url"),
    "input_audio": ("audio", "input_audio", "data format"),
}
"""Type of a part -> what it is, the member that holds it, and the members of that one, where it is an object."""


def media_part(part: object, path: str) -> MediaSource | None:
    """Read a part of a message that is a picture or sound; None for one of another type. Raises: ApiError."""
    if isinstance(part, MediaSource):
        return part
    shape = _SHAPES.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if shape is None:
        return None
    assert isinstance(part, Mapping)
    kind, member, inner = shape
    check_object(part, f"type {member} detail", path, MESSAGE_PARTS)
    value: Any = part.get(member)
    place = f"{path}.{member}"
    if isinstance(value, Mapping):
        check_object(value, inner, place, {})
        name = "url" if value.get("url") is not None else "data"
        place, value = f"{place}.{name}", value.get(name)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{place} is missing; give the bytes of a file as base64, or a data: URL", param=path)
    return MediaSource(kind, decoded(value, place, path), path)


def media_file(text: object, path: str) -> MediaSource:
    """A picture or sound that is told by its bytes. Raises: ApiError."""
    if not isinstance(text, str) or not text:
        raise ApiError(400, f"{path} is no file; give its bytes as base64", param=path)
    data = decoded(text, path, path)
    return MediaSource("audio" if is_sound(data) else "image", data, path)


def decoded(text: str, place: str, path: str) -> bytes:
    """The bytes of base64, or of a `data:` URL of it. place: of the text; path: of the part. Raises: ApiError."""
    if not is_data_url(text) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text):
        raise unsupported(
            f"{place} is the address {text[:60]!r}, and this server fetches nothing; send the bytes of the file as a "
            "data: URL, such as data:image/png;base64,..., or start it with --allow-media-urls",
            path,
        )
    try:
        return decode_base64(text)
    except ValueError:
        raise ApiError(
            400, f"{place} is no base64: it begins with {text[:30]!r}; send the bytes of the file so", param=path
        ) from None
