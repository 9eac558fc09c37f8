"""Calls among other things: inside reasoning, between texts, and what only begins like one there."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.stream import joined_calls
from localinfer.llm import LLM
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_format import ReasoningFormat
from localinfer.models.text.reply_learning import learn_call_format
from localinfer.models.text.tokenizer import SpellingFinder
from tests.engine.fakes import FakeTemplate, text_model
from tests.models.text.tool_templates import HERMES_CALL, HERMES_THINKING, KIMI, THINK, template

THOUGHT = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
FORMS = {
    name: learn_call_format(ChatTemplate(source), SpellingFinder({"<|im_end|>": 0}), reasoning=THOUGHT)
    for name, source in {"hermes": HERMES_THINKING, "kimi": KIMI}.items()
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
OTHER = CALL.replace('"n": 1', '"n": 2')
KIMI_CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
ONE, TWO = ("f", '{"n": 1}'), ("f", '{"n": 2}')


def parsed(pieces: list[str], name: str, *, is_open: bool, calls_in_reasoning: bool) -> tuple[str, str, list[Any]]:
    parser = ReplyParser(
        THOUGHT, FORMS[name], starts_reasoning=is_open, calls_in_reasoning=calls_in_reasoning, new_id=lambda: "id"
    )
    results = [*map(parser.push, pieces), parser.flush()]
    calls = joined_calls(delta for result in results for delta in result.tool_calls)
    texts = "".join(result.content for result in results), "".join(result.reasoning for result in results)
    return (*texts, [(call.name, call.arguments) for call in calls])


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning", "calls"),
    [
        ("hermes", f"So.\n{CALL}", "", "So.", [ONE]),
        ("hermes", CALL, "", "", [ONE]),
        ("hermes", f"So.\n{CALL}\n{OTHER}", "", "So.", [ONE, TWO]),
        ("hermes", f"So.\n{CALL}\nNow the other.\n{OTHER}", "", "So.\nNow the other.", [ONE, TWO]),
        ("hermes", f"So.\n{CALL}\n</think>\n\nDone.\n{OTHER}", "Done.", "So.", [ONE, TWO]),
        ("hermes", f"So.\n</think>\n\nFirst.\n{CALL}\nThen.\n{OTHER} End.", "First.\nThen. End.", "So.", [ONE, TWO]),
        # What reasoning is about is not done.
        ("hermes", f"I call {CALL} now.\n</think>\n\nHi", "Hi", "I call now.", [ONE]),
        ("hermes", "A call begins with <tool_call>.\n</think>\n\nHi", "Hi", "A call begins with <tool_call>.", []),
        (
            "hermes",
            "A <tool_call> is one.\n<tool_call>\nNo.\n</think>\n\nHi",
            "Hi",
            "A <tool_call> is one.\n<tool_call>\nNo.",
            [],
        ),
        ("hermes", 'So.\n<tool_call>\n{"name": "a b"}</think>\n\nHi', "Hi", 'So.\n<tool_call>\n{"name": "a b"}', []),
        (
            "kimi",
            f"I call <|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>",
            "",
            "I call",
            [("f", "{}")],
        ),
        ("kimi", f"I call {KIMI_CALL}", "", "I call", [("f", "{}")]),
    ],
)
def test_calls_inside_reasoning_and_between_texts_are_read_at_every_cut(
    name: str, text: str, content: str, reasoning: str, calls: list[Any]
) -> None:
    want = (content, reasoning, calls)
    options: Any = {"is_open": True, "calls_in_reasoning": True}
    assert parsed([text], name, **options) == want
    assert parsed(list(text), name, **options) == want
    for cut in range(1, len(text)):
        assert parsed([text[:cut], text[cut:]], name, **options) == want, text[:cut]


def test_reasoning_that_has_a_budget_holds_no_calls() -> None:
    text = f"So.\n{CALL}\n</think>\n\nHi"
    options: Any = {"is_open": True, "calls_in_reasoning": False}
    assert parsed([text], "hermes", **options) == ("Hi", f"So.\n{CALL}", [])


def test_every_letter_of_a_reply_that_is_cut_is_somewhere() -> None:
    text = f"So.\n{CALL}"
    place = text.index("{")
    for cut in range(1, place):
        content, reasoning, calls = parsed([text[:cut]], "hermes", is_open=True, calls_in_reasoning=True)
        assert (content, calls) == ("", []) and reasoning.rstrip() == text[:cut].rstrip()


class ThinkingTemplate(FakeTemplate):
    """Prompts of one length that open the reasoning, of a model that thinks and calls."""

    source = template(HERMES_CALL, between="\n", thought=THINK, prompt="<think>\n")

    def __init__(self) -> None:
        self._own = ChatTemplate(self.source)

    def render(self, *arguments: Any, **more: Any) -> str:
        return self._own.render(*arguments, **more)

    def render_segments(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **more: Any) -> list[tuple[str, bool]]:
        return [("?<think>", True)]


def test_a_model_calls_while_it_reasons_and_its_arguments_fit() -> None:
    wrong = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"n": "one", "m": 2}}\n</tool_call>'
    model = text_model(wrong, prompt_length=9, context_length=1000)
    model.chat_template = ThinkingTemplate()
    llm = LLM(model)  # type: ignore[arg-type]
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    ask = [{"role": "user", "content": "hi"}]
    events = list(llm.stream_chat(ask, tools=tools, parallel_tool_calls=False, temperature=0, max_tokens=200))
    calls = joined_calls(delta for event in events for delta in event.tool_calls)
    assert "".join(event.reasoning for event in events) == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"n": 1})]
    assert events[-1].finish_reason == "tool_calls"
