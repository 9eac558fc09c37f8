"""Messages and tools of a chat: checked as callers give them, shaped as templates expect them, and kept as plain data.

Callers are programs that pass on what they were sent: content may be missing beside a tool call, null, or in parts, and
members that do not apply are null. Every way into a chat, in Python and by HTTP, goes through `read_messages`.

Pictures and sounds stay parts of their message, read by `media_parts`.

Agents write system messages into the midst of conversations, and several at the start. Where a template takes none, or
none so late, their text stays in the conversation at the same position (`placed_system`). For templates that write no
tool calls, these are written as the model writes them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from localinfer.arguments import owned, shown
from localinfer.errors import ConstraintError, MessageError, RequestError
from localinfer.generation.chat.custom_tools import TextForm, patch_tool, read_custom
from localinfer.generation.chat.json_schema import enforced_schema
from localinfer.generation.chat.media_parts import MediaSource, parts_content, read_media_part
from localinfer.generation.chat.value_types import type_of
from localinfer.generation.options import ToolChoice
from localinfer.generation.stream import ToolCall
from localinfer.models.text.reply_format import (
    CALL_ID,
    CALL_NAME,
    CALL_NUMBER,
    TYPE_NAME,
    CallFormat,
    ParameterFormat,
    ValueNotation,
)

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

    Content in parts becomes their text, see `joined_parts`; with pictures or sounds it stays a list, of parts of text
    and of `MediaSource`. "developer" becomes "system", "function" "tool", and
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
    read["content"] = "" if content is None else read_content(content, f"{path}.content", role)
    return read


def read_content(content: object, path: str, role: str) -> str | list[Any]:
    """Text, that of parts joined; with pictures or sounds, the list of parts. Raises: MessageError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise MessageError(
            f'{path} is {content!r:.40}; give text, or a list like [{{"type": "text", "text": "..."}}]', path
        )
    parts: list[str | MediaSource] = []
    for index, part in enumerate(content):
        place = f"{path}[{index}]"
        media = read_media_part(part, place)
        if media is not None:
            parts.append(media)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            named = f"of type {kind!r:.40}" if isinstance(part, Mapping) else f"{part!r:.40}"
            raise MessageError(
                f'{place} is {named}; what is read is text, as {{"type": "text", "text": "..."}}, pictures and sounds',
                place,
                is_unsupported=True,
            )
        parts.append(text)
    return parts_content(parts, role)


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
    form: TextForm | None = None
    """Form of the one argument of a custom tool."""


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Check functions and custom tools in OpenAI's shape.

    Raises: RequestError; ConstraintError for a strict one's schema, and for a grammar.
    """
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
    form = tool.get("form") if isinstance(tool, Mapping) else None
    form = form if isinstance(form, TextForm) else None
    if isinstance(tool, Mapping) and tool.get("type") == "custom":
        made, form = read_custom(tool, f"tools[{index}]")
        tool = {"function": made}
    elif isinstance(tool, Mapping) and tool.get("type") == "apply_patch":
        made, form = patch_tool(is_once=False)
        tool = {"function": made}
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
    described = {"type": "function", "function": dict(function)}
    return Tool(name=name, description=described, parameters=parameters, form=form)


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


def written_calls(calls: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """The text of calls in OpenAI's shape; arguments that are text stand as they are."""
    written = [_call(call.get("id", ""), number, call["function"], form) for number, call in enumerate(calls)]
    return form.opening + (form.separator or "").join(written) + form.closing


def description(tools: tuple[Tool, ...], form: CallFormat) -> str:
    """Text that tells a model its tools and how it calls them."""
    described = "\n".join(json.dumps(tool.description["function"], ensure_ascii=False) for tool in tools)
    if form.parameters is None:
        how = form.opening + form.begin + "NAME" + form.middle + "ARGUMENTS" + form.end + form.closing
        rest = "where ARGUMENTS is a JSON object."
    else:
        function = {"name": "NAME", "arguments": {"PARAMETER": "VALUE", "OTHER": "VALUE"}}
        how = form.opening + _call("ID", 0, function, form) + form.closing
        rest = "with as many parameters as you need."
    for hole, text in ((CALL_ID, "ID"), (CALL_NUMBER, "0"), (CALL_NAME, "NAME")):
        how = how.replace(hole, text)
    return f"You can call these functions:\n{described}\n\nTo call one, answer with nothing but\n{how}\n{rest}"


def _call(call_id: str, number: int, function: Mapping[str, Any], form: CallFormat) -> str:
    name, arguments = str(function["name"]), function["arguments"]
    parameters = form.parameters
    if parameters is None or not isinstance(arguments, Mapping):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text = form.begin + name + form.middle + text + form.end
    elif not arguments:
        text = form.begin + name + parameters.empty
    else:
        values = parameters.following.join(_parameter(key, value, parameters) for key, value in arguments.items())
        text = form.begin + name + form.middle + values + form.end
    return text.replace(CALL_ID, call_id).replace(CALL_NUMBER, str(number)).replace(CALL_NAME, name)


