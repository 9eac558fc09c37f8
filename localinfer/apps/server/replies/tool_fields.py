"""Tools of each API, brought into the one shape that the engine reads.

Custom tools keep their kind. What a client of the API of responses runs itself under a kind of its own, such as a
shell, is shown to the model as a function. Tools that a server would have to run are left out with a notice, as clients
list them unasked: what a model is not shown it does not call.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import TOOLS, notice
from localinfer.errors import ConstraintError
from localinfer.generation.chat.custom_tools import (
    CUSTOM_ARGUMENT,
    TextForm,
    patch_tool,
    read_custom,
)

logger = logging.getLogger("localinfer.server")
Tools = Annotated[list[dict[str, Any]], Meta(max_length=256)]
CallKind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
_FUNCTION = "name description parameters strict"
_SEPARATOR = "__"
"""Between the name of a namespace and that of a tool in it: letters that every template prints as they are."""
_told: set[str] = set()
"""Kinds of tools that the log has said are left out."""

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
_ENVIRONMENT = {"type": "object", "additionalProperties": _TEXT}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_WHOLE = {"type": "integer", "minimum": 1}


class ClientTool(NamedTuple):
    """A kind of tool of the API of responses that the client runs."""

    members: str
    """Members that its definition may have."""
    function: Mapping[str, Any]
    """Function that the model is shown."""
    form: TextForm | None = None
    """Form of its input, if that is text."""


def _command(name: str, description: str, properties: dict[str, Any], required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema}


CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "local_shell": ClientTool(
        "type",
        _command(
            "local_shell",
            "Run a command, given as its words.",
            {
                "command": _TEXTS,
                "working_directory": _TEXT,
                "timeout_ms": _WHOLE,
                "env": _ENVIRONMENT,
                "user": _TEXT,
            },
            "command",
        ),
    ),
    "shell": ClientTool(
        "type environment allowed_callers",
        _command(
            "shell",
            "Run commands in a shell, each by itself.",
            {"commands": _TEXTS, "timeout_ms": _WHOLE, "max_output_length": _WHOLE},
            "commands",
        ),
    ),
    "apply_patch": ClientTool("type allowed_callers", *patch_tool(is_once=True)),
}
"""By their type, which is also the name that the model calls."""


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool that the model may call, in its namespace if it has one."""

    name: str
    namespace: str | None = None
    kind: CallKind = "function"


def leave_out(kind: str) -> None:
    """Say in the answer, and once in the log, that tools of a kind are left out."""
    notice(f"tools of type {kind!r:.40} are left out: this server runs none")
    if kind not in _told and len(_told) < 100:
        _told.add(kind)
        logger.warning("requests list tools of type %.40r, which are left out: no tool is run here", kind)


def function_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Function and custom tools, given with or without their wrapper, in it, without those that a server would run.

    Raises: ApiError for what is no tool, and for members that mean nothing.
    """
    made = []
    for index, tool in enumerate(tools or ()):
        if _is_hosted(tool, ()):
            leave_out(tool["type"])
        else:
            made.append(_own_tool(tool, f"tools[{index}]"))
    return made


def responses_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Like `function_tools` for the API of responses: with namespaces, and with kinds that its clients run."""
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        if is_left_out(tool):
            leave_out(tool["type"])
        elif tool.get("type") == "namespace":
            made += _namespace_tools(tool, path)
        elif (known := CLIENT_TOOLS.get(str(tool.get("type")))) is not None:
            check_object(tool, known.members, path, TOOLS)
            made.append(_with_form(dict(known.function), known.form))
        else:
            made.append(_own_tool(tool, path))
    return made


def is_left_out(tool: Mapping[str, Any]) -> bool:
    """True for a tool of the API of responses that a server would have to run."""
    environment = tool.get("environment")
    is_elsewhere = isinstance(environment, Mapping) and environment.get("type") != "local"
    return _is_hosted(tool, ("namespace", *CLIENT_TOOLS)) or (tool.get("type") == "shell" and is_elsewhere)


def _is_hosted(tool: Mapping[str, Any], known: Sequence[str]) -> bool:
    kind = tool.get("type", "function")
    return isinstance(kind, str) and kind not in ("function", "custom", *known)


def responses_choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None
) -> str | dict[str, Any] | None:
    """Like `checked_choice`, where custom tools and those of other kinds may be named, with the tools as given."""
    names = tool_names(tools)
    if isinstance(choice, Mapping):
        choice = _as_function(choice, names)
        allowed = choice.get("tools")
        if choice.get("type") == "allowed_tools" and isinstance(allowed, list):
            choice = {**choice, "tools": [_as_function(one, names) for one in allowed if isinstance(one, Mapping)]}
    return checked_choice(choice, tools, has_tools=bool(names))


def _as_function(choice: Mapping[str, Any], names: Mapping[str, ToolName]) -> Mapping[str, Any]:
    """A choice of a tool of another kind as that of the function that it became. Raises: ApiError if there is none."""
    kind = choice.get("type")
    if kind in CLIENT_TOOLS and kind in names:
        return {"type": "function", "name": kind}
    if kind != "custom" or not isinstance(choice.get("name"), str):
        return choice
    name = joined_name(choice.get("namespace"), choice["name"])
    if name not in names or names[name].kind != "custom":
        raise ApiError(400, f"tool_choice names {name!r:.80}, which is no custom tool here", param="tool_choice")
    return {**choice, "type": "function"}


