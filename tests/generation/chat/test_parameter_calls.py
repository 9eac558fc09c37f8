"""Calls whose parameters stand one by one: their grammar allows what schemas allow, and models held to it call."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from localinfer.errors import ConstraintError
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.grammar import reply_grammar
from localinfer.generation.chat.messages import read_tools
from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.stream import joined_calls
from localinfer.llm import LLM
from localinfer.loading.options import model_path
from localinfer.models.load.loader import load_model
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_format import CallFormat, ReasoningFormat
from localinfer.models.text.reply_learning import learn_call_format
from localinfer.models.text.tokenizer import SpellingFinder
from tests.engine.fakes import ByteTokenizer
from tests.generation.chat.conversations import ASK, called
from tests.models.text.family_templates import PARAMETER_FAMILIES
from tests.support.inside import with_template

THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
    },
    "required": ["city", "days", "tags", "code"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "boolean"}},
}


def function(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "x", "parameters": schema, **more}}


def call_format(name: str) -> CallFormat:
    family = PARAMETER_FAMILIES[name]
    ends = SpellingFinder({text: index for index, text in enumerate(family.ends)})
    return learn_call_format(ChatTemplate(family.source, family.bos, family.eos), ends, reasoning=THINK)


def written_call(form: CallFormat, arguments: dict[str, Any]) -> str:
    own = form.parameters
    assert own is not None
    values = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]
    text = own.following.join(f"{key}{own.assign}{value}{own.value_end}" for key, value in values)
    body = form.middle + text + form.end if values else own.empty
    return f"{form.opening}{form.begin}f{body}{form.closing}"


@pytest.fixture(scope="module")
def accepts() -> Callable[[CallFormat, dict[str, Any], str], bool]:
    """Whether the grammar of one call allows a text, from its first letter to its end."""
    compiler = ConstraintCompiler(ByteTokenizer(), 260)

    def check(form: CallFormat, tool: dict[str, Any], text: str) -> bool:
        grammar = reply_grammar(
            reasoning=None,
            state="none",
            calls=form,
            tools=read_tools([tool]),
            must_call=True,
            is_parallel=False,
            answer=None,
            specials=SpellingFinder({}),
        )
        assert grammar is not None
        mask = compiler.grammar_mask(grammar, start=0, what="schema")
        spelled = list(text.encode())
        empty = np.empty(0, np.int32)
        if mask.count_allowed(empty, spelled) < len(spelled):
            return False
        return bool(mask(np.array(spelled, np.int32))[ByteTokenizer.eos_token_id])

    return check


GOOD = {"city": "Bonn", "days": 3, "unit": "C", "tags": [True], "code": "ab/7"}


@pytest.mark.parametrize("family", PARAMETER_FAMILIES)
@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"unit": None}, True),
        ({"unit": "K"}, False),
        ({"unit": ...}, True),
        ({"city": "Zürich <3\n\n"}, True),
        ({"city": ""}, False),
        ({"city": "x" * 13}, False),
        ({"days": 0}, False),
        ({"days": "three"}, False),
        ({"days": ...}, False),
        ({"tags": [True, False, True]}, False),
        ({"tags": [1]}, False),
        ({"code": "ab7"}, False),
        ({"code": "xab/7"}, False),
        ({"more": "x"}, False),
    ],
    ids=repr,
)
def test_grammar_allows_what_the_schema_allows(accepts: Any, family: str, change: dict[str, Any], fits: bool) -> None:
    arguments = {key: value for key, value in (GOOD | change).items() if value is not ...}
    form = call_format(family)
    text = written_call(form, arguments)
    assert accepts(form, function(WEATHER), text) is fits
    if fits:
        types = {"f": {key: frozenset(("string",)) for key in ("city", "code")}}
        parser = ReplyParser(None, form, types=types, new_id=lambda: "id")
        pieces = [parser.push(text), parser.flush()]
        (call,) = joined_calls(delta for piece in pieces for delta in piece.tool_calls)
        assert json.loads(call.arguments) == arguments
        jsonschema.validate(arguments, WEATHER)


@pytest.mark.parametrize(
    ("schema", "arguments", "fits"),
    [
        ({}, {}, True),
        ({}, {"any": "text", "more": 1}, True),
        ({"additionalProperties": False}, {}, True),
        ({"additionalProperties": False}, {"a": 1}, False),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1}, True),
        ({"additionalProperties": {"type": "integer"}}, {"a": "x"}, False),
        ({"properties": {"a": {"type": "string"}}}, {}, True),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}, {"b": "x"}, True),
        ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}, {"a": None}, True),
        ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}, {"a": "x"}, False),
        ({"properties": {"a": {"type": ["integer", "string"]}}}, {"a": "x"}, True),
        ({"properties": {"a": {"const": "yes"}}}, {"a": "yes"}, True),
        ({"properties": {"a": {"const": "yes"}}}, {"a": "no"}, False),
        ({"properties": {"a": {"pattern": "b/c", "type": "string"}}}, {"a": "ab/cd"}, True),
        ({"properties": {"a": {"pattern": "b/c", "type": "string"}}}, {"a": "bc"}, False),
        ({"properties": {"a": True}}, {"a": [1, {"b": "x"}]}, True),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, {"a": "any text"}, True),
        ({"properties": {}}, {"any": "text"}, False),
        ({"properties": {"a": True}}, {"any": "text"}, False),
        ({"properties": {"a": True}, "additionalProperties": True}, {"any": "text"}, True),
        ({"properties": {"a": True}, "additionalProperties": {"type": "integer"}}, {"a": "x", "b": 1, "c": 2}, True),
        ({"properties": {"a": True}, "additionalProperties": {"type": "integer"}}, {"a": "x", "b": "y"}, False),
        ({"$defs": {"s": {"enum": ["u"]}}, "properties": {"a": {"$ref": "#/$defs/s"}}}, {"a": "u"}, True),
        ({"$defs": {"s": {"enum": ["u"]}}, "properties": {"a": {"$ref": "#/$defs/s"}}}, {"a": "v"}, False),
    ],
    ids=repr,
)
def test_schemas_of_every_kind_are_enforced(accepts: Any, schema: Any, arguments: Any, fits: bool) -> None:
    form = call_format("qwen-coder")
    assert accepts(form, function({"type": "object", **schema}), written_call(form, arguments)) is fits


@pytest.mark.parametrize("ending", ["</parameter>", "\n</parameter>\n</function>"])
def test_text_ends_at_the_first_marker(accepts: Any, ending: str) -> None:
    form = call_format("qwen-coder")
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 90}}}
    assert not accepts(form, function(schema), written_call(form, {"a": f"x{ending}y"}))


@pytest.fixture(scope="module")
def chat_with() -> Iterator[Callable[[str], LLM]]:
    """The demo model behind the template of a family."""
    model, made = load_model(model_path(None), threads=1), {}

    def make(name: str) -> LLM:
        family = PARAMETER_FAMILIES[name]
        if name not in made:
            made[name] = LLM(with_template(model, ChatTemplate(family.source, family.bos, family.eos)))
        return made[name]

    yield make
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("family", PARAMETER_FAMILIES)
def test_required_calls_fit_their_schema_streamed_and_whole(chat_with: Callable[[str], LLM], family: str) -> None:
    llm = chat_with(family)
    for seed in range(2):
        options: Any = {"tools": [function(WEATHER)], "tool_choice": "required", "parallel_tool_calls": False}
        options |= {"seed": seed, "max_tokens": 250, "thinking_budget": 3 if family == "glm" else None}
        whole = llm.chat(ASK, **options)
        assert (whole.finish_reason, whole.text, len(whole.tool_calls)) == ("tool_calls", "", 1)
        jsonschema.validate(json.loads(whole.tool_calls[0].arguments), WEATHER)
        events = list(llm.stream_chat(ASK, **options))
        (call,) = joined_calls(delta for event in events for delta in event.tool_calls)
        assert (call.name, call.arguments) == (whole.tool_calls[0].name, whole.tool_calls[0].arguments)


@pytest.mark.parametrize("family", PARAMETER_FAMILIES)
def test_calls_and_results_come_back_in_the_next_prompt(chat_with: Callable[[str], LLM], family: str) -> None:
    llm = chat_with(family)
    prompt = llm.render_chat(called("f", '{"city": "Bonn"}'))
    assert written_call(llm._chats().formats.calls, {"city": "Bonn"}) in prompt and "42 degrees" in prompt


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ({"properties": {"a": {"type": "string", "allOf": [{"maxLength": 3}]}}}, "allOf"),
        ({"properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": {"a": {"type": "string"}}, "required": ["b"]}, "required"),
        ({"required": ["b"]}, "required"),
        ({"minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "pattern"),
    ],
    ids=repr,
)
def test_a_strict_tool_names_what_cannot_be_enforced(
    chat_with: Callable[[str], LLM], schema: dict[str, Any], keyword: str
) -> None:
    llm = chat_with("qwen-coder")
    tool = function({"type": "object", **schema}, strict=True)
    with pytest.raises(ConstraintError, match="'f'") as caught:
        llm.stream_chat(ASK, tools=[tool])
    assert caught.value.keyword == keyword
    llm.stream_chat(ASK, tools=[function({"type": "object", **schema})]).close()
