"""The grammar of values in a notation of their own: strings between marks, names in objects perhaps without any."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localinfer.errors import ConstraintError
from localinfer.generation.chat.grammar_writer import ANY, NAME_BEFORE_COLON, GrammarWriter, escaped
from localinfer.generation.chat.value_grammar import ANNOTATIONS, LENGTHS, alternatives, whole_match
from localinfer.generation.chat.value_types import pointed_at, schema_types, type_of
from localinfer.generation.chat.written_calls import in_notation
from localinfer.models.text.reply_format import ParameterFormat

_KEYWORDS = {
    "string": frozenset((*LENGTHS, "pattern")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
"""What is enforced of a value of each type. Objects with properties have no others."""
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
        term = " & ".join([*(terms or [ANY]), f"~/(?s:.*){escaped(quote)}(?s:.*)/"])
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
