"""Arguments of a tool call that stand one by one, each with its name, as XML-like formats write them.

Their grammar: text for strings, JSON for other values, as schemas allow, in the order of the schema; what may be left
out may be missing. Their reader: the JSON object that they mean, while they arrive.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from localinfer.chat.grammar_writer import ANY, GrammarWriter, escaped
from localinfer.chat.messages import Tool
from localinfer.errors import ConstraintError
from localinfer.models.text.reply_format import CallFormat, ParameterFormat

ANY_TYPE = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
TEXT = frozenset(("string",))
_MOST_STEPS = 8
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Values as templates write them that print Python's, and so as some models learned to."""
_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated", "$comment"))
_LENGTHS = ("minLength", "maxLength")
_PARAMETERS = frozenset(
    "type properties required additionalProperties $defs definitions $schema title description".split()
)
_ANY_NAME = "/[A-Za-z0-9_.:-]{1,64}/"


def parameter_types(tool: Tool) -> dict[str, frozenset[str]]:
    """The types that each parameter of a tool may have, as its description says."""
    schema = tool.description["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: schema_types(of_property, schema) for name, of_property in properties.items()}


def schema_types(schema: object, root: Mapping[str, Any], steps: int = 0) -> frozenset[str]:
    """The types of the values that a schema accepts, perhaps more. root: the schema that `$ref` points into."""
    if not isinstance(schema, Mapping) or steps > _MOST_STEPS:
        return ANY_TYPE
    types = ANY_TYPE
    given = schema.get("type")
    if isinstance(given, str | list):
        types &= frozenset([given] if isinstance(given, str) else given)
    if isinstance(values := schema.get("enum"), list):
        types &= frozenset(map(type_of, values))
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(pointer := schema.get("$ref"), str):
        types &= schema_types(_pointed_at(pointer, root), root, steps + 1)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(keyword), list):
            types &= frozenset().union(*(schema_types(choice, root, steps + 1) for choice in choices))
    for part in schema.get("allOf") or ():
        types &= schema_types(part, root, steps + 1)
    return types


def alternatives(schema: Mapping[str, Any], root: Mapping[str, Any], steps: int = 0) -> Iterator[Mapping[str, Any]]:
    """Schemas of which a value satisfies one exactly if it satisfies `schema`, cut so that text and JSON come apart."""
    keywords = schema.keys() - {"title", "description", "default", "examples"}
    types = schema.get("type")
    if steps > _MOST_STEPS:
        yield schema
    elif keywords == {"$ref"} and isinstance(pointed := _pointed_at(schema["$ref"], root), Mapping):
        yield from alternatives(pointed, root, steps + 1)
    elif len(keywords) == 1 and (keyword := next(iter(keywords))) in ("anyOf", "oneOf"):
        for choice in schema[keyword]:
            yield from alternatives(choice, root, steps + 1) if isinstance(choice, Mapping) else iter([{}])
    elif isinstance(values := schema.get("enum"), list) and schema_types(schema, root) != TEXT:
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        yield from ({**schema, "enum": part} for part in (texts, others) if part)
    elif isinstance(types, list):
        yield from ({**schema, "type": one} for one in types)
    else:
        yield schema


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
        if found == "string" and "string" not in types and trimmed[:1] + trimmed[-1:] == '""':
            return trimmed
    return json.dumps(text, ensure_ascii=False)


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


def _pointed_at(pointer: str, root: Mapping[str, Any]) -> object:
    place: object = root
    if not pointer.startswith("#"):
        return None
    for step in pointer[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return place


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
        found = alternatives(schema, root) if isinstance(schema, Mapping) else [{}]
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


class ReadParameters(NamedTuple):
    """What became certain of the arguments' JSON text, what is left of the reply's, and whether the object is whole."""

    json: str
    rest: str
    is_whole: bool


class ParameterReader:
    """Reads the parameters of one call, from the name of the first on; there is at least one.

    types: of each parameter that is known. Text becomes certain letter by letter, other values when they have ended.
    """

    def __init__(self, form: ParameterFormat, types: Mapping[str, frozenset[str]]) -> None:
        self._form = form
        self._types = types
        self._lead = form.assign[len(form.assign.rstrip()) :]
        self._trail = form.value_end[: len(form.value_end) - len(form.value_marker)]
        self._value_types = ANY_TYPE
        self._held = ""
        self._made: list[str] = []
        self._is_whole = False
        self._is_first = True
        self._state: Callable[[], bool] = self._name

    def read(self, text: str) -> ReadParameters:
        """Take what is left of the last call with what came since."""
        self._held = text
        while not self._is_whole and self._state():
            pass
        made = "".join(self._made)
        self._made.clear()
        return ReadParameters(made, self._held, self._is_whole)

    def flush(self, text: str) -> str:
        """What the arguments' text still gets where the reply ends too early: the value that is held back."""
        if self._state == self._text:
            return _escaped(text)
        if self._state != self._value or not text:
            return ""
        return text if "string" not in self._value_types else f'"{_escaped(text)}'

    # Each state below consumes the buffered text, and returns whether to go on with what is left.

    def _name(self) -> bool:
        assign = self._form.assign
        place = -1
        while (place := self._held.find(assign.lstrip()[0], place + 1)) >= 0:
            length = match_length(self._held[place:], assign)
            if length is None:
                return False
            if length >= 0:
                return self._begin_value(self._held[:place].strip(), self._held[place + length :])
        return False

    def _begin_value(self, name: str, rest: str) -> bool:
        self._made.append("{" if self._is_first else ", ")
        self._made.append(f"{json.dumps(name, ensure_ascii=False)}: ")
        self._is_first = False
        self._value_types = self._types.get(name, ANY_TYPE)
        self._held = rest
        return self._go(self._before_value)

    def _before_value(self) -> bool:
        """Where the format may write a new line before the value."""
        if len(self._held) < len(self._lead) and self._lead.startswith(self._held):
            return False
        self._held = self._held.removeprefix(self._lead)
        if self._value_types != TEXT:
            return self._go(self._value)
        self._made.append('"')
        return self._go(self._text)

    def _text(self) -> bool:
        """Inside a string."""
        before, found, after = self._held.partition(self._form.value_marker)
        if found:
            self._made.append(_escaped(before.removesuffix(self._trail)) + '"')
            self._held = after
            return self._go(self._after_value)
        kept = len(self._held) - self._overlap()
        self._made.append(_escaped(self._held[:kept]))
        self._held = self._held[kept:]
        return False

    def _value(self) -> bool:
        """Inside another value, or one that may be."""
        before, found, after = self._held.partition(self._form.value_marker)
        if not found:
            return False
        self._made.append(json_value(before.removesuffix(self._trail), self._value_types))
        self._held = after
        return self._go(self._after_value)

    def _after_value(self) -> bool:
        if not self._held.strip():
            return False
        length = match_length(self._held, self._form.following)
        if length is None:
            return False
        if length >= 0:
            self._held = self._held[length:]
            return self._go(self._name)
        self._made.append("}")
        self._is_whole = True
        return True

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _overlap(self) -> int:
        """How many letters at the end may belong to what ends the value."""
        text, marker = self._held, self._form.value_marker
        for size in range(min(len(text), len(self._form.value_end) - 1), 0, -1):
            ending = text[-size:]
            if marker.startswith(ending) or self._form.value_end.startswith(ending):
                return size
        return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def match_length(text: str, literal: str) -> int | None:
    """How much of a text spells a literal, whatever white space either has; -1 if none does, None while it may yet."""
    place = 0
    for letter in literal:
        if letter.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text):
            return None
        if text[place] != letter:
            return -1
        place += 1
    return place
