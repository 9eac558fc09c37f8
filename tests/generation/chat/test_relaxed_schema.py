"""Schemas of everyday types: what cannot be enforced is left out and named, unless all has to be enforced."""

import json
from typing import Any

import pytest

from localinfer.errors import ConstraintError
from localinfer.generation.chat.constraints import check_enforceable, grammar_of
from localinfer.generation.options import JsonSchema

pytest.importorskip("llguidance")

TEXT, ANY_OBJECT = {"type": "string"}, {"type": "object"}
# As pydantic 2.14 writes them: the type, what is written of it, and what cannot be enforced of that.
EVERYDAY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Decimal": (
        {"anyOf": [{"type": "number"}, {**TEXT, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        ("pattern",),
    ),
    "set[int]": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ("uniqueItems",)),
    "Path": ({**TEXT, "format": "path"}, ("format",)),
    "FilePath": ({**TEXT, "format": "file-path"}, ("format",)),
    "SecretStr": ({**TEXT, "format": "password", "writeOnly": True}, ("format",)),
    "bytes": ({**TEXT, "format": "binary"}, ("format",)),
    "UUID4": ({**TEXT, "format": "uuid4"}, ()),
    "IPvAnyAddress": ({**TEXT, "format": "ipvanyaddress"}, ("format",)),
    "IPv4Network": ({**TEXT, "format": "ipv4network"}, ("format",)),
    "PostgresDsn": ({**TEXT, "format": "multi-host-uri", "minLength": 1}, ("format",)),
    "Base64Str": ({**TEXT, "format": "base64"}, ("format",)),
    "Pattern": ({**TEXT, "format": "regex"}, ("format",)),
    "max_length=20000": ({**TEXT, "maxLength": 20_000}, ("maxLength",)),
    "list, max_length=20000": ({"type": "array", "items": TEXT, "maxItems": 20_000}, ("maxItems",)),
    "dict[Color, int]": (
        {**ANY_OBJECT, "additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["r"]}},
        ("propertyNames",),
    ),
    "if, then": (
        {**ANY_OBJECT, "properties": {"a": {"const": 1}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        ("if", "then"),
    ),
    "dependentRequired": (
        {**ANY_OBJECT, "properties": {"a": TEXT, "b": TEXT}, "dependentRequired": {"a": ["b"]}},
        ("dependentRequired",),
    ),
    "not": ({**TEXT, "not": {"const": "x"}}, ("not",)),
    "contains": ({"type": "array", "contains": {"const": 1}, "minContains": 1}, ("contains", "minContains")),
    "look-behind": ({**TEXT, "pattern": "(?<!a)b", "maxLength": 9}, ("pattern",)),
    "back-reference": ({**TEXT, "pattern": r"^(a|b)\1$"}, ("pattern",)),
    "int, le=2**64": ({"type": "integer", "minimum": 0, "maximum": 2**64}, ("maximum",)),
    "float, ge=-1e300": ({"type": "number", "minimum": -1e300, "maximum": 1e300}, ("minimum", "maximum")),
    "oneOf": ({"type": "integer", "oneOf": [{"minimum": 1}, {"multipleOf": 2}]}, ("oneOf",)),
    "dict, 3 to 4 items": (
        {**ANY_OBJECT, "minProperties": 3, "maxProperties": 4, "properties": {"a": TEXT, "b": TEXT}},
        ("minProperties", "maxProperties"),
    ),
    "a list of items": ({"type": "array", "items": [TEXT, {"type": "integer"}]}, ()),
    "another file": ({"$ref": "https://example.com/schema.json"}, ("$ref",)),
    "datetime": ({**TEXT, "format": "date-time"}, ()),
}


def told(schema: Any) -> list[str]:
    notices: list[str] = []
    grammar_of(JsonSchema(schema, strict=False), notices)
    return notices


@pytest.mark.parametrize(("schema", "left_out"), EVERYDAY.values(), ids=EVERYDAY)
def test_what_cannot_be_enforced_is_left_out_and_named(schema, left_out):
    whole = {**ANY_OBJECT, "properties": {"value": schema, "other": {"type": "integer"}}, "required": ["value"]}
    check_enforceable(JsonSchema(whole, strict=False))
    notices = told(whole)
    assert [line.partition("'")[2].partition("'")[0] for line in notices] == [*left_out]
    assert all("at #/properties/value" in line and "is not enforced" in line for line in notices)
    if left_out:
        with pytest.raises(ConstraintError):
            check_enforceable(JsonSchema(whole))
    # What else it asks for stays.
    made = json.loads(grammar_of(JsonSchema(whole, strict=False)))["grammars"][0]["json_schema"]
    assert made["properties"]["other"] == {"type": "integer"}
    assert made["required"] == ["value"] and made["additionalProperties"] is False


def test_what_holds_of_a_text_beside_a_wrong_pattern_stays():
    schema = {**TEXT, "pattern": "(?=a)", "maxLength": 5}
    made = json.loads(grammar_of(JsonSchema(schema, strict=False)))["grammars"][0]["json_schema"]
    assert made["maxLength"] == 5 and "pattern" not in made


def test_each_keyword_is_named_once_with_the_number_of_its_places():
    members = {f"m{index}": {**TEXT, "format": "path"} for index in range(5)}
    (line,) = told({**ANY_OBJECT, "properties": members})
    assert "'format'" in line and "and 4 more places" in line


@pytest.mark.parametrize(
    "schema",
    [5, "{", {"enum": []}, {"properties": 1}, {"pattern": 3}, {"type": "nonsense"}, False, {"enum": ["x" * (1 << 19)]}],
)
def test_what_is_no_schema_or_too_large_is_refused_anyway(schema):
    with pytest.raises(ConstraintError):
        check_enforceable(JsonSchema(schema, strict=False))
