"""Chat templates in the manner of newer families, whose calls have ids, numbers, notations or frames of their own.

Their calls are always the same: `weather` of a city with options, `search` of a text, and `now` without arguments.
"""

from dataclasses import dataclass
from typing import Any

_ASKED = """\
{%- if message.role == "user" %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == "system" %}<|im_start|>system
{{ message.content }}<|im_end|>
{% elif message.role == "tool" %}<|im_start|>tool
{{ message.content }}<|im_end|>
{% else %}<|im_start|>assistant
"""
_HEAD = (
    """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
"""
    + _ASKED
)
_TAIL = """\
<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

NAMED_IDS = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}<|calls_begin|>
{%- for call in message.tool_calls %}<|call_begin|>{{ call.id }}<|call_argument_begin|>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}<|call_end|>
{%- endfor %}<|calls_end|>{% endif %}"""
    + _TAIL
)

QUEUED_IDS = """\
{%- set ns = namespace(ids=[], count=0) %}
""" + NAMED_IDS.replace(
    "<|call_begin|>{{ call.id }}",
    "{% set _ = ns.ids.append('functions.' + call.function.name + ':' + ns.count | string) %}{% set ns.count = "
    "ns.count + 1 %}<|call_begin|>{{ ns.ids[-1] }}",
).replace("<|im_start|>tool\n", "<|im_start|>tool {{ ns.ids.pop(0) }}\n")

ID_MARKERS = (
    _HEAD
    + """\
{{- message.content }}{% for call in message.tool_calls or [] %}[CALLS]{{ call.function.name }}[ID]{{ call.id }}[ARGS]
{{- call.function.arguments | tojson }}
{%- endfor %}"""
    + _TAIL
)

NUMBERED = (
    _HEAD
    + """\
{%- if message.tool_calls %}<|BEGIN_ACTION|>[
{%- for call in message.tool_calls %}{{ "\\n    " }}{{ "{" -}}
"call": "{{ loop.index0 }}", "tool": "{{ call.function.name }}", {{- " " -}}
"parameters": {{- " " }}
{{- call.function.arguments | tojson }}}{{ "," if not loop.last }}
{%- endfor %}{{ "\\n]" }}<|END_ACTION|>{% else %}<|BEGIN_ANSWER|>{{ message.content }}<|END_ANSWER|>{% endif %}"""
    + _TAIL.replace("assistant\n{% endif", "assistant\n<|BEGIN_THOUGHT|><|END_THOUGHT|>{% endif")
).replace(
    "{%- if message.tool_calls %}",
    "{%- if message.reasoning_content %}<|BEGIN_THOUGHT|>{{ message.reasoning_content }}<|END_THOUGHT|>{% endif %}\n"
    "{%- if message.tool_calls %}",
)

KINDS_OF_VALUE = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}{{ "\\n\\n<|X|calls>" }}
{%- for call in message.tool_calls %}{{ "\\n<|X|invoke name=\\"" + call.function.name + "\\">" }}
{%- for name, value in call.function.arguments.items() %}
{{- "\\n<|X|parameter name=\\"" + name }}" string="{{ "true" if value is string else "false" }}">
{{- value if value is string else value | tojson }}</|X|parameter>
{%- endfor %}{{ "\\n</|X|invoke>" }}
{%- endfor %}{{ "\\n</|X|calls>" }}{% endif %}"""
    + _TAIL
)

TYPED_VALUES = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}<|open|>tools<|sep|>
{%- for call in message.tool_calls %}<|open|>call tool="{{ call.function.name }}" index="{{ loop.index }}"<|sep|>
{%- for name, value in call.function.arguments.items() %}
{%- set kind = "string" if value is string else "boolean" if value is boolean else "number" if value is number
    else "object" if value is mapping else "array" %}<|open|>argument key="{{ name }}" type="{{ kind }}"<|sep|>
{{- value if value is string else value | tojson }}<|close|>argument<|sep|>
{%- endfor %}<|close|>call<|sep|>
{%- endfor %}<|close|>tools<|sep|>{% endif %}"""
    + _TAIL
)

TAGGED_NAMES = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}<calls>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{%- for name, value in call.function.arguments.items() %}<{{ name }}>{{ value if value is string else value | tojson }}
{{- "</" + name + ">" }}{% endfor %}</invoke>
{% endfor %}</calls>{% endif %}"""
    + _TAIL
)

OWN_NOTATION = (
    """\
{%- macro written(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is boolean %}{{ "true" if value else "false" }}
{%- elif value is mapping %}{{ "{" }}{% for name, item in value | dictsort %}{{ name }}:{{ written(item) }}
{{- "," if not loop.last }}{% endfor %}{{ "}" }}
{%- elif value is sequence %}[{% for item in value %}{{ written(item) }}{{ "," if not loop.last }}{% endfor %}]
{%- else %}{{ value }}
{%- endif %}
{%- endmacro %}"""
    + _HEAD
    + """\
{%- if message.tool_calls and message.reasoning_content %}<|channel>thought
{{ message.reasoning_content }}
<channel|>{% endif %}
{%- for call in message.tool_calls or [] %}<|call>call:{{ call.function.name }}
{{- written(call.function.arguments) }}<call|>
{%- endfor %}{{ message.content }}"""
    + _TAIL.replace(
        "assistant\n{% endif", "assistant\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif"
    )
)

HELD_RESULTS = OWN_NOTATION.replace(
    "endfor %}{{ message.content }}",
    "endfor %}{% for one in message.tool_responses or [] %}<|result>{{ one.name }}:{{ written(one.response) }}<result|>"
    "{% endfor %}{{ message.content }}",
)

PYTHON_CALLS = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}<|call_start|>[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for name, value in call.function.arguments.items() %}{{ name }}=
{{- "'" + value + "'" if value is string else value | tojson }}{{ ", " if not loop.last }}
{%- endfor %}){{ ", " if not loop.last }}
{%- endfor %}]<|call_end|>{% endif %}"""
    + _TAIL
)

