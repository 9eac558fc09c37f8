"""No chat template, however it goes about it, takes much time or memory: it is stopped with an error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localinfer.errors import TemplateError
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.template_costs import MAX_LEVELS, MAX_OUTPUT_CHARACTERS, CostError, TemplateBudget
from tests.models.text import hostile_templates
from tests.models.text.family_templates import HERMES_THINKING
from tests.support.limits import seconds

# One that is not stopped ends its process, not the tests: by its memory, its time, or the clock outside.
_CHILD = """\
import json, sys, warnings
from localinfer.models.text import template_costs
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.errors import TemplateError
from tests.models.text import hostile_templates
try:
    import resource
except ImportError:
    pass
else:
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
warnings.simplefilter("ignore")
template_costs.MAX_RENDER_SECONDS = 0.02
for group in sys.argv[1:]:
    for name, source in getattr(hostile_templates, group).items():
        print(json.dumps([name, "began"]), flush=True)
        template = ChatTemplate(source)
        try:
            outcome = "fallback" if template.is_fallback else template.render([{"role": "user", "content": "hi"}])
        except TemplateError as error:
            outcome = str(error)
        print(json.dumps([name, outcome[:200]]), flush=True)
"""


GROUPS = ("SHARED", "REPEATED", "TEXT", "TIME", "COMPILED")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each template of all groups; "began" where the process did not survive it."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", _CHILD, *GROUPS]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds(50))
    found = dict(json.loads(line) for line in ended.stdout.splitlines())
    assert found, ended.stderr
    return found


@pytest.mark.parametrize("group", GROUPS[:-1])
def test_a_template_that_asks_for_too_much_is_stopped(group: str, outcomes: dict[str, str]) -> None:
    templates: dict[str, str] = getattr(hostile_templates, group)
    wrong = {name: outcomes.get(name, "never tried") for name in templates if not is_stop(outcomes.get(name, ""))}
    assert wrong == {}


def is_stop(outcome: str) -> bool:
    return outcome.startswith("the chat template stopped") and "MemoryError" not in outcome


def test_a_template_that_is_costly_to_compile_is_refused_or_compiled(outcomes: dict[str, str]) -> None:
    wrong = {name: outcomes.get(name, "never tried") for name in hostile_templates.COMPILED}
    wrong = {name: outcome for name, outcome in wrong.items() if not is_stop(outcome) and outcome != "fallback"}
    assert wrong == {}


def test_shared_parts_count_as_often_as_they_are_met() -> None:
    budget = TemplateBudget()
    budget.start()
    value: list[Any] = [1]
    sizes = []
    for _ in range(10):
        value = [value, value]
        sizes.append(budget.size(value)[:2])
    assert sizes[-1][1] == 3 * 2**10 - 1
    assert [second[0] > 2 * first[0] for first, second in zip(sizes, sizes[1:], strict=False)] == [True] * 9
    with pytest.raises(CostError, match="makes a value"):
        for _ in range(20):
            value = [value, value]
            budget.size(value)


def test_sizes_are_at_least_what_texts_of_values_have_without_escapes() -> None:
    budget = TemplateBudget()
    budget.start()
    for value in ("abc", 5, -(10**30), 2.5, None, True, [], [1, [2, "x"]], {"a": {"b": ()}}, (1,), {1: 2.5}.items()):
        assert budget.size(value)[0] >= len(str(value)) - len("dict_items([])")
        if not isinstance(value, type({}.items())):
            assert budget.size(value)[0] >= len(json.dumps(value))


def test_levels_are_bounded_and_named() -> None:
    source = (
        "{% set ns = namespace(x=[]) %}{% for i in range(n) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | length }}"
    )
    assert ChatTemplate(source).render([], n=MAX_LEVELS - 1) == "1"
    with pytest.raises(TemplateError, match=f"at line 1: it nests lists or dicts {MAX_LEVELS + 1} levels deep"):
        ChatTemplate(source).render([], n=MAX_LEVELS)


def test_a_namespace_may_hold_itself() -> None:
    source = "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a.a is sameas ns }}"
    assert ChatTemplate(source).render([]) == "True"


def test_the_same_messages_cost_the_same_every_time() -> None:
    template = ChatTemplate(HERMES_THINKING)
    messages = [{"role": "user", "content": "x" * 1000}] * 500
    assert template.render(messages) == template.render(messages)
    assert len({template.render(messages) for _ in range(3)}) == 1


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_conversation_as_long_as_any_context_renders(role: str) -> None:
    messages = [{"role": role, "content": "word " * 1000}] * 700
    text = ChatTemplate(HERMES_THINKING).render(messages)
    assert 3_500_000 < len(text) < MAX_OUTPUT_CHARACTERS


def test_looking_at_messages_costs_little_however_long_they_are() -> None:
    source = (
        "{% for message in messages %}{% set rest = messages[loop.index:] %}"
        "{% if rest | selectattr('role', 'equalto', 'user') | list | length == 0 %}last{% endif %}"
        "{% if rest | map(attribute='role') | list | first == 'user' or message != messages[-1] %}.{% endif %}"
        "{% for name in ('role', 'name', 'tool_calls', 'content') %}{{ message.get(name) is none }}{% endfor %}"
        "{% for name, value in message.items() if name in message %}{{ name }}{% endfor %}"
        "{% if '</think>' in message.content or message['content'].startswith('x') %}{{ message.content | length }}"
        "{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "é" * 3_000_000}, *[{"role": "assistant", "content": "word " * 100}] * 500]
    assert "last" in ChatTemplate(source).render(messages)


def test_methods_of_classes_cannot_change_what_a_template_is_given() -> None:
    messages = [{"role": "user", "content": "hi"}]
    for source in ("{{ dict.update(messages[0], role='x') }}", "{{ dict.clear(messages[0]) }}"):
        with pytest.raises(TemplateError):
            ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]
