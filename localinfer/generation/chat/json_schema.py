"""What is refused of a JSON Schema before it is compiled: sizes that only a hostile schema has, and keywords that
would otherwise pass in silence without being enforced."""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from localinfer.errors import ConstraintError

MAX_CHARACTERS = 1 << 18
MAX_DEPTH = 64
_TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} deep; define parts in $defs and refer to them"
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.?+[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")
MAX_COUNT = 10_000
"""Largest minItems and the like, and the sum of all of them that make the compiled grammar grow."""

MAX_PROPERTIES = {"properties": 2_000, "patternProperties": 200}
"""In a whole schema: the compiler's work grows with their square, and these numbers take it half a second at most."""

# Keywords that hold one schema, a list of schemas, and a mapping of names to schemas.
_ONE = ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
GROWING = ("minItems", "maxItems", "minProperties", "maxProperties")
COUNTED = (*GROWING, "minLength", "maxLength")
"""Keywords of numbers up to MAX_COUNT; GROWING: those that make the compiled grammar grow."""
_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("$ref", "pattern", "format"), (str, "text")),
    **dict.fromkeys(("enum", *_MANY), (list, "a list")),
    **dict.fromkeys(("properties", "patternProperties"), (dict, "a mapping")),
}
_SHOWN_NAME = 80
# Under these stand names; before there was a list, "required" was a flag of the member itself.
_TEXTS = {"type": (str, list), "required": (list, bool)}
NOT_ENFORCED = frozenset(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependentRequired dependentSchemas"
    " dependencies unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef extends"
    " disallow divisibleBy".split()
)
"""The validation keywords of every draft that the compiler neither enforces nor refuses by itself."""
# What the compiler's messages say where they do not spell the keyword.
_MESSAGES = (
    ("Resource ", "$ref"),
    ("Pointer ", "$ref"),
    ("regex parse error", "pattern"),
    ("invalid regex", "pattern"),
    ("Unknown format", "format"),
    ("Invalid type", "type"),
    ("oneOf", "oneOf"),
)
_NAMES = re.compile(
    r"\b(type|enum|const|format|pattern|multipleOf|minimum|maximum|exclusiveMinimum|exclusiveMaximum|required|"
    + "|".join(sorted({*_ONE, *_MANY, *_NAMED, *COUNTED, *NOT_ENFORCED}, key=len, reverse=True)).replace("$", r"\$")
    + r")\b"
)


def checked_schema(schema: object) -> dict[str, Any]:
    """Return a schema as an object that is small enough and uses only keywords that are enforced.

    Raises: ConstraintError naming the keyword and its place, or the limit.
    """
    parsed = parsed_schema(schema)
    total = 0
    num_named = dict.fromkeys(MAX_PROPERTIES, 0)
    for place, node in schemas_in(parsed):
        for keyword in sorted(NOT_ENFORCED & node.keys()):
            raise ConstraintError(
                f"the schema uses {keyword!r} at {place}, which cannot be enforced; leave it out, and check it in the "
                "answer instead",
                keyword=keyword,
            )
        _check_shapes(place, node)
        if isinstance(node.get("items"), list):
            raise ConstraintError(
                f"the schema has a list under 'items' at {place}; since draft 2020-12 that is 'prefixItems'",
                keyword="items",
            )
        if node.get("enum", True) == []:
            raise ConstraintError(f"'enum' at {place} is empty, so that no text fits; list a value", keyword="enum")
        for keyword, limit in MAX_PROPERTIES.items():
            named = node.get(keyword)
            num_named[keyword] += len(named) if isinstance(named, dict) else 0
            if num_named[keyword] > limit:
                raise ConstraintError(
                    f"the schema has {num_named[keyword]} or more {keyword!r}, counted up to {place}; wanted at most "
                    f"{limit} in all",
                    keyword=keyword,
                )
        for keyword in COUNTED:
            count = node.get(keyword, 0)
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_COUNT:
                raise ConstraintError(
                    f"{keyword!r} at {place} is {count!r:.40}; wanted a whole number from 0 to {MAX_COUNT}",
                    keyword=keyword,
                )
            total += count if keyword in GROWING else 0
            if total > MAX_COUNT:
                raise ConstraintError(
                    f"the numbers of minItems, maxItems, minProperties and maxProperties add up to {total} at {place}; "
                    f"wanted at most {MAX_COUNT} in a schema",
                    keyword=keyword,
                )
    return parsed


