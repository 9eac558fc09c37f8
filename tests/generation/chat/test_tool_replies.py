"""Replies with calls of well-known models: read at every cut, and allowed by their grammar, as their templates tell.

A folder of the models' own templates, as llama.cpp has them in `models/templates`, may be beside the checkout as
`../shared/templates`, or named by the environment variable LOCALINFER_TEST_TEMPLATES; without it, those are skipped.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.grammar import ReasoningState
from localinfer.generation.chat.messages import read_tools
from localinfer.generation.chat.parser import ReplyParser
from localinfer.generation.chat.value_types import parameter_types
from localinfer.generation.stream import joined_calls
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_format import CallFormat, ReasoningFormat
from localinfer.models.text.reply_learning import learn_call_format, learn_reasoning_format
from localinfer.models.text.tokenizer import SpellingFinder
from tests.conftest import SHARED
from tests.engine.fakes import ByteTokenizer
from tests.generation.chat.allowed_replies import allows_reply
from tests.models.text.tool_replies import ROWS, Row

TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": name, "description": "x", "parameters": {**schema, "type": "object"}}}
        for name, schema in {
            "get_weather": {
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
            "search": {"properties": {"query": {"type": "string"}}, "required": ["query"]},
        }.items()
    ]
)
Formats = tuple[CallFormat, ReasoningFormat | None]
Parsed = tuple[str, str, list[tuple[str, Any]]]


def learned(source: str, ends: tuple[str, ...]) -> Formats:
    template = ChatTemplate(source, "<s>", "</s>")
    spellings = SpellingFinder({text: index for index, text in enumerate(ends)})
    reasoning = learn_reasoning_format(template, source, spellings)
    return learn_call_format(template, spellings, reasoning=reasoning, source=source), reasoning


def parse(pieces: list[str], formats: Formats, row: Row, *, json_of: Callable[[str], Any] = json.loads) -> Parsed:
    calls, reasoning = formats
    types = {tool.name: parameter_types(tool) for tool in TOOLS}
    reads: dict[str, Any] = {"starts_reasoning": row.is_open, "calls_in_reasoning": True, "types": types}
    parser = ReplyParser(reasoning, calls, new_id=lambda: "id", **reads)
    deltas = [*map(parser.push, pieces), parser.flush()]
    made = joined_calls(delta for result in deltas for delta in result.tool_calls)
    text = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    return (*text, [(call.name, json_of(call.arguments)) for call in made])


def check(formats: Formats, row: Row, accepts: Callable[[Formats, Row], bool]) -> None:
    want = (row.content, row.reasoning, list(row.calls))
    assert parse([row.reply], formats, row) == want
    assert parse(list(row.reply), formats, row) == want
    for cut in range(1, len(row.reply), 7):
        assert parse([row.reply[:cut], row.reply[cut:]], formats, row) == want
    assert accepts(formats, row)


@pytest.fixture(scope="module")
def accepts() -> Callable[[Formats, Row], bool]:
    """Whether the grammar of a reply in which a model may call allows one."""
    compiler = ConstraintCompiler(ByteTokenizer(), 260)

    def allows(formats: Formats, row: Row) -> bool:
        state: ReasoningState = "none" if formats[1] is None else "open" if row.is_open else "possible"
        return allows_reply(compiler, formats, TOOLS, row.reply, state=state, must_call=False)

    return allows


@pytest.mark.parametrize("name", ROWS)
def test_replies_of_every_family_are_read(accepts: Callable[[Formats, Row], bool], name: str) -> None:
    row = ROWS[name]
    check(learned(row.source, row.ends), row, accepts)


def damaged(text: str, form: CallFormat, rng: random.Random) -> str:
    """A text of which some parts are missing, doubled, or replaced by what a reply may have."""
    others = [
        "\n",
        " ",
        "<",
        "{",
        "}",
        '"',
        "</think>",
        "<tool_call>",
        "Hi",
        "]",
        "\\",
        form.begin,
        form.opening,
        form.end,
    ]
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randint(1, 25))
        choices = [text[:start] + text[end:], text[:end] + text[start:], text[:start]]
        text = rng.choice([*choices, text[:start] + rng.choice(others) + text[start:]])
    return text


def test_no_reply_is_an_error_and_nothing_of_one_without_calls_is_lost() -> None:
    rng = random.Random(18)
    forms = {name: learned(row.source, row.ends) for name, row in ROWS.items()}
    num_lossless = 0
    for name, row in [item for item in ROWS.items() for _ in range(15)]:
        text = damaged(row.reply, forms[name][0], rng)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = parse([text], forms[name], row, json_of=str)
        assert parse(pieces, forms[name], row, json_of=str) == whole, text
        content, _, calls = whole
        if not calls and forms[name][1] is None:
            assert content.split() == text.split(), text
            num_lossless += 1
    assert num_lossless > 50


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.real])
def test_so_they_are_with_the_models_own_templates(accepts: Callable[[Formats, Row], bool], name: str) -> None:
    row = ROWS[name]
    path = Path(os.environ.get("LOCALINFER_TEST_TEMPLATES", SHARED / "templates")) / f"{row.real}.jinja"
    if not path.is_file():
        pytest.skip(f"the models' own templates are not in {path.parent}")
    check(learned(path.read_text(encoding="utf-8"), row.ends), row, accepts)
