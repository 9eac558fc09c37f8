"""Python functions as tools: their JSON schema, the check of arguments that a model gives, and the outcome of a call.

Descriptions are read from docstrings in the styles of Google ("Args:"), NumPy ("Parameters" underlined) and Sphinx
(":param name:").
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from localinfer.arguments import check_callable, owned, shown
from localinfer.errors import RequestError
from localinfer.generation.session.typed_answers import AnswerType, has_pydantic, reorder
from localinfer.generation.stream import ToolCall
from localinfer.system.extras import require

if TYPE_CHECKING:
    import asyncio


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
_SECTION = re.compile(r"[A-Z][A-Za-z ]{2,30}:")
_PARAMETERS = ("Args:", "Arguments:", "Parameters:", "Params:")
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?")
_SPHINX = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_FIELD = re.compile(r":[a-z]+[^:]*:")


@dataclass(frozen=True)
class Docstring:
    """summary: the first sentence, on one line. parameters: what is said of each, on one line, by name."""

    summary: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Docstring:
    """Read a docstring; sections that it lacks are empty."""
    lines = cleandoc(text or "").splitlines()
    first: list[str] = []
    for index, line in enumerate(lines):
        if not line.strip() or _begins_section(lines, index) or _FIELD.match(line):
            break
        first.append(line.strip())
    summary = _SENTENCE_END.split(" ".join(first), maxsplit=1)[0]
    found = {**_google(lines), **_numpy(lines), **_sphinx(lines)}
    return Docstring(summary, {name: " ".join(text.split()) for name, text in found.items() if text.strip()})


def _begins_section(lines: list[str], index: int) -> bool:
    is_underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]) is not None
    return is_underlined or _SECTION.fullmatch(lines[index].strip()) is not None


def _google(lines: list[str]) -> dict[str, str]:
    starts = [index for index, line in enumerate(lines) if line.rstrip() in _PARAMETERS]
    return _entries(_indented(lines[starts[0] + 1 :]), _GOOGLE) if starts else {}


def _sphinx(lines: list[str]) -> dict[str, str]:
    return _entries(iter(lines), _SPHINX)


def _numpy(lines: list[str]) -> dict[str, str]:
    starts = [i for i, line in enumerate(lines) if line.strip() == "Parameters" and _begins_section(lines, i)]
    found: dict[str, str] = {}
    names: list[str] = []
    for index in range(starts[0] + 2 if starts else len(lines), len(lines)):
        line = lines[index]
        if _begins_section(lines, index):
            break
        if line.strip() and not line[0].isspace():
            head = _NUMPY.fullmatch(line.rstrip())
            names = [] if head is None else re.split(r"\s*,\s*", head[1])
        else:
            found |= {name: f"{found.get(name, '')} {line}" for name in names}
    return found


def _indented(lines: list[str]) -> Iterator[str]:
    """The lines of a section, without what is indented on every line of it."""
    first = next((line for line in lines if line.strip()), "")
    indent = len(first) - len(first.lstrip())
    for line in lines:
        if line.strip() and not line[0].isspace():
            return
        yield line[indent:]


def _entries(lines: Iterator[str], head: re.Pattern[str]) -> dict[str, str]:
    """Entries that begin with `head` at the margin; lines that are further in continue them, an empty one ends them."""
    found: dict[str, str] = {}
    name = None
    for line in lines:
        begin = head.match(line)
        if begin is not None:
            name = begin[1]
            found[name] = begin[2]
        elif name is not None and line[:1].isspace() and line.strip():
            found[name] += f" {line}"
        else:
            name = None
    return found


REFUSED = "The user refused this call."
"""Text for the model in place of the result of a refused call."""

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function, or a tool in OpenAI's shape, whose calls the caller runs."""


