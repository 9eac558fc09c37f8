"""Messages of Ollama's chats, brought into the one shape that the engine reads, and tool calls back into Ollama's."""

from collections.abc import Sequence
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from localinfer.apps.server.replies.message_fields import ChatMessage, FunctionCall, Role, ToolCall, template_messages
from localinfer.apps.server.transport.http import ApiError, unsupported


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function that was called, with its arguments as an object. index: ignored, as calls stand in their order."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call that an assistant made."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat.

    thinking: the reasoning of a former reply. tool_name, tool_call_id: of a tool's result, the call that it answers, by
    the tool's name or the call's id. images: refused, as models read text only here.
    """

    role: str
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


OllamaMessages = Annotated[list[OllamaMessage], Meta(max_length=10_000)]


def read_ollama_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages as templates read them. Raises: ApiError for what cannot be read, naming its place."""
    calls = _OpenCalls()
    return template_messages([_read(message, f"messages[{index}]", calls) for index, message in enumerate(messages)])


def check_no_images(images: Sequence[Any] | None, path: str) -> None:
    """Raise ApiError if there are images."""
    if images:
        raise unsupported(
            f"{path} has {len(images)} images, and models read text only here; leave them out, or describe them in "
            "the text",
            path,
        )


def written_call(index: int, call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A whole tool call of a reply."""
    return {"id": call_id, "function": {"index": index, "name": name, "arguments": arguments}}


class _OpenCalls:
    """Calls whose results are still to come, by id: clients that know no ids name the tool, or answer in order."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._num_made = 0

    def add(self, call: OllamaCall) -> str:
        """The id of a call, a new one if it has none."""
        self._num_made += 1
        call_id = call.id or f"call_{self._num_made:04}"
        self._names[call_id] = call.function.name
        return call_id

    def take(self, message: OllamaMessage) -> str | None:
        """The id of the call that a result answers; where none is open, the one that it names."""
        wanted = message.tool_call_id
        if self._names and wanted not in self._names:
            # Some clients name ids in results only.
            name = message.tool_name or message.name
            named = (call_id for call_id, called in self._names.items() if called == name)
            wanted = next(named, None) or next(iter(self._names))
        if wanted is not None:
            self._names.pop(wanted, None)
        return wanted


def _read(message: OllamaMessage, path: str, calls: _OpenCalls) -> ChatMessage:
    role: Any = message.role.lower()
    if role not in get_args(Role):
        raise ApiError(
            400,
            f"{path}.role is {message.role!r:.40}; give one of {', '.join(get_args(Role))}",
            param=f"{path}.role",
        )
    check_no_images(message.images, f"{path}.images")
    made = [
        ToolCall(FunctionCall(call.function.name, call.function.arguments or {}), calls.add(call), "function")
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=role,
        content=message.content or "",
        name=message.tool_name or message.name,
        tool_calls=made or None,
        tool_call_id=calls.take(message) if role == "tool" else message.tool_call_id,
        reasoning_content=message.thinking or None,
    )