def tool_names(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, ToolName]:
    """By the name that the model calls: what clients of OpenAI's APIs call each tool."""
    names: dict[str, ToolName] = {}
    for tool in tools or ():
        kind = tool.get("type")
        if is_left_out(tool):
            continue
        if kind == "shell" or kind == "local_shell" or kind == "apply_patch":
            names[kind] = ToolName(kind, None, kind)
            continue
        namespace = str(tool.get("name")) if kind == "namespace" else None
        for one in [tool] if namespace is None else _inner_tools(tool):
            if _is_hosted(one, ()):
                continue
            kind = one.get("type", "function")
            inner = one.get(str(kind))
            name = inner.get("name") if isinstance(inner, Mapping) else one.get("name")
            made = ToolName(str(name), namespace, "custom" if kind == "custom" else "function")
            names[joined_name(namespace, made.name)] = made
    return names


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool of a namespace."""
    return name if not namespace else f"{namespace}{_SEPARATOR}{name}"


def checked_choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None, *, has_tools: bool
) -> str | dict[str, Any] | None:
    """A choice of tools in the engine's shape; the model's own where it is of tools that are left out.

    tools: as they were given. has_tools: some are not left out. Raises: ApiError for what is no choice.
    """
    kinds = {tool["type"] for tool in tools or () if _is_hosted(tool, ("namespace",))}
    is_of_these = isinstance(choice, Mapping) and choice.get("type") in kinds
    if is_of_these or (tools and not has_tools and choice not in (None, "none", "auto")):
        notice("tool_choice is of tools that are left out, and the model chooses")
        return "auto"
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
    custom = choice.get("custom")
    if choice.get("type") == "custom" and isinstance(custom, Mapping):
        check_object(choice, "type custom", "tool_choice", {})
        check_object(custom, "name", "tool_choice.custom", {})
        return {"type": "function", "function": dict(custom)}
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
        "tools": [_named_choice(tool) for tool in tools if tool.get("type", "function") in ("function", "custom")],
    }


def _namespace_tools(tool: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    check_object(tool, "type name description tools", path, TOOLS)
    namespace = tool.get("name")
    if not isinstance(namespace, str) or not _inner_tools(tool):
        raise ApiError(400, f"{path} is a namespace without a name or without tools; give both", param=path)
    for index, inner in enumerate(_inner_tools(tool)):
        if _is_hosted(inner, ()):
            leave_out(inner["type"])
            continue
        wrapped = _own_tool(inner, f"{path}.tools[{index}]")
        function = wrapped["function"]
        descriptions = (tool.get("description"), function.get("description"))
        joined = "\n".join(text for text in descriptions if isinstance(text, str) and text)
        function |= {"name": joined_name(namespace, str(function.get("name"))), "description": joined}
        yield wrapped


def _inner_tools(tool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = tool.get("tools")
    return [one for one in inner if isinstance(one, Mapping)] if isinstance(inner, list) else []


def _own_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A function, or a custom tool. Raises: ApiError, also for a grammar that cannot be enforced."""
    if tool.get("type") != "custom":
        return _wrapped(tool, path)
    inner, place = tool.get("custom"), path
    if isinstance(inner, Mapping):
        check_object(tool, "type custom", path, TOOLS)
        place = f"{path}.custom"
    else:
        inner = tool
    check_object(inner, "type name description format", place, TOOLS)
    if isinstance(form := inner.get("format"), Mapping):
        check_object(form, "type syntax definition grammar", f"{place}.format", {})
    try:
        function, text_form = read_custom(tool, path)
    except ConstraintError as error:
        raise ApiError(400, str(error), code="unsupported_parameter", param=error.field) from None
    return _with_form(function, text_form)


def _with_form(function: dict[str, Any], form: TextForm | None) -> dict[str, Any]:
    tool: dict[str, Any] = {"type": "function", "function": function}
    return tool if form is None else {**tool, "form": form}


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


def anthropic_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat completions have them, without those that a server would run, or that need more than text.

    Raises: ApiError for what is no tool.
    """
    made = []
    for index, tool in enumerate(tools):
        if _is_foreign(tool):
            leave_out(str(tool["type"]))
        else:
            made.append(_anthropic_tool(tool, f"tools[{index}]"))
    return made


def anthropic_choice(choice: str | dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any] | None:
    """A choice of these tools; the model's own where it names one that is left out. Raises: ApiError."""
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    if name is not None and any(tool.get("name") == name and _is_foreign(tool) for tool in tools):
        notice("tool_choice names a tool that is left out, and the model chooses")
        return "auto"
    has_tools = not all(map(_is_foreign, tools))
    return checked_choice(choice, tools, has_tools=has_tools)


def _is_foreign(tool: Mapping[str, Any]) -> bool:
    kind = _kind_of(tool)
    return isinstance(tool.get("type"), str) and kind != "custom" and kind not in _CLIENT_TOOLS


def _kind_of(tool: Mapping[str, Any]) -> str:
    """The type of a tool without the date of its version."""
    kind = str(tool.get("type") or "custom")
    name, _, version = kind.rpartition("_")
    return name if version.isdigit() else kind


def _anthropic_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
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
