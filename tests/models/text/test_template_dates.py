"""Templates that write a date: their own stays unless one is asked for, so prompts keep their prefix over night."""

from datetime import datetime

import pytest

import localinfer
from localinfer.errors import RequestError
from localinfer.models.text.chat_template import ChatTemplate

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST, SECOND = datetime(2026, 9, 30, 23, 59), datetime(2026, 10, 1, 0, 1)

OWN = {
    "set where it is not given": "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}"
    "{%- endif %}Today Date: {{ date_string }}",
    "the same by `is undefined`": "{% if date_string is undefined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "Today Date: {{ date_string }}",
    "a default": "Today Date: {{ date_string | default('26 Jul 2024') }}",
    "a default of another spelling": "Today Date: {{ date_string | d('26 Jul 2024', true) }}",
    "an alternative": "Today Date: {{ date_string or '26 Jul 2024' }}",
    "a choice": "Today Date: {{ date_string if date_string else '26 Jul 2024' }}",
    "a choice by `is defined`": "Today Date: {{ date_string if date_string is defined else '26 Jul 2024' }}",
    "a branch": "Today Date: {% if date_string %}{{ date_string }}{% else %}26 Jul 2024{% endif %}",
    "by another name": "Today Date: {% if not datetime %}{% set datetime = '26 Jul 2024' %}{% endif %}{{ datetime }}",
}
"""Templates with a date of their own -> which they write on every day."""
OF_TODAY = {
    "strftime_now where it is not given": "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}Today Date: {{ date_string }}",
    "strftime_now": "Current date: {{ strftime_now('%Y-%m-%d') }}",
    "strftime_now in a macro": "{% macro head() %}On {{ strftime_now('%d/%m/%y') }}{% endmacro %}{{ head() }}",
    "strftime_now where there is no system message": "{% if messages[0].role != 'system' %}{% set today = "
    "strftime_now('%Y-%m-%d') %}The current date is {{ today }}.{% endif %}",
    "strftime_now where there are tools": "{% if tools %}Today is {{ strftime_now('%A, %B %d') }}.{% endif %}",
    "a name that it does not ask for": "Today is {{ datetime }}.",
    "another": "Today is {{ date_string }}.",
}
"""Templates that have no date but today's."""
UNDATED = {
    "none": "",
    "a date of the past": "Cutting Knowledge Date: December 2023",
    "its own name": "{% set date_string = 'never' %}{{ date_string }}",
}


def prompts(source: str, day: datetime, **variables: object) -> list[str]:
    """Of a conversation, without tools and with some."""
    template = ChatTemplate(source + CHAT, now=lambda: day)
    return [template.render(ASK, tools=tools, **variables) for tools in (None, TOOLS)]


@pytest.mark.parametrize("name", [*OWN, *UNDATED])
def test_a_template_with_a_date_of_its_own_writes_the_same_on_every_day(name: str) -> None:
    source = (OWN | UNDATED)[name]
    first = prompts(source, FIRST)
    assert first == prompts(source, SECOND)
    assert all("26 Jul 2024<user>hi" in prompt for prompt in first) == (name in OWN)
    assert not ChatTemplate(source + CHAT).writes_date()


@pytest.mark.parametrize("name", OF_TODAY)
def test_a_template_without_one_writes_todays_and_is_said_to(name: str) -> None:
    assert prompts(OF_TODAY[name], FIRST) != prompts(OF_TODAY[name], SECOND)
    assert ChatTemplate(OF_TODAY[name] + CHAT).writes_date()


@pytest.mark.parametrize("name", [*OWN, *OF_TODAY])
def test_a_day_that_is_asked_for_is_written_however_a_template_does_it(name: str) -> None:
    source = (OWN | OF_TODAY)[name]
    asked = prompts(source, FIRST, template_date="2026-10-01")
    assert asked == prompts(source, SECOND, template_date="2026-10-01")
    today = [prompts(source, day, template_date="today") for day in (FIRST, SECOND)]
    assert today[0] != today[1] == asked
    assert not any("26 Jul 2024" in prompt for prompt in (*asked, *today[0]))


@pytest.mark.parametrize("name", [name for name, source in (OWN | OF_TODAY).items() if "date_string" in source])
def test_a_text_in_place_of_the_date_reaches_the_template_as_it_is(name: str) -> None:
    for day in (FIRST, SECOND):
        assert all(
            "the first of May" in text for text in prompts((OWN | OF_TODAY)[name], day, date_string="the first of May")
        )


def test_strftime_now_is_now() -> None:
    days = [datetime.now()]
    text = ChatTemplate("{{ strftime_now('%Y/%m/%d') }}").render(ASK)
    days.append(datetime.now())
    assert text in [day.strftime("%Y/%m/%d") for day in days]


@pytest.mark.parametrize("value", ["tomorrow", "2026-13-01", 5, ["2026-10-01"], ""])
def test_what_is_no_day_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match='give "today", or a day such as "2026-10-01"'):
        ChatTemplate(CHAT).render(ASK, template_date=value)


def test_variables_of_a_model_hold_for_its_chats_and_each_chat_adds_its_own(tmp_path) -> None:
    source = OWN["a default"] + "{{ name }}" + CHAT
    with localinfer.load(threads=1, context_length=256, chat_template=source, disk_cache=False) as llm:
        own = llm.render_chat(ASK)
        llm.set_defaults(template_variables={"template_date": "2026-10-01", "name": "A"})
        assert "26 Jul 2024" in own and "01 Oct 2026A" in llm.render_chat(ASK)
        assert "01 Oct 2026B" in llm.render_chat(ASK, template_variables={"name": "B"})
        assert "1 May" in llm.render_chat(ASK, template_variables={"date_string": "1 May"})
        assert llm.render_chat(ASK, template_variables=None) == own
        asked, free = (llm.count_chat_tokens(ASK, template_variables=one) for one in ({}, None))
        llm.chat(ASK, max_tokens=1)
        assert llm.chat(ASK, max_tokens=1).stats.cached_tokens > 0
        assert llm.session().ask("hi", max_tokens=1).stats.prompt_tokens == asked != free
        llm.complete("Once", max_tokens=1)
        for wrong in ({"messages": []}, {"template_date": "soon"}, [], {1: 2}):
            with pytest.raises(RequestError, match="template_"):
                llm.set_defaults(template_variables=wrong)
        llm.set_defaults()
        assert llm.render_chat(ASK) == own
