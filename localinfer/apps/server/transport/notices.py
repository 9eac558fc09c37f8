"""What a request is told of itself: members that no route reads, and values that were taken for others.

Clients are newer than servers: they send members that a server does not know yet, and go on well without them. Such a
member is left unread with a notice, at every depth; only one that is misspelled is refused, since what was meant is
known. Members that would change a reply and cannot be had are refused by their names (`known_fields`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from msgspec import inspect

HEADER = "x-localinfer-notices"
"""The header of every answer to a request of which there are notices."""
_MOST = 16
_MOST_CHARACTERS = 200
_SHORTEST_WORD = 5
_ALIKE = 0.9
_notices: ContextVar[list[str] | None] = ContextVar("notices", default=None)

Unread = Callable[[type, Collection[str], str, str, Any], None]
"""Called with the record, the names of its members, a member's name, its path and its value; may raise."""


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Gather what `notice` is told while the context lasts, in threads that work for it too."""
    found: list[str] = []
    before = _notices.set(found)
    try:
        yield found
    finally:
        _notices.reset(before)


def notice(text: str) -> None:
    """Have a request's answer say something, in one line; once, and not more than some such lines."""
    found = _notices.get()
    if found is None or len(found) >= _MOST:
        return
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:_MOST_CHARACTERS])
    if shown not in found:
        found.append(shown)


def is_full() -> bool:
    """Whether no further notice is taken, so that none needs to be made."""
    found = _notices.get()
    return found is not None and len(found) >= _MOST


def header(notices: Collection[str]) -> dict[str, str]:
    """The header that says them, in ASCII; none where there are none."""
    text = "; ".join(notices).encode("ascii", "backslashreplace").decode("ascii")
    return {HEADER: text} if notices else {}


def meant_name(name: str, known: Collection[str]) -> str | None:
    """The member that a misspelled one is meant for, None for one that is like no other."""
    if not _SHORTEST_WORD <= len(name) <= _MOST_CHARACTERS:
        return None
    return next(iter(get_close_matches(name, known, 1, _ALIKE)), None)


def read_value(value: Any, record: type, unread: Unread) -> Any:
    """A request without what its record does not read, at every depth: members it has not, of which `unread` is told,
    and nulls of members that have another value by default.

    value: as JSON is decoded. Raises: what `unread` raises.
    """
    return _read(value, inspect.type_info(record), "", unread)


def _read(value: Any, kind: inspect.Type, path: str, unread: Unread) -> Any:
    if isinstance(value, dict):
        match _of(kind, inspect.StructType, inspect.DictType):
            case inspect.StructType() as struct:
                return _read_members(value, struct, path, unread)
            case inspect.DictType(value_type=inner):
                return {name: _read(one, inner, _join(path, name), unread) for name, one in value.items()}
    if isinstance(value, list):
        match _of(kind, inspect.ListType):
            case inspect.ListType(item_type=inner) if not isinstance(inner, inspect.AnyType):
                return [_read(one, inner, f"{path}[{index}]", unread) for index, one in enumerate(value)]
    return value


def _read_members(value: Mapping[str, Any], struct: inspect.StructType, path: str, unread: Unread) -> dict[str, Any]:
    members = _members_of(struct.cls)
    made = {}
    for name, one in value.items():
        member = members.get(name)
        if member is None:
            if one is not None:
                unread(struct.cls, members, name, _join(path, name), one)
        elif one is not None or member.required:
            made[name] = _read(one, member.type, _join(path, name), unread)
    return made


@lru_cache(maxsize=256)
def _members_of(record: type) -> Mapping[str, inspect.Field]:
    found = inspect.type_info(record)
    assert isinstance(found, inspect.StructType), "records are structs"
    return {field.encode_name: field for field in found.fields}


def _of(kind: inspect.Type, *wanted: type[inspect.Type]) -> inspect.Type | None:
    """The first of some kinds that a type is, or is among others."""
    if isinstance(kind, inspect.UnionType):
        return next((found for one in kind.types if (found := _of(one, *wanted)) is not None), None)
    if isinstance(kind, inspect.Metadata):
        return _of(kind.type, *wanted)
    return kind if isinstance(kind, wanted) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
