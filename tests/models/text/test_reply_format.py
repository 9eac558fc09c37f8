"""Call and reasoning formats are learned from templates in the manner of well-known families."""

import pytest

from localinfer.errors import TemplateError
from localinfer.models.text.chat_template import THINKING_VARIABLES, ChatTemplate
from localinfer.models.text.reply_format import HERMES, CallFormat, ReasoningFormat
from localinfer.models.text.reply_learning import Trials, learn_call_format, learn_reasoning_format
from localinfer.models.text.tokenizer import SpellingFinder
from tests.models.text.family_templates import DEEPSEEK, FAMILIES, HERMES_THINKING, PARAMETER_FAMILIES, PLAIN, Family
from tests.models.text.newer_templates import CHANNELS, MESSAGES, NUMBERED, OWN_NOTATION


def learned(family: Family) -> tuple[CallFormat, ReasoningFormat | None]:
    template = ChatTemplate(family.source, family.bos, family.eos)
    reasoning = learn_reasoning_format(template, template.source)
    ends = SpellingFinder({text: index for index, text in enumerate(family.ends)})
    return learn_call_format(template, ends, reasoning=reasoning), reasoning


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_written_as_the_template_writes_them(name: str) -> None:
    family = FAMILIES[name]
    form, _ = learned(family)
    one, two = '{"city": "Bonn", "days": 3}', '{"query": "a {\\"b\\": [1]} \\\\"}'
    first = f"{form.begin}weather{form.middle}{one}{form.end}"
    second = f"{form.begin}search{form.middle}{two}{form.end}"
    assert form.opening + first + form.closing == family.one_call
    if family.two_calls is None:
        assert form.separator is None
    else:
        assert form.separator is not None
        assert form.opening + first + form.separator + second + form.closing == family.two_calls
    assert form.is_native == (name != "plain")


@pytest.mark.parametrize("name", PARAMETER_FAMILIES)
def test_parameters_are_written_one_by_one_as_the_template_writes_them(name: str) -> None:
    family = PARAMETER_FAMILIES[name]
    form, _ = learned(family)
    own = form.parameters
    assert own is not None and form.separator is not None and form.is_native

    def call(called: str, *arguments: tuple[str, str]) -> str:
        values = own.following.join(f"{key}{own.assign}{value}{own.value_end}" for key, value in arguments)
        return f"{form.begin}{called}{form.middle}{values}{form.end}"

    first = call("weather", ("city", "Bonn"), ("days", "3"))
    second = call("search", ("query", 'a {"b": [1]} \\'))
    assert form.opening + first + form.closing == family.one_call
    assert form.opening + first + form.separator + second + form.closing == family.two_calls
    bare = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [bare]}]
    shown = ChatTemplate(family.source).render(messages, add_generation_prompt=False)
    assert f"{form.opening}{form.begin}weather{own.empty}{form.closing}" in shown


def test_numbers_with_marks_of_their_own_are_no_known_format() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
        "{{ v if v is string else '#' ~ v ~ '#' }}{{ ', ' if not loop.last }}{% endfor %})]{% endfor %}{% endfor %}"
    )
    assert learn_call_format(ChatTemplate(source), SpellingFinder({})) == HERMES


def test_what_begins_a_call_is_known_where_text_cannot_look_like_it() -> None:
    triggers = {name: learned(family)[0].trigger for name, family in FAMILIES.items()}
    assert triggers == {
        "hermes": "<tool_call>",
        "llama3": "",
        "mistral": "[TOOL_CALLS]",
        "deepseek": "<｜tool▁calls▁begin｜>",
        "deepseek-tight": "<｜tool▁calls▁begin｜>",
        "plain": "<tool_call>",
    }


def test_reasoning_markers_are_learned_by_rendering_or_found_in_the_source() -> None:
    think = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
    reasoning = {name: learned(family)[1] for name, family in FAMILIES.items()}
    assert [name for name, form in reasoning.items() if form is None] == ["llama3", "mistral", "plain"]
    assert all(form in (None, think) for form in reasoning.values())