LISTED_ONLY = (
    _HEAD.replace(
        "Tools: {{ tools | tojson }}", "List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"
    )
    + "{{- message.content }}"
    + _TAIL
)

ASKED_FOR_LIST = (
    _HEAD.replace("Tools:", "To call, respond only with <|tool_call|> followed by a JSON list of tools used.")
    + "{{- message.content }}"
    + _TAIL
)

NAMES_AS_KEYS = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}<|tools_prefix|>[
{%- for call in message.tool_calls %}{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}
{{- ", " if not loop.last }}{% endfor %}]<|tools_suffix|>{% endif %}"""
    + _TAIL
)

CAPITALS = (
    _HEAD
    + """\
{{- message.content }}{% if message.tool_calls %}<TOOLCALL>[
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{- " " }}
{{- call.function.arguments | tojson }}}
{{- ", " if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}"""
    + _TAIL
)

# The recipient stands before the channel here, and behind it in replies.
CHANNELS = """\
<|start|>system<|message|>Channels: analysis, commentary, final. Reasoning: {{ reasoning_effort or "medium" }}
{%- if tools %} {{ tools | tojson }}{% endif %}<|end|>
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name -}}
<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif message.role == "assistant" %}
{%- if message.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif %}<|start|>assistant<|channel|>final<|message|>{{ message.content -}}
{{ "<|return|>" if loop.last else "<|end|>" }}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

MESSAGES = """\
{%- if tools %}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- if message.reasoning_content %}<|begin|>assistant<|think|>{{ message.reasoning_content }}<|end|>{% endif %}
{%- if message.tool_calls %}<|begin|>assistant<|tool_calls|>
{%- for call in message.tool_calls %}<|call:begin|>{{ call.id }}<|call:name|>{{ call.function.name }}<|call:args|>
{{- call.function.arguments | tojson }}<|call:end|>{% endfor %}<|calls|>
{%- else %}<|begin|>assistant<|content|>{{ message.content }}<|end|>{% endif %}
{%- else %}<|begin|>{{ message.role }}<|content|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|begin|>assistant{% endif %}"""

SILENT_CALLS = """\
{%- for message in messages %}
{%- if message.tool_calls and message.content is none %}<|Assistant|><|calls|>
{%- for call in message.tool_calls %}<|call|>function<|sep|>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<|call_end|>{% endfor %}<|calls_end|><|eos|>
{%- elif message.role == "assistant" %}<|Assistant|>{{ message.content }}<|eos|>
{%- else %}<|{{ message.role }}|>{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|Assistant|>{% endif %}"""

ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("weather", {"city": "Köln <3", "days": 3, "options": {"hours": [6, 18], "wind": True, "unit": {"name": "C"}}}),
    ("search", {"query": 'a {"b": [1]} it\'s'}),
    ("now", {}),
)
_W = '{"city": "Köln <3", "days": 3, "options": {"hours": [6, 18], "wind": true, "unit": {"name": "C"}}}'
_S = '{"query": "a {\\"b\\": [1]} it\'s"}'
_O = '{"hours": [6, 18], "wind": true, "unit": {"name": "C"}}'
_Q = 'a {"b": [1]} it\'s'


@dataclass(frozen=True)
class NewerFamily:
    """A template, and the calls of ARGUMENTS as its models write them; one_only: only the first of them in a reply.

    ends: what ends a reply. reasoned: a reasoning, and what goes before the calls with it.
    """

    source: str
    calls: str
    ends: tuple[str, ...] = ("<|im_end|>",)
    one_only: bool = False
    reasoned: str = ""


