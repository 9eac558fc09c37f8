"""Anthropic's messages as records: what a request may hold, and what it means in our own words."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.server.api.chat_messages import ChatMessage, FunctionCall, ToolCall
from localinfer.server.replies.constraint_fields import ResponseFormat
from localinfer.server.replies.reply_fields import Thinking, Tools
from localinfer.server.replies.sampling_fields import Count, Probability, StopText
from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.known_fields import COUNTS, MESSAGE_PARTS, MESSAGES, TOOLS, check_object

_BLOCKS = {
    "text": "type text",
    "thinking": "type thinking",
    "redacted_thinking": "type",
    "tool_use": "type id name input",
    "tool_result": "type tool_use_id content",
}
"""Type of a block -> its members that are read."""


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message: text, or blocks of text, tool calls, their results, and former reasoning."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model has to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def as_openai(self) -> str | dict[str, Any]:
        """The choice as chat completions have it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the reply, and how hard the model should think, for templates that know such a word."""

    format: ResponseFormat | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """A conversation, and what else its prompt depends on."""

    known_fields: ClassVar = COUNTS

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=10_000)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat_options(self) -> dict[str, Any]:
        """The engine's options about tools and reasoning. Raises: ApiError for a tool that is not the caller's own."""
        choice = self.tool_choice or ToolChoice()
        tools = [_tool(tool, index) for index, tool in enumerate(self.tools or ())]
        if not tools and choice.type in ("any", "tool"):
            raise ApiError(400, "tool_choice asks for a call, but there are no tools; give some", param="tool_choice")
        thinking = self.thinking
        effort = None if self.output_config is None else self.output_config.effort
        options = {
            "tools": tools or None,
            "tool_choice": choice.as_openai() if tools else None,
            "parallel_tool_calls": not choice.disable_parallel_tool_use if tools else None,
            "thinking": None if thinking is None else thinking.type != "disabled",
            "thinking_budget": None if thinking is None else thinking.budget_tokens,
            "template_variables": None if effort is None else {"reasoning_effort": effort},
        }
        return {name: value for name, value in options.items() if value is not None}

    def chat_messages(self) -> list[ChatMessage]:
        """The conversation as chat messages, the system's first. Raises: ApiError for what is not text."""
        found = [] if self.system is None else [ChatMessage("system", _text(self.system, "system"))]
        for index, message in enumerate(self.messages):
            found += _convert(message, f"messages[{index}].content")
        return found


class MessagesRequest(CountRequest, kw_only=True):
    """The members of a messages request that are read."""

    known_fields: ClassVar = MESSAGES

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request."""
        form = None if self.output_config is None else self.output_config.format
        options = {
            "max_tokens": self.max_tokens,
            "constraint": None if form is None else form.constraint("output_config.format"),
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return self.chat_options() | {name: value for name, value in options.items() if value is not None}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """A tool as chat completions have it. Raises: ApiError for one that this API's maker would run itself."""
    match tool:
        case {"name": str(name), "input_schema": dict(schema)} if tool.get("type", "custom") in (None, "custom"):
            check_object(tool, "type name description input_schema strict", f"tools[{index}]", TOOLS)
            described = {"name": name, "description": tool.get("description") or "", "parameters": schema}
            return {"type": "function", "function": described | ({"strict": True} if tool.get("strict") else {})}
        case _:
            raise _refused(tool, f"tools[{index}]")


def _convert(message: InputMessage, path: str) -> list[ChatMessage]:
    """One message as one or several: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        check_object(block, _BLOCKS.get(str(block.get("type")), " ".join(block)), f"{path}[{index}]", MESSAGE_PARTS)
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                calls.append(ToolCall(FunctionCall(name, arguments), call_id, "function"))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                content = block.get("content") or ""
                results.append(ChatMessage("tool", _text(content, f"{path}[{index}].content"), tool_call_id=call_id))
            case _:
                raise _refused(block, f"{path}[{index}]")
    if not (texts or thoughts or calls) and results:
        return results
    reasoning = "".join(thoughts) if thoughts else None
    spoken = ChatMessage(message.role, "".join(texts), tool_calls=calls or None, reasoning_content=reasoning)
    return [*results, spoken]


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content if isinstance(content, list) else [content]):
        match block:
            case {"type": "text", "text": str(text)}:
                check_object(block, "type text", f"{path}[{index}]", MESSAGE_PARTS)
                texts.append(text)
            case _:
                raise _refused(block, f"{path}[{index}]")
    return "".join(texts)


def _refused(block: Any, path: str) -> ApiError:
    kind = block.get("type") if isinstance(block, dict) else block
    return ApiError(
        400,
        f"{path} is of type {kind!r:.40} and cannot be read; this server reads text, tool calls and their results",
        code="unsupported_parameter",
        param=path,
    )
