"""Short chat templates of our own, put together of turns and of calls as well-known models write them."""

import json
from typing import Any

NAME, ARGUMENTS, TEXT = (
    "{{ c.function.name }}",
    "{{ c.function.arguments | tojson }}",
    "{{ '' + c.function.arguments }}",
)
Call = tuple[str, dict[str, Any]]
WEATHER: Call = ("get_weather", {"city": "Bonn", "days": 3})
SEARCH: Call = ("search", {"query": "a <b>"})
W, S = (json.dumps(arguments) for _, arguments in (WEATHER, SEARCH))


def say(text: str) -> str:
    """Jinja that writes a text, as it is."""
    return "{{ " + json.dumps(text) + " }}" if text else ""


def call(before: str, middle: str, end: str, arguments: str = ARGUMENTS) -> str:
    """Jinja that writes a call."""
    return say(before) + NAME + say(middle) + arguments + say(end)


def parameters(before: str, assign: str, end: str, following: str = "") -> str:
    """Jinja that writes the arguments of a call one by one."""
    value = "{{ v if v is string else v | tojson }}"
    separator = "{{ " + json.dumps(following) + " if not loop.last }}" if following else ""
    one = f"{say(before)}{{{{ k }}}}{say(assign)}{value}{say(end)}{separator}"
    return f"{{% for k, v in c.function.arguments | items %}}{one}{{% endfor %}}"


def template(
    calls: str,
    *,
    opening: str = "",
    between: str = "",
    closing: str = "",
    end: str = "<|im_end|>",
    turn: tuple[str, str] = ("<|im_start|>", "\n"),
    assistant: str = "assistant",
    thought: tuple[str, str] | None = None,
    prompt: str = "",
    only_one: bool = False,
    tools: str = "{{ tools | tojson }}",
) -> str:
    """A template with turns between marks, whose replies have calls; thought: what stands around reasoning."""
    before, behind = turn
    separator = "{{ " + json.dumps(between) + " if not loop.first }}" if between else ""
    reasons = ""
    if thought is not None:
        written = f"{say(thought[0])}{{{{ m.reasoning_content }}}}{say(thought[1])}"
        reasons = f"{{% if m.reasoning_content %}}{written}{{% endif %}}"
    refusal = "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}" if only_one else ""
    return (
        f"{{% if tools %}}{say(before + 'system' + behind)}{tools}{say(end)}{{% endif %}}"
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{say(before + assistant + behind)}{reasons}"
        f"{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{refusal}{say(opening)}"
        f"{{% for c in m.tool_calls %}}{separator}{calls}{{% endfor %}}{say(closing)}{{% endif %}}"
        f"{{% else %}}{say(before)}{{{{ m.role }}}}{say(behind)}{{{{ m.content }}}}{{% endif %}}{say(end)}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{say(before + assistant + behind + prompt)}{{% endif %}}"
    )


HERMES_CALL = call('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
HERMES = template(HERMES_CALL, between="\n")
HERMES_REPLY = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "search", "arguments": {S}}}\n</tool_call>'
)
THINK = ("<think>\n", "\n</think>\n\n")
HERMES_THINKING = template(HERMES_CALL, between="\n", thought=THINK)
XML_CALL = (
    say("<tool_call>\n<function=")
    + NAME
    + say(">\n")
    + parameters("<parameter=", ">\n", "\n</parameter>\n")
    + say("</function>\n</tool_call>")
)
XML_REPLY = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=query>\na <b>\n</parameter>\n</function>\n"
    "</tool_call>"
)
LLAMA_TURN = ("<|start_header_id|>", "<|end_header_id|>\n\n")
LLAMA = template(call('{"name": "', '", "parameters": ', "}"), turn=LLAMA_TURN, end="<|eot_id|>", only_one=True)
LLAMA_REPLY = f'{{"name": "get_weather", "parameters": {W}}}'
LIST_CALL = call('{"name": "', '", "arguments": ', "}")
LIST_REPLY = f'[{{"name": "get_weather", "arguments": {W}}}, {{"name": "search", "arguments": {S}}}]'
MISTRAL_TURN = ("[", "]")
DEEPSEEK = {"turn": ("<｜", "｜>"), "assistant": "Assistant", "end": "<｜end▁of▁sentence｜>"}
DEEPSEEK_CALLS = {"opening": "<｜tool▁calls▁begin｜>", "closing": "<｜tool▁calls▁end｜>"}
GLM_CALL = (
    say("<tool_call>")
    + NAME
    + say("\n")
    + parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    + say("</tool_call>")
)
GLM_REPLY = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a <b>"
    "</arg_value>\n</tool_call>"
)
KIMI_CALL = (
    say("<|tool_call_begin|>")
    + "{{ c.id }}"
    + say("<|tool_call_argument_begin|>")
    + ARGUMENTS
    + say("<|tool_call_end|>")
)
KIMI = template(
    KIMI_CALL,
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    turn=("<|im_", "<|im_middle|>"),
)
KIMI_REPLY = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{W}"
    f"<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{S}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
MINIMAX_CALL = (
    say('<invoke name="')
    + NAME
    + say('">\n')
    + parameters('<parameter name="', '">', "</parameter>\n")
    + say("</invoke>\n")
)