def _check_shapes(place: str, node: dict[str, Any]) -> None:
    """Refuse keywords that hold what no schema has there."""
    for keyword, (kind, wanted) in _SHAPES.items():
        if keyword in node and not isinstance(node[keyword], kind):
            raise ConstraintError(f"{keyword!r} at {place} is {node[keyword]!r:.40}; wanted {wanted}", keyword=keyword)
    for keyword, kinds in _TEXTS.items():
        found = node.get(keyword, [])
        is_list_of_others = isinstance(found, list) and not all(isinstance(text, str) for text in found)
        if not isinstance(found, kinds) or is_list_of_others:
            raise ConstraintError(f"{keyword!r} at {place} is {found!r:.40}; wanted names", keyword=keyword)


def keyword_in(message: str) -> str | None:
    """The keyword that a compiler's message is about, or None."""
    for words, keyword in _MESSAGES:
        if words in message:
            return keyword
    found = _NAMES.search(message)
    return None if found is None else found[0]


def parsed_schema(schema: object) -> dict[str, Any]:
    """A schema, given as a mapping or as JSON text, as an object of its own.

    Raises: ConstraintError for what is no schema, is nested too deeply or too large.
    """
    if not isinstance(schema, str):
        check_depth(schema)
        try:
            schema = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConstraintError(f"the schema is not JSON: {error}; give a mapping or JSON text") from None
    if len(schema) > MAX_CHARACTERS:
        raise ConstraintError(f"the schema has {len(schema)} characters; wanted at most {MAX_CHARACTERS}")
    _check_text_depth(schema)
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise ConstraintError(f"the schema is not JSON: {error}; give a mapping or JSON text") from None
    if parsed is True:
        return {}
    if parsed is False:
        raise ConstraintError("the schema is false, which no text satisfies; give one that some text does")
    if not isinstance(parsed, dict):
        raise ConstraintError(f"the schema is {schema:.40}; a schema is a JSON object, true or false")
    return parsed


def check_depth(value: object) -> None:
    """Raise ConstraintError for what is nested too deeply, or without end."""
    level: list[object] = [value]
    size = 0
    for _ in range(MAX_DEPTH + 1):
        size += len(level)
        if size > MAX_CHARACTERS:
            raise ConstraintError(f"the schema has more than {MAX_CHARACTERS} parts; give a smaller one")
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, list | tuple):
                inner.extend(item)
        level = inner
        if not level:
            return
    raise ConstraintError(_TOO_DEEP)


def _check_text_depth(text: str) -> None:
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            raise ConstraintError(_TOO_DEEP)


def schemas_in(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its place as a JSON pointer; not what merely looks like one, such as a const."""
    waiting: deque[tuple[str, object]] = deque([("#", root)])
    while waiting:
        place, node = waiting.popleft()
        if not isinstance(node, dict):
            continue
        yield place, node
        for keyword in _ONE:
            waiting.append((f"{place}/{keyword}", node.get(keyword)))
        for keyword in _MANY:
            if isinstance(parts := node.get(keyword), list):
                waiting.extend((f"{place}/{keyword}/{index}", part) for index, part in enumerate(parts))
        for keyword in _NAMED:
            if isinstance(named := node.get(keyword), dict):
                waiting.extend(
                    (f"{place}/{keyword}/{printable(name[:_SHOWN_NAME])}", part) for name, part in named.items()
                )


def printable(text: str) -> str:
    """Text as messages show it, which may hold anything in a constraint: what cannot be printed is escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
