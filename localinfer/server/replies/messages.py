"""Messages and tools as the APIs describe them, brought into the one shape that the engine reads, or refused."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.chat.messages import read_messages
from localinfer.errors import MessageError
from localinfer.server.transport.http import ApiError, check_object, unsupported
from localinfer.server.transport.known_fields import MESSAGE_PARTS, SEARCH_TOOLS, TOOLS

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=256)]
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_IGNORED = ("refusal", "annotations", "audio", "id")
_FUNCTION = "name description parameters strict"
_SEPARATOR = "__"
"""Between the name of a namespace and that of a tool in it: letters that every template prints as they are."""


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
        written["content"] = joined_text(message.content, f"{path}.content")
    return written


def joined_text(content: str | Sequence[Mapping[str, Any]] | None, path: str) -> str:
    """The text of a message, of its parts if it has some. Raises: ApiError for what is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text_of(part, f"{path}[{index}]") for index, part in enumerate(content))


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


def function_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Function tools, given with or without their wrapper, in it.

    Raises: ApiError for other kinds, which a server would have to run itself, and for members that mean nothing.
    """
    return [_wrapped(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def responses_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Like `function_tools`, with those of namespaces, and without searches, as the API of responses has them."""
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") == "namespace":
            made += _namespace_tools(tool, f"tools[{index}]")
        elif tool.get("type") not in SEARCH_TOOLS:
            made.append(_wrapped(tool, f"tools[{index}]"))
    return made


def namespaced_names(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, tuple[str, str]]:
    """By the name that the model calls: the namespace of a tool, and its name in there."""
    names = [
        (str(tool.get("name")), str(inner.get("name")))
        for tool in tools or ()
        if tool.get("type") == "namespace"
        for inner in _inner_tools(tool)
    ]
    return {joined_name(*name): name for name in names}


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool of a namespace."""
    return name if not namespace else f"{namespace}{_SEPARATOR}{name}"


def checked_choice(choice: str | Mapping[str, Any] | None, *, has_tools: bool) -> str | dict[str, Any] | None:
    """A choice of tools in the engine's shape. Raises: ApiError for kinds that are not known here."""
    made = _named_choice(choice) if isinstance(choice, Mapping) else choice
    if not has_tools and made not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice asks for a call, but there are no tools; give some", param="tool_choice")
    return made


def _named_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    function = choice.get("function")
    if choice.get("type") == "function" and isinstance(function, Mapping):
        check_object(choice, "type function", "tool_choice", {})
        check_object(function, "name", "tool_choice.function", {})
        return dict(choice)
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        check_object(choice, "type name namespace", "tool_choice", {})
        return {"type": "function", "function": {"name": joined_name(choice.get("namespace"), choice["name"])}}
    raise unsupported(
        f"tool_choice is of type {choice.get('type')!r:.40}; give auto, none, required, or a function's name",
        "tool_choice",
    )


def _namespace_tools(tool: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    check_object(tool, "type name description tools", path, TOOLS)
    namespace = tool.get("name")
    if not isinstance(namespace, str) or not _inner_tools(tool):
        raise ApiError(400, f"{path} is a namespace without a name or without tools; give both", param=path)
    for index, inner in enumerate(_inner_tools(tool)):
        wrapped = _wrapped(inner, f"{path}.tools[{index}]")
        function = wrapped["function"]
        descriptions = (tool.get("description"), function.get("description"))
        joined = "\n".join(text for text in descriptions if isinstance(text, str) and text)
        function |= {"name": joined_name(namespace, str(function.get("name"))), "description": joined}
        yield wrapped


def _inner_tools(tool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = tool.get("tools")
    return [one for one in inner if isinstance(one, Mapping)] if isinstance(inner, list) else []


def _wrapped(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type", "function")
    if kind != "function":
        raise unsupported(
            f"{path} is of type {kind!r:.40}, which this server cannot run; describe it as a function that the client "
            "runs, or leave it out",
            f"{path}.type",
        )
    function = tool.get("function")
    if isinstance(function, Mapping):
        check_object(tool, "type function", path, TOOLS)
        check_object(function, _FUNCTION, f"{path}.function", TOOLS)
    else:
        check_object(tool, f"type {_FUNCTION}", path, TOOLS)
        function = tool
    return {"type": "function", "function": {name: function[name] for name in _FUNCTION.split() if name in function}}
