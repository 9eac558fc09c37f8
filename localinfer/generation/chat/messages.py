"""Messages and tools of a chat as callers give them: checked, and in the one shape that templates are given.

Callers are programs that pass on what they were sent: content may be missing beside a tool call, null, or in parts, and
members that do not apply are null. Every way into a chat, in Python and by HTTP, goes through `read_messages`.

Agents write system messages into the midst of conversations, and several at the start. Where a template takes none, or
none so late, their text stays in the conversation at the same position (`placed_system`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localinfer.arguments import shown
from localinfer.errors import ConstraintError, MessageError, RequestError
from localinfer.generation.chat.json_schema import enforced_schema
from localinfer.generation.options import ToolChoice

_EXAMPLE = '{"role": "user", "content": "Hello"}'
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# Newer and older names of the roles that templates know.
_ROLES = {"developer": "system", "function": "tool"}
ROLES = ("system", "user", "assistant", "tool")
"""The roles that every chat may have, once they are read."""
# Whose content may be missing: an assistant may only have called tools, and a tool may have nothing to tell.
_MAY_BE_SILENT = ("assistant", "tool")
_WAYS = (
    """give 'auto', 'none', 'required', {"type": "function", "function": {"name": ...}} with the name of a tool, or """
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
)


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`, both text, and what else they hold but for members that are None.

    Content in parts becomes their text, see `joined_parts`; "developer" becomes "system", "function" "tool", and
    `reasoning` `reasoning_content`. Raises: MessageError for what is no message, naming its path; RequestError if
    there is none.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages are {messages!r:.60}; give a list of at least one, like {_EXAMPLE}")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_roles(messages: Sequence[Mapping[str, Any]], *sources: str | None) -> None:
    """Check the roles of messages as they were read: the usual ones, and those that a template names in its source.

    Raises: MessageError for another: a template leaves it out, or writes what its model has never seen.
    """
    known = " ".join(filter(None, sources))
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in known and f'"{role}"' not in known:
            path = f"messages[{index}].role"
            raise MessageError(
                f"{path} is {role!r:.40}, which this model's template does not know; give one of {', '.join(ROLES)}",
                path,
            )


def _read_message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(name, str) for name in message):
        raise MessageError(f"{path} is {message!r:.60}; give each a role and content, like {_EXAMPLE}", path)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessageError(
            f"{path}.role is {role!r:.40}; give each a role and content, like {_EXAMPLE}", f"{path}.role"
        )
    role = _ROLES.get(role, role)
    read: dict[str, Any] = {"role": role, "content": ""}
    read |= {name: value for name, value in message.items() if value is not None and name not in read}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if name in read and not isinstance(read[name], str):
            raise MessageError(f"{path}.{name} is {read[name]!r:.40}; give text, or leave it out", f"{path}.{name}")
    if "reasoning" in read:
        read.setdefault("reasoning_content", read.pop("reasoning"))
        read.pop("reasoning", None)
    calls = _read_calls(read.pop("tool_calls", None), read.pop("function_call", None), role, path)
    if calls:
        read["tool_calls"] = calls
    content = message.get("content")
    if content is None and role not in _MAY_BE_SILENT:
        raise MessageError(
            f"{path}.content is missing or null; only an assistant's or a tool's may be", f"{path}.content"
        )
    read["content"] = "" if content is None else _text(content, f"{path}.content", role)
    return read


def joined_parts(texts: Sequence[str], role: str) -> str:
    """The parts of a message as one text: lines of their own, but in a reply, whose parts are pieces of one text."""
    return ("" if role == "assistant" else "\n").join(texts)


def _text(content: object, path: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise MessageError(
            f'{path} is {content!r:.40}; give text, or a list like [{{"type": "text", "text": "..."}}]', path
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            named = f"of type {kind!r:.40}" if isinstance(part, Mapping) else f"{part!r:.40}"
            place = f"{path}[{index}]"
            raise MessageError(
                f'{place} is {named}; only text is read, as {{"type": "text", "text": "..."}}',
                place,
                is_unsupported=True,
            )
        texts.append(text)
    return joined_parts(texts, role)


def _read_calls(calls: object, single: object, role: str, path: str) -> list[dict[str, Any]]:
    """The calls of a message, without members that are None; `single` is a call as they were before there were ids."""
    path = f"{path}.tool_calls"
    if calls is None and single is not None:
        calls = [{"function": single}]
    if calls is None:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise MessageError(f"{path} are {calls!r:.40}; give a list, or leave them out", path)
    if calls and role != "assistant":
        raise MessageError(f'{path} are of the role {role!r:.40}; only messages of "assistant" call tools', path)
    return [_read_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise MessageError(
            f"{path} is {call!r:.60}; give each like "
            '{"id": "a1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}',
            path,
        )
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        place = f"{path}.function.arguments"
        raise MessageError(f"{place} are {arguments!r:.40}; give an object, or its JSON as text", place)
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise MessageError(f"{path}.id is {call_id!r:.40}; give text, or leave it out", f"{path}.id")
    read = {key: value for key, value in call.items() if value is not None}
    return {**read, "function": {key: value for key, value in function.items() if value is not None}}


_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TOOL_EXAMPLE = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
_MOST_TOOLS = 512


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: Mapping[str, Any]
    """Description in the form that the caller gave, for the template."""
    parameters: Mapping[str, Any] | None
    """The JSON Schema of its arguments, checked; None where it cannot be enforced and need not be (`"strict": true`
    was not asked for), so that any object goes."""
    left_out: tuple[str, ...] = ()
    """Parts of the schema that are not enforced, in words."""


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Check tools in OpenAI's shape. Raises: RequestError; ConstraintError for a strict one's schema."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes) or len(tools) > _MOST_TOOLS:
        wanted = f"a list of at most {_MOST_TOOLS}, each like {_TOOL_EXAMPLE}"
        raise RequestError(f"tools are {tools!r:.60}; give {wanted}", field="tools")
    read = tuple(_read_tool(index, tool) for index, tool in enumerate(tools))
    names = [tool.name for tool in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are named {twice!r}; give each a name of its own", field="tools")
    return read


def _read_tool(index: int, tool: object) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"tool {index} is {tool!r:.60}; give each a name of at most 128 letters, digits, '_', '-', '.' or ':', "
            f"like {_TOOL_EXAMPLE}",
            field="tools",
        )
    schema = function.get("parameters")
    try:
        parameters: Mapping[str, Any] | None = enforced_schema({"type": "object", **(schema or {})})
        if parameters is not None and parameters["type"] != "object":
            raise ConstraintError("the arguments of a tool are an object; give its parameters that type")
    except (ConstraintError, TypeError) as error:
        if function.get("strict") or not isinstance(error, ConstraintError):
            raise ConstraintError(
                f"the parameters of tool {name!r} cannot be enforced: {error}",
                keyword=getattr(error, "keyword", None),
                field="tools",
            ) from None
        parameters = None
    return Tool(name=name, description={"type": "function", "function": dict(function)}, parameters=parameters)


Messages = Sequence[Mapping[str, Any]]

SYSTEM_ROLES = ("system", "developer")


def has_late_system(messages: Messages) -> bool:
    """True if a system message follows another message."""
    return any(message["role"] in SYSTEM_ROLES for message in messages[1:])


def placed_system(messages: Messages, *, takes_one: bool) -> list[Mapping[str, Any]]:
    """Messages of which at most the first is a system message.

    Those at the start become one; takes_one: else it stands before the text of the first message of the user. Later
    ones are written behind the message of the user before them, or, behind another one, as a message of the user.
    Texts are joined by an empty line.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    head = "\n\n".join(message["content"] for message in messages[:start] if message["content"])
    result: list[Mapping[str, Any]] = [{**messages[0], "content": head}] if start else []
    if start and not takes_one:
        result = [{"role": "user", "content": head}]
    is_made = bool(result) and not takes_one
    for message in messages[start:]:
        last = result[-1] if result else {"role": None}
        if message["role"] in SYSTEM_ROLES:
            if last["role"] == "user":
                result[-1] = _joined(last, message)
            else:
                result.append({"role": "user", "content": message["content"]})
                is_made = True
            continue
        if message["role"] == "user" and is_made:
            # Templates may want roles to alternate.
            result[-1] = _joined(last, message)
        else:
            result.append(message)
        is_made = False
    return result


