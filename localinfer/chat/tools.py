"""Tools as a caller describes them, checked, and messages with calls in the shape that templates expect."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from localinfer.arguments import shown
from localinfer.chat.json_schema import checked_schema
from localinfer.errors import ConstraintError, RequestError
from localinfer.models.text.reply_format import CallFormat

ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]
"""auto: the model decides. none: it may not call. required: it has to. {"type": "function", "function": {"name": ...}}:
it has to call that one."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_EXAMPLE = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
_MOST_TOOLS = 512


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    description: as the caller gave it, for the template. parameters: the JSON Schema of its arguments, checked; None
    where it cannot be enforced and need not be (`"strict": true` was not asked for), so that any object goes.
    """

    name: str
    description: Mapping[str, Any]
    parameters: Mapping[str, Any] | None


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Check tools in OpenAI's shape. Raises: RequestError; ConstraintError for a strict one's schema."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes) or len(tools) > _MOST_TOOLS:
        raise RequestError(f"tools are {tools!r:.60}; give a list of at most {_MOST_TOOLS}, each like {_EXAMPLE}")
    read = tuple(_read_tool(index, tool) for index, tool in enumerate(tools))
    names = [tool.name for tool in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are named {twice!r}; give each a name of its own")
    return read


def choose_tools(tools: tuple[Tool, ...], choice: ToolChoice | None) -> tuple[tuple[Tool, ...], bool]:
    """The tools that the model may call, and whether it has to. Raises: RequestError for a choice that is none."""
    if not isinstance(choice, str | Mapping | None):
        raise RequestError(f"tool_choice is {shown(choice)}; give 'auto', 'none', 'required' or the name of a tool")
    if choice is None or choice == "auto":
        return tools, False
    if choice == "none":
        return (), False
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice is 'required', but there are no tools; give some, or leave it out")
        return tools, True
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestError(
            f"tool_choice is {choice!r:.80}; give 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}} with the name of a tool (there are: {known})'
        )
    return named, True


def template_messages(
    messages: Sequence[Mapping[str, Any]], calls: CallFormat, tools: tuple[Tool, ...]
) -> list[Mapping[str, Any]]:
    """Bring former calls and their results, as `read_messages` reads them, into the shape that a template expects.

    A call without an id gets one, and a result without one that of the first call that has no result yet. Arguments
    become objects, or text, whichever the template prints; where it knows no tools, calls and results become text of
    the messages, and the tools are described in the system message.
    """
    names: dict[str, str] = {}
    open_ids: list[str] = []
    result: list[Mapping[str, Any]] = []
    for message in messages:
        made = message.get("tool_calls")
        if made:
            read = [_for_template(len(names) + i, call, calls.arguments_as_text) for i, call in enumerate(made)]
            names.update({call["id"]: call["function"]["name"] for call in read})
            open_ids = [call["id"] for call in read]
            message = {**message, "tool_calls": read}
            if not calls.is_native:
                message = {"role": message["role"], "content": message["content"] + _written(read, calls)}
        elif message.get("role") == "tool":
            call_id = message.get("tool_call_id") or next(iter(open_ids), None)
            open_ids = [open_id for open_id in open_ids if open_id != call_id]
            if call_id is not None:
                message = {**message, "tool_call_id": call_id}
            message = {**message, "name": message.get("name") or names.get(str(call_id), "")}
            if not calls.is_native:
                text = f"<tool_response>\n{message['content']}\n</tool_response>"
                message = {"role": "user", "content": text}
        result.append(message)
    if tools and not calls.is_native:
        return _with_description(result, tools, calls)
    return result


def _read_tool(index: int, tool: object) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"tool {index} is {tool!r:.60}; give each a name of at most 128 letters, digits, '_', '-', '.' or ':', "
            f"like {_EXAMPLE}"
        )
    schema = function.get("parameters")
    try:
        parameters: Mapping[str, Any] | None = checked_schema({"type": "object", **(schema or {})})
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


def _written(calls: list[dict[str, Any]], form: CallFormat) -> str:
    written = [
        form.begin + call["function"]["name"] + form.middle + _as_json(call["function"]["arguments"]) + form.end
        for call in calls
    ]
    return form.opening + (form.separator or "").join(written) + form.closing


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_description(
    messages: list[Mapping[str, Any]], tools: tuple[Tool, ...], form: CallFormat
) -> list[Mapping[str, Any]]:
    described = "\n".join(json.dumps(tool.description["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions:\n{described}\n\nTo call one, answer with nothing but\n"
        f"{form.opening}{form.begin}NAME{form.middle}ARGUMENTS{form.end}{form.closing}\n"
        "where ARGUMENTS is a JSON object."
    )
    if messages and messages[0].get("role") in ("system", "developer") and isinstance(messages[0].get("content"), str):
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