def _parameter(name: str, value: object, form: ParameterFormat) -> str:
    if form.notation is not None:
        return f"{name}{form.assign}{in_notation(value, form.notation)}"
    is_text = isinstance(value, str)
    assign = form.assign if is_text or form.json_assign is None else form.json_assign
    kind = {"integer": "number"}.get(type_of(value), type_of(value))
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    return f"{name}{assign.replace(TYPE_NAME, kind)}{text}{form.named(form.value_end, name)}"


def in_notation(value: object, notation: ValueNotation) -> str:
    """A value in the notation of a format."""
    quote = notation.quotes[0]
    if notation.is_json:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        marks = "" if notation.has_bare_keys else quote
        items = (f"{marks}{key}{marks}{notation.key}{in_notation(item, notation)}" for key, item in value.items())
        return "{" + notation.item.join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + notation.item.join(in_notation(item, notation) for item in value) + "]"
    return json.dumps(value)


_REASONING = "reasoning_content"
_RESULTS = "tool_responses"


def template_messages(
    messages: Sequence[Mapping[str, Any]], calls: CallFormat, tools: tuple[Tool, ...], *, has_system: bool = True
) -> list[Mapping[str, Any]]:
    """Bring former calls and their results, as `read_messages` reads them, into the shape that a template expects.

    A call without an id gets one, and a result without one that of the first call that has no result yet. Arguments
    become objects, or text, whichever the template prints; results stand in the message that called where it reads them
    there; where it has no tools, calls and results become text of
    the messages, and the tools are described in the system message; has_system: whether the template takes one, else
    they are described in the first message.
    """
    names: dict[str, str] = {}
    open_ids: list[str] = []
    # Where ids hold the name: as the caller has them, and as the template wants them.
    renamed: dict[object, str] = {}
    result: list[Mapping[str, Any]] = []
    is_response = False
    for message in messages:
        made = message.get("tool_calls")
        if made:
            read = [_for_template(len(names) + i, call, calls.arguments_as_text) for i, call in enumerate(made)]
            if calls.id_form is not None:
                renamed.update(_named_ids(read, calls.id_form, len(names)))
                read = [{**call, "id": renamed[call["id"]]} for call in read]
            names.update({call["id"]: call["function"]["name"] for call in read})
            open_ids = [call["id"] for call in read]
            if not calls.allows_content:
                if message["content"]:
                    result.append({key: value for key, value in message.items() if key != "tool_calls"})
                message = {**message, "content": None}
            message = {**message, "tool_calls": read}
            if not calls.is_native:
                message = {"role": message["role"], "content": message["content"] + written_calls(read, calls)}
        elif message.get("role") == "tool":
            call_id = message.get("tool_call_id") or next(iter(open_ids), None)
            call_id = renamed.get(call_id, call_id)
            open_ids = [open_id for open_id in open_ids if open_id != call_id]
            if call_id is not None:
                message = {**message, "tool_call_id": call_id}
            message = {**message, "name": message.get("name") or names.get(str(call_id), "")}
            if calls.holds_results and result and result[-1].get("tool_calls"):
                held = {"name": message["name"], "response": message["content"]}
                caller = result.pop()
                result.append({**caller, _RESULTS: [*caller.get(_RESULTS, ()), held]})
                continue
            if not calls.is_native and not calls.describes_tools:
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                if is_response:
                    # Templates may want the roles to alternate.
                    text = f"{result.pop()['content']}\n{text}"
                message = {"role": "user", "content": text}
                is_response = True
                result.append(message)
                continue
        elif result and result[-1].get(_RESULTS) and message.get("role") == "assistant":
            # The model continues behind the results in the same turn.
            caller = result.pop()
            if caller.get("content"):
                result.append(caller)
            else:
                message = {**caller, "content": message["content"]}
        is_response = False
        result.append(message)
    if tools and calls.reads_tools:
        functions = json.dumps([tool.description["function"] for tool in tools], ensure_ascii=False)
        if not result or result[0].get("role") != "system":
            result.insert(0, {"role": "system", "content": ""})
        return [{**result[0], "tools": functions}, *result[1:]]
    if tools and not calls.describes_tools:
        return _with_description(result, description(tools, calls), has_system)
    return result


