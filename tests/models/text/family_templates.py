"""Chat templates in the manner of well-known families, and replies as their models write them."""

from dataclasses import dataclass

_OTHER_TURNS = """\
{% elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
"""
"""After the turns of the assistant, and the beginning of a new one."""

HERMES_THINKING = (
    """\
{%- if tools %}<|im_start|>system
You may call functions.
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<|im_start|>assistant
{% if loop.last or message.reasoning_content %}<think>
{{ (message.reasoning_content or "") | trim }}
</think>

{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}
{{ "\\n" }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
"""
    + _OTHER_TURNS
    + """\
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
)

LLAMA3 = """\
{{- bos_token }}{% for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ "ipython" if message.role == "tool" else message.role }}<|end_header_id|>

{% if tools and loop.first %}Functions: {% for tool in tools %}{{ tool | tojson }}{% endfor %}

{% endif %}{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}{% for message in messages %}
{%- if message.role == "user" %}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{{- call.function | tojson | replace("}}", "}") }}, "id": "{{ call.id }}"}{{ ", " if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- else %} {{ message.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""

DEEPSEEK = """\
{{- bos_token }}{% if tools %}Tools: {{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}<｜User｜>{{ message.content }}
{%- elif message.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}{{ "\\n" if not loop.first }}<｜tool▁call▁begin｜>
{{- call.type + "<｜tool▁sep｜>" + call.function.name + "\\n```json\\n" + call.function.arguments + "\\n```" }}
{{- "<｜tool▁call▁end｜>" }}
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- else %}<｜Assistant｜>{{ message.content.split("</think>")[-1] }}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

DEEPSEEK_TIGHT = """\
{{- bos_token }}{% if tools %}Tools: {{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}<｜User｜>{{ message.content }}
{%- elif message.tool_calls %}<｜Assistant｜></think><｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}<｜tool▁call▁begin｜>
{{- call.function.name + "<｜tool▁sep｜>" + call.function.arguments + "<｜tool▁call▁end｜>" }}
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- else %}<｜Assistant｜></think>{{ message.content.split("</think>")[-1] }}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{{ "<think>" if thinking else "</think>" }}{% endif %}"""

QWEN_CODER = (
    """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
<function><name>{{ tool.function.name }}</name></function>{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}<|im_start|>assistant
{%- if message.content %}{{ "\\n" + message.content | trim + "\\n" }}{% endif %}
{%- for call in message.tool_calls %}
{{- "\\n<tool_call>\\n<function=" + call.function.name + ">\\n" }}
{%- for name, value in call.function.arguments | items %}
{{- "<parameter=" + name + ">\\n" }}{{ value if value is string else value | tojson }}{{ "\\n</parameter>\\n" }}
{%- endfor %}{{ "</function>\\n</tool_call>" }}
{%- endfor %}<|im_end|>
"""
    + _OTHER_TURNS
    + """\
{% endif %}"""
)

GLM = """\
[gMASK]<sop>{% if tools %}<|system|>
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<|assistant|>
<think>{{ message.reasoning_content or "" }}</think>
{%- if message.content %}{{ "\\n" + message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ "\\n<tool_call>" + call.function.name }}
{% for name, value in call.function.arguments.items() -%}
<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- elif message.role == "tool" %}<|observation|>
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}<|{{ message.role }}|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

MINIMAX = """\
{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}]~b]{{ "ai" if message.role == "assistant" else message.role }}
{{ message.content or "" }}
{%- if message.tool_calls %}{{ "\\n<minimax:tool_call>\\n" }}
{%- for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for name, value in call.function.arguments.items() -%}
<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>
{%- endif %}[e~[
{% endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""

PLAIN = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, the tokens that end its replies, and what two calls and one call look like in it."""

    source: str
    ends: tuple[str, ...]
    one_call: str
    two_calls: str | None
    bos: str = "<s>"
    eos: str = "</s>"


_ONE, _TWO = '{"city": "Bonn", "days": 3}', '{"query": "a {\\"b\\": [1]} \\\\"}'

FAMILIES = {
    "hermes": Family(
        HERMES_THINKING,
        ("<|im_end|>",),
        f'<tool_call>\n{{"name": "weather", "arguments": {_ONE}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {_ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "search", "arguments": {_TWO}}}\n</tool_call>',
    ),
    "llama3": Family(LLAMA3, ("<|eot_id|>",), f'{{"name": "weather", "parameters": {_ONE}}}', None),
    "mistral": Family(
        MISTRAL,
        ("</s>",),
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_ONE}}}]',
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_ONE}}}, {{"name": "search", "arguments": {_TWO}}}]',
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<｜end▁of▁sentence｜>",),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{_ONE}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{_ONE}\n```"
        f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{_TWO}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek-tight": Family(
        DEEPSEEK_TIGHT,
        ("<｜end▁of▁sentence｜>",),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ONE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ONE}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{_TWO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "plain": Family(
        PLAIN,
        ("<|im_end|>",),
        f'<tool_call>\n{{"name": "weather", "arguments": {_ONE}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {_ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "search", "arguments": {_TWO}}}\n</tool_call>',
    ),
}
_QUERY = 'a {"b": [1]} \\'

PARAMETER_FAMILIES = {
    "qwen-coder": Family(
        QWEN_CODER,
        ("<|im_end|>",),
        "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=query>\n{_QUERY}\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "glm": Family(
        GLM,
        ("<|user|>", "<|observation|>"),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>search\n<arg_key>query</arg_key>\n"
        f"<arg_value>{_QUERY}</arg_value>\n</tool_call>",
    ),
    "minimax": Family(
        MINIMAX,
        ("[e~[",),
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="search">\n'
        f'<parameter name="query">{_QUERY}</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
}
"""Templates that write arguments one by one: strings as they are, all else as JSON."""

ARGUMENTS = (_ONE, _TWO)
