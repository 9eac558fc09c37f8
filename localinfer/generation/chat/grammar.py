"""The grammar of a whole reply: reasoning, then an answer that a constraint allows, or text with tool calls in it.

In llguidance's dialect of Lark: a rule marked `lazy` ends at the first position where it can, and `<[5]>` is the
control token with id 5, which no text can spell.

Arguments of calls are one JSON object, or stand one by one, each with its name, in the order of the schema, and
optional ones may be missing. Their values are text for strings and JSON for all else, as XML-like formats write them
(`TextValues`), or in a notation of their own, with strings between marks and perhaps unquoted names in objects
(`NotationValues`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from localinfer.errors import ConstraintError
from localinfer.generation.chat.constraints import ONE_LINE
from localinfer.generation.chat.custom_tools import CUSTOM_ARGUMENT, TextForm
from localinfer.generation.chat.grammar_writer import ANY, ANY_NAME, NAME_BEFORE_COLON, GrammarWriter, escaped, without
from localinfer.generation.chat.messages import Tool, in_notation
from localinfer.generation.chat.text_spelling import TextSpelling
from localinfer.generation.chat.value_types import MOST_STEPS, TEXT, pointed_at, schema_types, type_of
from localinfer.models.text.reply_format import (
    PARAMETER_NAME,
    TYPE_NAME,
    CallFormat,
    ParameterFormat,
    ReasoningFormat,
    first_marker,
)
from localinfer.models.text.tokenizer import SpellingFinder

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
    """Targets of a schema that is only a reference, or a choice of several; None for others."""
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
        return without(self._end.lstrip().partition(PARAMETER_NAME)[0])

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


_KEYWORDS = {
    "string": frozenset((*LENGTHS, "pattern")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
"""Keywords enforced for a value of each type. Objects with declared properties have no others."""
_DEFINITIONS = frozenset(("$defs", "definitions", "$schema"))
_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


class NotationValues:
    """Writes values with what stands around them, in a notation. rules: those that were written so far."""

    def __init__(self, writer: GrammarWriter, form: ParameterFormat, rule: str, options: Any, is_strict: bool) -> None:
        assert form.notation is not None, "the format has a notation"
        self.rules: list[str] = []
        self._writer = writer
        self._form = form
        self._notation = form.notation
        self._rule = rule
        self._options = options
        self._is_strict = is_strict
        self._known: dict[str, str] = {}

    def value(self, rule: str, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The name of a rule for a parameter's value of this schema, from behind the parameter's name on."""
        write = self._json if self._notation.is_json else self._value
        try:
            made = write(f"{rule}_of", schema, root)
        except ConstraintError:
            if self._is_strict:
                raise
            made = write(f"{rule}_any", {}, root)
        self.rules.append(f"{rule}: {self._writer.literal(self._form.assign)} {made}")
        return rule

    def _json(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        """A value as JSON, or as Python writes it where the two differ only in words and single quotes."""
        parts = alternatives(schema, root) if isinstance(schema, Mapping) else [{}]
        made = []
        for index, part in enumerate(parts):
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            self.rules.append(
                f"{rule}_{index}: %json {json.dumps({**part, **definitions, 'x-guidance': self._options})}"
            )
            made.append(f"{rule}_{index}")
            types = schema_types(part, root)
            values = part["enum"] if "enum" in part else [part["const"]] if "const" in part else None
            if values is not None:
                made += [json.dumps(repr(value)) for value in values if isinstance(value, str | bool | None)]
                continue
            made += [json.dumps(word) for kind in sorted(types & _PYTHON_WORDS.keys()) for word in _PYTHON_WORDS[kind]]
            if "string" in types and not part.keys() & {*LENGTHS, "pattern", "format"}:
                made.append("/'([^'\\\\\\n]|\\\\['\\\\n])*'/")
        self.rules.append(f"{rule}: {' | '.join(made)}")
        return rule

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        """A value in the notation; the rule's name, or a literal. Raises: ConstraintError naming a keyword."""
        if not isinstance(schema, Mapping):
            schema = {}
        if isinstance(pointer := schema.get("$ref"), str):
            return self._referred(pointer, schema, root)
        keywords = schema.keys() - ANNOTATIONS - _DEFINITIONS
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                self._check(keywords, {keyword})
                return self._one_of(rule, schema[keyword], root)
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
        if values is not None:
            self._check(keywords, {"enum", "const"})
            allowed = schema_types({"type": schema["type"]} if "type" in schema else {}, root)
            fitting = [
                value
                for value in values
                if type_of(value) in allowed or (type_of(value), "number") == ("integer", "number")
            ]
            literals = (self._writer.literal(in_notation(value, self._notation)) for value in fitting)
            self.rules.append(f"{rule}: {' | '.join(dict.fromkeys(literals))}")
            return rule
        types = schema.get("type")
        if types is None:
            implied = next((kind for kind, known in _KEYWORDS.items() if keywords and keywords <= known), None)
            if implied is None:
                self._check(keywords, frozenset())
                return self._any()
            types = implied
        if not isinstance(types, str):
            parts = [{**{key: schema[key] for key in schema.keys() & _known(one)}, "type": one} for one in types]
            self._check(keywords, frozenset().union(*map(_known, types)))
            return self._one_of(rule, parts, root)
        self._check(keywords, _known(types))
        return self._typed(rule, types, schema, root)

    def _typed(self, rule: str, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._string(rule, schema)
            case "array":
                items = self._value(f"{rule}_item", schema.get("items", {}), root)
                return self._array(rule, items, schema.get("minItems", 0), schema.get("maxItems"))
            case "object":
                return self._object(rule, schema, root)
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '("null" | "None")'
        part = {key: schema[key] for key in schema.keys() & {*_KEYWORDS["number"], "type"}}
        self.rules.append(f"{rule}: %json {json.dumps(part)}")
        return rule

    def _referred(self, pointer: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        self._check(schema.keys() - ANNOTATIONS - _DEFINITIONS, {"$ref"})
        if pointer not in self._known:
            self._known[pointer] = f"{self._rule}_ref_{len(self._known)}"
            made = self._value(f"{self._known[pointer]}_of", pointed_at(pointer, root), root)
            self.rules.append(f"{self._known[pointer]}: {made}")
        return self._known[pointer]

    def _one_of(self, rule: str, choices: Sequence[Any], root: Mapping[str, Any]) -> str:
        made = [self._value(f"{rule}_{index}", choice, root) for index, choice in enumerate(choices)]
        self.rules.append(f"{rule}: {' | '.join(dict.fromkeys(made))}")
        return rule

    def _string(self, rule: str, schema: Mapping[str, Any]) -> str:
        quote = self._notation.quotes[0]
        terms = []
        if not schema.keys().isdisjoint(LENGTHS):
            terms.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        if "pattern" in schema:
            terms.append(f"/{whole_match(schema['pattern'])}/")
        if not terms and rule != f"{self._rule}_string":
            return self._once(f"{self._rule}_string", lambda name: self._string(name, {}))
        terminal = rule.upper()
        inner = f"{rule}_inner"
        term = " & ".join([*(terms or [ANY]), without(quote)])
        self.rules += [f"{rule}: {self._writer.literal(quote)} {inner}", f"{terminal}: {term}"]
        self.rules += self._writer.until(inner, terminal, quote)
        return rule

    def _array(self, rule: str, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[]"'
        more = f"({self._writer.literal(self._notation.item)} {item})"
        bounds = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        if most == 1:
            more, bounds = "", ""
        empty = ' | "[]"' if least == 0 else ""
        self.rules.append(f'{rule}: "[" {item} {more}{bounds} "]"{empty}')
        return rule

    def _object(self, rule: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties", True)
        required = schema.get("required") or ()
        for name in required:
            if name not in properties:
                raise ConstraintError(f"'required' names {name!r}, which has no schema; add one", keyword="required")
        if not properties:
            if extra is False:
                return '"{}"'
            return self._map(rule, self._value(f"{rule}_item", extra if isinstance(extra, Mapping) else {}, root))
        rules = [f'{rule}: "{{" {rule}_first_0']
        for index, (name, of_property) in enumerate(properties.items()):
            value = self._value(f"{rule}_value_{index}", of_property, root)
            for start, between in (("first", ""), ("rest", self._notation.item)):
                missing = "" if name in required else f" | {rule}_{start}_{index + 1}"
                key = self._writer.literal(between + self._key(name))
                rules.append(f"{rule}_{start}_{index}: {key} {value} {rule}_rest_{index + 1}{missing}")
        last = len(properties)
        self.rules += [*rules, f'{rule}_first_{last}: "}}"', f'{rule}_rest_{last}: "}}"']
        return rule

    def _map(self, rule: str, value: str) -> str:
        """An object of any names."""
        quote = "" if self._notation.has_bare_keys else self._notation.quotes[0]
        mark = self._writer.literal(quote)
        one = f"{mark} {rule}_name {mark} {self._writer.literal(self._notation.key)} {value}"
        more = f"({self._writer.literal(self._notation.item)} {one})*"
        self.rules += [f'{rule}: "{{" ({one} {more})? "}}"', f"{rule}_name: {NAME_BEFORE_COLON}"]
        return rule

    def _any(self) -> str:
        """Any value."""
        return self._once(f"{self._rule}_any", self._write_any)

    def _write_any(self, rule: str) -> str:
        text = self._string(f"{rule}_string", {})
        self._map(f"{rule}_object", rule)
        self._array(f"{rule}_array", rule, 0, None)
        number = f"{rule}_number: %json {json.dumps({'type': 'number'})}"
        words = '"true" | "false" | "null" | "None"'
        self.rules += [number, f"{rule}: {text} | {rule}_object | {rule}_array | {rule}_number | {words}"]
        return rule

    def _once(self, rule: str, write: Any) -> str:
        if rule not in self._known:
            self._known[rule] = rule
            write(rule)
        return rule

    def _key(self, name: str) -> str:
        quote = "" if self._notation.has_bare_keys else self._notation.quotes[0]
        return f"{quote}{name}{quote}{self._notation.key}"

    def _check(self, keywords: Any, known: Any) -> None:
        for keyword in sorted(set(keywords) - set(known) - {"type"}):
            raise ConstraintError(
                f"{keyword!r} cannot be enforced in the notation that this model writes; leave it out", keyword=keyword
            )


def _known(kind: str) -> frozenset[str]:
    return _KEYWORDS.get("number" if kind == "integer" else kind, frozenset())


_PARAMETERS = frozenset(
    "type properties required additionalProperties $defs definitions $schema title description".split()
)


def parameter_rules(writer: GrammarWriter, calls: CallFormat, tool: Tool, rule: str, options: Any) -> list[str]:
    """Rules, the first named `rule`, for a call of a tool from its name to its end.

    options: llguidance's, for JSON. Raises: ConstraintError where a schema cannot be enforced, naming the keyword.
    """
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    is_strict = bool(tool.description["function"].get("strict"))
    written = (TextValues if form.notation is None else NotationValues)(writer, form, rule, options, is_strict)
    schema = tool.parameters or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for keyword in sorted(schema.keys() - _PARAMETERS):
        raise ConstraintError(
            f"{keyword!r} beside the parameters' names cannot be enforced; leave it out", keyword=keyword
        )
    required = schema.get("required") or ()
    for name in required:
        if name not in properties:
            raise ConstraintError(f"'required' names {name!r}, which has no schema; add one", keyword="required")
    if not properties or tool.parameters is None:
        return [*_any_parameters(writer, calls, tool, rule, written, schema), *written.rules]
    rules = [f"{rule}: {writer.literal(tool.name)} {rule}_first_0"]
    for index, (name, of_property) in enumerate(properties.items()):
        value = written.value(f"{rule}_value_{index}", name, of_property, schema)
        more = f"{rule}_rest_{index + 1}"
        may_miss = name not in required
        for start, between in (("first", calls.middle), ("rest", form.following)):
            taken = f"{writer.literal(between + name)} {value} {more}"
            missing = f" | {rule}_{start}_{index + 1}" if may_miss else ""
            rules.append(f"{rule}_{start}_{index}: {taken}{missing}")
    last = len(properties)
    first, rest = writer.literal(form.empty), writer.literal(calls.end)
    if (extra := schema.get("additionalProperties", False)) is not False:
        rules += _others(writer, calls, rule, written, extra, schema, besides=properties)
        first, rest = f"{rule}_other {rest} | {first}", f"{rule}_further* {rest}"
    rules += [f"{rule}_first_{last}: {first}", f"{rule}_rest_{last}: {rest}"]
    return rules + written.rules


def text_rule(
    writer: GrammarWriter, calls: CallFormat, tool: Tool, form: TextForm, rule: str, text: str
) -> tuple[str, list[str]]:
    """The rule of a custom tool's call, from its name to its end, and the grammar of its text and what ends that.

    text: the name of the grammar. Raises: ConstraintError.
    """
    parameters = calls.parameters
    if parameters is None:
        head, tail, spelling = f'{{"{CUSTOM_ARGUMENT}": "', '"}', TextSpelling(is_json=True)
    else:
        head = f"{CUSTOM_ARGUMENT}{parameters.assign}"
        if parameters.notation is None:
            tail = parameters.named(parameters.value_end, CUSTOM_ARGUMENT)
            spelling = TextSpelling(is_json=False, end=tail.lstrip())
        else:
            tail = parameters.notation.quotes[0]
            head += tail
            spelling = TextSpelling(is_json=parameters.notation.is_json, end=tail)
    spelled = form.grammar().spelled(spelling)
    if spelled.is_word and not spelling.is_json:
        begin = writer.until("start", spelled.start, tail)
    else:
        begin = [f"start: {spelled.start} {writer.literal(tail)}"]
    before, behind = writer.literal(tool.name + calls.middle + head), writer.literal(calls.end)
    return f"{rule}: {before} @{text} {behind}", ["%llguidance {}", *begin, *spelled.rules]


def _any_parameters(
    writer: GrammarWriter,
    calls: CallFormat,
    tool: Tool,
    rule: str,
    written: TextValues | NotationValues,
    schema: Mapping[str, Any],
) -> list[str]:
    """A call with parameters of any names."""
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    extra = schema.get("additionalProperties", True)
    name, end = writer.literal(tool.name), writer.literal(calls.end)
    if extra is False:
        return [f"{rule}: {name} {writer.literal(form.empty)}"]
    others = _others(writer, calls, rule, written, extra, schema)
    return [f"{rule}: {name} ({rule}_other {end} | {writer.literal(form.empty)})", *others]


def _others(
    writer: GrammarWriter,
    calls: CallFormat,
    rule: str,
    written: TextValues | NotationValues,
    extra: object,
    schema: Mapping[str, Any],
    besides: Iterable[str] = (),
) -> list[str]:
    """Rules `RULE_other` for parameters of any names but some, from behind the call's name on, and `RULE_further` for
    one behind others. extra: the schema of their values."""
    form = calls.parameters
    assert form is not None, "the format writes parameters one by one"
    value = written.value(f"{rule}_value", PARAMETER_NAME, extra if isinstance(extra, Mapping) else {}, schema)
    any_name = NAME_BEFORE_COLON if form.assign.startswith(":") else ANY_NAME
    return [
        f"{rule}_other: {rule}_name {value} {rule}_further*",
        f"{rule}_further: {rule}_next {value}",
        *writer.naming(f"{rule}_name", calls.middle, any_name, besides),
        *writer.naming(f"{rule}_next", form.following, any_name, besides),
    ]


ReasoningState = Literal["open", "possible", "none"]
"""open: the prompt ends inside the reasoning. possible: the reply may begin with it. none: it has none."""


def reply_grammar(
    *,
    reasoning: ReasoningFormat | None,
    state: ReasoningState,
    calls: CallFormat | None,
    tools: Sequence[Tool],
    must_call: bool,
    is_parallel: bool,
    answer: str | None,
    specials: SpellingFinder,
    calls_in_reasoning: bool = False,
) -> str | None:
    """The grammar in llguidance's form, or None where everything is allowed.

    answer: the grammar outside of reasoning and calls, from `constraint_compiler.grammar_of`; None allows any
    text. calls: None where the prompt has no tools; where it has some, but `tools` are none, no call may be written.
    specials: the spellings of control tokens. calls_in_reasoning: a call may also end the reasoning.
    Raises: ConstraintError for a tool whose parameters cannot be enforced where they stand one by one.
    """
    if calls is None and answer is None:
        return None
    writer = GrammarWriter(specials)
    frame = reasoning if reasoning is not None and reasoning.answer_begin else None
    called = calls if tools and calls_in_reasoning and frame is None else None
    rules = [*_reasoning_rules(writer, reasoning, state, called)]
    not_text = []
    if state == "possible" and reasoning is not None:
        not_text.append(reasoning.begin)
    options = []
    nowhere = []
    texts: list[dict[str, Any]] = []
    if calls is not None and not tools:
        nowhere.append(calls.opening + calls.begin)
        not_text.append(calls.opening + calls.begin)
    elif calls is not None:
        rules += _call_rules(writer, calls, tools, is_parallel, texts)
        if must_call or answer is not None:
            options.append("section")
        elif frame is not None:
            between = frame.end + frame.following if frame.following else frame.answer_end
            alone = "" if frame.following else " | head preamble"
            rules += [f"text_and_calls: (head preamble)? section{alone}", *writer.until("preamble", "TEXT", between)]
            options.append("text_and_calls")
        elif not calls.trigger:
            options += ["section", *(f"{writer.literal(begin)} first_call" for begin in calls.other_begins)]
            not_text += calls.other_begins
        else:
            rules += _calls_behind(writer, "text_and_calls", "TEXT", calls)
            options.append("text_and_calls")
        if not calls.trigger:
            not_text.append(calls.opening + calls.begin)
    end = f"({writer.literal(frame.answer_end)})?" if frame is not None and frame.answer_end else ""
    if answer is not None:
        options.append("@answer" if frame is None else f"{writer.literal(frame.answer_begin)} @answer {end}")
    elif not must_call:
        options.append("TEXT" if frame is None else f"head TEXT {end}")
    if frame is not None:
        rules.append(f"head: {' | '.join(map(writer.literal, (frame.answer_begin, *frame.other_answers)))}")
    rules += [f"reply: {' | '.join(options)}", r"GAP: /[ \t\r\n]{0,8}/"]
    exclusions = "".join(rf" & ~/\s*{escaped(text)}(?s:.*)/" for text in not_text)
    exclusions += "".join(rf" & ~/(?s:.*){_spaced(text)}(?s:.*)/" for text in nowhere if first_marker(text))
    # A call right behind the marker that opens reasoning is none of its text.
    called_first = "" if called is None else rf" & ~/\s*{escaped(called.opening + called.begin)}(?s:.*)/"
    rules += [f"TEXT: {ANY}{exclusions}", f"THOUGHT: {ANY}{called_first}", *writer.terminals]
    grammars: list[dict[str, Any]] = [{"name": "reply", "lark_grammar": "\n".join(["%llguidance {}", *rules, ""])}]
    if answer is not None:
        grammars.append({**json.loads(answer)["grammars"][0], "name": "answer"})
    return json.dumps({"grammars": grammars + texts})


def _reasoning_rules(
    writer: GrammarWriter, reasoning: ReasoningFormat | None, state: ReasoningState, calls: CallFormat | None
) -> list[str]:
    """Rules, the first named `start`; calls: the format of those that may also end the reasoning."""
    if reasoning is None or state == "none":
        return ["start: reply"]
    rules = writer.until("thought", "THOUGHT", reasoning.end)
    behind = f"thought GAP {writer.literal(reasoning.following)} reply"
    if calls is not None and calls.trigger:
        rules += _calls_behind(writer, "thought_and_calls", "THOUGHT", calls, is_about_calls=True)
        behind = f"({behind} | thought_and_calls | GAP section)"
    if state == "open":
        return [f"start: {behind}", *rules]
    return [f"start: GAP {writer.literal(reasoning.begin)} {behind} | reply", *rules]


def _calls_behind(
    writer: GrammarWriter, rule: str, text: str, calls: CallFormat, *, is_about_calls: bool = False
) -> list[str]:
    """Rules, the first named `rule`, for calls behind a text, which ends where the first of them begins.

    is_about_calls: the text may have the marker that calls begin with, unless that is a control token, but no more.
    """
    made, choices = [], []
    for index, begin in enumerate((calls.opening + calls.begin, *calls.late_begins)):
        marker = first_marker(begin)
        head = begin if is_about_calls and not writer.is_control(marker) else marker
        made += writer.until(f"{rule}_{index}", text, head)
        rest = writer.literal(begin[len(head) :])
        choices.append(f"{rule}_{index} {rest} {'late_call' if index else 'first_call'}")
    return [f"{rule}: {' | '.join(choices)}", *made]


def _call_rules(
    writer: GrammarWriter,
    calls: CallFormat,
    tools: Sequence[Tool],
    is_parallel: bool,
    texts: list[dict[str, Any]],
) -> list[str]:
    """Rules of calls, the first named `call`. texts: gets the grammars of the texts of custom tools."""
    rules = [f"call: {' | '.join(f'tool_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        form = calls.for_tool(tool.name)
        if tool.form is not None:
            made, lines = text_rule(writer, form, tool, tool.form, f"tool_{index}", f"text_{index}")
            rules.append(made)
            texts.append({"name": f"text_{index}", "lark_grammar": "\n".join([*lines, ""])})
            continue
        if form.parameters is not None:
            rules += parameter_rules(writer, form, tool, f"tool_{index}", ONE_LINE)
            continue
        arguments, end = json.dumps(_arguments_schema(tool.parameters)), writer.literal(form.end)
        rules.append(f"tool_{index}: {writer.literal(tool.name + form.middle)} %json {arguments} {end}")
    more = ""
    if is_parallel and calls.separator is not None:
        more = f" ({writer.literal(calls.separator + calls.begin)} call)*"
    closing = writer.literal(calls.closing)
    rules.append(f"first_call: call{more} {closing}")
    rules.append(f"late_call: call{more}" + (f" ({closing})?" if closing else ""))
    rules.append(f"section: {writer.literal(calls.opening + calls.begin)} first_call")
    return rules


def _spaced(text: str) -> str:
    """A text as a regular expression, whatever white space is in it."""
    return r"\s*".join(map(escaped, text.split()))


def _arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**({"type": "object"} if parameters is None else parameters), "x-guidance": ONE_LINE}