def with_reasoning_as(member: str, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages as `read_messages` gives them, with their reasoning under the name that a template reads.

    Templates with a name of their own take text or reasoning beside calls, not both: there, the text comes before.
    """
    if member == _REASONING or not any(_REASONING in message for message in messages):
        return messages
    result: list[Mapping[str, Any]] = []
    for message in messages:
        if _REASONING in message:
            message = {member if name == _REASONING else name: value for name, value in message.items()}
            if message["content"] and message.get("tool_calls"):
                result.append({"role": message["role"], "content": message["content"]})
                message = {**message, "content": ""}
        result.append(message)
    return result


def _for_template(index: int, call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if as_text:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    elif isinstance(arguments, str):
        # A model that was cut short wrote no whole JSON; the template prints that as it is.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {
        "id": call.get("id") or f"call{index:05d}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments if arguments is not None else {}},
    }


def _named_ids(calls: list[dict[str, Any]], form: str, count: int) -> dict[object, str]:
    """By the id of each call the one that a template wants that reads the name from it; count: of calls before."""
    numbered = enumerate(calls, count)
    return {call["id"]: form.format(name=call["function"]["name"], number=number) for number, call in numbered}


def _with_description(messages: list[Mapping[str, Any]], text: str, has_system: bool) -> list[Mapping[str, Any]]:
    first = messages[0] if messages else {}
    if isinstance(first.get("content"), str):
        if first.get("role") in ("system", "developer"):
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        if not has_system:
            return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


Turn = dict[str, Any]
"""A message with `role` and `content`; replies have `reasoning`, `finish_reason` and `tool_calls` where there are any,
results of calls `tool_call_id` and `name`."""

Turns = Sequence[Mapping[str, Any]]

Content = str | Sequence[str | Mapping[str, Any]]
"""A user message: text, or a list of texts, pictures and sounds."""


def read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Check messages that are to be kept, and copy them. Raises: MessageError, RequestError."""
    turns = read_messages(owned(messages))
    for turn in turns:
        turn["content"] = kept_content(turn["content"])
        if turn["role"] not in ROLES:
            raise RequestError(f"a message has the role {shown(turn['role'])}; give one of {', '.join(ROLES)}")
        if "reasoning_content" in turn:
            turn["reasoning"] = turn.pop("reasoning_content")
        try:
            json.dumps(turn)
        except (TypeError, ValueError) as error:
            raise RequestError(f"a message cannot be kept: {error}; give text, numbers, lists and dicts") from None
    return turns


def first_turns(system: str | None, messages: Sequence[Mapping[str, Any]] | None) -> list[Turn]:
    """The messages that a conversation begins with. Raises: MessageError, RequestError."""
    is_empty = isinstance(messages, list | tuple) and not messages
    turns = [] if messages is None or is_empty else read_turns(messages)
    if system is None:
        return turns
    if turns and turns[0]["role"] == "system":
        raise RequestError("messages begin with a system message, and system was given too; leave one of them out")
    return [{"role": "system", "content": checked_text(system, "system")}, *turns]


def checked_text(text: object, name: str = "the text of a message") -> str:
    """Return the text of a message. Raises: RequestError for what is none."""
    if not isinstance(text, str):
        raise RequestError(f"{name} is {shown(text)}; give text")
    return text


def checked_content(content: object) -> str | list[dict[str, str]]:
    """Return the text of a user message, or its parts as plain data: texts, pictures and sounds, in order.

    Raises: RequestError, MessageError for what is neither.
    """
    if not isinstance(content, list | tuple):
        return checked_text(content)
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return kept_content(read_content(parts, "the message", "user"))


def kept_content(content: str | list[Any]) -> str | list[dict[str, str]]:
    """Content as `read_messages` gives it, as plain data that JSON can hold."""
    if isinstance(content, str):
        return content
    return [part.as_part() if isinstance(part, MediaSource) else part for part in content]


def reply_turn(text: str, finish_reason: str, *, reasoning: str = "", tool_calls: Sequence[ToolCall] = ()) -> Turn:
    """The message of a reply. Its calls are in it only where they ended it: of those cut short, nothing can be made."""
    turn: Turn = {"role": "assistant", "content": text}
    if reasoning:
        turn["reasoning"] = reasoning
    if finish_reason == "tool_calls":
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in tool_calls
        ]
    return {**turn, "finish_reason": finish_reason}


def result_turn(call: ToolCall, text: str) -> Turn:
    """The message with the result of a call."""
    return {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}


def exchange_starts(turns: Turns, first: int = 0) -> list[int]:
    """The indices of the user messages from `first` on, each of which begins an exchange.

    A summary inside an exchange (`generation/compaction.py`) begins none.
    """
    users = (place for place in range(first, len(turns)) if turns[place]["role"] == "user")
    return [place for place in users if not turns[place].get("continues")]


def tool_rounds(turns: Turns) -> int:
    """Number of replies since the last user message that called tools."""
    starts = exchange_starts(turns)
    return sum(bool(turn.get("tool_calls")) for turn in turns[starts[-1] if starts else 0 :])


def open_calls(turns: Turns) -> list[ToolCall]:
    """The calls of the last reply that have no result behind it."""
    place = next((place for place in reversed(range(len(turns))) if turns[place]["role"] != "tool"), None)
    if place is None or not turns[place].get("tool_calls"):
        return []
    answered = [turn.get("tool_call_id") for turn in turns[place + 1 :]]
    return [call for call in map(_kept_call, turns[place]["tool_calls"]) if call.id not in answered]


def _kept_call(call: Mapping[str, Any]) -> ToolCall:
    arguments = call["function"].get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(call.get("id", ""), call["function"]["name"], text)


def check_no_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise MessageError for messages with pictures or sounds, which a model of text cannot read."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, MediaSource):
                raise MessageError(
                    f"{part.path} is of type {part.kind!r}, and this model reads text only; load one that reads it, "
                    "with its encoders' file (mmproj), or leave it out",
                    part.path,
                    is_unsupported=True,
                )
