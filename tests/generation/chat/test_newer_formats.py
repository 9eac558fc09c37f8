"""Formats of newer families from end to end: learned, read at every cut, held to by a grammar, and rendered again."""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.grammar import ReasoningState, reply_grammar
from localinfer.generation.chat.messages import (
    Tool,
    read_messages,
    read_tools,
    template_messages,
    with_reasoning_as,
    written_calls,
)
from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.chat.value_types import parameter_types
from localinfer.generation.stream import joined_calls
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_format import CallFormat, ReasoningFormat
from localinfer.models.text.reply_learning import learn_call_format, learn_reasoning_format
from localinfer.models.text.tokenizer import SpellingFinder
from tests.engine.fakes import ByteTokenizer
from tests.generation.chat.allowed_replies import allows_reply
from tests.models.text.newer_templates import ARGUMENTS, HELD_RESULTS, NEWER_FAMILIES
from tests.support.samples import by_turns

OPTIONS = {
    "type": "object",
    "properties": {
        "hours": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "wind": {"type": "boolean"},
        "unit": {"type": "object", "properties": {"name": {"enum": ["C", "F"]}}, "additionalProperties": False},
    },
    "required": ["hours"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "options": OPTIONS,
    },
    "search": {"query": {"type": "string"}},
    "now": {},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "description": "x",
            "parameters": {"type": "object", "properties": properties, "additionalProperties": False},
        },
    }
    for name, properties in SCHEMAS.items()
]
Formats = tuple[CallFormat, ReasoningFormat | None]
Parsed = tuple[str, str, list[tuple[str, Any]]]


@cache
def learned(name: str) -> Formats:
    family = NEWER_FAMILIES[name]
    template = ChatTemplate(family.source)
    ends = SpellingFinder({text: index for index, text in enumerate(family.ends)})
    reasoning = learn_reasoning_format(template, family.source, ends)
    return learn_call_format(template, ends, reasoning=reasoning, source=family.source), reasoning


def calls_of(name: str) -> list[dict[str, Any]]:
    some = ARGUMENTS[:1] if NEWER_FAMILIES[name].one_only else ARGUMENTS
    return [
        {"id": f"abcdef00{index}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for index, (called, arguments) in enumerate(some, 1)
    ]


def expected(name: str) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls_of(name)]


@cache
def types_of_tools() -> dict[str, Any]:
    return {tool.name: parameter_types(tool) for tool in read_tools(TOOLS)}


def parse(pieces: list[str], formats: Formats, *, starts_reasoning: bool = False) -> tuple[Parsed, list[str]]:
    calls, reasoning = formats
    parser = ReplyParser(
        reasoning, calls, starts_reasoning=starts_reasoning, types=types_of_tools(), new_id=lambda: "id"
    )
    results = [*map(parser.push, pieces), parser.flush()]
    made = joined_calls(delta for result in results for delta in result.tool_calls)
    text = "".join(result.content for result in results), "".join(result.reasoning for result in results)
    return (*text, [(call.name, json.loads(call.arguments)) for call in made]), [call.id for call in made]


@pytest.mark.parametrize("name", NEWER_FAMILIES)
def test_calls_are_read_at_every_cut_behind_text_and_reasoning(name: str) -> None:
    family, formats = NEWER_FAMILIES[name], learned(name)
    replies = {family.calls: ("", ""), family.reasoned + family.calls: ("", "Both < one." if family.reasoned else "")}
    if not family.reasoned:
        replies["First < this.\n\n" + family.calls] = ("First < this.", "")
    for turn, (text, before) in enumerate(replies.items()):
        want = (*before, expected(name))
        assert parse([text], formats)[0] == want
        assert parse(list(text), formats)[0] == want
        # Counted from the end, so that every place in the calls is cut in one of the replies.
        for cut in by_turns(range(1, len(text)), turn + len(text), 2):
            assert parse([text[:cut], text[cut:]], formats)[0] == want, text[:cut]


@pytest.mark.parametrize("name", NEWER_FAMILIES)
def test_calls_are_written_as_models_write_them(name: str) -> None:
    formats = learned(name)
    written = written_calls(calls_of(name), formats[0])
    assert parse([written], formats)[0] == ("", "", expected(name))
    if name not in ("python-calls", "listed-only", "own-notation", "named-ids", "typed-values"):
        assert written == NEWER_FAMILIES[name].calls


