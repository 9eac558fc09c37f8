"""Replies of a form: JSON objects, schemas in every wrapper, grammars, and what cannot be enforced."""

import json
import re

import pytest
from event_frames import post_stream, text_of
from local_servers import STORY

PATH = "/v1/chat/completions"
BODY = {"messages": STORY, "max_tokens": 60, "temperature": 0.8, "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def reply_of(client, **members) -> str:
    response = client.post(PATH, json={**BODY, **members})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}},
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json", "value": SCHEMA}},
        {"response_format": {"type": "json_object", "value": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}},
        {"structural_tag": json.dumps({"format": {"type": "json_schema", "json_schema": SCHEMA}})},
        {"structured_outputs": {"structural_tag": {"format": {"type": "json_schema", "json_schema": SCHEMA}}}},
    ],
    ids=json.dumps,
)
def test_schema_holds_in_every_wrapper(tcp, form):
    found = json.loads(reply_of(tcp, **form))
    assert found["name"] in ("Tom", "Lily")
    assert 1 <= found["age"] <= 9


def test_streamed_json_is_the_whole_json(http):
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    assert text_of(post_stream(http, PATH, {**BODY, **form})) == reply_of(http, **form)


def test_any_json_object_is_an_object_or_unfinished(tcp):
    assert reply_of(tcp, response_format={"type": "json_object"}).startswith("{")


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": 'root ::= "yes" | "no"'},
        {"grammar": 'start: "yes" | "no"'},
        {"guided_grammar": 'root ::= "yes" | "no"', "grammar": ""},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        {"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}},
        {"response_format": {"type": "regex", "pattern": "yes|no"}},
        {"response_format": {"type": "regex", "value": "yes|no"}},
        {"regex": "yes|no"},
        {"guided_regex": "yes|no"},
        {"structured_outputs": {"regex": "yes|no"}},
    ],
    ids=json.dumps,
)
def test_grammars_expressions_and_choices_hold_in_every_way(tcp, form):
    assert reply_of(tcp, **form) in ("yes", "no")


def test_tags_hold_what_is_between_them_in_free_text(tcp):
    # Every letter of the text is a trigger, so that the first tag comes at once.
    structures = [
        {"begin": f"{letter}<pet>", "schema": SCHEMA, "end": "</pet>"} for letter in "abcdefghijklmnopqrstuvwxyz"
    ]
    older = {"type": "structural_tag", "structures": structures, "triggers": list("abcdefghijklmnopqrstuvwxyz")}
    text = reply_of(tcp, response_format=older, max_tokens=120)
    found = re.search("<pet>(.*?)</pet>", text)
    assert found, text
    assert json.loads(found[1])["name"] in ("Tom", "Lily")


def test_plain_text_is_no_form(tcp):
    assert reply_of(tcp, response_format={"type": "text"}) == reply_of(tcp)


def test_responses_and_completions_take_forms_too(tcp):
    body = {"input": "Tell me a story.", "max_output_tokens": 60}
    form = {"format": {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}}
    reply = tcp.post("/v1/responses", json={**body, "text": form}).json()
    assert json.loads(reply["output"][0]["content"][0]["text"])["name"] in ("Tom", "Lily")
    assert reply["text"]["format"]["type"] == "json_schema"
    reply = tcp.post("/v1/completions", json={"prompt": "A pet: ", "max_tokens": 60, "json_schema": SCHEMA}).json()
    assert set(json.loads(reply["choices"][0]["text"])) == {"name", "age"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, None),
        ({"type": "array", "minItems": 10**9}, "minItems"),
        ({"type": "string", "pattern": "(?=a)b"}, None),
        ({"enum": []}, "enum"),
        ({"type": "nonsense"}, None),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_cannot_be_enforced_is_refused_by_its_keyword(tcp, schema, keyword):
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    response = tcp.post(PATH, json={**BODY, "stream": True, "response_format": form})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_schema", "response_format")
    if keyword is not None:
        assert error["keyword"] == keyword
        assert keyword in error["message"]


