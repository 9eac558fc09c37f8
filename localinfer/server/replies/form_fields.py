"""Members of requests that hold a reply to a form, in the ways of several servers, and the constraint they become."""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.chat.constraints import Constraint, Grammar, JsonObject, JsonSchema, Regex
from localinfer.server.transport.http import ApiError

MAX_SCHEMA_BYTES = 256 << 10
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
"""Characters that mean something in a regular expression."""

Source = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Schema = dict[str, Any] | bool
Choices = Annotated[list[Source], Meta(min_length=1, max_length=10_000)]


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema with a name, as chat completions wrap it. What it asks for is always enforced, `strict` or not.

    name, description: for people; the model is held to the schema, and not shown it.
    """

    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a reply: any text, any JSON object, or JSON of a schema, which stands in its wrapper or beside."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None

    def constraint(self, path: str) -> Constraint | None:
        """The constraint that this form is, None for any text. Raises: ApiError."""
        schema = self.schema if self.json_schema is None else self.json_schema.schema
        if self.type == "json_schema" and schema is None:
            raise ApiError(400, f"{path} is of type json_schema and has no schema; add one", param=path)
        if self.type == "text":
            return None
        return JsonObject() if schema is None else _json_schema(schema, path)


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a reply as vLLM has it."""

    json: Schema | Source | None = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None


class FormFields(msgspec.Struct):
    """The ways to hold a reply to a form, of which at most one may be given.

    response_format: OpenAI's way. grammar, json_schema: llama.cpp's. structured_outputs and what begins with `guided`:
    vLLM's newer and older ways. Schemas may be JSON text too, where vLLM allows it.
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

    def constraint(self) -> Constraint | None:
        """What the reply must be, None for anything. Raises: ApiError."""
        outputs = self.structured_outputs or StructuredOutputs()
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
        )
        found = {path: form for path, value, make in forms if value is not None and (form := make(value, path))}
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


def _json_schema(schema: Schema | str, path: str) -> JsonSchema:
    size = len(schema.encode() if isinstance(schema, str) else msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise ApiError(
            400,
            f"the schema at {path} has {size:,} bytes; give one of at most {MAX_SCHEMA_BYTES:,}",
            code="unsupported_schema",
            param=path,
        )
    return JsonSchema(schema)
