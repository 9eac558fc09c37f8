"""Messages as clients write them, brought into the one shape that the engine reads, or refused."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import MESSAGE_MEMBERS, MESSAGE_PARTS
from localinfer.errors import MessageError
from localinfer.generation.chat.messages import joined_parts, read_messages

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_IGNORED = ("refusal", "annotations", "audio", "id", "prefix", "partial")


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a function: its arguments are JSON, written as a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call that an assistant made. index: ignored, as calls stand in their order."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat, as clients write it, and as they send former replies back.

    refusal, annotations, audio, id: members of former replies that are ignored, because this server gives none of them,
    or nothing in them. prefix, partial: say of a last reply that it is to be continued, which it is anyway.
    """

    known_fields: ClassVar = MESSAGE_MEMBERS

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: FunctionCall | None = None
    id: str | None = None
    prefix: bool | None = None
    partial: bool | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages as templates read them. Raises: ApiError for what cannot be read, naming its place."""
    try:
        return read_messages([_as_written(message, f"messages[{index}]") for index, message in enumerate(messages)])
    except MessageError as error:
        code = "unsupported_parameter" if error.is_unsupported else None
        raise ApiError(400, str(error), code=code, param=error.path) from error


def _as_written(message: ChatMessage, path: str) -> dict[str, Any]:
    """The message without the members that are ignored, its parts checked member by member and joined."""
    written: dict[str, Any] = msgspec.to_builtins(message)
    for name in _IGNORED:
        del written[name]
    for call in written["tool_calls"] or ():
        del call["index"]
    if isinstance(message.content, list):
        written["content"] = joined_text(message.content, f"{path}.content", message.role)
    return written


def joined_text(content: str | Sequence[Mapping[str, Any]] | None, path: str, role: str = "user") -> str:
    """The text of a message, of its parts if it has some. Raises: ApiError for what is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined_parts([_text_of(part, f"{path}[{index}]") for index, part in enumerate(content)], role)


def _text_of(part: Mapping[str, Any], path: str) -> str:
    kind = part.get("type")
    member = "refusal" if kind == "refusal" else "text"
    text = part.get(member)
    if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
        raise unsupported(
            f'{path} is of type {kind!r:.40}; this server reads text only, as {{"type": "text", "text": "..."}}', path
        )
    check_object(part, f"type {member}", path, MESSAGE_PARTS)
    return text
