"""Messages as clients send them, and as chat templates want them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.server.wire_errors import ApiError

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class FunctionCall(msgspec.Struct):
    """A call of a function: its arguments are JSON, written as a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """A tool call that an assistant made."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as templates know it: content as text, `developer` as `system`."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": _text(self.content, f"{path}.content")}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [msgspec.to_builtins(call) for call in self.tool_calls]
        reasoning = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        return message


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages as templates know them. Raises: ApiError for what is not text."""
    return [message.for_template(f"messages[{index}]") for index, message in enumerate(messages)]


def _text(content: str | list[dict[str, Any]] | None, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind, text = part.get("type"), part.get("text", part.get("refusal"))
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ApiError(
                400,
                f"{path}[{index}] is of type {kind!r:.40}; this server reads text only, as "
                '{"type": "text", "text": "..."}',
                code="unsupported_parameter",
                param=f"{path}[{index}]",
            )
        texts.append(text)
    return "".join(texts)