RELAXED = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "enum": ["/a"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 1, "maxItems": 1},
    },
    "required": ["path", "ages"],
}


@pytest.mark.parametrize("strict", [{}, {"strict": False}])
def test_what_cannot_be_enforced_is_named_where_that_is_not_asked_for(tcp, strict):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": RELAXED, **strict}}
    reply = tcp.post(PATH, json={**BODY, "response_format": form}).json()
    made = json.loads(reply["choices"][0]["message"]["content"])
    assert made["path"] == "/a" and isinstance(made["ages"][0], int)
    told = reply["timings"]["notices"]
    assert [line.partition(" ")[0] for line in told] == ["'uniqueItems'", "'format'"]
    tool = {"type": "function", "function": {"name": "pet", "parameters": RELAXED}}
    reply = tcp.post(PATH, json={**BODY, "tools": [tool], "tool_choice": "required"}).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["path"] == "/a"
    assert reply["timings"]["notices"] == [f"tool 'pet': {line}" for line in told]


def test_other_apis_take_such_schemas_too(tcp):
    asked = {"input": "A pet.", "max_output_tokens": 60, "text": {"format": {"type": "json_schema", "schema": RELAXED}}}
    asked["text"]["format"]["name"] = "a"
    reply = tcp.post("/v1/responses", json=asked).json()
    assert json.loads(reply["output"][0]["content"][0]["text"])["path"] == "/a" and reply["timings"]["notices"]
    ollama = {"model": "demo", "prompt": "A pet.", "stream": False, "format": RELAXED, "options": {"num_predict": 60}}
    reply = tcp.post("/api/generate", json=ollama).json()
    assert json.loads(reply["response"])["path"] == "/a" and "'uniqueItems'" in reply["warnings"][0]


@pytest.mark.parametrize(("kind", "most"), [("integer", 20), ("number", 25)])
def test_numbers_of_a_small_model_end(tcp, kind, most):
    schema = {"type": "object", "properties": {"age": {"type": kind}}, "required": ["age"]}
    likes_digits = {str(code): 60.0 for code in digit_ids(tcp)}
    for asked in ({}, {"logit_bias": likes_digits}):
        reply = tcp.post(
            PATH, json={**BODY, "max_tokens": 300, "temperature": 0, "json_schema": schema, **asked}
        ).json()
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "stop"
        number = choice["message"]["content"].removeprefix('{"age": ').removesuffix("}")
        assert float(number) is not None and len(number) <= most


def digit_ids(client):
    """The tokens of single digits."""
    found = [
        client.post("/tokenize", json={"content": digit, "add_special": False}).json()["tokens"]
        for digit in "0123456789"
    ]
    return {ids[-1] for ids in found}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "regex", "pattern": "a", "value": "b"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strickt": 1}}},
        {"response_format": {"type": "structural_tag"}},
        {"structural_tag": {"format": {"type": "qwen_xml_parameter", "json_schema": {}}}},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *"}},
        {"structured_outputs": {"xml": "a"}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " *"},
        {"response_format": {}},
        {"grammar": "root ::= missing"},
        {"regex": "(?=a)"},
        {"regex": "a", "grammar": 'root ::= "a"'},
        {"response_format": {"type": "json_object"}, "regex": "a"},
        {"json_schema": {"enum": ["x" * 1000] * 300}},
    ],
    ids=lambda form: json.dumps(form)[:40],
)
def test_forms_that_mean_nothing_are_refused(tcp, form):
    assert tcp.post(PATH, json={**BODY, **form}).status_code == 400


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"enum": [f"word {index}" for index in range(10_000)]},
        {"type": "string", "pattern": "((a+)+)+"},
        {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(12)} | {"12": {"type": "null"}}}
        | {"$ref": "#/$defs/0"},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
    ],
    ids=["self", "enum", "pattern", "doublings", "unsatisfiable"],
)
def test_costly_schemas_end(tcp, schema):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    response = tcp.post(PATH, json={**BODY, "max_tokens": 8, "response_format": form})
    assert response.status_code in (200, 400), response.text
