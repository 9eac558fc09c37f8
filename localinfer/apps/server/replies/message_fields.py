"""Messages and tools of each API, brought into the one shape that the engine reads, or refused.

A custom tool takes any text. It becomes a function whose one argument is that text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.replies.media_fields import media_part
from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import MESSAGE_MEMBERS, MESSAGE_PARTS, SEARCH_TOOLS, TOOLS
from localinfer.errors import MessageError
from localinfer.generation.chat.media_parts import MediaSource, joined_parts, parts_content
from localinfer.generation.chat.messages import read_messages

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_IGNORED = ("refusal", "annotations", "audio", "id", "prefix", "partial")


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a function: its arguments are JSON, written as a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
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
    tool_calls: list[MessageToolCall] | None = None
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
    """All messages as templates read them. Raises: ApiError for what cannot be read, naming its path."""
    try:
        return read_messages([_as_written(message, f"messages[{index}]") for index, message in enumerate(messages)])
    except MessageError as error:
        code = "unsupported_parameter" if error.is_unsupported else None
        raise ApiError(400, str(error), code=code, param=error.path) from error


def _as_written(message: ChatMessage, path: str) -> dict[str, Any]:
    """The message without the members that are ignored, its parts checked member by member."""
    written: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(message, content=None))
    for name in _IGNORED:
        del written[name]
    for call in written["tool_calls"] or ():
        del call["index"]
    written["content"] = message.content
    if isinstance(message.content, list):
        written["content"] = message_content(message.content, f"{path}.content", message.role)
    return written


def message_content(
    content: str | Sequence[Mapping[str, Any] | MediaSource] | None, path: str, role: str = "user"
) -> str | list[Any]:
    """The text of a message, of its parts if it has some; with pictures or sounds, the list of parts as `read_messages`
    takes them. Raises: ApiError for what is neither."""
    if content is None or isinstance(content, str):
        return content or ""
    return parts_content([_part_of(part, f"{path}[{index}]") for index, part in enumerate(content)], role)


def _part_of(part: Mapping[str, Any] | MediaSource, path: str) -> str | MediaSource:
    media = media_part(part, path)
    if media is not None:
        return media
    assert not isinstance(part, MediaSource)
    return _text_of(part, path)


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
            f'{path} is of type {kind!r:.40}; what is read here is text, as {{"type": "text", "text": "..."}}', path
        )
    check_object(part, f"type {member}", path, MESSAGE_PARTS)
    return text


_MEMBERS = {
    "text": "type text",
    "thinking": "type thinking",
    "redacted_thinking": "type",
    "tool_use": "type id name input",
    "tool_result": "type tool_use_id content",
    "image": "type source",
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


def anthropic_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
    parts: list[str | MediaSource] = []
    reasoning: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(message.content):
        place = f"{path}[{index}]"
        _check_block(block, place)
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                calls.append(MessageToolCall(FunctionCall(name, arguments), call_id, "function"))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                content = blocks_content(block.get("content") or "", f"{place}.content")
                results.append(ChatMessage("tool", content, tool_call_id=call_id))
            case _:
                parts.append(_block_part(block, place))
    if not (parts or reasoning or calls) and results:
        return results
    return [
        *results,
        ChatMessage(
            message.role,
            parts_content(parts, message.role),
            tool_calls=calls or None,
            reasoning_content="".join(reasoning) if reasoning else None,
        ),
    ]


def blocks_content(content: Any, path: str) -> str | list[Any]:
    """The content of a result, of its blocks if it has some. Raises: ApiError for what is no text or picture."""
    if isinstance(content, str):
        return content
    parts: list[str | MediaSource] = []
    for index, block in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(block, dict):
            raise _refused(block, f"{path}[{index}]")
        _check_block(block, f"{path}[{index}]")
        parts.append(_block_part(block, f"{path}[{index}]"))
    return parts_content(parts, "user")


def text_of(content: Any, path: str) -> str:
    """As `blocks_content`, of what has to be text, such as a system message."""
    read = blocks_content(content, path)
    if isinstance(read, list):
        media = next(part for part in read if isinstance(part, MediaSource))
        raise unsupported(f"{media.path} is of type {media.kind!r}; only text can stand there", media.path)
    return read


def _block_part(block: Mapping[str, Any], path: str) -> str | MediaSource:
    media = media_part(block, path)
    return _block_text(block, path) if media is None else media


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
        f"{path} is of type {kind!r:.40} and cannot be read; this server reads text, images, tool calls and their "
        "results",
        path,
    )


Tools = Annotated[list[dict[str, Any]], Meta(max_length=256)]
_FUNCTION = "name description parameters strict"
_SEPARATOR = "__"
"""Between the name of a namespace and that of a tool in it: letters that every template prints as they are."""
CUSTOM_ARGUMENT = "input"
"""The one argument of the function that a custom tool becomes."""


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool that the model may call, in its namespace if it has one."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def function_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Function tools, given with or without their wrapper, in it.

    Raises: ApiError for other kinds, which a server would have to run itself, and for members that mean nothing.
    """
    return [_wrapped(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def responses_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Like `function_tools` for the API of responses: with custom tools and namespaces, and without searches."""
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") == "namespace":
            made += _namespace_tools(tool, f"tools[{index}]")
        elif tool.get("type") not in SEARCH_TOOLS:
            made.append(_responses_tool(tool, f"tools[{index}]"))
    return made


def responses_choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None
) -> str | dict[str, Any] | None:
    """Like `checked_choice`, where custom tools may be named, with the tools as they were given."""
    names = tool_names(tools)
    if isinstance(choice, Mapping):
        choice = _as_function(choice, names)
        allowed = choice.get("tools")
        if choice.get("type") == "allowed_tools" and isinstance(allowed, list):
            choice = {**choice, "tools": [_as_function(one, names) for one in allowed if isinstance(one, Mapping)]}
    return checked_choice(choice, has_tools=bool(names))


def _as_function(choice: Mapping[str, Any], names: Mapping[str, ToolName]) -> Mapping[str, Any]:
    """A choice of a custom tool as that of the function that it became. Raises: ApiError if there is none."""
    if choice.get("type") != "custom" or not isinstance(choice.get("name"), str):
        return choice
    name = joined_name(choice.get("namespace"), choice["name"])
    if name not in names or not names[name].is_custom:
        raise ApiError(400, f"tool_choice names {name!r:.80}, which is no custom tool here", param="tool_choice")
    return {**choice, "type": "function"}


def tool_names(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, ToolName]:
    """By the name that the model calls: what clients of the API of responses call each tool."""
    names: dict[str, ToolName] = {}
    for tool in tools or ():
        if tool.get("type") in SEARCH_TOOLS:
            continue
        namespace = str(tool.get("name")) if tool.get("type") == "namespace" else None
        for one in [tool] if namespace is None else _inner_tools(tool):
            made = ToolName(str(one.get("name")), namespace, one.get("type") == "custom")
            names[joined_name(namespace, made.name)] = made
    return names


def custom_arguments(text: str) -> str:
    """The arguments of the function that a custom tool became, for an input."""
    # Written as models are held to write it, so that a call in a conversation is found in the prefix cache.
    return json.dumps({CUSTOM_ARGUMENT: text}, ensure_ascii=False)


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool of a namespace."""
    return name if not namespace else f"{namespace}{_SEPARATOR}{name}"


def checked_choice(choice: str | Mapping[str, Any] | None, *, has_tools: bool) -> str | dict[str, Any] | None:
    """A choice of tools in the engine's shape. Raises: ApiError for kinds that are not known here."""
    made = _named_choice(choice) if isinstance(choice, Mapping) else choice
    if not has_tools and made not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice demands a call, but there are no tools; give some", param="tool_choice")
    return made


def _named_choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    function = choice.get("function")
    if choice.get("type") in ("auto", "none", "required", "any"):
        check_object(choice, "type", "tool_choice", {})
        return str(choice["type"])
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice)
    if choice.get("type") == "function" and isinstance(function, Mapping):
        check_object(choice, "type function", "tool_choice", {})
        check_object(function, "name", "tool_choice.function", {})
        return dict(choice)
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        check_object(choice, "type name namespace", "tool_choice", {})
        return {"type": "function", "function": {"name": joined_name(choice.get("namespace"), choice["name"])}}
    raise unsupported(
        f"tool_choice is of type {choice.get('type')!r:.40}; give auto, none, required, a function's name, or "
        "allowed_tools",
        "tool_choice",
    )


def _allowed_tools(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The tools among which the model may choose, given beside the type or, for chat completions, in a wrapper."""
    wrapped = choice.get("allowed_tools")
    given = wrapped if isinstance(wrapped, Mapping) else choice
    check_object(choice, "type allowed_tools" if given is wrapped else "type mode tools", "tool_choice", {})
    tools = given.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ApiError(400, "tool_choice has no list of the tools that are allowed; give tools", param="tool_choice")
    return {
        "type": "allowed_tools",
        "mode": given.get("mode", "auto"),
        "tools": [_named_choice(tool) for tool in tools if tool.get("type") not in SEARCH_TOOLS],
    }


def _namespace_tools(tool: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    check_object(tool, "type name description tools", path, TOOLS)
    namespace = tool.get("name")
    if not isinstance(namespace, str) or not _inner_tools(tool):
        raise ApiError(400, f"{path} is a namespace without a name or without tools; give both", param=path)
    for index, inner in enumerate(_inner_tools(tool)):
        wrapped = _responses_tool(inner, f"{path}.tools[{index}]")
        function = wrapped["function"]
        descriptions = (tool.get("description"), function.get("description"))
        joined = "\n".join(text for text in descriptions if isinstance(text, str) and text)
        function |= {"name": joined_name(namespace, str(function.get("name"))), "description": joined}
        yield wrapped


def _inner_tools(tool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = tool.get("tools")
    return [one for one in inner if isinstance(one, Mapping)] if isinstance(inner, list) else []


def _responses_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    return _custom_tool(tool, path) if tool.get("type") == "custom" else _wrapped(tool, path)


def _custom_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A custom tool as a function. A regex binds its argument; a Lark grammar is only shown, as JSON cannot hold one.

    Raises: ApiError.
    """
    check_object(tool, "type name description format", path, TOOLS)
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise ApiError(
            400, f'{path}.format is {form!r:.60}; give {{"type": "text"}} or a grammar', param=f"{path}.format"
        )
    check_object(form, "type syntax definition", f"{path}.format", {})
    argument: dict[str, Any] = {"type": "string", "description": "The input, as plain text."}
    parts = [tool.get("description")]
    is_regex = False
    if form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise ApiError(
                400,
                f"{path}.format is a grammar; name lark or regex as its syntax, and give its definition",
                param=f"{path}.format",
            )
        parts.append(
            f"The {CUSTOM_ARGUMENT} must follow this {'Lark grammar' if syntax == 'lark' else 'regex'}:\n{definition}"
        )
        is_regex = syntax == "regex"
        if is_regex:
            argument["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: argument},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    function = {
        "name": tool.get("name"),
        "description": "\n\n".join(part for part in parts if isinstance(part, str) and part),
        "parameters": parameters,
        # Then a regex that cannot be enforced is refused.
        **({"strict": True} if is_regex else {}),
    }
    return {"type": "function", "function": function}


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


_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SPECIAL = re.compile(r'["\\]')
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class CustomInput:
    """Takes the JSON of one call's arguments in pieces, cut anywhere, and gives the text that they hold."""

    def __init__(self) -> None:
        self._json = ""
        self._at = 0
        self._given: list[str] = []

    def push(self, piece: str) -> str:
        """The text that a piece adds; it may be empty."""
        self._json += piece
        if not self._at:
            opening = _OPENING.match(self._json)
            if opening is None:
                return ""
            self._at = opening.end()
        text = self._read()
        self._given.append(text)
        return text

    def rest(self) -> str:
        """The rest of the whole text at the end: of arguments that are no such JSON, all of them as they are."""
        given = "".join(self._given)
        whole = self._whole(given)
        rest = whole.removeprefix(given)
        self._given.append(rest)
        return rest

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._given)

    def _whole(self, given: str) -> str:
        try:
            arguments = json.loads(self._json)
        except ValueError:
            # Cut short, or no JSON.
            return given if self._at else self._json
        text = arguments.get(CUSTOM_ARGUMENT) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) and text.startswith(given) else given or self._json

    def _read(self) -> str:
        """Decode what can be decoded by now; stops before the closing quote and before an escape that is not whole."""
        parts: list[str] = []
        while self._at < len(self._json):
            sign = self._json[self._at]
            if sign == '"':
                break
            if sign != "\\":
                found = _SPECIAL.search(self._json, self._at)
                end = len(self._json) if found is None else found.start()
                parts.append(self._json[self._at : end])
                self._at = end
                continue
            decoded, length = self._escape()
            if not length:
                break
            parts.append(decoded)
            self._at += length
        return "".join(parts)

    def _escape(self) -> tuple[str, int]:
        """The character of the escape here, and its length in JSON; 0 if it is not whole yet."""
        kind = self._json[self._at + 1 : self._at + 2]
        if kind != "u":
            return _ESCAPES.get(kind, kind), 2 if kind else 0
        first = _UNICODE.match(self._json, self._at)
        if first is None:
            # Not whole yet, or no escape that JSON knows: the end decides.
            return "", 0
        code = int(first[1], 16)
        if code not in _HIGH:
            return chr(code) if code not in _LOW else "\ufffd", 6
        second = _UNICODE.match(self._json, self._at + 6)
        if second is None:
            is_cut = r"\u".startswith(self._json[self._at + 6 : self._at + 8]) and len(self._json) < self._at + 12
            return ("", 0) if is_cut else ("\ufffd", 6)
        low = int(second[1], 16)
        if low not in _LOW:
            return "\ufffd", 6
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), 12
