"""Copies of what a caller passed, so that nothing the caller changes later is seen."""

import sys
from collections.abc import Mapping
from typing import Any

_MOST_LEVELS = 128
"""Values nested deeper than this are not copied; whatever reads messages and schemas refuses them."""


def owned(value: Any) -> Any:
    """Return a copy of lists, tuples, mappings and arrays, at every level; other values as they are.

    A mapping comes back as a dict. A part that occurs several times is copied once, so that values which refer to
    themselves, or share much, cost no more than their own size.
    """
    return _copied(value, {}, _MOST_LEVELS)


def _copied(value: Any, known: dict[int, Any], levels: int) -> Any:
    is_array = _is_array(value)
    is_container = is_array or isinstance(value, list | tuple | Mapping)
    if not is_container or not levels:
        return value
    if id(value) in known:
        return known[id(value)]
    if is_array:
        known[id(value)] = value.copy()
    elif isinstance(value, Mapping):
        copies: dict[Any, Any] = {}
        known[id(value)] = copies
        copies.update((name, _copied(inner, known, levels - 1)) for name, inner in value.items())
    elif isinstance(value, list):
        items: list[Any] = []
        known[id(value)] = items
        items.extend(_copied(inner, known, levels - 1) for inner in value)
    else:
        known[id(value)] = tuple(_copied(inner, known, levels - 1) for inner in value)
    return known[id(value)]


def _is_array(value: Any) -> bool:
    """Whether a value is one of NumPy's arrays; whoever has one has imported it, which takes too long for `--help`."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
