"""Messages as clients send them, and as chat templates want them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.chat.messages import read_messages
from localinfer.errors import MessageError
from localinfer.server.replies.message_parts import joined_text
from localinfer.server.transport.errors import ApiError

_IGNORED = ("refusal", "annotations", "audio", "id")
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


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
    """One message of a chat, as clients write it and as they give back what they got.

    refusal, annotations, audio, id: members of former replies that are ignored, because this server gives none of them,
    or nothing in them.
    """

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


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages as templates know them. Raises: ApiError for what cannot be read, naming its place."""
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
        written["content"] = joined_text(message.content, f"{path}.content")
    return written
