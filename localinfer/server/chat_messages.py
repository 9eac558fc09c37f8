"""Messages as clients send them, and as chat templates want them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.server.message_parts import joined_text

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

    refusal, annotations, audio, function_call, id: members of former replies that are ignored, because this server
    gives none of them, or nothing in them.
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
    function_call: None = None
    id: str | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as templates know it: content as text, `developer` as `system`."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": joined_text(self.content, f"{path}.content")}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {"function": msgspec.to_builtins(call.function), "id": call.id, "type": call.type}
                for call in self.tool_calls
            ]
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages as templates know them. Raises: ApiError for what is not text."""
    return [message.for_template(f"messages[{index}]") for index, message in enumerate(messages)]
