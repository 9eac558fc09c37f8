"""The grammar of values that stand one by one, as XML-like formats write them: text for strings, JSON for all else."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.grammar_writer import ANY, GrammarWriter, escaped
from localinfer.generation.chat.value_types import MOST_STEPS, TEXT, pointed_at, schema_types
from localinfer.models.text.reply_format import PARAMETER_NAME, TYPE_NAME, ParameterFormat

ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment"))
LENGTHS = ("minLength", "maxLength")
_NUMBERS = frozenset(("number", "integer"))
_MOST_SEEN = 1_000
"""Schemas that are looked at for the alternatives of one: references to each other multiply them."""


def alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Schemas of which a value satisfies one exactly if it satisfies `schema`, cut so that text and JSON come apart.

    The schema itself where there are very many.
    """
    found: list[Mapping[str, Any]] = []
    waiting: list[tuple[Mapping[str, Any], int]] = [(schema, 0)]
    num_seen = 0
    while waiting:
        part, steps = waiting.pop()
        num_seen += 1
        if num_seen > _MOST_SEEN:
            return [schema]
        choices = _choices(part, root) if steps <= MOST_STEPS else None
        if choices is None:
            found += _parted(part, root) if steps <= MOST_STEPS else [part]
        else:
            waiting.extend((choice, steps + 1) for choice in reversed(choices))
    return found


def _choices(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """What a schema leads to that is nothing but a reference, or one of several; None for others."""
    keywords = schema.keys() - {"title", "description", "default", "examples"}
    if keywords == {"$ref"} and isinstance(pointed := pointed_at(schema["$ref"], root), Mapping):
        return [pointed]
    if len(keywords) == 1 and (keyword := next(iter(keywords))) in ("anyOf", "oneOf"):
        return [choice if isinstance(choice, Mapping) else {} for choice in schema[keyword]]
    return None


def _parted(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A schema for each of its types, or for its texts and its other values."""
    types = schema.get("type")
    if isinstance(values := schema.get("enum"), list) and schema_types(schema, root) != TEXT:
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        return [{**schema, "enum": part} for part in (texts, others) if part]
    return [{**schema, "type": one} for one in types] if isinstance(types, list) else [schema]


class TextValues:
    """Writes values with what stands around them, strings as they are. rules: those that were written so far."""

    def __init__(self, writer: GrammarWriter, form: ParameterFormat, rule: str, options: Any, is_strict: bool) -> None:
        self.rules: list[str] = []
        self._writer = writer
        self._form = form
        self._options = options
        self._is_strict = is_strict
        self._spaces = escaped(form.value_end[: len(form.value_end) - len(form.value_marker)])
        self._rule = rule
        self._free: dict[str, str] = {}
        self._end = form.value_end

    def value(self, rule: str, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The name of a rule for a parameter's value of this schema, from behind the parameter's name on."""
        self._end = self._form.named(self._form.value_end, name)
        found = alternatives(schema, root) if isinstance(schema, Mapping) else [{}]
        made = [one for index, part in enumerate(found) for one in self._alternative(f"{rule}_{index}", part, root)]
        self.rules.append(f"{rule}: {' | '.join(dict.fromkeys(made))}")
        return rule

    def _alternative(self, rule: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
        types = schema_types(schema, root)
        assign = self._writer.literal(self._form.assign)
        if "string" not in types:
            yield from self._json(rule, schema, types, root)
        elif types != TEXT:
            yield f"{assign} {self._free_text()}"
            if self._form.json_assign is not None:
                others = types - TEXT
                yield from self._json(rule, {**schema, "type": sorted(others)}, others, root)
        else:
            try:
                text = self._text(rule, schema)
            except ConstraintError:
                if self._is_strict:
                    raise
                text = self._free_text()
            yield f"{assign} {text}"

    def _json(
        self, rule: str, schema: Mapping[str, Any], types: frozenset[str], root: Mapping[str, Any]
    ) -> Iterator[str]:
        """A value that is written as JSON, behind the name of its type where the format has it."""
        assign = self._form.assign if self._form.json_assign is None else self._form.json_assign
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        kinds = [types]
        if TYPE_NAME in assign:
            # Integers are numbers there.
            numbers = types & _NUMBERS
            kinds = [numbers] * bool(numbers) + [frozenset((kind,)) for kind in sorted(types - numbers)]
        for index, kind in enumerate(kinds):
            part = schema if len(kinds) == 1 else {**schema, "type": sorted(kind)}
            grammar = json.dumps({**part, **definitions, "x-guidance": self._options})
            self.rules.append(f"{rule}_json_{index}: %json {grammar} {self._writer.literal(self._end)}")
            word = "number" if kind & _NUMBERS else next(iter(kind), "")
            yield f"{self._writer.literal(assign.replace(TYPE_NAME, word))} {rule}_json_{index}"

    def _text(self, rule: str, schema: Mapping[str, Any]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        known = ANNOTATIONS | {"enum", "const"} if values is not None else ANNOTATIONS | {*LENGTHS, "pattern"}
        for keyword in sorted(schema.keys() - known):
            raise ConstraintError(
                f"{keyword!r} cannot be enforced for text that this model writes without quotation marks; leave it out",
                keyword=keyword,
            )
        if values is not None:
            literals = [self._writer.literal(value + self._end) for value in dict.fromkeys(values)]
            self.rules.append(f"{rule}: {' | '.join(literals)}")
            return rule
        terms = []
        if not schema.keys().isdisjoint(LENGTHS):
            terms.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
        if "pattern" in schema:
            terms.append(whole_match(schema["pattern"]))
        if not terms:
            return self._free_text()
        term = " & ".join([*(f"/{one}{self._spaces}/" for one in terms), self._without_marker])
        self._add_text(rule, term)
        return rule

    def _free_text(self) -> str:
        if self._end not in self._free:
            self._free[self._end] = f"{self._rule}_text_{len(self._free)}"
            self._add_text(self._free[self._end], f"{ANY} & {self._without_marker}")
        return self._free[self._end]

    @property
    def _without_marker(self) -> str:
        return f"~/(?s:.*){escaped(self._end.lstrip().partition(PARAMETER_NAME)[0])}(?s:.*)/"

    def _add_text(self, rule: str, term: str) -> None:
        terminal = rule.upper()
        self.rules += [*self._writer.until(rule, terminal, self._end.lstrip()), f"{terminal}: {term}"]


def whole_match(pattern: str) -> str:
    """A regular expression for whole texts in which a schema's pattern is found, perhaps not for all of them."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[starts : len(pattern) - ends]
    return f"{'' if starts else '(?s:.*)'}(?:{_without_slashes(inner)}){'' if ends else '(?s:.*)'}"


def _without_slashes(pattern: str) -> str:
    """A regular expression in which slashes end nothing."""
    made, is_escaped = [], False
    for letter in pattern:
        made.append("\\/" if letter == "/" and not is_escaped else letter)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(made)
