"""Answers as values of a type that the caller names: its JSON schema, and the JSON of an answer read as that type.

msgspec makes schemas of dataclasses, TypedDicts, its own Structs and plain types, and reads them; what holds a pydantic
model is pydantic's to describe and to read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints, is_typeddict

from localinfer.arguments import shown
from localinfer.errors import AnswerError, ConstraintError, RequestError
from localinfer.generation.options import Constraint, JsonSchema
from localinfer.system.extras import require

_BARE = (dict, list, tuple, set, frozenset)
_KINDS = "a dataclass, a TypedDict, a msgspec Struct, a pydantic model, or a plain type such as list[str] or Literal"


class AnswerType:
    """A type, the JSON schema of its values, and how they are read.

    name: as errors call it. schema: objects take no members but those of the type. Raises: RequestError for what is no
    type of JSON values.
    """

    def __init__(self, answer_type: Any) -> None:
        if answer_type in _BARE:
            raise RequestError(
                f"type is {answer_type.__name__}, which says nothing of what is in it; "
                "give its parts too, such as list[str] or dict[str, int], or a dataclass"
            )
        self.type = answer_type
        self.name = getattr(answer_type, "__name__", None) or str(answer_type)
        self._read: Callable[[str], Any]
        self.schema: dict[str, Any] = self._use_pydantic() if has_pydantic(answer_type) else self._use_msgspec()
        _close_objects(self.schema)

    def constraint(self) -> JsonSchema:
        """Constraint of an answer."""
        return JsonSchema(self.schema)

    def check(self, check_constraint: Callable[[Constraint], None]) -> None:
        """Have the schema compiled. Raises: ConstraintError naming the field of the type that cannot be enforced."""
        try:
            check_constraint(self.constraint())
        except ConstraintError as error:
            field = self._refused_field(check_constraint)
            about = self.name if field is None else f"{self.name}, field {field!r},"
            raise ConstraintError(
                f"answers of type {about} cannot be enforced: {error}", keyword=error.keyword, field=field
            ) from None

    def read(self, text: str) -> Any:
        """The value that a JSON text stands for. Raises: ValueError with what is wrong."""
        return self._read(text)

    def read_answer(self, text: str, finish_reason: str) -> Any:
        """The value of a reply. Raises: AnswerError with its text, if it was cut short or is not of the type."""
        if finish_reason != "stop":
            why, way_out = _CUTS.get(finish_reason, _CUTS["cancelled"])
            raise AnswerError(f"the answer, a {self.name}, {why}; {way_out}", text=text, finish_reason=finish_reason)
        try:
            return self.read(text)
        except ValueError as error:
            raise AnswerError(
                f"the answer is no {self.name}: {error}; ask again, or for a type that its schema says more of",
                text=text,
                finish_reason=finish_reason,
            ) from None

    def _use_msgspec(self) -> dict[str, Any]:
        require("tools", "a typed answer or a Python function as a tool")
        import msgspec

        decoder = None
        try:
            schema = msgspec.json.schema(self.type)
            decoder = msgspec.json.Decoder(self.type)
            order = dict(_typed_dict_orders(msgspec.inspect.type_info(self.type)))
        except (TypeError, NameError, ValueError) as error:
            why = str(error).strip().rpartition("\n")[2]
            raise RequestError(
                f"type is {shown(self.type)}, which JSON cannot be read as: {why}; give {_KINDS}"
            ) from None
        self._read = decoder.decode
        # Members are written in the schema's order, and msgspec sorts those of TypedDicts.
        for name, names in order.items():
            properties = schema.get("$defs", {}).get(name, schema).get("properties", {})
            if properties.keys() == set(names):
                reorder(properties, names)
        return schema

    def _use_pydantic(self) -> dict[str, Any]:
        import pydantic

        try:
            adapter = pydantic.TypeAdapter(self.type)
            schema = adapter.json_schema()
        except (pydantic.errors.PydanticUserError, TypeError, NameError) as error:
            why = str(error).strip().rpartition("\n")[2]
            raise RequestError(
                f"type is {shown(self.type)}, which JSON cannot be read as: {why}; give {_KINDS}"
            ) from None
        self._read = adapter.validate_json
        return schema

    def _refused_field(self, check_constraint: Callable[[Constraint], None]) -> str | None:
        """The innermost field whose schema cannot be enforced by itself."""
        definitions = self.schema.get("$defs", {})

        def refused(part: Mapping[str, Any]) -> bool:
            # Definitions are checked whether they are referred to or not.
            needed = {name: definitions[name] for name in _references(part, definitions)}
            try:
                check_constraint(JsonSchema({**part, "$defs": needed}))
            except ConstraintError:
                return True
            return False

        found: str | None = None
        node = _resolved(self.schema, definitions)
        seen: set[int] = set()
        while id(node) not in seen:
            seen.add(id(node))
            for name, part in _parts(node):
                if refused(part):
                    found = ".".join(filter(None, (found, name)))
                    node = _resolved(part, definitions)
                    break
        return found


_CUTS = {
    "length": ("was cut at max_tokens or the end of the context", "allow more tokens, or shorten the session"),
    "tool_calls": ("is still to come: the model called tools that the caller runs", "ask again with their results"),
    "cancelled": ("was cancelled", "ask again"),
}


def has_pydantic(answer_type: Any, depth: int = 8) -> bool:
    """True if a type is or contains one that only pydantic can read."""
    if hasattr(answer_type, "__pydantic_core_schema__") or hasattr(answer_type, "__pydantic_validator__"):
        return True
    if not depth:
        return False
    parts = list(get_args(answer_type))
    if isinstance(answer_type, type) and (is_typeddict(answer_type) or hasattr(answer_type, "__dataclass_fields__")):
        try:
            parts += get_type_hints(answer_type, include_extras=True).values()
        except NameError:
            return False
    return any(has_pydantic(part, depth - 1) for part in parts if part is not answer_type)


def _close_objects(node: Any) -> None:
    """Let objects have no members but their properties, where a schema leaves that open."""
    if isinstance(node, dict):
        if node.get("type") == "object" and "properties" in node:
            node.setdefault("additionalProperties", False)
        for name, part in node.items():
            # What looks like a schema in these is a value.
            if name not in ("default", "const", "enum", "examples"):
                _close_objects(part)
    elif isinstance(node, list):
        for part in node:
            _close_objects(part)


def _typed_dict_orders(info: Any, seen: set[int] | None = None) -> Iterator[tuple[str, list[str]]]:
    """The names of TypedDicts in a type, as msgspec describes it, each with those of its members in order."""
    import msgspec

    seen = set() if seen is None else seen
    if isinstance(info, list | tuple):
        for part in info:
            yield from _typed_dict_orders(part, seen)
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field) and id(info) not in seen:
        seen.add(id(info))
        if isinstance(info, msgspec.inspect.TypedDictType):
            yield info.cls.__name__, list(get_type_hints(info.cls))
        for name in info.__struct_fields__:
            yield from _typed_dict_orders(getattr(info, name), seen)


def reorder(properties: dict[str, Any], names: Iterable[str]) -> None:
    """Bring the members of an object's schema into this order, in which they are written."""
    for name in names:
        properties[name] = properties.pop(name)


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema, or the definition that it refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return definitions.get(reference.rpartition("/")[2], schema) if isinstance(reference, str) else schema


def _references(node: Any, definitions: Mapping[str, Any]) -> set[str]:
    """The names of the definitions that a schema refers to, at every level."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name in definitions and name not in found:
                found.add(name)
                waiting.append(definitions[name])
    return found


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly in a schema, each with the name of its field; "" for those that have none."""
    if not isinstance(node, dict):
        return
    yield from node.get("properties", {}).items()
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield "", node[keyword]
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for part in node.get(keyword, []):
            yield "", part
