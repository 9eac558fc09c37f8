"""The JSON types of tools' parameters, and the JSON of a value that a model wrote as text."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.generation.chat.messages import Tool

ANY_TYPE = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
TEXT = frozenset(("string",))
MOST_STEPS = 8
_PYTHON = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|\b(?:True|False|None)\b""")
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\.|\"")
_ESCAPES = {"\\'": "'", '"': '\\"'}
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Values as templates write them that print Python's, and so as some models learned to."""


def parameter_types(tool: "Tool") -> dict[str, frozenset[str]]:
    """The types that each parameter of a tool may have, as its description says."""
    schema = tool.description["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: schema_types(of_property, schema) for name, of_property in properties.items()}


def schema_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that a schema accepts, perhaps more. root: the schema that `$ref` points into.

    A schema may be any value: those that cannot be enforced are never checked.
    """
    return _types(schema, root, {}, 0)


def _types(schema: object, root: Mapping[str, Any], known: dict[int, frozenset[str]], steps: int) -> frozenset[str]:
    """As `schema_types`. known: what was found, by the schema's id, so that each is looked at once however it is
    referred to."""
    if not isinstance(schema, Mapping) or steps > MOST_STEPS:
        return ANY_TYPE
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = types = ANY_TYPE
    given = schema.get("type")
    if isinstance(given, str | list):
        types &= frozenset(one for one in ([given] if isinstance(given, str) else given) if isinstance(one, str))
    if isinstance(values := schema.get("enum"), list):
        types &= frozenset(map(type_of, values))
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(pointer := schema.get("$ref"), str):
        types &= _types(pointed_at(pointer, root), root, known, steps + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(keyword), list):
            types &= frozenset().union(*(_types(choice, root, known, steps + 1) for choice in choices))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            types &= _types(part, root, known, steps + 1)
    known[id(schema)] = types
    return types


def json_value(text: str, types: frozenset[str]) -> str:
    """A parameter as JSON, given the text that stands for it; what is not of its other types is a string."""
    trimmed = text.strip()
    trimmed = _WORDS.get(trimmed, trimmed)
    if types != TEXT:
        try:
            found = type_of(json.loads(trimmed, parse_constant=_refuse))
        except (ValueError, RecursionError):
            found = "string"
        if found != "string" and (found in types or (found == "integer" and "number" in types)):
            return trimmed
        made = _from_python(trimmed) if found == "string" and trimmed[:1] in ("{", "[") else None
        if made is not None and type_of(made) in types:
            return json.dumps(made, ensure_ascii=False)
        if found == "string" and "string" not in types and trimmed[:1] + trimmed[-1:] == '""':
            return trimmed
    return json.dumps(text, ensure_ascii=False)


def _from_python(text: str) -> object:
    """The object or list that Python would print so, as some templates print values; None for anything else."""
    try:
        return json.loads(_PYTHON.sub(_as_json, text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _as_json(found: re.Match[str]) -> str:
    """A string or a word of Python as JSON."""
    written = found[0]
    if written[0] != "'":
        return _WORDS.get(written, written)
    return '"' + _ESCAPED.sub(lambda part: _ESCAPES.get(part[0], part[0].replace("\\x", "\\u00")), written[1:-1]) + '"'


def type_of(value: object) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def pointed_at(pointer: str, root: Mapping[str, Any]) -> object:
    """Target of a `$ref`; None if there is none."""
    place: object = root
    if not pointer.startswith("#"):
        return None
    for step in pointer[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return place
