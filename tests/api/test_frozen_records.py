"""`Record` makes what `dataclass(frozen=True)` does: each of a start is compared with a dataclass of its fields."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field, fields, make_dataclass, replace
from typing import Any

import pytest

import localinfer.loading.build  # noqa: F401  imports them
from localinfer.kernels.ops import OpRecord
from localinfer.types import Record


def records(base: type = Record) -> Iterator[type]:
    for one in base.__subclasses__():
        yield from (one, *records(one))


def made(record: type, values: dict[str, Any]) -> Any:
    """An instance with any values, which checks of its own do not see."""
    result = object.__new__(record)
    result.__dict__.update(values)
    return result


def twin_of(record: type) -> type:
    kept = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
    parts = [(one.name, one.type, field(**{name: getattr(one, name) for name in kept})) for one in fields(record)]
    return make_dataclass(record.__name__, parts, frozen=True, eq=not issubclass(record, OpRecord))


@pytest.mark.parametrize("record", sorted(set(records()) - {OpRecord}, key=lambda one: (one.__module__, one.__name__)))
def test_a_record_is_a_frozen_dataclass(record: type) -> None:
    twin, own = twin_of(record), vars(record)
    assert inspect.signature(record) == inspect.signature(twin).replace(return_annotation=None)
    assert own["__match_args__"] == twin.__match_args__
    values = {one.name: f"value {index}" for index, one in enumerate(fields(record))}
    first, second, other = made(record, values), made(record, dict(values)), made(twin, values)
    assert first == second
    assert first != other
    if "__repr__" not in own:
        assert repr(first) == repr(other).replace(twin.__qualname__, record.__qualname__, 1)
    if issubclass(record, OpRecord):
        with pytest.raises(TypeError, match="unhashable"):
            hash(first)
    elif "__hash__" not in own:
        assert hash(first) == hash(second) == hash(other)
    for one in fields(record):
        changed = made(record, values | {one.name: "another"})
        assert (first == changed) is (other == made(twin, values | {one.name: "another"}) or "__eq__" in own)
        for act in (lambda name=one.name: setattr(first, name, 1), lambda name=one.name: delattr(first, name)):
            with pytest.raises(FrozenInstanceError, match=f"cannot (assign to|delete) field '{one.name}'"):
                act()
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'further'"):
        first.further = 1
    assert vars(copy.deepcopy(first)) == vars(pickle.loads(pickle.dumps(first))) == values


def test_records_are_made_replaced_and_inherited_as_dataclasses() -> None:
    class Base(Record):
        first: int
        second: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            object.__setattr__(self, "first", self.first + 1)

    class Further(Base, kw_only=True):
        third: float = 0.5

    made_one = Further(1, [2], third=3.0)
    assert (made_one.first, made_one.second, made_one.third) == (2, [2], 3.0)
    assert replace(made_one, third=4.0) == Further(2, [2], third=4.0)
    assert Base(1) != Further(1)
    assert Base(1).second is not Base(1).second
    with pytest.raises(TypeError, match="positional"):
        Further(1, [], 3.0)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unhashable"):
        hash(made_one)
    with pytest.raises(TypeError, match="cannot inherit"):
        dataclass(frozen=True)(type("Mixed", (Base,), {}))
    loop = Base(1, [])
    loop.second.append(loop)  # type: ignore[arg-type]
    assert repr(loop).endswith("Base(first=2, second=[...])")
