"""The grammar of a call whose arguments stand one by one: text for strings, JSON for other values, as schemas allow.

Parameters come in the order of their schema, as in a JSON object held to it; what may be left out may be missing.
"""

import json
from collections.abc import Mapping
from typing import Any

from localinfer.chat.grammar_writer import ANY, GrammarWriter, escaped
from localinfer.chat.parameter_types import TEXT, alternatives, schema_types
from localinfer.chat.tools import Tool
from localinfer.errors import ConstraintError
from localinfer.models.text.reply_format import CallFormat, ParameterFormat

_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment"))
_LENGTHS = ("minLength", "maxLength")
_PARAMETERS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "title",
        "description",
    )
)
_ANY_NAME = "/[A-Za-z0-9_.:-]{1,64}/"


def parameter_rules(writer: GrammarWriter, calls: CallFormat, tool: Tool, rule: str, options: Any) -> list[str]:
    """Rules, the first named `rule`, for a call of a tool from its name to its end.

    options: llguidance's, for JSON. Raises: ConstraintError where a schema cannot be enforced, naming the keyword.
    """
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    written = _Parameters(writer, form, rule, options, bool(tool.description["function"].get("strict")))
    schema = tool.parameters or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if not properties or tool.parameters is None:
        return [*_any_parameters(writer, calls, tool, rule, written, schema), *written.rules]
    for keyword in sorted(schema.keys() - _PARAMETERS):
        raise ConstraintError(
            f"{keyword!r} beside the parameters' names cannot be enforced; leave it out", keyword=keyword
        )
    required = schema.get("required") or ()
    for name in required:
        if name not in properties:
            raise ConstraintError(f"'required' names {name!r}, which has no schema; add one", keyword="required")
    rules = [f"{rule}: {writer.literal(tool.name)} {rule}_first_0"]
    for index, (name, of_property) in enumerate(properties.items()):
        value = written.value(f"{rule}_value_{index}", of_property, schema)
        more = f"{rule}_rest_{index + 1}"
        may_miss = name not in required
        for start, between in (("first", calls.middle), ("rest", form.following)):
            taken = f"{writer.literal(between + name + form.assign)} {value} {more}"
            missing = f" | {rule}_{start}_{index + 1}" if may_miss else ""
            rules.append(f"{rule}_{start}_{index}: {taken}{missing}")
    last = len(properties)
    rules += [f"{rule}_first_{last}: {writer.literal(form.empty)}", f"{rule}_rest_{last}: {writer.literal(calls.end)}"]
    return rules + written.rules


def _any_parameters(
    writer: GrammarWriter,
    calls: CallFormat,
    tool: Tool,
    rule: str,
    written: "_Parameters",
    schema: Mapping[str, Any],
) -> list[str]:
    """A call with parameters of any names."""
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    extra = schema.get("additionalProperties", True)
    name, end = writer.literal(tool.name), writer.literal(calls.end)
    if extra is False:
        return [f"{rule}: {name} {writer.literal(form.empty)}"]
    value = written.value(f"{rule}_value", extra if isinstance(extra, Mapping) else {}, schema)
    one = f"{rule}_name {writer.literal(form.assign)} {value}"
    some = f"{writer.literal(calls.middle)} {one} ({writer.literal(form.following)} {one})* {end}"
    return [f"{rule}: {name} ({some} | {writer.literal(form.empty)})", f"{rule}_name: {_ANY_NAME}"]


class _Parameters:
    """Writes values with what ends them. rules: those that were written so far."""

    def __init__(self, writer: GrammarWriter, form: ParameterFormat, rule: str, options: Any, is_strict: bool) -> None:
        self.rules: list[str] = []
        self._writer = writer
        self._form = form
        self._options = options
        self._is_strict = is_strict
        self._spaces = escaped(form.value_end[: len(form.value_end) - len(form.value_marker)])
        self._without_marker = f"~/(?s:.*){escaped(form.value_marker)}(?s:.*)/"
        self._free = f"{rule}_text"
        self._has_free = False

    def value(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The name of a rule for a value of this schema, and of what ends it."""
        found = [one for one in alternatives(schema, root)] if isinstance(schema, Mapping) else [{}]
        made = [self._alternative(f"{name}_{index}", one, root) for index, one in enumerate(found)]
        self.rules.append(f"{name}: {' | '.join(dict.fromkeys(made))}")
        return name

    def _alternative(self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        types = schema_types(schema, root)
        if "string" not in types:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            grammar = json.dumps({**schema, **definitions, "x-guidance": self._options})
            self.rules.append(f"{name}: %json {grammar} {self._writer.literal(self._form.value_end)}")
            return name
        if types != TEXT:
            return self._free_text()
        try:
            return self._text(name, schema)
        except ConstraintError:
            if self._is_strict:
                raise
            return self._free_text()

    def _text(self, name: str, schema: Mapping[str, Any]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        known = _ANNOTATIONS | {"enum", "const"} if values is not None else _ANNOTATIONS | {*_LENGTHS, "pattern"}
        for keyword in sorted(schema.keys() - known):
            raise ConstraintError(
                f"{keyword!r} cannot be enforced for text that this model writes without quotation marks; leave it out",
                keyword=keyword,
            )
        if values is not None:
            literals = [self._writer.literal(value + self._form.value_end) for value in dict.fromkeys(values)]
            self.rules.append(f"{name}: {' | '.join(literals)}")
            return name
        terms = []
        if not schema.keys().isdisjoint(_LENGTHS):
            terms.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
        if "pattern" in schema:
            terms.append(_whole(schema["pattern"]))
        if not terms:
            return self._free_text()
        term = " & ".join([*(f"/{one}{self._spaces}/" for one in terms), self._without_marker])
        self._add_text(name, term)
        return name

    def _free_text(self) -> str:
        if not self._has_free:
            self._has_free = True
            self._add_text(self._free, f"{ANY} & {self._without_marker}")
        return self._free

    def _add_text(self, name: str, term: str) -> None:
        terminal = name.upper()
        self.rules += [*self._writer.until(name, terminal, self._form.value_marker), f"{terminal}: {term}"]


def _whole(pattern: str) -> str:
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
