"""JSON Schemas before they are compiled: refused, closed or relaxed.

Refused: sizes that only a hostile schema has, and keywords that would otherwise pass in silence without being enforced.

Closed: objects that name their members take no others without `additionalProperties`, as in OpenAI's strict mode and
llama.cpp; JSON Schema itself lets a model invent members.

Relaxed: libraries write schemas of everyday types with keywords that no grammar can follow: sets (`uniqueItems`), paths
and secrets (formats of their own), decimals (a pattern that looks ahead), limits beyond any reply. Where strictness was
not asked for, those are left out and named, and the reply has the right members of the right types.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.value_types import pointed_at

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

    Raises: ConstraintError naming the keyword and its path, or the limit.
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
    """Every schema in a schema, with its path as a JSON pointer; not what merely looks like one, such as a const."""
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
    """True if a schema is only a reference, or a choice of several, which are closed each for itself."""
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


_SCALARS = {
    **dict.fromkeys(("format", "pattern", "minLength", "maxLength"), "string"),
    **dict.fromkeys(("multipleOf", "exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum"), "number"),
}
"""Keywords of values without parts, in the order in which they are given up, and the type that they speak of."""
_GIVEN_UP = frozenset((*_SCALARS, *COUNTED, "oneOf", "allOf", "patternProperties"))
"""Keywords without which the rest still has its shape."""
_MOST_ROUNDS = 16
_SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}
"""Formats that a known one holds for, too."""


def relaxed_schema(schema: object, check: Callable[[Mapping[str, Any]], None]) -> tuple[dict[str, Any], list[str]]:
    """A schema as `enforced_schema` makes it of what can be enforced of it, and a line for each keyword left out.

    check: raises ConstraintError, with the keyword, for a schema that does not compile.
    Raises: ConstraintError for what is no schema, and for sizes that only a hostile one has.
    """
    try:
        made = enforced_schema(schema)
        check(made)
        return made, []
    except ConstraintError:
        root = parsed_schema(schema)
    left_out = _LeftOut()
    _leave_known(root, left_out)
    _leave_scalars(root, left_out, check)
    for _ in range(_MOST_ROUNDS):
        made = enforced_schema(root)
        try:
            check(made)
            return made, left_out.lines()
        except ConstraintError as error:
            if error.keyword not in _GIVEN_UP or not _leave_everywhere(root, error.keyword, left_out):
                raise
    raise ConstraintError("the schema cannot be enforced, whatever is left out; give a simpler one")


class _LeftOut:
    """Keywords that are left out, each with its paths."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, keyword: str, place: str) -> None:
        self._places.setdefault(keyword, []).append(place)

    def lines(self) -> list[str]:
        """Description of each keyword."""
        lines = []
        for keyword, places in self._places.items():
            more = f" and {len(places) - 1} more places" if len(places) > 1 else ""
            lines.append(f"{keyword!r} of the schema at {places[0]:.80}{more} is not enforced; check it in the answer")
        return lines


def _leave_known(root: dict[str, Any], left_out: _LeftOut) -> None:
    """Leave out keywords that are never enforced, and counts that make a grammar too large."""
    total = 0
    for place, node in schemas_in(root):
        for keyword in sorted(NOT_ENFORCED & node.keys()):
            del node[keyword]
            left_out.add(keyword, place)
        if isinstance(node.get("$ref"), str) and pointed_at(node["$ref"], root) is None:
            del node["$ref"]
            left_out.add("$ref", place)
        if isinstance(node.get("items"), list):
            # So it was called before draft 2020-12.
            node["prefixItems"] = node.pop("items")
            node["items"] = node.pop("additionalItems", True)
        for keyword in COUNTED:
            count = node.get(keyword, 0)
            if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
                total += count if keyword in GROWING else 0
                if count > MAX_COUNT or (keyword in GROWING and total > MAX_COUNT):
                    del node[keyword]
                    total -= count if keyword in GROWING else 0
                    left_out.add(keyword, place)


def _leave_scalars(root: dict[str, Any], left_out: _LeftOut, check: Callable[[Mapping[str, Any]], None]) -> None:
    """Leave out patterns, formats and bounds that do not compile, each node by itself."""
    known: dict[str, tuple[str, ...]] = {}
    for place, node in schemas_in(root):
        if node.get("format") in _SAME_FORMATS:
            node["format"] = _SAME_FORMATS[node["format"]]
        for kind in ("string", "number"):
            part = {name: node[name] for name, of in _SCALARS.items() if of == kind and _is_meant(name, node.get(name))}
            if not part:
                continue
            is_whole = kind == "number" and node.get("type") == "integer"
            key = repr((is_whole, part))
            if key not in known:
                known[key] = _wrong_in({"type": "integer" if is_whole else kind}, part, check)
            for keyword in known[key]:
                del node[keyword]
                left_out.add(keyword, place)


def _is_meant(keyword: str, value: object) -> bool:
    """True if a keyword's value has a valid type; any other makes the whole no schema."""
    if keyword in ("format", "pattern"):
        return isinstance(value, str)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong_in(
    kind: dict[str, Any], part: dict[str, Any], check: Callable[[Mapping[str, Any]], None]
) -> tuple[str, ...]:
    """The keywords that have to go so that the others compile: those that do not by themselves, or else all."""
    if _compiles({**kind, **part}, check):
        return ()
    wrong = tuple(name for name in part if not _compiles({**kind, name: part[name]}, check))
    rest = {name: value for name, value in part.items() if name not in wrong}
    return wrong if wrong and _compiles({**kind, **rest}, check) else tuple(part)


def _compiles(schema: dict[str, Any], check: Callable[[Mapping[str, Any]], None]) -> bool:
    try:
        check(schema)
    except ConstraintError:
        return False
    return True


def _leave_everywhere(root: dict[str, Any], keyword: str, left_out: _LeftOut) -> bool:
    """Leave out a keyword, and the one that goes with it, wherever it stands; return whether it stood somewhere."""
    found = False
    both = ("minProperties", "maxProperties")
    for place, node in schemas_in(root):
        for one in both if keyword in both else (keyword,):
            if one not in node:
                continue
            value = node.pop(one)
            found = True
            left_out.add(one, place)
            if one == "oneOf" and "anyOf" not in node:
                # All but that no two hold at once.
                node["anyOf"] = value
    return found
