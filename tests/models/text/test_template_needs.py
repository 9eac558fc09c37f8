"""What some templates need beside what is documented: queues, and tools by other names."""

import pytest

from localinfer.errors import TemplateError
from localinfer.models.text.chat_template import ChatTemplate

ASK = [{"role": "user", "content": "hi"}]


def test_a_namespace_may_keep_a_queue_and_nothing_else_changes() -> None:
    source = (
        "{% set ns = namespace(ids=[], name='x') %}"
        "{% for m in messages %}{% set _ = ns.ids.append(m.content) %}{% endfor %}"
        "{% set kept = ns.ids %}{{ ns.ids.pop(0) }}{{ ns.ids.pop() }}{{ ns.ids }}{{ kept }}"
    )
    messages = [{"role": "user", "content": letter} for letter in "abc"]
    assert ChatTemplate(source).render(messages) == "ac['b']['a', 'b', 'c']"
    for refused in (
        "{{ messages[0].parts.append(1) }}",
        "{% set ns = namespace(a='x') %}{{ ns.a.append(1) }}",
        "{% set ns = namespace(a=[]) %}{{ ns.a.pop() }}",
        "{% set ns = namespace(a=[]) %}{{ ns.a.append() }}",
        "{% set d = {'a': []} %}{{ d.a.append(1) }}",
    ):
        with pytest.raises(TemplateError, match="at line 1"):
            ChatTemplate(refused).render([{"role": "user", "parts": []}])
    held = [1]
    source = "{% set ns = namespace(a=messages[0].parts) %}{{ ns.a.append(2) }}{{ ns.a }}"
    assert ChatTemplate(source).render([{"role": "user", "parts": held}]) == "None[1, 2]" and held == [1]


def test_a_queue_that_grows_without_end_is_refused() -> None:
    source = "{% set ns = namespace(a=[]) %}{% for i in range(100000) %}{% set _ = ns.a.append(i) %}{% endfor %}"
    with pytest.raises(TemplateError, match="units of work|longer than"):
        ChatTemplate(source).render([])


def test_templates_for_tools_alone_render_chats_without_tools() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    assert ChatTemplate(source).render(ASK) == "hi"
    with pytest.raises(TemplateError, match="NoneType"):
        ChatTemplate("{% for tool in tools %}{% endfor %}{{ 1 + 'a' }}").render(ASK)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if xml_tools %}{{ xml_tools[0].function.name }}{% else %}none{% endif %}", "f"),
        ("{{ functions }}", '[{"function": {"name": "f"}}]'),
        ("{% if functions is defined %}no{% endif %}{{ tools[0].function.name }}", "f"),
        ("{{ tools | map(attribute='function') | tojson }}", '[{"name": "f"}]'),
        ("{{ datetime is string }}", "True"),
    ],
)
def test_tools_and_the_time_have_the_names_that_templates_read(source: str, text: str) -> None:
    tools = [{"function": {"name": "f"}}]
    assert ChatTemplate(source).render(ASK, tools=tools) == text
    if "xml" in source:
        assert ChatTemplate(source).render(ASK) == "none"
        assert ChatTemplate(source).render(ASK, tools=tools, xml_tools=[]) == "none"


@pytest.mark.parametrize(
    ("source", "undefined"),
    [
        ("<think>{% if not enable_thinking %}</think>{% endif %}", "<think>"),
        ("<think>{% if not thinking %}</think>{% endif %}", "<think>"),
        # These say what holds where nothing is given.
        ("{% if not (enable_thinking | default(false)) %}</think>{% endif %}", "</think>"),
        ("{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}", ""),
        ("{% if enable_thinking is not defined or not enable_thinking %}</think>{% endif %}", "</think>"),
        ("{% set enable_thinking = enable_thinking or false %}{{ '</think>' if not enable_thinking }}", "</think>"),
        ("{% if enable_thinking %}<think>{% endif %}", ""),
    ],
)
def test_reasoning_is_off_only_where_the_caller_or_the_template_says_so(source: str, undefined: str) -> None:
    template = ChatTemplate(source)
    assert template.render(ASK) == undefined
    closed = template.render(ASK, enable_thinking=False, thinking=False)
    assert closed.endswith("</think>") == ("</think>" in source)