@dataclass(frozen=True)
class RequestedCall:
    """A call that the model makes; arguments: as JSON values, empty where they are no JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CallOutcome:
    """A call that was made; result: what the model reads. error: what the function raised, or the arguments lacked."""

    call: RequestedCall
    result: str
    error: Exception | None
    seconds: float


class PythonTool:
    """A function that the model may call.

    description: in OpenAI's shape. Parameters need names and are best annotated; their text, and the function's, are
    its docstring's. Raises: RequestError for a function that no schema describes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", "")
        if not name.isidentifier():
            raise RequestError(f"tool {shown(function)} has no name that a model could call; define it with def")
        require("tools", f"the function {name!r} as a tool")
        self.name = name
        self._function = function
        said = read_docstring(inspect.getdoc(function))
        fields = _fields(function, name)
        self._answer_type = AnswerType(_record(name, fields))
        parameters = _inlined(self._answer_type.schema)
        properties = parameters.setdefault("properties", {})
        reorder(properties, fields)
        for parameter, (annotation, default) in fields.items():
            properties[parameter].pop("title", None)
            if text := said.parameters.get(parameter) or _annotated_text(annotation):
                properties[parameter].setdefault("description", text)
            if type(default) in (str, int, float, bool):
                properties[parameter]["default"] = default
            else:
                properties[parameter].pop("default", None)
        described = {"description": said.summary} if said.summary else {}
        self.description = {"type": "function", "function": {"name": name, **described, "parameters": parameters}}

    def read_arguments(self, text: str) -> dict[str, Any]:
        """The arguments that a JSON object holds, as the parameters' types. Raises: ValueError with what is wrong."""
        return _given(self._answer_type.read(text))

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function. Raises: what it raises."""
        return self._function(**arguments)


class ToolBox:
    """The tools of a session: their description for the model, and calls of those that are functions.

    on_call: asked before each: True or None has it run, False refuses it, and anything else is its result.
    on_result: called with each result. What these raise goes to the caller; the model gets what a function raises.
    """

    def __init__(
        self,
        tools: Sequence[Tool] | None,
        *,
        on_call: Callable[[RequestedCall], Any] | None = None,
        on_result: Callable[[CallOutcome], Any] | None = None,
    ) -> None:
        check_callable("on_tool_call", on_call)
        check_callable("on_tool_result", on_result)
        if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str)):
            raise RequestError(f"tools are {shown(tools)}; give a list of functions, or of tools in OpenAI's shape")
        self.descriptions: list[Mapping[str, Any]] = []
        self._functions: dict[str, PythonTool] = {}
        for tool in tools or ():
            if isinstance(tool, Mapping):
                self.descriptions.append(owned(tool))
                continue
            if not callable(tool):
                raise RequestError(f"a tool is {shown(tool)}; give a function, or a tool in OpenAI's shape")
            made = PythonTool(tool)
            self.descriptions.append(made.description)
            self._functions[made.name] = made
        self._on_call = on_call
        self._on_result = on_result

    def has(self, name: str) -> bool:
        """True if a tool of this name is a function."""
        return name in self._functions

    def run(self, call: ToolCall, loop: asyncio.AbstractEventLoop | None = None) -> str:
        """Run one call, unless it is refused, and return what the model reads of it.

        loop: where coroutines run, in another thread; None: in this one.
        """
        request = RequestedCall(call.id, call.name, _object(call.arguments))
        verdict = None if self._on_call is None else _resolved(self._on_call(request), loop)
        began, error = time.perf_counter(), None
        if verdict is False:
            result = REFUSED
        elif verdict is not None and verdict is not True:
            result = result_text(verdict)
        else:
            result, error = self._call(call, loop)
        if self._on_result is not None:
            _resolved(self._on_result(CallOutcome(request, result, error, time.perf_counter() - began)), loop)
        return result

    def _call(self, call: ToolCall, loop: asyncio.AbstractEventLoop | None) -> tuple[str, Exception | None]:
        tool = self._functions[call.name]
        try:
            arguments = tool.read_arguments(call.arguments)
        except ValueError as error:
            return f"Error: the arguments do not fit the function: {error}", error
        try:
            return result_text(_resolved(tool.call(arguments), loop)), None
        # Whatever a function raises is for the model to read, and for the caller's watcher.
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}", error


def result_text(value: Any) -> str:
    """Text of a result for the model: text as it is, anything else as JSON. Raises: TypeError for what is no JSON."""
    if isinstance(value, str):
        return value
    import msgspec

    def convert(part: Any) -> Any:
        if has_pydantic(type(part)) and hasattr(part, "model_dump"):
            return part.model_dump(mode="json")
        raise TypeError(f"a result holds a {type(part).__name__}, which is no JSON; return text, numbers or dicts")

    return msgspec.json.encode(value, enc_hook=convert).decode()


def _object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _resolved(value: Any, loop: asyncio.AbstractEventLoop | None) -> Any:
    """A value, or what comes of one that is awaitable."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    if loop is not None:
        return asyncio.run_coroutine_threadsafe(_awaited(value), loop).result()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_awaited(value))
    if inspect.iscoroutine(value):
        value.close()
    raise RequestError(
        "a tool, or what watches it, is a coroutine function, and this thread runs an event loop: use aask"
    )


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _fields(function: Callable[..., Any], name: str) -> dict[str, tuple[Any, Any]]:
    """The annotation and default of each parameter; `inspect.Parameter.empty` where there is none."""
    try:
        parameters = inspect.signature(function).parameters
        target = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(target, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise RequestError(f"the parameters of tool {name!r} cannot be read: {error}; annotate it with types") from None
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RequestError(
                f"tool {name!r} has the parameter {str(parameter)!r}, which takes no name; give each a name of its own"
            )
    return {each.name: (hints.get(each.name, Any), each.default) for each in parameters.values()}


def _record(name: str, fields: Mapping[str, tuple[Any, Any]]) -> Any:
    """A type whose values are the arguments of a call; parameters with a default may be left out."""
    empty = inspect.Parameter.empty
    if any(has_pydantic(annotation) for annotation, _ in fields.values()):
        import pydantic

        members: Any = {n: (kind, ... if default is empty else None) for n, (kind, default) in fields.items()}
        return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **members)
    import msgspec

    listed: list[Any] = [
        (n, kind) if default is empty else (n, kind | msgspec.UnsetType, msgspec.UNSET)
        for n, (kind, default) in fields.items()
    ]
    return msgspec.defstruct(name, listed, kw_only=True, forbid_unknown_fields=True)


def _given(record: Any) -> dict[str, Any]:
    """The members of a record that were given."""
    if has_pydantic(type(record)):
        return {name: getattr(record, name) for name in record.model_fields_set}
    import msgspec

    members = {name: getattr(record, name) for name in record.__struct_fields__}
    return {name: value for name, value in members.items() if value is not msgspec.UNSET}


def _inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object as one that begins with it, not with a reference to its definition."""
    definitions = dict(schema.get("$defs", {}))
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    root = dict(definitions.pop(name) if name in definitions else schema)
    root = {key: value for key, value in root.items() if key not in ("title", "description", "$defs")}
    return {**root, "$defs": definitions} if definitions else root


def _annotated_text(annotation: Any) -> str | None:
    """The text among what an annotation is `Annotated` with."""
    if get_origin(annotation) is not Annotated:
        return None
    return next((part for part in get_args(annotation)[1:] if isinstance(part, str)), None)
