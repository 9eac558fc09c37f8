"""A JSON Schema without what cannot be enforced, and what was left out of it, in words.

Libraries write schemas of everyday types with keywords that no grammar can follow: sets (`uniqueItems`), paths and
secrets (formats of their own), decimals (a pattern that looks ahead), limits beyond any reply. Where nobody asked for
strictness the rest is worth having: the reply has the right members of the right types, and its reader checks what is
named here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.closed_objects import enforced_schema
from localinfer.generation.chat.json_schema import COUNTED, GROWING, MAX_COUNT, NOT_ENFORCED, parsed_schema, schemas_in
from localinfer.generation.chat.value_types import pointed_at

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
    """Keywords that are left out, each with the places where it stood."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, keyword: str, place: str) -> None:
        self._places.setdefault(keyword, []).append(place)

    def lines(self) -> list[str]:
        """What to say of each keyword."""
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
    """Whether a keyword holds what it can hold; anything else makes the whole no schema."""
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
