"""Members of a request that say what form the reply must have, in the words of several APIs."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.constraint import Constraint, Grammar, JsonObject, JsonSchema, Regex
from localinfer.server.sampling_fields import SamplingFields
from localinfer.server.wire_errors import ApiError

MAX_SCHEMA_BYTES = 256 << 10
Source = Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_BYTES)]
Schema = dict[str, Any] | bool


class NamedSchema(msgspec.Struct):
    """A schema with a name, as chat completions wrap it. What it asks for is always enforced, `strict` or not."""

    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form of a reply: any text, any JSON object, or JSON of a schema, which stands in its wrapper or beside."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None

    def constraint(self, path: str) -> Constraint | None:
        """The constraint that this form is, None for any text. Raises: ApiError."""
        schema = self.schema if self.json_schema is None else self.json_schema.schema
        if self.type == "json_schema" and schema is None:
            raise ApiError(400, f"{path} is of type json_schema and has no schema; add one", param=path)
        if self.type == "text":
            return None
        return JsonObject() if schema is None else json_schema(schema, path)


class ConstraintFields(SamplingFields):
    """Sampling, and the ways to hold a reply to a form; at most one of them may be given."""

    response_format: ResponseFormat | None = None
    grammar: Source | None = None
    regex: Source | None = None
    json_schema: Schema | None = None

    def constraint(self) -> Constraint | None:
        """What the reply must be, None for anything. Raises: ApiError."""
        found: dict[str, Constraint] = {}
        if self.response_format is not None:
            constraint = self.response_format.constraint("response_format")
            if constraint is not None:
                found["response_format"] = constraint
        if self.grammar is not None:
            found["grammar"] = Grammar(self.grammar)
        if self.regex is not None:
            found["regex"] = Regex(self.regex)
        if self.json_schema is not None:
            found["json_schema"] = json_schema(self.json_schema, "json_schema")
        if len(found) > 1:
            names = " and ".join(found)
            raise ApiError(400, f"{names} were given, and a reply has one form; choose one", param=list(found)[1])
        return next(iter(found.values()), None)


def json_schema(schema: Schema, path: str) -> JsonSchema:
    """A schema as a constraint. Raises: ApiError if it is too large."""
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise ApiError(
            400,
            f"the schema at {path} has {size:,} bytes; give one of at most {MAX_SCHEMA_BYTES:,}",
            code="unsupported_schema",
            param=path,
        )
    return JsonSchema(schema)