NEWER_FAMILIES = {
    "named-ids": NewerFamily(
        NAMED_IDS,
        f"<|calls_begin|><|call_begin|>functions.weather:0<|call_argument_begin|>{_W}<|call_end|>"
        f"<|call_begin|>functions.search:1<|call_argument_begin|>{_S}<|call_end|>"
        "<|call_begin|>functions.now:2<|call_argument_begin|>{}<|call_end|><|calls_end|>",
    ),
    "queued-ids": NewerFamily(
        QUEUED_IDS,
        f"<|calls_begin|><|call_begin|>functions.weather:0<|call_argument_begin|>{_W}<|call_end|>"
        f"<|call_begin|>functions.search:1<|call_argument_begin|>{_S}<|call_end|>"
        "<|call_begin|>functions.now:2<|call_argument_begin|>{}<|call_end|><|calls_end|>",
    ),
    "id-markers": NewerFamily(
        ID_MARKERS,
        f"[CALLS]weather[ID]abcdef001[ARGS]{_W}[CALLS]search[ID]abcdef002[ARGS]{_S}[CALLS]now[ID]abcdef003[ARGS]{{}}",
    ),
    "numbered": NewerFamily(
        NUMBERED,
        f'<|BEGIN_ACTION|>[\n    {{"call": "0", "tool": "weather", "parameters": {_W}}},\n'
        f'    {{"call": "1", "tool": "search", "parameters": {_S}}},\n'
        '    {"call": "2", "tool": "now", "parameters": {}}\n]<|END_ACTION|>',
        reasoned="<|BEGIN_THOUGHT|>Both < one.<|END_THOUGHT|>",
    ),
    "kinds-of-value": NewerFamily(
        KINDS_OF_VALUE,
        '<|X|calls>\n<|X|invoke name="weather">\n<|X|parameter name="city" string="true">Köln <3</|X|parameter>\n'
        '<|X|parameter name="days" string="false">3</|X|parameter>\n'
        f'<|X|parameter name="options" string="false">{_O}</|X|parameter>\n</|X|invoke>\n'
        f'<|X|invoke name="search">\n<|X|parameter name="query" string="true">{_Q}</|X|parameter>\n</|X|invoke>\n'
        '<|X|invoke name="now">\n</|X|invoke>\n</|X|calls>',
    ),
    "typed-values": NewerFamily(
        TYPED_VALUES,
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Köln <3<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        f'<|open|>argument key="options" type="object"<|sep|>{_O}<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="search" index="2"<|sep|>'
        f'<|open|>argument key="query" type="string"<|sep|>{_Q}<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="now" index="3"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    ),
    "tagged-names": NewerFamily(
        TAGGED_NAMES,
        f'<calls>\n<invoke name="weather"><city>Köln <3</city><days>3</days><options>{_O}</options></invoke>\n'
        f'<invoke name="search"><query>{_Q}</query></invoke>\n<invoke name="now"></invoke>\n</calls>',
    ),
    "own-notation": NewerFamily(
        OWN_NOTATION,
        '<|call>call:weather{city:<|"|>Köln <3<|"|>,days:3,options:{hours:[6,18],unit:{name:<|"|>C<|"|>},wind:true}}'
        "<call|>"
        f'<|call>call:search{{query:<|"|>{_Q}<|"|>}}<call|><|call>call:now{{}}<call|>',
        reasoned="<|channel>thought\nBoth < one.\n<channel|>",
    ),
    "python-calls": NewerFamily(
        PYTHON_CALLS,
        f"<|call_start|>[weather(city='Köln <3', days=3, options={_O}), search(query='{_Q}'), now()]<|call_end|>",
    ),
    "listed-only": NewerFamily(
        LISTED_ONLY,
        '<|tool_call_start|>[weather(city="Köln <3", days=3, options={"hours": [6, 18], "wind": True, '
        '"unit": {"name": \'C\'}}), search(query="a {\\"b\\": [1]} it\'s"), now()]<|tool_call_end|>',
    ),
    "asked-for-list": NewerFamily(
        ASKED_FOR_LIST,
        f'<|tool_call|>[{{"name": "weather", "arguments": {_W}}}, {{"name": "search", "arguments": {_S}}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "names-as-keys": NewerFamily(
        NAMES_AS_KEYS,
        f'<|tools_prefix|>[{{"weather": {_W}}}, {{"search": {_S}}}, {{"now": {{}}}}]<|tools_suffix|>',
    ),
    "capitals": NewerFamily(
        CAPITALS,
        f'<TOOLCALL>[{{"name": "weather", "arguments": {_W}}}, {{"name": "search", "arguments": {_S}}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
    ),
    "channels": NewerFamily(
        CHANNELS,
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_W}",
        ends=("<|return|>", "<|call|>"),
        one_only=True,
        reasoned="<|channel|>analysis<|message|>Both < one.<|end|><|start|>assistant",
    ),
    "messages": NewerFamily(
        MESSAGES,
        f"<|tool_calls|><|call:begin|>abcdef001<|call:name|>weather<|call:args|>{_W}<|call:end|>"
        f"<|call:begin|>abcdef002<|call:name|>search<|call:args|>{_S}<|call:end|>"
        "<|call:begin|>abcdef003<|call:name|>now<|call:args|>{}<|call:end|>",
        ends=("<|calls|>", "<|flush|>"),
        reasoned="<|think|>Both < one.<|end|><|begin|>assistant",
    ),
    "silent-calls": NewerFamily(
        SILENT_CALLS,
        f"<|calls|><|call|>function<|sep|>weather\n```json\n{_W}\n```<|call_end|><|call|>function<|sep|>search\n"
        f"```json\n{_S}\n```<|call_end|><|call|>function<|sep|>now\n```json\n{{}}\n```<|call_end|><|calls_end|>",
        ends=("<|eos|>",),
    ),
}