def _joined(message: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": f"{message['content']}\n\n{other['content']}"}


@dataclass(frozen=True)
class ChosenTools:
    """The tools that may be called: none, where none may. must_call: one has to be. is_single: only once."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    is_single: bool = False


def choose_tools(tools: tuple[Tool, ...], choice: ToolChoice | None) -> ChosenTools:
    """Resolve a choice among these tools. Raises: RequestError for an invalid choice, or one of unknown tools."""
    kind: object = choice if isinstance(choice, str) else None
    if isinstance(choice, Mapping):
        kind = _word(choice.get("type"))
        if kind in ("function", "tool") or "function" in choice:
            return ChosenTools((_named(choice, tools, choice),), must_call=True, is_single=True)
        if kind == "allowed_tools":
            return _allowed(choice, tools)
    match kind:
        case None if choice is None:
            return ChosenTools(tools)
        case "auto":
            return ChosenTools(tools)
        case "none":
            return ChosenTools(())
        case "required" | "any":
            return ChosenTools(_some(tools, kind), must_call=True)
    raise RequestError(f"tool_choice is {shown(choice)}; {_WAYS}")


def _allowed(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> ChosenTools:
    given = choice.get("allowed_tools", choice)
    allowed = given.get("tools") if isinstance(given, Mapping) else None
    mode = _word(given.get("mode", "auto")) if isinstance(given, Mapping) else None
    if not isinstance(allowed, Sequence) or isinstance(allowed, str | bytes) or mode not in ("auto", "required"):
        raise RequestError(f"tool_choice is {shown(choice)}; give allowed_tools a mode, auto or required, and tools")
    named = [_named(one, tools, choice) for one in allowed]
    found = tuple(tool for tool in tools if tool in named)
    return ChosenTools(_some(found, mode) if mode == "required" else found, must_call=mode == "required")


def _word(value: object) -> str | None:
    """A text; None for anything else, which may not even compare with one."""
    return value if isinstance(value, str) else None


def _some(tools: tuple[Tool, ...], choice: object) -> tuple[Tool, ...]:
    if not tools:
        raise RequestError(f"tool_choice is {choice!r}, but there are no tools; give some, or leave it out")
    return tools


def _named(one: object, tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> Tool:
    """The tool that a choice names, with or without a wrapper."""
    function = one.get("function", one) if isinstance(one, Mapping) else None
    name = _word(function.get("name")) if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none"
    raise RequestError(f"tool_choice is {choice!r:.80}; {_WAYS} (there are: {known})")
