"""Replies are taken apart alike however they are cut: reasoning, content, calls, and what only looks like them."""

import json
from typing import Any

import pytest

from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.chat.value_types import json_value
from localinfer.generation.stream import joined_calls
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_format import CallFormat, ReasoningFormat
from localinfer.models.text.reply_learning import learn_call_format
from localinfer.models.text.tokenizer import SpellingFinder
from tests.models.text.family_templates import ARGUMENTS, FAMILIES, PARAMETER_FAMILIES, Family

THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")


def call_format(family: Family) -> CallFormat:
    ends = SpellingFinder({text: index for index, text in enumerate(family.ends)})
    return learn_call_format(ChatTemplate(family.source, family.bos, family.eos), ends, reasoning=THINK)


FORMS = {name: call_format(family) for name, family in (FAMILIES | PARAMETER_FAMILIES).items()}
TYPES = {
    "weather": {"city": frozenset(("string",)), "days": frozenset(("integer",))},
    "search": {"query": frozenset(("string",))},
}
Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(pieces: list[str], calls: CallFormat | None, *, starts_reasoning: bool = False, types: Any = None) -> Parsed:
    parser = ReplyParser(THINK, calls, starts_reasoning=starts_reasoning, types=types, new_id=lambda: "id")
    results = [*map(parser.push, pieces), parser.flush()]
    deltas = [delta for result in results for delta in result.tool_calls]
    for delta in deltas:
        assert (delta.id is None) == (delta.name is None) and (delta.name is None or not delta.arguments)
    made = [(call.name, call.arguments) for call in joined_calls(deltas)]
    return "".join(result.content for result in results), "".join(result.reasoning for result in results), made


def assert_cuts_do_not_matter(text: str, calls: CallFormat | None, expected: Parsed, **options: Any) -> None:
    assert parse([text], calls, **options) == expected
    assert parse(list(text), calls, **options) == expected
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], calls, **options) == expected, cut


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_every_family_are_read_at_every_cut(name: str) -> None:
    family = FAMILIES[name]
    weather, search = ("weather", ARGUMENTS[0]), ("search", ARGUMENTS[1])
    assert_cuts_do_not_matter(family.one_call, FORMS[name], ("", "", [weather]))
    if family.two_calls is not None:
        assert_cuts_do_not_matter(family.two_calls, FORMS[name], ("", "", [weather, search]))
    reasoned = f"<think>\nI need < both.\n</think>\n\n{family.one_call}"
    assert_cuts_do_not_matter(reasoned, FORMS[name], ("", "I need < both.", [weather]))
    if FORMS[name].trigger:
        spoken = f"I look it up.\n\n{family.one_call}"
        assert_cuts_do_not_matter(spoken, FORMS[name], ("I look it up.", "", [weather]))


@pytest.mark.parametrize("types", [None, TYPES], ids=["unknown", "known"])
@pytest.mark.parametrize("name", PARAMETER_FAMILIES)
def test_parameters_of_every_family_are_read_as_json_at_every_cut(name: str, types: Any) -> None:
    family = PARAMETER_FAMILIES[name]
    weather, search = ("weather", ARGUMENTS[0]), ("search", ARGUMENTS[1])
    assert family.two_calls is not None
    reasoned = f"<think>\nI need < both.\n</think>\n\nI look it up.\n{family.two_calls}"
    assert_cuts_do_not_matter(
        reasoned, FORMS[name], ("I look it up.", "I need < both.", [weather, search]), types=types
    )


