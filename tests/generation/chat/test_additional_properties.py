"""Objects of a schema that name their members take no others, however schemas are put together."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from localinfer.errors import ConstraintError
from localinfer.generation.chat.constraints import ConstraintCompiler
from localinfer.generation.chat.json_schema import enforced_schema
from localinfer.generation.options import JsonSchema
from tests.engine.fakes import ByteTokenizer

INTEGER = {"type": "integer"}
OF_A, OF_B = {"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}
BASE = {"$defs": {"base": {"type": "object", **OF_A}}, "type": "object"}
REFERRED = {"$ref": "#/$defs/base"}
SHARED = {**BASE, "properties": {"u": REFERRED, "v": {"allOf": [REFERRED, OF_B]}}}
TREE = {"type": "object", "properties": {"v": INTEGER, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
EITHER = [{**OF_A, "required": ["a"]}, {**OF_B, "required": ["b"]}]


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), 260)


def accepts(compiler: ConstraintCompiler, schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema's mask allows a value, from its first letter to its end."""
    mask = compiler.mask(JsonSchema(schema), start=0)
    spelled = list(json.dumps(value).encode())
    if mask.count_allowed(np.empty(0, np.int32), spelled) < len(spelled):
        return False
    return bool(mask(np.array(spelled, np.int32))[ByteTokenizer.eos_token_id])


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"x": 1}),
        ({"type": "object", "properties": {}}, {}),
        ({"type": "object", **OF_A, "additionalProperties": True}, {"a": 1, "b": 2}),
        ({"type": "object", **OF_A, "additionalProperties": INTEGER}, {"a": 1, "b": 2}),
        ({"type": "object", **OF_A, "patternProperties": {"^x": INTEGER}}, {"a": 1, "xb": 2}),
        ({"type": "object", "allOf": [OF_A, OF_B]}, {"a": 1, "b": 2}),
        ({"type": "object", "allOf": [OF_A, {**OF_B, "additionalProperties": True}]}, {"a": 1, "c": 2}),
        ({"type": "object", "anyOf": EITHER}, {"b": 1}),
        ({"type": "object", "properties": {"k": {"type": "string"}}, "anyOf": EITHER}, {"k": "x", "b": 1}),
        ({"type": "object", **OF_A, "anyOf": [{"required": ["a"]}]}, {"a": 1}),
        (SHARED, {"u": {"a": 1}, "v": {"a": 1, "b": 2}}),
        ({"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}, {"v": 1, "kids": [{"v": 2, "kids": []}]}),
    ],
    ids=repr,
)
def test_members_that_a_schema_names_or_lets_in_are_taken(
    compiler: ConstraintCompiler, schema: dict[str, Any], value: Any
) -> None:
    assert accepts(compiler, schema, value)
    jsonschema.validate(value, schema)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {}}, {"x": 1}),
        ({"type": "object", **OF_A}, {"a": 1, "x": 1}),
        ({"type": "array", "items": {"type": "object", **OF_A}}, [{"x": 1}]),
        ({"type": "object", **OF_A, "patternProperties": {"^y": INTEGER}}, {"a": 1, "x": 1}),
        ({"type": "object", "allOf": [OF_A, OF_B]}, {"a": 1, "x": 1}),
        ({**BASE, "properties": {"u": {"allOf": [REFERRED], "description": "One."}}}, {"u": {"x": 1}}),
        ({**BASE, "properties": {"u": {**REFERRED, "description": "One."}}}, {"u": {"x": 1}}),
        ({"type": "object", "anyOf": EITHER}, {"b": 1, "x": 1}),
        ({"type": "object", "properties": {"k": {"type": "string"}}, "anyOf": EITHER}, {"k": "x", "b": 1, "x": 1}),
        ({"type": "object", **OF_A, "anyOf": [{"required": ["a"]}]}, {"a": 1, "x": 1}),
        (SHARED, {"u": {"a": 1, "x": 1}}),
        (SHARED, {"v": {"a": 1, "x": 1}}),
        ({"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}, {"v": 1, "kids": [{"x": 2}]}),
    ],
    ids=repr,
)
def test_members_that_a_schema_does_not_name_are_not(
    compiler: ConstraintCompiler, schema: dict[str, Any], value: Any
) -> None:
    assert not accepts(compiler, schema, value)
    # JSON Schema itself would let them in.
    jsonschema.validate(value, schema)


def test_schemas_put_together_without_end_are_refused() -> None:
    choices = [{"$ref": f"#/$defs/{index}"} for index in range(60)]
    schema = {"$defs": {str(index): {"anyOf": choices} for index in range(60)}, "$ref": "#/$defs/0"}
    with pytest.raises(ConstraintError, match="puts more than"):
        enforced_schema(schema)
