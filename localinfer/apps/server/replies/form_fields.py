"""Members of requests that hold a reply to a form, in the ways of several servers, and the constraint they become."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.transport.http import ApiError, check_object, unsupported
from localinfer.apps.server.transport.known_fields import FORMS
from localinfer.generation.chat.constraints import Constraint, Grammar, JsonObject, JsonSchema, Regex, StructuralTag

MAX_SCHEMA_BYTES = 256 << 10
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
"""Characters that mean something in a regular expression."""

Source = Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES)]
"""Text that defines a form; empty, it asks for nothing."""
Schema = dict[str, Any] | bool
_Choice = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Choices = Annotated[list[_Choice], Meta(min_length=1, max_length=10_000)]
_WRAPPED = frozenset(("name", "description", "strict", "schema"))


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a reply. What it asks for is always enforced, but for what cannot be: with `strict` that is refused,
    without it told in notices.

    json_schema, schema, value: a schema in a wrapper with a name, as chat completions have it, or alone, or beside the
    type. pattern, value: of regex. structures, triggers, format: of structural_tag. name, description: for people; the
    model is held to the schema, and not shown it.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar", "structural_tag"]
    json_schema: Schema | None = None
    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None
    pattern: Source | None = None
    regex: Source | None = None
    grammar: Source | None = None
    value: Schema | Source | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def constraint(self, path: str) -> Constraint | None:
        """The constraint that this form is, None for any text. Raises: ApiError."""
        match self.type:
            case "text":
                return None
            case "regex":
                return Regex(self._text(path, pattern=self.pattern, regex=self.regex, value=self.value))
            case "grammar":
                return Grammar(self._text(path, grammar=self.grammar, value=self.value))
            case "structural_tag":
                older = {"structures": self.structures, "triggers": self.triggers}
                return StructuralTag(older if self.format is None else {"format": self.format})
        schema = self._schema(path)
        if self.type == "json_schema" and schema is None:
            raise ApiError(400, f"{path} is of type json_schema and has no schema; add one", param=path)
        wrapped = self.json_schema if isinstance(self.json_schema, dict) else {}
        is_strict = self.strict is True or wrapped.get("strict") is True
        return JsonObject() if schema is None else _json_schema(schema, path, is_strict=is_strict)

    def _schema(self, path: str) -> Schema | str | None:
        found = self.json_schema
        if isinstance(found, dict) and (found.keys() <= _WRAPPED or isinstance(found.get("schema"), dict)):
            check_object(found, " ".join(_WRAPPED), f"{path}.json_schema", {})
            found = found.get("schema")
        return next((one for one in (found, self.schema, self.value) if one is not None), None)

    def _text(self, path: str, **members: object) -> str:
        """The only member that has text. Raises: ApiError."""
        found = [text for text in members.values() if isinstance(text, str) and text]
        if len(found) != 1:
            raise ApiError(400, f"{path} is of type {self.type}; give {' or '.join(members)} as text", param=path)
        return found[0]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a reply as vLLM has it.

    disable_any_whitespace, disable_additional_properties, disable_fallback: JSON is on one line, objects take the
    members that their schema names, and nothing but the form is tried, whatever these say.
    """

    known_fields: ClassVar = FORMS

    json: Schema | Source | None = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | Source | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: Source | None = None


class FormFields(msgspec.Struct):
    """The ways to hold a reply to a form, of which at most one may be given.

    response_format: OpenAI's way. grammar, json_schema: llama.cpp's. structured_outputs and what begins with `guided`:
    vLLM's newer and older ways, and structural_tag. Schemas may be JSON text too, where vLLM allows it.
    """

    response_format: ResponseFormat | None = None
    grammar: Source | None = None
    regex: Source | None = None
    json_schema: Schema | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    structural_tag: dict[str, Any] | Source | None = None

    def constraint(self) -> Constraint | None:
        """What the reply must be, None for anything. Raises: ApiError."""
        outputs = self.structured_outputs or StructuredOutputs()
        if outputs.whitespace_pattern:
            path = "structured_outputs.whitespace_pattern"
            raise unsupported(f"{path} cannot be had: JSON comes on one line; lay it out in the client", path)
        forms: tuple[tuple[str, Any, Callable[[Any, str], Constraint | None]], ...] = (
            ("response_format", self.response_format, ResponseFormat.constraint),
            ("grammar", self.grammar, _grammar),
            ("regex", self.regex, _regex),
            ("json_schema", self.json_schema, _json_schema),
            ("guided_json", self.guided_json, _json_schema),
            ("guided_regex", self.guided_regex, _regex),
            ("guided_choice", self.guided_choice, _choice),
            ("guided_grammar", self.guided_grammar, _grammar),
            ("structured_outputs.json", outputs.json, _json_schema),
            ("structured_outputs.regex", outputs.regex, _regex),
            ("structured_outputs.choice", outputs.choice, _choice),
            ("structured_outputs.grammar", outputs.grammar, _grammar),
            ("structured_outputs.json_object", outputs.json_object or None, lambda value, path: JsonObject()),
            ("structured_outputs.structural_tag", outputs.structural_tag, _structural_tag),
            ("structural_tag", self.structural_tag, _structural_tag),
        )
        found = {
            path: form
            for path, value, make in forms
            if value is not None and value != "" and (form := make(value, path))
        }
        if len(found) > 1:
            names = " and ".join(found)
            raise ApiError(400, f"{names} were given, and a reply has one form; choose one", param=list(found)[1])
        return next(iter(found.values()), None)


def _grammar(text: str, path: str) -> Grammar:
    return Grammar(text)


def _regex(pattern: str, path: str) -> Regex:
    return Regex(pattern)


def _choice(texts: Sequence[str], path: str) -> Regex:
    """One of several texts, to the letter."""
    return Regex("|".join(_SYNTAX.sub(r"\\\g<0>", text) for text in texts))


def _structural_tag(tag: dict[str, Any] | str, path: str) -> StructuralTag:
    return StructuralTag(tag)


def _json_schema(schema: Schema | str, path: str, *, is_strict: bool = False) -> JsonSchema:
    size = len(schema.encode() if isinstance(schema, str) else msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise ApiError(
            400,
            f"the schema at {path} has {size:,} bytes; give one of at most {MAX_SCHEMA_BYTES:,}",
            code="unsupported_schema",
            param=path,
        )
    return JsonSchema(schema, strict=is_strict)
