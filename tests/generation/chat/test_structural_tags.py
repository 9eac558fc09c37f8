"""Structural tags: free text, and what tags in it hold to a form."""

import json
from typing import Any

import numpy as np
import pytest

from localinfer.errors import ConstraintError
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.options import StructuralTag
from tests.engine.fakes import ByteTokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OLDER = {
    "structures": [
        {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=g>", "schema": {}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
FORM = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<a>", "content": FORM, "end": "</a>"}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": ["</think>", "<end>"]}
NONE = {"type": "const_string", "value": "none"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [TAG]}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), 260)


@pytest.mark.parametrize(
    ("form", "fitting", "others"),
    [
        (
            OLDER,
            ["hello", 'hi <function=f>{"a": 1}</function> then <function=g>[1]</function>!'],
            ["<function=h>", '<function=f>{"b": 1}</function>', '<function=f>{"a": 1}'],
        ),
        (
            {"format": {"type": "sequence", "elements": [THOUGHT, {"type": "or", "elements": [FORM, NONE]}]}},
            ["<think>so < we</think>none", '<think></think>{"a": 2}', "<think>x<end>none"],
            ["none", "<think>x</think>else"],
        ),
        ({"format": TRIGGERED}, ["", "hm", 'hm <a>{"a": 1}</a> <a>{"a": 2}</a>.'], ["<a>", "<a>x</a>"]),
        (
            {"format": {**TRIGGERED, "at_least_one": True, "stop_after_first": True}},
            ['hm <a>{"a": 1}</a>'],
            ["hm", '<a>{"a": 1}</a> more'],
        ),
        (
            {"format": {"type": "tag", "begin": "<", "content": TRIGGERED, "end": "!"}},
            ["<text!", '<text <a>{"a": 1}</a> more!'],
            ["<t! x", "<t"],
        ),
        ({"format": SEPARATED}, ["", '<a>{"a": 1}</a>, <a>{"a": 1}</a>'], ['<a>{"a": 1}</a>x']),
        ({"format": {**SEPARATED, "at_least_one": True}}, ['<a>{"a": 1}</a>'], [""]),
        ({"format": {"type": "regex", "pattern": "[a-z]+/[0-9]"}}, ["ab/1"], ["ab"]),
        ({"format": {"type": "star", "content": NONE}}, ["", "nonenone"], ["non"]),
        ({"format": {"type": "plus", "content": NONE}}, ["none"], [""]),
        ({"format": {"type": "optional", "content": NONE}}, ["", "none"], ["nonenone"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_text_is_free_and_tags_hold(
    compiler: ConstraintCompiler, form: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    for given in (form, json.dumps(form)):
        for text in (*fitting, *others):
            mask = compiler.mask(StructuralTag(given), start=0)
            spelled = list(text.encode())
            is_whole = mask.count_allowed(np.empty(0, np.int32), spelled) == len(spelled)
            fits = is_whole and bool(mask(np.array(spelled, np.int32))[ByteTokenizer.eos_token_id])
            assert fits is (text in fitting), text


def nested(levels: int) -> dict[str, Any]:
    return {"type": "star", "content": nested(levels - 1)} if levels else NONE


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ({"format": {"type": "grammar", "grammar": "x"}}, "of type 'grammar'"),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "qwen_xml_parameter"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, FORM]}}, "any_text before"),
        ({"format": {"type": "sequence", "elements": [TRIGGERED, FORM]}}, "triggered_tags before"),
        ({}, "None"),
        ("[", "not JSON"),
        ("[]", "is \\[\\]"),
        ({"structures": [], "triggers": ["x"]}, "structures"),
        ({**OLDER, "triggers": ["<fn"]}, "no trigger"),
        ({"format": {"type": "or", "elements": [NONE] * 2000}}, "more than 1000 parts"),
        ({"format": nested(70)}, "nested"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "'not'"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "cannot be enforced"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_unknown_in_a_tag_is_refused(compiler: ConstraintCompiler, form: Any, found: str) -> None:
    with pytest.raises(ConstraintError, match=found):
        compiler.mask(StructuralTag(form), start=0)