@pytest.mark.parametrize("name", NEWER_FAMILIES)
def test_calls_and_results_come_back_in_the_next_prompt(name: str) -> None:
    family, (form, reasoning) = NEWER_FAMILIES[name], learned(name)
    calls = calls_of(name)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['id']}"} for call in calls]
    asked = [{"role": "user", "content": "Hi"}]
    said = {"role": "assistant", "content": "", "reasoning_content": "Both.", "tool_calls": calls}
    for order in (results, results[::-1]):
        messages = read_messages([*asked, said, *order])
        if reasoning is not None:
            messages = list(with_reasoning_as(reasoning.member, messages))
        messages = template_messages(messages, form, read_tools(TOOLS))
        text = ChatTemplate(family.source).render(messages, tools=TOOLS if form.describes_tools else None)
        assert all(result["content"] in text for result in results) and '"maxLength": 12' in text
        found = ChatTemplate(family.source).render(messages[: -len(results)], add_generation_prompt=False)
        turn = found[found.index("Hi") + 2 :]
        stop = max(turn.rfind(end) for end in family.ends)
        read = parse([turn[:stop]], (form, reasoning))[0]
        assert read[2] == expected(name) and ("Both." in turn) is (reasoning is not None)


def test_results_stand_in_the_message_that_called_where_a_template_reads_them_there() -> None:
    template = ChatTemplate(HELD_RESULTS)
    ends = SpellingFinder({"<|im_end|>": 1})
    form = learn_call_format(template, ends, reasoning=learn_reasoning_format(template, HELD_RESULTS, ends))
    assert form.holds_results and not learned("own-notation")[0].holds_results
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("now", "search")]
    asked = {"role": "user", "content": "Hi"}
    results = [{"role": "tool", "tool_call_id": name, "content": f"by {name}"} for name in ("now", "search")]
    written = '<|result>now:<|"|>by now<|"|><result|><|result>search:<|"|>by search<|"|><result|>'
    for content, after in (("", "Done."), ("See.", "See.<|im_end|>\n<|im_start|>assistantDone.")):
        said = {"role": "assistant", "content": content, "tool_calls": calls}
        messages = read_messages([asked, said, *results, {"role": "assistant", "content": "Done."}, asked])
        text = template.render(template_messages(messages, form, ()))
        assert f"<|call>call:now{{}}<call|><|call>call:search{{}}<call|>{written}{after}<|im_end|>" in text
        assert "<|im_start|>tool" not in text
        # What was given is not changed, and a result that no call came before is a message as it was.
        assert all("tool_responses" not in message for message in messages)
    lonely = template_messages(read_messages([asked, results[0]]), form, ())
    assert "<|im_start|>tool\nby now" in template.render(lonely)


@pytest.fixture(scope="module")
def accepts() -> Callable[..., bool]:
    """Whether the grammar of a reply allows a text, from its first letter to its end."""
    compiler = ConstraintCompiler(ByteTokenizer(), 260)

    def check(
        formats: Formats, tools: tuple[Tool, ...], text: str, *, state: ReasoningState, must: bool = True
    ) -> bool:
        return allows_reply(compiler, formats, tools, text, state=state, must_call=must)

    return check


@pytest.mark.parametrize("name", NEWER_FAMILIES)
def test_a_grammar_allows_this_format_and_these_tools_only(accepts: Callable[..., bool], name: str) -> None:
    formats, tools = learned(name), read_tools(TOOLS)
    form, reasoning = formats
    whole = written_calls(calls_of(name), form)
    assert accepts(formats, tools, whole, state="none")
    assert not accepts(formats, tools[1:], whole, state="none")
    assert not accepts(formats, tools, whole[:-1], state="none")
    assert not accepts(formats, tools, "Hello", state="none")
    for key, value in (("days", 10), ("days", "3"), ("city", "x"), ("options", {}), ("more", 1)):
        arguments = {**ARGUMENTS[0][1], key: value}
        call = {"id": "abcdef001", "function": {"name": "weather", "arguments": arguments}}
        wrong = written_calls([call], form)
        if (key, value) != ("days", "3") or (form.parameters is None or form.parameters.notation is not None):
            assert not accepts(formats, tools, wrong, state="none"), (key, value)
    if reasoning is not None:
        thought = f"{reasoning.begin}Both.{reasoning.end}{reasoning.following}"
        assert accepts(formats, tools, thought + whole, state="possible")
        answer = f"{reasoning.answer_begin}Hello.{reasoning.answer_end}"
        assert accepts(formats, tools, thought + answer, state="possible", must=False)
        assert not accepts(formats, tools, thought + answer, state="possible")