@pytest.mark.parametrize(
    ("written", "types", "read"),
    [
        ("12", ("string",), '"12"'),
        ("12", ("integer",), "12"),
        ("12", ("number", "string"), "12"),
        ("12", ("string", "null"), '"12"'),
        (" true ", ("boolean",), "true"),
        ("True", ("boolean",), "true"),
        ("None", ("string", "null"), "null"),
        ("None", ("string",), '"None"'),
        ("NaN", ("number",), '"NaN"'),
        ('{"a": [1, "<"]}', ("object",), '{"a": [1, "<"]}'),
        ("", ("string",), '""'),
        ("\n\n", ("string",), '"\\n\\n"'),
        ('say "a"\nand </b>', ("string",), '"say \\"a\\"\\nand </b>"'),
        ("</param", ("string",), '"</param"'),
        ("no number", ("integer",), '"no number"'),
        ("{'a': [True, None]}", ("object",), '{"a": [true, null]}'),
        ("['cut]", ("array",), '"[\'cut]"'),
        ("{'a': f(1)}", ("object",), "\"{'a': f(1)}\""),
        ("<![CDATA[a </parameter> <b>]]>", ("string",), '"a </parameter> <b>"'),
        ("<![CDATA[3]]>", ("integer", "string"), '"3"'),
        ("<![", ("string",), '"<!["'),
    ],
)
def test_values_become_json_of_the_types_that_they_may_have(written: str, types: tuple[str, ...], read: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    known = {"f": {"a": frozenset(types)}}
    assert_cuts_do_not_matter(text, FORMS["qwen-coder"], ("", "", [("f", f'{{"a": {read}}}')]), types=known)


@pytest.mark.parametrize(
    "value",
    [
        ["it's", 'a "b" True', 'it\'s "c"'],
        {"a": [True, False, None], "b": {"\x07\n\\": 1.5}},
        [[], {}, ""],
        ["ü'\u200b"],
    ],
)
def test_what_python_prints_of_a_value_is_that_value(value: Any) -> None:
    types = frozenset(("array", "object"))
    assert json.loads(json_value(str(value), types)) == value
    assert json_value(str(value)[:-1], types) == json.dumps(str(value)[:-1], ensure_ascii=False)


def test_white_space_around_a_parameter_may_be_missing() -> None:
    text = "<tool_call><function=f><parameter=a>x</parameter><parameter=b>\n\ny</parameter></function></tool_call> Ok."
    assert_cuts_do_not_matter(text, FORMS["qwen-coder"], ("Ok.", "", [("f", '{"a": "x", "b": "\\ny"}')]))


@pytest.mark.parametrize("name", PARAMETER_FAMILIES)
def test_a_call_without_parameters_has_an_empty_object(name: str) -> None:
    form = FORMS[name]
    assert form.parameters is not None
    text = f"{form.opening}{form.begin}f{form.parameters.empty}{form.closing}"
    assert_cuts_do_not_matter(text, form, ("", "", [("f", "{}")]))


@pytest.mark.parametrize("types", [None, TYPES], ids=["unknown", "known"])
@pytest.mark.parametrize("name", PARAMETER_FAMILIES)
def test_a_parameter_that_is_cut_short_keeps_what_came_of_it(name: str, types: Any) -> None:
    text = PARAMETER_FAMILIES[name].one_call
    assert parse([text[: text.index("Bonn") + 2]], FORMS[name], types=types) == ("", "", [("weather", '{"city": "Bo')])
    assert parse([text[: text.index("city") + 2]], FORMS[name], types=types) == ("", "", [("weather", "")])


def test_text_parameters_stream_as_they_come() -> None:
    for name, family in PARAMETER_FAMILIES.items():
        parser = ReplyParser(None, FORMS[name], types=TYPES, new_id=lambda: "id")
        pieces = [parser.push(letter) for letter in family.one_call]
        fragments = [delta.arguments for piece in pieces for delta in piece.tool_calls if delta.name is None]
        assert {"B", "o", "n"} <= set(fragments) and "".join(fragments) == ARGUMENTS[0]


OPEN = {
    "a</think>b": ("b", "a", []),
    "<think>\na\n</think>\n\nb": ("b", "a", []),
    "never ending <": ("", "never ending <", []),
    "</think>b": ("b", "", []),
}
"""What is said where the prompt has begun the reasoning."""
CLOSED = {
    "plain": ("plain", "", []),
    "<think>\na\n\nb\n</think>\n\nc\n": ("c\n", "a\n\nb", []),
    "\n<think>a</think>b": ("b", "a", []),
    "<think>never ending </thin": ("", "never ending </thin", []),
    "<thin": ("<thin", "", []),
    "<thinker> x": ("<thinker> x", "", []),
    "a <think>b</think>": ("a <think>b</think>", "", []),
    "<think></think>b": ("b", "", []),
}


@pytest.mark.parametrize(
    ("text", "starts_reasoning", "expected"),
    [(text, starts, expected) for starts, table in ((True, OPEN), (False, CLOSED)) for text, expected in table.items()],
)
def test_reasoning_is_split_off_at_every_cut(text: str, starts_reasoning: bool, expected: Parsed) -> None:
    for calls in (None, FORMS["hermes"], FORMS["llama3"]):
        assert_cuts_do_not_matter(text, calls, expected, starts_reasoning=starts_reasoning)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b <tool_ca"),
        ("hermes", "say <tool_call> aloud <tool_call>\n{"),
        ("hermes", "spaces \n\n"),
        ("llama3", '{"name": 3}'),
        ("llama3", '{"na'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL"),
        ("qwen-coder", "say <tool_call> aloud"),
        ("glm", "a < b <tool_ca"),
    ],
)
def test_what_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    assert_cuts_do_not_matter(text, FORMS[name], (text, "", []))


