"""Tools, reasoning and constraints in chats of the demo model, whose template is exchanged for those of families."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

import localinfer
from localinfer.errors import ConstraintError, RequestError
from localinfer.generation.chat.reply import ThinkingBudget
from localinfer.generation.options import JsonSchema, Regex
from localinfer.generation.stream import ToolCall, joined_calls
from localinfer.llm import LLM
from localinfer.loading.drafters import make_speculation
from localinfer.loading.options import model_path
from localinfer.models.load.loader import load_model
from localinfer.models.text.chat_template import ChatTemplate
from tests.engine.fakes import ByteTokenizer, FakeTemplate, fake_model, scripted_logits, text_model
from tests.generation.chat.conversations import ASK, called
from tests.models.text.family_templates import FAMILIES, PLAIN, QWEN_CODER
from tests.models.text.newer_templates import NEWER_FAMILIES
from tests.support.inside import with_template

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {"query": {"enum": ["a", "b"]}},
    "required": ["query"],
    "additionalProperties": False,
}
SCHEMAS = {"get": SEARCH, "get_weather": WEATHER}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def chat_with() -> Iterator[Callable[[str], LLM]]:
    """The demo model behind the template of a family, with drafts."""
    made: dict[str, LLM] = {}

    def make(family: str) -> LLM:
        if family not in made:
            form = FAMILIES[family]
            model = load_model(model_path(None), threads=1)
            speculation = make_speculation("ngram", model, None)
            made[family] = LLM(
                with_template(model, ChatTemplate(form.source, form.bos, form.eos)), speculation=speculation
            )
        return made[family]

    yield make
    for llm in made.values():
        llm.close()


def check_calls(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert len(call.id) == 9 and call.id.isalnum()
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_have_arguments_that_fit(chat_with: Callable[[str], LLM], family: str) -> None:
    llm = chat_with(family)
    budget = 3 if family in ("deepseek", "hermes") else None
    options: Any = {"tools": TOOLS, "tool_choice": "required", "thinking_budget": budget}
    reply = llm.chat(ASK, **options, seed=0, parallel_tool_calls=False, max_tokens=200)
    assert (reply.finish_reason, reply.text, len(reply.tool_calls)) == ("tool_calls", "", 1)
    check_calls(reply.tool_calls)
    events = list(llm.stream_chat(ASK, **options, seed=1, max_tokens=200))
    assert "".join(event.text for event in events) == ""
    calls = joined_calls(delta for event in events for delta in event.tool_calls)
    if events[-1].finish_reason == "tool_calls":
        check_calls(calls)


def test_texts_do_not_depend_on_drafts() -> None:
    with localinfer.load(threads=1, speculation=None) as plain, localinfer.load(threads=1) as drafting:
        for options in (
            {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150},
            {"tools": TOOLS, "max_tokens": 40},
            {"tools": TOOLS, "constraint": Regex("[a-z]{3,9} [0-9]{4}"), "max_tokens": 40},
            {"constraint": JsonSchema(WEATHER), "max_tokens": 80},
        ):
            replies = [llm.chat(ASK, seed=4, temperature=1.5, **options) for llm in (plain, drafting)]
            assert replies[0].token_ids == replies[1].token_ids
            assert replies[0].text == replies[1].text


def test_a_named_tool_is_the_one_that_is_called(chat_with: Callable[[str], LLM]) -> None:
    choice = {"type": "function", "function": {"name": "get"}}
    reply = chat_with("mistral").chat(ASK, tools=TOOLS, tool_choice=choice, seed=1, max_tokens=200)
    assert reply.tool_calls[0].name == "get"
    none = chat_with("mistral").chat(ASK, tools=TOOLS, tool_choice="none", seed=1, max_tokens=5)
    assert not none.tool_calls and none.text


def test_reasoning_comes_apart_and_the_constraint_counts_after_it(chat_with: Callable[[str], LLM]) -> None:
    llm = chat_with("deepseek")
    options: Any = {"constraint": JsonSchema(WEATHER), "seed": 3, "max_tokens": 120}
    reply = llm.chat(ASK, thinking_budget=6, **options)
    jsonschema.validate(json.loads(reply.text), WEATHER)
    assert reply.reasoning and "</think>" not in reply.reasoning
    silent = llm.chat(ASK, thinking=False, **options)
    jsonschema.validate(json.loads(silent.text), WEATHER)
    assert silent.reasoning == ""
    free = llm.chat(ASK, seed=3, max_tokens=6)
    assert free.text == "" and free.reasoning == llm.chat(ASK, thinking_budget=50, seed=3, max_tokens=6).reasoning


def test_a_budget_of_tokens_ends_reasoning_exactly(chat_with: Callable[[str], LLM]) -> None:
    llm = chat_with("deepseek")
    closing = llm.tokenizer.encode("\n</think>\n\n", add_special=False)
    for budget in (0, 1, 7):
        reply = llm.chat(ASK, thinking_budget=budget, seed=5, max_tokens=budget + len(closing) + 4)
        assert reply.token_ids[budget : budget + len(closing)] == closing
        assert reply.text and llm.tokenizer.decode(reply.token_ids[:budget]).strip() == reply.reasoning


def scripted(text: str, **options: Any) -> LLM:
    model = text_model(text, prompt_length=5, context_length=1000, **options)
    model.chat_template = FakeTemplate()
    return LLM(model)  # type: ignore[arg-type]


class SilentTemplate(FakeTemplate):
    """Shows neither tools nor a system message, so that prompts keep their length."""

    def render_segments(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **more: Any) -> list[tuple[str, bool]]:
        return super().render_segments([m for m in messages if m["role"] != "system"], *rest, **more)


def test_a_model_that_wants_to_call_streams_deltas() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"query": "b"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
    )
    model = text_model(text, prompt_length=5, context_length=1000)
    model.chat_template = SilentTemplate()
    llm = LLM(model)  # type: ignore[arg-type]
    events = list(llm.stream_chat([{"role": "user", "content": "hi"}], tools=TOOLS, temperature=0))
    assert events[-1].finish_reason == "tool_calls"
    assert "".join(event.text for event in events) == "Let me see."
    deltas = [delta for event in events for delta in event.tool_calls]
    assert [(delta.index, delta.name) for delta in deltas if delta.name] == [(0, "get"), (1, "get_weather")]
    whole = llm.chat([{"role": "user", "content": "hi"}], tools=TOOLS, temperature=0)
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [
        ("get", '{"query": "b"}'),
        ("get_weather", '{"city": "Bonn", "days": 2}'),
    ]
    assert joined_calls(deltas)[1].arguments == whole.tool_calls[1].arguments


class SpellingTokenizer(ByteTokenizer):
    """Spells its control tokens out, as real tokenizers do, and reads them in prompts."""

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode() if token_id >= 256 else bytes([token_id])


class ControlTemplate(FakeTemplate):
    """Writes calls between control tokens: <user>NAME<bot>ARGUMENTS."""

    source = ""

    def render(self, messages: Sequence[Mapping[str, Any]], *_: Any, tools: Any = None, **__: Any) -> str:
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        written = [f"<user>{call['name']}<bot>{json.dumps(call['arguments'])}" for call in calls]
        return "<begin>" + messages[0]["content"] + json.dumps(tools or "") + "".join(written)


def control_model(script: list[int]) -> LLM:
    steps = {5 + index: token_id for index, token_id in enumerate(script)}
    model = fake_model(scripted_logits(steps), context_length=200)
    model.chat_template, model.tokenizer = ControlTemplate(), SpellingTokenizer()
    return LLM(model)  # type: ignore[arg-type]


def test_markers_that_are_control_tokens_are_required_as_tokens_and_read_as_markers() -> None:
    llm = control_model([*b"Ok. ", 258, *b"get", 259, *b'{"query": "b"}', 257])
    ask = [{"role": "user", "content": "hi"}]
    reply = llm.chat(ask, tools=TOOLS, temperature=0)
    assert (reply.text, reply.finish_reason) == ("Ok.", "tool_calls")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("get", '{"query": "b"}')]
    # A model that wants to write the marker's letters has to begin with the token.
    forced = control_model([*b'<user>get<bot>{"query": "b"}', 257])
    called = forced.chat(ask, tools=TOOLS, tool_choice="required", seed=1, max_tokens=80)
    assert called.token_ids[0] == 258 and called.tool_calls
    check_calls(called.tool_calls)


def test_stop_texts_count_in_content_only() -> None:
    text = 'One. <tool_call>\n{"name": "get", "arguments": {"query": "b"}}\n</tool_call>'
    model = text_model(text, prompt_length=5, context_length=1000)
    model.chat_template = SilentTemplate()
    llm = LLM(model)  # type: ignore[arg-type]
    ask = [{"role": "user", "content": "hi"}]
    assert llm.chat(ask, tools=TOOLS, temperature=0, stop="query").tool_calls[0].arguments == '{"query": "b"}'
    stopped = llm.chat(ask, tools=TOOLS, temperature=0, stop="ne.")
    assert (stopped.text, stopped.finish_reason, stopped.tool_calls) == ("O", "stop", ())


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_and_results_come_back_in_the_next_prompt(chat_with: Callable[[str], LLM], family: str) -> None:
    llm = chat_with(family)
    prompt = llm.render_chat(called("get", '{"query": "b"}'), tools=TOOLS)
    form = llm._chats().formats.calls
    assert f'{form.begin}get{form.middle}{{"query": "b"}}' in prompt and "42 degrees" in prompt
    assert "get_weather" in prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "x"}, "tools are"),
        ({"tools": [{}]}, "tool 0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tool 0"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "named 'get'"),
        ({"tools": [{"function": {"name": "a", "parameters": 3}}]}, "'a'"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "get_weather"),
        ({"tool_choice": "required"}, "no tools"),
        ({"thinking": 1}, "thinking"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking": True}, "no reasoning"),
        ({"template_variables": {"messages": []}}, "messages"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scripted("hi").chat(ASK, **options)


def test_a_strict_tool_names_what_cannot_be_enforced_and_another_is_held_to_an_object() -> None:
    for schema, keyword in (({"not": {}}, "not"), ({"properties": {"a": {"format": "zip"}}}, "format")):
        function = {"name": "f", "parameters": {"type": "object", **schema}}
        with pytest.raises(ConstraintError, match="'f'") as caught:
            scripted("hi").chat(ASK, tools=[{"type": "function", "function": {**function, "strict": True}}])
        assert caught.value.keyword == keyword
        loose = scripted("hi").stream_chat(ASK, tools=[{"type": "function", "function": function}])
        loose.close()


def test_a_budget_waits_for_the_end_of_a_character() -> None:
    budget = ThinkingBudget(
        ByteTokenizer(), None, start=1, vocab_size=260, begin="<", end=">", closing_ids=[10, 62], budget=2
    )  # fmt: skip

    def forced(text: str | bytes) -> list[int]:
        raw = text if isinstance(text, bytes) else text.encode()
        return budget.forced(np.array([256, *raw], np.int32), 9)

    assert forced("") == forced("<") == forced("<a") == forced("ab") == forced("ab<cde") == []
    assert forced("<ab") == [10, 62] and forced("<ab\n") == [62] and forced("<ab\n>") == []
    assert forced("<aé") == [10, 62] and forced("<aé".encode()[:-1]) == []
    assert forced("<a>bcd") == [] and forced(" <ab") == [10, 62]
    allowed = budget(np.array([256, *b"<ab"], np.int32))
    assert np.flatnonzero(allowed).tolist() == [10] and budget(np.array([256, *b"<a"], np.int32)).all()
    assert budget.count_allowed(np.array([256], np.int32), list(b"<abc")) == 3


def test_tools_are_described_where_templates_do_not_in_the_format_that_they_write() -> None:
    described = NEWER_FAMILIES["silent-calls"].source
    model = load_model(model_path(None), threads=1)
    with LLM(with_template(model, ChatTemplate(described))) as llm:
        prompt = llm.render_chat(ASK, tools=TOOLS)
        assert "get_weather" in prompt and "<|calls|><|call|>function<|sep|>NAME\n```json\nARGUMENTS\n```" in prompt
    strict = PLAIN.replace(
        "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
    )
    with LLM(with_template(model, ChatTemplate(strict))) as llm:
        assert llm.render_chat(ASK, tools=TOOLS).startswith("<|im_start|>user\nYou can call")
        results = [{"role": "tool", "tool_call_id": "abcdefghi", "content": text} for text in ("one", "two")]
        prompt = llm.render_chat([*called("get", '{"query": "b"}')[:2], *results], tools=TOOLS)
        assert prompt.count("<|im_start|>user") == 2 and "two" in prompt
    in_parameters = QWEN_CODER.replace("{%- if tools %}", "{%- if none %}", 1)
    with LLM(with_template(model, ChatTemplate(in_parameters))) as llm:
        assert "<function=NAME>\n<parameter=PARAMETER>\nVALUE\n</parameter>" in llm.render_chat(ASK, tools=TOOLS)


def test_thinking_asks_for_effort_where_nothing_else_lets_a_model_reason() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
        "{{ m.content }}{% endfor %}<|assistant|><think>{{ '' if reasoning_effort == 'high' else '</think>' }}"
    )
    model = load_model(model_path(None), threads=1)
    with LLM(with_template(model, ChatTemplate(source))) as llm:
        ends = {thinking: llm.render_chat(ASK, thinking=thinking)[-8:] for thinking in (True, False, None)}
        assert ends == {True: "><think>", False: "</think>", None: "</think>"}
        low = llm.render_chat(ASK, thinking=True, template_variables={"reasoning_effort": "low"})
        assert low.endswith("</think>")
