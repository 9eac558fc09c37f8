"""Long lists in pieces, between which other threads run Python.

One call of the interpreter's own code, such as `dict(zip(...))` over the 280,000 merges of a vocabulary, keeps all
others waiting until it ends, and an app's window with them.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

Value = TypeVar("Value")
PIECE = 8192
"""Some 1 ms of work on strings."""
_SMALL_TEXT = 1 << 17
_LEVELS = 3
"""Down to the tokens and merges of a tokenizer.json."""
_PAUSE_SECONDS = 5e-5
"""A thread that waits for the interpreter's lock gets it at a pause; it is given it after 5 ms otherwise."""


def pieces(values: Iterable[Value]) -> Iterator[list[Value]]:
    """Yield the values, thousands at a time; never an empty list.

    Values should be no tuples made for it: so many new ones have the garbage collector look through all objects.
    """
    rest = iter(values)
    while piece := list(islice(rest, PIECE)):
        yield piece
        give_way()


def give_way() -> None:
    """Let other threads run Python now; every millisecond or so of work that keeps the interpreter's lock."""
    time.sleep(_PAUSE_SECONDS)


def last_places(texts: Sequence[str]) -> dict[str, int]:
    """Map each text to its index, the last one's where it occurs more than once."""
    # A dictionary that once had another key keeps the hashes of texts beside them. Else CPython fetches each text for
    # its hash whenever the dictionary grows, and for most lookups, which takes twice as long.
    places: dict[Any, int] = {0: 0}
    del places[0]
    first = 0
    for piece in pieces(texts):
        places.update(zip(piece, range(first, first + len(piece)), strict=True))
        first += len(piece)
    return places


def parse_json(text: str) -> Any:
    """Return what `json.loads` does of a text, as large as a tokenizer.json may be. Raises: as it.

    Its outer levels are read entry by entry, which takes some four times as long, so that other threads run.
    """
    if len(text) >= _SMALL_TEXT:
        try:
            value, end = _read_value(text, _skip_space(text, 0), _LEVELS)
            if _skip_space(text, end) == len(text):
                return value
        except (ValueError, IndexError):
            # What is wrong, `json.loads` says best.
            pass
    return json.loads(text)


_decode = json.JSONDecoder().raw_decode
_find_space = re.compile(r"[ \t\n\r]*").match


def _skip_space(text: str, start: int) -> int:
    found = _find_space(text, start)
    return start if found is None else found.end()


def _read_value(text: str, start: int, levels: int) -> tuple[Any, int]:
    """Read the value that starts there, so many levels of it entry by entry; return it and where it ends."""
    is_object = text[start] == "{"
    if not levels or not (is_object or text[start] == "["):
        return _decode(text, start)
    entries: dict[str, Any] = {}
    values: list[Any] = []
    closing = "}" if is_object else "]"
    at = _skip_space(text, start + 1)
    while text[at] != closing or entries or values:
        key = ""
        if is_object:
            key, at = _read_key(text, at)
        value, at = _read_value(text, at, levels - 1)
        if is_object:
            entries[key] = value
        else:
            values.append(value)
        at = _skip_space(text, at)
        if text[at] == closing:
            break
        at = _skip_space(text, _after(",", text, at))
    return (entries if is_object else values), at + 1


def _read_key(text: str, start: int) -> tuple[str, int]:
    """Read a key and the colon after it; return it and where its value starts."""
    _after('"', text, start)
    key, end = _decode(text, start)
    return key, _skip_space(text, _after(":", text, _skip_space(text, end)))


def _after(character: str, text: str, at: int) -> int:
    if text[at] != character:
        raise ValueError(f"found {text[at]!r}, wanted {character!r}")
    return at + 1
