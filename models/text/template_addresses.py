"""Texts of objects without the place in memory that Python writes into them.

A template that prints a function, or what a filter gives bit by bit, prints `<list_iterator object at 0x7f96289e4460>`.
The place is another one each time, so one conversation would have other tokens each time that it is asked for, none of
them cached; and nobody outside of a process is to know where its memory lies.
"""

import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from itertools import chain
from typing import TypeVar

Text = TypeVar("Text", bound=str)

# Windows writes capitals, and zeros before them.
_ADDRESS = re.compile(r" at 0x([0-9A-Fa-f]+)")
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def without_addresses(text: Text, values: Iterable[object]) -> Text:
    """A text made of values, without the addresses of the objects among and in them; like texts in them stay."""
    if " at 0x" not in text:
        return text
    addresses = {id(found) for found in _objects(values)}
    made = _ADDRESS.sub(lambda match: "" if int(match[1], 16) in addresses else match[0], text)
    return text if made == text else type(text)(made)


def _objects(values: Iterable[object]) -> Iterable[object]:
    """All objects that values hold, and the owners of methods, which a method's text names."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Mapping):
            waiting += chain(value.keys(), value.values())
        elif isinstance(value, _CONTAINERS):
            waiting += value
        elif (owner := getattr(value, "__self__", None)) is not None:
            waiting.append(owner)
