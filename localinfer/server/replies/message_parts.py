"""Text that clients send in parts."""

from collections.abc import Mapping, Sequence
from typing import Any

from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.known_fields import MESSAGE_PARTS, check_object

_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")


def joined_text(content: str | Sequence[Mapping[str, Any]] | None, path: str) -> str:
    """The text of a message, of its parts if it has some. Raises: ApiError for what is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{path}[{index}]") for index, part in enumerate(content))


def _text_of(part: Mapping[str, Any], path: str) -> str:
    kind = part.get("type")
    member = "refusal" if kind == "refusal" else "text"
    text = part.get(member)
    if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
        raise ApiError(
            400,
            f'{path} is of type {kind!r:.40}; this server reads text only, as {{"type": "text", "text": "..."}}',
            code="unsupported_parameter",
            param=path,
        )
    check_object(part, f"type {member}", path, MESSAGE_PARTS)
    return text
