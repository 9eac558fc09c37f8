"""What a model is told of a function, and what of a call reaches it."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest

from localinfer.errors import RequestError
from localinfer.generation.session.python_tools import PythonTool, ToolBox, read_docstring, result_text


@dataclass
class Point:
    x: float
    y: float = 0.0


class Size(pydantic.BaseModel):
    width: int


def draw(
    name: str,
    at: Point,
    style: Literal["thin", "bold"] = "thin",
    opacity: Optional[int] = None,  # noqa: UP045
    *,
    points: Annotated[list[Point], "further ones"] = [],  # noqa: B006
    anything=3,  # type: ignore[no-untyped-def]
) -> Any:
    """Draw a figure, e.g. a circle. It stays.

    Args:
        name (str): What it is called,
            in one word.
        at: Where.
    """
    return name, at, style, opacity, points, anything


def test_a_signature_becomes_a_schema() -> None:
    tool = PythonTool(draw)
    function = tool.description["function"]
    assert (function["name"], function["description"]) == ("draw", "Draw a figure, e.g. a circle.")
    parameters = function["parameters"]
    assert list(parameters["properties"]) == ["name", "at", "style", "opacity", "points", "anything"]
    assert parameters["properties"]["name"] == {"type": "string", "description": "What it is called, in one word."}
    assert parameters["properties"]["style"] == {"enum": ["bold", "thin"], "default": "thin"}
    assert parameters["properties"]["opacity"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert parameters["properties"]["points"]["description"] == "further ones"
    assert parameters["properties"]["anything"] == {"default": 3}
    assert (parameters["required"], parameters["additionalProperties"]) == (["name", "at"], False)
    assert parameters["$defs"]["Point"]["additionalProperties"] is False
    assert json.dumps(tool.description)


def test_arguments_come_as_their_types_and_what_is_left_out_keeps_its_default() -> None:
    tool = PythonTool(draw)
    given = tool.read_arguments('{"name": "a", "at": {"x": 1}, "points": [{"x": 2, "y": 3}]}')
    assert given == {"name": "a", "at": Point(1.0), "points": [Point(2.0, 3.0)]}
    assert tool.call(given) == ("a", Point(1.0), "thin", None, [Point(2.0, 3.0)], 3)
    for wrong in (
        '{"name": "a"}',
        '{"name": 3, "at": {"x": 1}}',
        '{"name": "a", "at": {"x": 1}, "more": 1}',
        "[]",
        "x",
    ):
        with pytest.raises(ValueError, match="."):
            tool.read_arguments(wrong)


def test_pydantic_models_are_arguments_too() -> None:
    def fit(size: Size, times: int = 2) -> int:
        return size.width * times

    tool = PythonTool(fit)
    assert tool.description["function"]["parameters"]["required"] == ["size"]
    assert tool.description["function"]["parameters"]["properties"]["times"] == {"type": "integer", "default": 2}
    assert tool.call(tool.read_arguments('{"size": {"width": 4}}')) == 8
    assert tool.call(tool.read_arguments('{"size": {"width": 4}, "times": 3}')) == 12
    for wrong in ('{"size": {"width": "x"}}', '{"size": {"width": 1}, "more": 1}'):
        with pytest.raises(ValueError, match="."):
            tool.read_arguments(wrong)


class Counter:
    def count(self, upto: int) -> int:
        """Count."""
        return upto

    def __call__(self, upto: int) -> int:
        return upto


def test_methods_are_functions_without_their_first_parameter() -> None:
    tool = PythonTool(Counter().count)
    assert list(tool.description["function"]["parameters"]["properties"]) == ["upto"]
    assert tool.call(tool.read_arguments('{"upto": 4}')) == 4


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda x: x, "has no name"),
        (Counter(), "has no name"),
        (partial(draw, "a"), "has no name"),
        (print, "takes no name"),
        (3, "a tool is 3"),
        ("draw", "a tool is 'draw'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(tool: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ToolBox([tool])


def test_functions_that_no_schema_describes_are_refused() -> None:
    def unknown(x: "Nowhere") -> None:  # type: ignore[name-defined] # noqa: F821
        pass

    def odd(x: complex) -> None:
        pass

    for function, message in ((unknown, "'Nowhere' is not defined"), (odd, "complex")):
        with pytest.raises(RequestError, match=message):
            PythonTool(function)


def test_results_are_text_or_json() -> None:
    values = ["grey", None, 3, Point(1, 2), [Size(width=3)], {"a": True}]
    assert [result_text(value) for value in values] == [
        *("grey", "null", "3", '{"x":1,"y":2}', '[{"width":3}]', '{"a":true}'),
    ]
    with pytest.raises(TypeError, match="a result holds a object"):
        result_text(object())


GOOGLE = """X.

    Args:
        a (int): First,
            on.
        **b: Second

    Returns:
        c: no
    """
NUMPY = """X.

    Parameters
    ----------
    a : int
        First.

        On.
    b, c
        Both.

    Returns
    -------
    d : int
        No.
    """
SPHINX = """X

    :param a: First
        on.
    :param int b: Second
    :type b: int
    :returns: no
    """


@pytest.mark.parametrize(
    ("text", "summary", "parameters"),
    [
        *((None, "", {}), ("One line", "One line", {}), ("Two\n    lines. More.", "Two lines.", {})),
        ("Version 1.5 of it! More.", "Version 1.5 of it!", {}),
        (GOOGLE, "X.", {"a": "First, on.", "b": "Second"}),
        (NUMPY, "X.", {"a": "First. On.", "b": "Both.", "c": "Both."}),
        (SPHINX, "X", {"a": "First on.", "b": "Second"}),
    ],
)
def test_docstrings_are_read_in_three_styles(text: str | None, summary: str, parameters: dict[str, str]) -> None:
    found = read_docstring(text)
    assert (found.summary, found.parameters) == (summary, parameters)
