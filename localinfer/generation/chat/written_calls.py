"""Tool calls as a model writes them, for templates that write none: in former messages, and described to a model."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localinfer.generation.chat.messages import Tool
from localinfer.generation.chat.value_types import type_of
from localinfer.models.text.reply_format import (
    CALL_ID,
    CALL_NAME,
    CALL_NUMBER,
    TYPE_NAME,
    CallFormat,
    ParameterFormat,
    ValueNotation,
)


def written_calls(calls: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """The text of calls in OpenAI's shape; arguments that are text stand as they are."""
    written = [_call(call.get("id", ""), number, call["function"], form) for number, call in enumerate(calls)]
    return form.opening + (form.separator or "").join(written) + form.closing


def description(tools: tuple[Tool, ...], form: CallFormat) -> str:
    """What tells a model which tools there are and how it calls them."""
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
