"""Closes the objects of a JSON Schema that name their members: without `additionalProperties` they take no others.

So do OpenAI's strict mode and llama.cpp; JSON Schema itself lets a model invent members. What says
`additionalProperties` itself stays as it is.
"""

from collections.abc import Mapping
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.json_schema import checked_schema, schemas_in
from localinfer.generation.chat.value_types import pointed_at

_OPENING = ("additionalProperties", "patternProperties")
_CHOICES = ("allOf", "anyOf", "oneOf")
_MOST_PARTS = 100_000
"""Schemas that are looked at where several hold for one value, each as often as it does."""


def enforced_schema(schema: object) -> dict[str, Any]:
    """A schema as it is enforced: checked as `checked_schema` does, and with its objects closed.

    Where several schemas hold for one object (`allOf`, or `anyOf`, `oneOf` and `$ref` beside `properties`), it takes
    the members that any of them names, unless one of them says what others there may be. Raises: ConstraintError.
    """
    root = checked_schema(schema)
    nodes = [node for _, node in schemas_in(root)]
    parts_of: dict[int, list[dict[str, Any]]] = {}
    num_parts = 0
    for node in nodes:
        if not node.keys().isdisjoint((*_CHOICES, "$ref")):
            parts = parts_of[id(node)] = _parts(node, root)
            num_parts += len(parts)
            if num_parts > _MOST_PARTS:
                raise ConstraintError(
                    f"the schema puts more than {_MOST_PARTS} schemas together; use less '$ref', 'allOf', 'anyOf' and "
                    "'oneOf' inside each other"
                )
    joint = {
        id(node): parts_of[id(node)]
        for node in nodes
        if id(node) in parts_of
        and not _is_choice(node)
        and sum("properties" in part for part in parts_of[id(node)]) > 1
    }
    shared = {id(part) for parts in joint.values() for part in parts}
    # What is part of others somewhere stays open there, and is closed where it stands alone.
    alone = {
        id(node): parts
        for node in nodes
        if id(node) not in shared and "$ref" in node
        for parts in [parts_of[id(node)]]
        if any(id(part) in shared for part in parts)
    }
    inside = {id(part) for key, parts in joint.items() for part in parts if id(part) != key}
    for node in nodes:
        parts = joint.get(id(node), []) if id(node) not in inside else []
        parts = parts or alone.get(id(node), [])
        if parts and not any(keyword in part for part in parts for keyword in _OPENING):
            own = node.get("properties", {})
            names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
            if names:
                node["properties"] = {name: own.get(name, {}) for name in names}
                node["additionalProperties"] = False
        elif "properties" in node and id(node) not in shared:
            node.setdefault("additionalProperties", False)
    return root


def _is_choice(node: Mapping[str, Any]) -> bool:
    """Whether a schema is nothing but another one, or one of several, which are closed each for itself."""
    return (
        "properties" not in node and "allOf" not in node and sum(key in node for key in ("anyOf", "oneOf", "$ref")) < 2
    )


def _parts(node: object, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A schema and all that may hold for the same value."""
    parts: dict[int, dict[str, Any]] = {}
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in parts:
            continue
        parts[id(part)] = part
        if isinstance(pointer := part.get("$ref"), str):
            waiting.append(pointed_at(pointer, root))
        for keyword in _CHOICES:
            if isinstance(choices := part.get(keyword), list):
                waiting.extend(reversed(choices))
    return list(parts.values())
