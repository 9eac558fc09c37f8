"""Answers as values of a type: every kind of type, in the order of its members, and what is said of one that fails."""

import datetime
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import pydantic
import pytest

import localinfer
from localinfer.errors import AnswerError, ConstraintError, RequestError
from localinfer.generation.session.typed_answers import AnswerType
from localinfer.llm import LLM
from tests.api.scripted_chat import scripted_chat


class Mood(enum.Enum):
    CALM = "calm"
    WILD = "wild"


@dataclass
class Place:
    name: Annotated[str, msgspec.Meta(max_length=9)]
    height: Annotated[int, msgspec.Meta(ge=0, le=99)] = 0


@dataclass
class Animal:
    """An animal of a story."""

    kind: Literal["badger", "fox"]
    age: Annotated[int, msgspec.Meta(ge=1, le=9)]
    mood: Mood
    home: Place
    visited: Annotated[list[Place], msgspec.Meta(max_length=2)] = field(default_factory=list)


class Weather(TypedDict):
    sky: Literal["grey", "blue"]
    degrees: Annotated[int, msgspec.Meta(ge=0, le=40)]
    at: Place
    note: NotRequired[Literal["x"]]


class Report(msgspec.Struct):
    day: datetime.date
    is_dry: bool
    next: "Report | None" = None


class Model(pydantic.BaseModel):
    grade: int = pydantic.Field(ge=1, le=6)
    mood: Mood


@dataclass
class Holder:
    model: Model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localinfer.load(threads=1) as made:
        yield made


KINDS: list[tuple[Any, type]] = [
    *((Animal, Animal), (Place, Place), (Weather, dict), (Report, Report), (Model, Model), (Holder, Holder)),
    *((list[Place], list), (list[Model], list), (tuple[bool, Mood], tuple), (Mood, Mood)),
    *((Literal["yes", "no"], str), (int, int), (bool, bool), (float, float), (str, str), (Place | None, Place)),
]


@pytest.mark.parametrize(("answer_type", "expected"), KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind)))
def test_an_answer_is_a_value_of_the_type(llm: LLM, answer_type: Any, expected: type) -> None:
    session = llm.session(max_tokens=200)
    for seed in range(8):
        try:
            answer = session.ask("Tell me.", type=answer_type, seed=seed, temperature=0.7)
        except AnswerError as error:
            # A small model may write a text without end.
            assert error.finish_reason == "length" and session.messages == []
            continue
        assert isinstance(answer, expected) or answer is None
        assert session.last_completion is not None and session.last_completion.finish_reason == "stop"
        AnswerType(answer_type).read(session.messages[-1]["content"])
        return
    raise AssertionError("no answer ended")


def test_members_come_in_the_order_of_the_type_and_no_others() -> None:
    schema = AnswerType(Weather).schema
    assert list(schema["$defs"]["Weather"]["properties"]) == ["sky", "degrees", "at", "note"]
    for answer_type in (Animal, Weather, Report, list[Model]):
        schema = AnswerType(answer_type).schema
        objects = [part for part in (schema, *schema["$defs"].values()) if part.get("type") == "object"]
        assert objects and all(part["additionalProperties"] is False for part in objects)
    assert AnswerType(dict[str, int]).schema["additionalProperties"] == {"type": "integer"}


def test_an_answer_that_is_cut_keeps_its_text_and_leaves_no_message() -> None:
    session = scripted_chat('{"name": "Bonn", "height": 60}').session(temperature=0)
    with pytest.raises(AnswerError, match="a Place, was cut at max_tokens") as caught:
        session.ask("Where?", type=Place, max_tokens=14)
    assert caught.value.text == '{"name": "Bonn' and caught.value.finish_reason == "length"
    assert session.messages == []
    assert session.ask("Where?", type=Place) == Place("Bonn", 60)


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number % 2:
            raise ValueError("it is odd")
        return number


def test_what_the_grammar_lets_pass_the_library_may_refuse() -> None:
    session = scripted_chat('{"number": 3}').session(temperature=0)
    with pytest.raises(AnswerError, match=r"(?s)is no Even: .*it is odd") as caught:
        session.ask("Which?", type=Even)
    assert caught.value.text == '{"number": 3}' and session.messages == []


def test_a_mapping_has_what_members_it_likes() -> None:
    session = scripted_chat('{"a": 1, "b": 2}').session(temperature=0)
    assert session.ask("Which?", type=dict[str, int]) == {"a": 1, "b": 2}


@dataclass
class Prices:
    label: str
    totals: dict[str, list[Decimal]]


@dataclass
class Order:
    number: int
    prices: Prices


class Tags(msgspec.Struct):
    names: set[str]


class Unlike(pydantic.BaseModel):
    codes: frozenset[int]


@pytest.mark.parametrize(
    ("answer_type", "field", "keyword"),
    [
        (Order, "prices.totals", "format"),
        (list[Order], "prices.totals", "format"),
        (Tags, "names", "uniqueItems"),
        (Unlike, "codes", "uniqueItems"),
        (set[int], None, "uniqueItems"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused_by_the_name_of_its_field(
    llm: LLM, answer_type: Any, field: str | None, keyword: str
) -> None:
    name = "field '" + field if field else answer_type.__name__
    with pytest.raises(ConstraintError, match=name) as caught:
        llm.session().ask("x", type=answer_type)
    assert (caught.value.field, caught.value.keyword) == (field, keyword)


class Plain:
    pass


@pytest.mark.parametrize("answer_type", [Plain, list[Plain], 5, "int", Place(""), complex, [int]], ids=str)
def test_what_is_no_type_of_json_is_refused(llm: LLM, answer_type: Any) -> None:
    with pytest.raises(RequestError, match="type is .* give a dataclass"):
        llm.session().ask("x", type=answer_type)


def test_a_type_and_a_constraint_are_one_too_many(llm: LLM) -> None:
    with pytest.raises(RequestError, match="leave one of them out"):
        llm.session(constraint=localinfer.JsonObject()).ask("x", type=int)