class MarkerTokenizer(ByteTokenizer):
    """Has a control token for each marker of a text."""

    def __init__(self, text: str) -> None:
        self.markers = sorted(set(re.findall(r"<[^<>\s]+>|\[[A-Z_/]+\]", text)))
        self.vocab_size = 260 + len(self.markers)
        self.special_spellings = SpellingFinder({marker: 260 + index for index, marker in enumerate(self.markers)})

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id) if token_id < 260 else self.markers[token_id - 260].encode()

    def token_text(self, token_id: int) -> str:
        return super().token_text(token_id) if token_id < 260 else self.markers[token_id - 260]


@pytest.mark.parametrize("name", NEWER_FAMILIES)
def test_grammars_hold_where_markers_are_control_tokens(name: str) -> None:
    form, reasoning = learned(name)
    calls = written_calls(calls_of(name), form)
    tokenizer = MarkerTokenizer(" ".join([*form.texts, *(() if reasoning is None else reasoning.texts)]))
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    thought, answer = "", "Hello."
    if reasoning is not None:
        thought = f"{reasoning.begin}Both.{reasoning.end}{reasoning.following}"
        answer = reasoning.answer_begin + answer + reasoning.answer_end
    between = "" if reasoning is None else reasoning.end + reasoning.following if reasoning.following else ""
    preamble = answer if reasoning is None or not reasoning.following else f"{reasoning.answer_begin}Hello.{between}"
    for text, must in ((calls, True), (thought + calls, True), (thought + answer, False), (preamble + calls, False)):
        grammar = reply_grammar(
            reasoning=reasoning,
            state="none" if reasoning is None else "possible",
            calls=form,
            tools=read_tools(TOOLS),
            must_call=must,
            is_parallel=True,
            answer=None,
            specials=tokenizer.special_spellings,
            calls_in_reasoning=True,
        )
        assert grammar is not None
        mask = compiler.grammar_mask(grammar, start=0, what="schema")
        spelled = tokenizer.encode_segments([(text, True)])
        assert mask.count_allowed(np.empty(0, np.int32), spelled) == len(spelled), text
        assert mask(np.array(spelled, np.int32))[ByteTokenizer.eos_token_id], text


def test_reasoning_and_text_beside_calls_reach_templates_that_read_other_names() -> None:
    _, reasoning = learned("channels")
    assert reasoning is not None and reasoning.member == "thinking"
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "So.", "tool_calls": calls_of("channels")}
    asked, answered = {"role": "user", "content": "Hi"}, {"role": "tool", "content": "x"}
    messages = with_reasoning_as(reasoning.member, [asked, said, answered])
    text = ChatTemplate(NEWER_FAMILIES["channels"].source).render(messages)
    assert text.index("I look.") < text.index("analysis<|message|>So.<|end|>") < text.index("to=functions.weather")
    plain = [asked, {"role": "assistant", "content": "Yes."}]
    assert (
        with_reasoning_as("thinking", plain) is plain and with_reasoning_as("reasoning_content", messages) is messages
    )