def test_white_space_in_a_call_may_differ() -> None:
    text = (
        '<tool_call>{"name":"weather","arguments":{"a":1}}</tool_call>\n\n<tool_call> { "name" : "b", "arguments": {} }'
    )
    assert_cuts_do_not_matter(text, FORMS["hermes"], ("", "", [("weather", '{"a":1}'), ("b", "{}")]))


def test_a_call_that_is_cut_short_keeps_what_came_of_its_arguments() -> None:
    for name, family in FAMILIES.items():
        cut = family.one_call.index("Bonn") + 2
        assert parse([family.one_call[:cut]], FORMS[name]) == ("", "", [("weather", '{"city": "Bo')])


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_an_id_beside_the_arguments_belongs_to_the_frame(family: str) -> None:
    text = FAMILIES[family].two_calls
    assert text is not None
    for member in (', "id": "abcdefghi"', ' , "call_id" : 12 '):
        written = text.replace("3}", f"3}}{member}", 1)
        weather, search = ("weather", ARGUMENTS[0]), ("search", ARGUMENTS[1])
        assert_cuts_do_not_matter(written, FORMS[family], ("", "", [weather, search]))


@pytest.mark.parametrize(
    "call", ['<tool_call>\n{"name": "a b", "arguments": {}}', '<tool_call>\n{"name": "f", "arguments": "text"}']
)
def test_a_malformed_call_is_given_back_as_text_and_the_next_is_read(call: str) -> None:
    whole = f"So: {call}\n</tool_call>"
    assert_cuts_do_not_matter(whole, FORMS["hermes"], (whole, "", []))
    both = f"{whole}\n{FAMILIES['hermes'].one_call}"
    assert_cuts_do_not_matter(both, FORMS["hermes"], (whole, "", [("weather", ARGUMENTS[0])]))


def test_a_call_that_is_cut_short_before_its_arguments_is_text() -> None:
    whole = FAMILIES["hermes"].two_calls
    assert whole is not None
    for start, calls in ((0, []), (whole.index("</tool_call>"), [("weather", ARGUMENTS[0])])):
        place = whole.index("<tool_call>", start)
        named = whole.index('"name": "', place) + len('"name": "')
        for cut in range(named + 1, whole.index('{"', named)):
            content, *rest = parse([whole[:cut]], FORMS["hermes"])
            assert (content.lstrip(), rest) == (whole[place:cut], ["", calls])
    # Of the frame between two calls nothing is text.
    for cut in range(whole.index("</tool_call>") + 3, named):
        assert parse([whole[:cut]], FORMS["hermes"]) == ("", "", calls)


def test_text_after_the_calls_is_content() -> None:
    text = FAMILIES["hermes"].one_call + "\n\nThat was it."
    assert_cuts_do_not_matter(text, FORMS["hermes"], ("That was it.", "", [("weather", ARGUMENTS[0])]))


def test_arguments_stream_as_they_come() -> None:
    parser = ReplyParser(None, FORMS["hermes"], new_id=lambda: "id")
    pieces = [parser.push(letter) for letter in FAMILIES["hermes"].one_call]
    fragments = [delta.arguments for piece in pieces for delta in piece.tool_calls if delta.name is None]
    assert len(fragments) == len(ARGUMENTS[0]) and json.loads("".join(fragments)) == json.loads(ARGUMENTS[0])


def test_content_is_held_back_no_longer_than_needed() -> None:
    parser = ReplyParser(THINK, FORMS["hermes"], new_id=lambda: "id")
    shown = [parser.push(letter).content for letter in "Hi <b> there"]
    assert shown == ["H", "i", "", "", " <b", ">", "", " t", "h", "e", "r", "e"]
