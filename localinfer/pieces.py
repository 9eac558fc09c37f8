"""Long lists in pieces, between which other threads run Python.

One call of the interpreter's own code, such as `dict(zip(...))` over the 280,000 merges of a vocabulary, keeps all
others waiting until it ends, and an app's window with them.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

Value = TypeVar("Value")
PIECE = 8192
"""Some 1 ms of work on strings."""
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
    places: dict[str, int] = {}
    first = 0
    for piece in pieces(texts):
        places.update(zip(piece, range(first, first + len(piece)), strict=True))
        first += len(piece)
    return places