def test_ids_that_a_model_writes_are_kept_and_those_of_templates_hold_names() -> None:
    text = NEWER_FAMILIES["id-markers"].calls
    assert parse([text], learned("id-markers"))[1] == ["abcdef001", "abcdef002", "abcdef003"]
    twice = text.replace("abcdef002", "abcdef001")
    assert parse([twice], learned("id-markers"))[1] == ["abcdef001", "id", "abcdef003"]
    assert parse([NEWER_FAMILIES["messages"].calls], learned("messages"))[1][1] == "abcdef002"
    form, _ = learned("named-ids")
    assert form.id_form == "functions.{name}:{number}" and learned("queued-ids")[0].id_form is None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<|channel|>final<|message|>Hello <b>.", ("Hello <b>.", "", [])),
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi", ("Hi", "So.", [])),
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}',
            ("I look.", "So.", [("now", {"a": 1})]),
        ),
        (
            ' to=functions.now<|channel|>commentary json<|message|>{"a": "<|end|>"}',
            ("", "", [("now", {"a": "<|end|>"})]),
        ),
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
            "<|message|>{}",
            ("", "So.", [("now", {})]),
        ),
        ("<|channel|>final<|message|>Ends early<|start", ("Ends early", "", [])),
        ("<|channel|>commentary to=functions.now <|message|>no object", None),
    ],
)
def test_replies_in_channels_come_apart(text: str, want: Parsed | None) -> None:
    formats = learned("channels")
    whole = parse([text], formats)[0]
    assert want is None or whole == want
    # What is no call after all is given back.
    assert want is not None or whole == (text, "", [])
    for cut in range(1, len(text)):
        assert parse([text[:cut], text[cut:]], formats)[0] == whole, text[:cut]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("a=1, b=-2.5e3", {"a": 1, "b": -2500.0}),
        ("a=True, b=False, c=None, d=true, e=null", {"a": True, "b": False, "c": None, "d": True, "e": None}),
        ('a=\'it\\\'s\', b="say \\"x\\""', {"a": "it's", "b": 'say "x"'}),
        ("a='it's', b=1", {"a": "it's", "b": 1}),
        ("a='\\u00e9\\x41\\n\\ud83d\\ude00\\q'", {"a": "éA\n😀\\q"}),
        ("a=[1, [2, 'x'], {}], b={'k': (1, 2), \"l\": []}", {"a": [1, [2, "x"], {}], "b": {"k": [1, 2], "l": []}}),
        ("a = 'x' , b = [ ]", {"a": "x", "b": []}),
        ("a=word, b='), g('", {"a": "word", "b": "), g("}),
        ("a=''", {"a": ""}),
    ],
)
def test_python_values_become_json(written: str, read: dict[str, Any]) -> None:
    text = f"<|tool_call_start|>[f({written}), now()]<|tool_call_end|>"
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert parse(pieces, learned("listed-only"))[0] == ("", "", [("f", read), ("now", {})])


@pytest.mark.parametrize("name", ["own-notation", "python-calls", "kinds-of-value", "channels", "id-markers"])
def test_a_call_that_is_cut_short_keeps_what_came_of_its_arguments(name: str) -> None:
    calls, reasoning = learned(name)
    text = NEWER_FAMILIES[name].calls
    parser = ReplyParser(reasoning, calls, new_id=lambda: "id")
    deltas = [parser.push(text[: text.index("Köln") + 2]), parser.flush()]
    (call,) = joined_calls(delta for result in deltas for delta in result.tool_calls)
    assert (call.name, call.arguments) == ("weather", '{"city": "Kö')


def test_values_outside_a_schema_are_refused_in_a_notation(accepts: Callable[..., bool]) -> None:
    form = learned("own-notation")
    mark = '<|"|>'
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/node"},
            "b": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "null"}]},
            "c": {},
            "d": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 1},
            "e": {"type": "object", "additionalProperties": {"type": "boolean"}},
        },
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"const": 1}}}},
    }
    tools = read_tools([{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}])
    for text, fits in {
        "a:{next:{next:{n:1}}}": True,
        "a:{n:2}": False,
        f"b:{mark}abc{mark}": True,
        f"b:{mark}ABC{mark}": False,
        "b:null": True,
        f"c:[1,{{x:{mark}y{mark}}},true]": True,
        "c:[1": False,
        "d:[1.5]": True,
        "d:[]": False,
        "d:[1,2]": False,
        "e:{x:true,y:false}": True,
        "e:{x:1}": False,
    }.items():
        assert accepts(form, tools, f"<|call>call:f{{{text}}}<call|>", state="none") is fits, text
