"""Messages in the shape that a template expects: former calls and their results, and tools where it describes none.

For templates that write no tool calls, these are written as the model writes them.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
