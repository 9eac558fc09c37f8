"""Messages as clients write them, in OpenAI's and Anthropic's shapes, brought into that of the engine, or refused."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import MESSAGE_MEMBERS, MESSAGE_PARTS, TOOLS
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


_MEMBERS = {
    "text": "type text",
    "thinking": "type thinking",
    "redacted_thinking": "type",
    "tool_use": "type id name input",
    "tool_result": "type tool_use_id content",
    "document": "type source title context",
    "search_result": "type source title content",
}
"""Type of a block -> its members that are read."""

_TEXT = {"type": "string"}
_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": {"type": "integer"}},
}
_CLIENT_TOOLS: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bash": (
        "Run a command in a shell that stays open between calls; restart opens a new one.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        (),
    ),
    "text_editor": (
        "View, create and edit files. str_replace replaces old_str, which must occur once, by new_str; insert puts a "
        "text after insert_line.",
        {"command": {"enum": ["view", "create", "str_replace", "insert"]}, **_EDITS},
        ("command", "path"),
    ),
    "memory": (
        "View, create, edit, delete and rename files of notes under /memories, which outlive the conversation.",
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITS,
            "old_path": _TEXT,
            "new_path": _TEXT,
        },
        ("command",),
    ),
}
"""Tools that the client runs and whose arguments their type stands for: description, arguments, those required."""
_SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search_tool_regex", "tool_search_tool_bm25")
"""Tools that their maker's server runs; clients list them unasked, and what a model is not shown it does not call."""


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message: text, or blocks of text, documents, tool calls, their results, and former reasoning."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


def function_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat completions have them, without those that a server would run.

    Raises: ApiError for what is no tool, and for one that needs more than text.
    """
    read = (_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools) if _kind_of(tool) not in _SERVER_TOOLS)
    return list(read)


def check_tool_choice(tools: Sequence[Mapping[str, Any]], name: str | None) -> None:
    """Raise ApiError for the choice of a tool that is left out."""
    if name is not None and any(tool.get("name") == name and _kind_of(tool) in _SERVER_TOOLS for tool in tools):
        raise unsupported(
            f"tool_choice names {name!r:.60}, which a server would run itself, and this one runs none; give a tool "
            "that the client runs",
            "tool_choice",
        )


def _kind_of(tool: Mapping[str, Any]) -> str:
    """The type of a tool without the date of its version."""
    kind = str(tool.get("type") or "custom")
    name, _, version = kind.rpartition("_")
    return name if version.isdigit() else kind


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = _kind_of(tool)
    match tool:
        case {"name": str(name), "input_schema": dict(schema)} if kind == "custom":
            check_object(tool, "type name description input_schema strict", path, TOOLS)
            described = {"name": name, "description": tool.get("description") or "", "parameters": schema}
            return {"type": "function", "function": described | ({"strict": True} if tool.get("strict") else {})}
        case {"name": str(name)} if kind in _CLIENT_TOOLS:
            if tool.get("input_schema") is not None:
                raise unsupported(
                    f"{path}.input_schema is given for a tool of type {tool['type']!r:.40}, whose arguments are known; "
                    "leave out one of both",
                    f"{path}.input_schema",
                )
            check_object(tool, "type name max_characters", path, TOOLS)
            description, properties, required = _CLIENT_TOOLS[kind]
            parameters = {"type": "object", "properties": properties, "required": list(required)}
            described = {"name": name, "description": description, "parameters": parameters}
            return {"type": "function", "function": described}
        case _:
            raise unsupported(
                f"{path} is of type {tool.get('type')!r:.40}, which this server cannot describe to the model; give a "
                "name, a description and an input_schema",
                path,
            )


def chat_messages(message: InputMessage, path: str) -> list[ChatMessage]:
    """One message as one or several: results of tools are messages of their own. Raises: ApiError."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        place = f"{path}[{index}]"
        _check_block(block, place)
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                calls.append(ToolCall(FunctionCall(name, arguments), call_id, "function"))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                content = text_of(block.get("content") or "", f"{place}.content")
                results.append(ChatMessage("tool", content, tool_call_id=call_id))
            case _:
                texts.append(_block_text(block, place))
    if not (texts or reasoning or calls) and results:
        return results
    return [
        *results,
        ChatMessage(
            message.role,
            joined_parts(texts, message.role),
            tool_calls=calls or None,
            reasoning_content="".join(reasoning) if reasoning else None,
        ),
    ]


def text_of(content: Any, path: str) -> str:
    """The text of a system message or a result, of its blocks if it has some. Raises: ApiError for what is not text."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(block, dict):
            raise _refused(block, f"{path}[{index}]")
        _check_block(block, f"{path}[{index}]")
        texts.append(_block_text(block, f"{path}[{index}]"))
    return joined_parts(texts, "user")


def _check_block(block: Mapping[str, Any], path: str) -> None:
    check_object(block, _MEMBERS.get(str(block.get("type")), " ".join(block)), path, MESSAGE_PARTS)


def _block_text(block: Mapping[str, Any], path: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "document", "source": dict(source)}:
            return _titled(block, _document_text(source, f"{path}.source"))
        case {"type": "search_result", "source": str(source), "content": list(content)}:
            return _titled({**block, "context": source}, text_of(content, f"{path}.content"))
        case _:
            raise _refused(block, path)


def _document_text(source: Mapping[str, Any], path: str) -> str:
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": content}:
            return text_of(content, f"{path}.content")
        case _:
            raise unsupported(
                f"{path} is of type {source.get('type')!r:.40}; this server reads documents of plain text only, as "
                '{"type": "text", "media_type": "text/plain", "data": "..."}',
                path,
            )


def _titled(block: Mapping[str, Any], text: str) -> str:
    """A document as the model reads it: its title and context, where it has some, then its text."""
    heads = [block[name] for name in ("title", "context") if isinstance(block.get(name), str) and block[name]]
    return "\n".join([*heads, text])


def _refused(block: Any, path: str) -> ApiError:
    kind = block.get("type") if isinstance(block, dict) else block
    return unsupported(
        f"{path} is of type {kind!r:.40} and cannot be read; this server reads text, tool calls and their results", path
    )
