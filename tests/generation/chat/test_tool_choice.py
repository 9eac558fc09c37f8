"""Every choice of tools: what it means, what it does to a reply, and that the prompt stays the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from localinfer.errors import RequestError
from localinfer.generation.chat.messages import choose_tools, read_tools
from localinfer.llm import LLM
from tests.engine.fakes import FakeTemplate, text_model

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"n": {"enum": [1]}}}},
    }
    for name in ("get", "put", "cut")
]
ASK = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"n": 1}}\n</tool_call>'


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "names", "must_call", "is_single"),
    [
        (None, "get put cut", False, False),
        ("auto", "get put cut", False, False),
        ({"type": "auto"}, "get put cut", False, False),
        ("none", "", False, False),
        ({"type": "none"}, "", False, False),
        ("required", "get put cut", True, False),
        ("any", "get put cut", True, False),
        ({"type": "any"}, "get put cut", True, False),
        (named("put"), "put", True, True),
        ({"type": "function", "name": "put"}, "put", True, True),
        ({"type": "tool", "name": "put"}, "put", True, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named("cut"), {"name": "get"}]}, "get cut", False, False),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("cut")]}},
            "cut",
            True,
            False,
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "", False, False),
    ],
    ids=repr,
)
def test_choices_of_every_api_are_read(choice: Any, names: str, must_call: bool, is_single: bool) -> None:
    chosen = choose_tools(read_tools(TOOLS), choice)
    assert [tool.name for tool in chosen.tools] == names.split()
    assert (chosen.must_call, chosen.is_single) == (must_call, is_single)


@pytest.mark.parametrize(
    "choice",
    [
        "sometimes",
        {},
        {"type": "custom", "name": "get"},
        named("other"),
        {"type": "tool"},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "mode": "never", "tools": [named("get")]},
        {"type": "allowed_tools", "tools": [named("other")]},
        {"type": "allowed_tools", "mode": "required", "tools": []},
        3,
        np.zeros(2),
        {"type": np.zeros(2)},
        {"type": "allowed_tools", "mode": np.zeros(2), "tools": [named("get")]},
        {"type": "function", "name": np.zeros(2)},
    ],
    ids=repr,
)
def test_choices_that_mean_nothing_are_refused(choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        choose_tools(read_tools(TOOLS), choice)


class FixedTemplate(FakeTemplate):
    """Prompts of one length, whatever the tools."""

    def render_segments(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **more: Any) -> list[tuple[str, bool]]:
        return super().render_segments([m for m in messages if m["role"] != "system"], *rest, **more)


def scripted(text: str) -> LLM:
    """A model that writes this text where it may."""
    model = text_model(text, prompt_length=5, context_length=1000)
    model.chat_template = FixedTemplate()
    return LLM(model)  # type: ignore[arg-type]


def test_a_named_tool_is_called_once_though_the_model_wants_to_go_on() -> None:
    llm = scripted("\n".join(CALL % "put" for _ in range(3)))
    for choice, count in (("required", 3), (named("put"), 1)):
        reply = llm.chat(ASK, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=300)
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("put", {"n": 1})] * count
        assert reply.finish_reason == "tool_calls"


def test_a_model_that_may_not_call_writes_no_call() -> None:
    llm = scripted("So.\n" + CALL % "put")
    reply = llm.chat(ASK, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=60)
    assert reply.text.startswith("So.\n<tool_call>") and not reply.tool_calls
    assert '"name": "put"' not in reply.text and "arguments" in reply.text
    assert (
        not scripted(CALL % "put").chat(ASK, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=60).tool_calls
    )


def test_only_allowed_tools_are_called() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named("get"), named("cut")]}
    reply = scripted(CALL % "put").chat(ASK, tools=TOOLS, tool_choice=allowed, temperature=0, max_tokens=90)
    assert reply.tool_calls[0].name in ("get", "cut")


def test_the_prompt_is_the_same_whatever_is_chosen() -> None:
    model = text_model("x", prompt_length=5, context_length=4000)
    model.chat_template = FakeTemplate()
    llm = LLM(model)  # type: ignore[arg-type]
    choices: list[Any] = ["auto", "none", "required", named("put"), {"type": "allowed_tools", "tools": [named("cut")]}]
    prompts = [llm.render_chat(ASK, tools=TOOLS, tool_choice=choice) for choice in choices]
    assert prompts.count(prompts[0]) == len(choices) and "cut" in prompts[0]
