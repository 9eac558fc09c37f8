"""Chat templates in the manner of well-known families, and replies as their models write them."""

from dataclasses import dataclass

HERMES_THINKING = """\
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
{% elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

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
ARGUMENTS = (_ONE, _TWO)