def test_a_prompt_tells_whether_its_reply_reasons() -> None:
    think = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
    ask = [{"role": "user", "content": "hi"}]
    hermes, deepseek = ChatTemplate(HERMES_THINKING), ChatTemplate(DEEPSEEK)
    assert think.is_open(deepseek.render(ask))
    assert not think.is_open(hermes.render(ask)) and not think.is_closed(hermes.render(ask))
    assert think.is_closed(hermes.render(ask, **dict.fromkeys(THINKING_VARIABLES, False)))


def test_boundaries_never_cut_a_marker() -> None:
    form, _ = learned(FAMILIES["deepseek-tight"])
    assert form.opening == "<｜tool▁calls▁begin｜>" and form.begin == "<｜tool▁call▁begin｜>"
    assert form.end == "<｜tool▁call▁end｜>" and form.closing == "<｜tool▁calls▁end｜>" and form.separator == ""


@pytest.mark.parametrize(
    "source",
    [
        PLAIN,
        "{{ raise_exception('no') }}",
        # Tools are described, but calls are not written, or not as JSON.
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<f={{ c.function.name }}>{% for k in c.function.arguments %}<{{ k }}>{% endfor %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_templates_without_calls_fall_back_to_the_general_format(source: str) -> None:
    template = ChatTemplate(source)
    assert learn_call_format(template, SpellingFinder({})) == HERMES
    assert learn_reasoning_format(template, source) is None


@pytest.mark.parametrize(
    ("source", "ends", "form"),
    [
        (
            CHANNELS,
            ("<|return|>", "<|call|>"),
            ReasoningFormat(
                begin="<|channel|>analysis<|message|>",
                end="<|end|>",
                closing="<|end|><|start|>assistant",
                following="<|start|>assistant",
                answer_begin="<|channel|>final<|message|>",
                other_answers=("<|channel|>commentary<|message|>",),
                member="thinking",
            ),
        ),
        (
            MESSAGES,
            ("<|calls|>",),
            ReasoningFormat(
                begin="<|think|>",
                end="<|end|>",
                closing="<|end|><|begin|>assistant",
                following="<|begin|>assistant",
                answer_begin="<|content|>",
                answer_end="<|end|>",
            ),
        ),
        (
            NUMBERED,
            ("<|im_end|>",),
            ReasoningFormat(
                begin="<|BEGIN_THOUGHT|>",
                end="<|END_THOUGHT|>",
                closing="<|END_THOUGHT|>",
                answer_begin="<|BEGIN_ANSWER|>",
                answer_end="<|END_ANSWER|>",
            ),
        ),
        (OWN_NOTATION, ("<|im_end|>",), ReasoningFormat("<|channel>thought", "<channel|>", "\n<channel|>")),
        # The prompt has opened the reasoning, or closed it.
        (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}<think:a>{{ m.thinking }}</think:a>{% endif %}"
            "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think:a></think:a>{% endif %}",
            (),
            ReasoningFormat("<think:a>", "</think:a>", "</think:a>", member="thinking"),
        ),
    ],
)
def test_frames_of_answers_are_learned_with_the_reasoning(
    source: str, ends: tuple[str, ...], form: ReasoningFormat
) -> None:
    spellings = SpellingFinder({text: index for index, text in enumerate(ends)})
    assert learn_reasoning_format(ChatTemplate(source), source, spellings) == form


def test_what_every_turn_ends_with_is_no_part_of_calls() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function.name }}|{{ c.function.arguments | tojson }}</call>{% endfor %}<stop>{% endfor %}"
        "Answer now."
    )
    form = learn_call_format(ChatTemplate(source), SpellingFinder({}))
    assert (form.begin, form.middle, form.end, form.closing) == ("<call>", "|", "</call>", "")


def test_trials_of_a_template_that_takes_long_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        num_renderings = 0

        def render(self, messages: object, *_: object, **__: object) -> str:
            self.num_renderings += 1
            return ""

    clock = iter(range(1000))
    monkeypatch.setattr("localinfer.models.text.reply_learning.time.thread_time", lambda: float(next(clock)))
    template = Slow()
    trials = Trials(template)  # type: ignore[arg-type]
    assert learn_reasoning_format(trials, "") is None
    assert learn_call_format(trials, SpellingFinder({})) == HERMES
    assert template.num_renderings == 2
    with pytest.raises(TemplateError, match=r"took 2\.0 s"):
        trials.render([])
