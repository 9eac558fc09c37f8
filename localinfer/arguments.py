"""Arguments of the public API: checks whose errors name the argument, and copies that later changes do not reach."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localinfer.errors import RequestError
from localinfer.system.folders import expand_home

MAX_PRIORITY = 2**31 - 1
"""Of a request; the least is as far below 0."""
_MOST_LEVELS = 128
"""Values nested deeper than this are not copied; whatever reads messages and schemas refuses them."""


def check_flag(name: str, value: object) -> bool:
    """Return a yes or no; None is a no. Raises: RequestError."""
    import numpy as np

    if value is None:
        return False
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise RequestError(f"{name} is {shown(value)}; give True or False", field=name)


def check_number(
    name: str,
    value: Any,
    least: float,
    most: float = math.inf,
    *,
    kind: type[int] | type[float] = int,
    none: str | None = None,
    hint: str = "",
    field: str | None = None,
) -> Any:
    """Return a number from `least` to `most` as a `kind`: int takes whole numbers only, float finite ones.

    none: what None means, where it may be given and is returned as it is. hint: ends the error. field: the option at
    fault, where `name` says more. Raises: RequestError.
    """
    if type(value) is kind and least <= value <= most and value != math.inf:
        return value
    if value is None and none is not None:
        return None
    import numpy as np

    kinds = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    if isinstance(value, kinds) and not isinstance(value, bool):
        # Python's integers may be more than any float.
        with contextlib.suppress(OverflowError):
            number = kind(value)
            if least <= number <= most and number != math.inf:
                return number
    noun = "a whole number" if kind is int else "a number"
    least_shown, most_shown = (str(bound) if kind is int else f"{bound:g}" for bound in (least, most))
    if math.isinf(most):
        wanted = f", {least_shown} or more" + ("" if kind is int else ", and finite")
    else:
        wanted = f" from {least_shown} to {most_shown}"
    more = ("" if none is None else f", or None {none}") + (f" ({hint})" if hint else "")
    raise RequestError(f"{name} is {shown(value)}; it must be {noun}{wanted}{more}", field=field or name)


def check_priority(priority: object) -> int:
    """Return how urgent a request is, the least number the most. Raises: RequestError."""
    number: int = check_number("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    return number


def check_hashable(name: str, value: object) -> None:
    """Raise RequestError for what cannot be a key."""
    try:
        hash(value)
    except Exception:
        raise RequestError(
            f"{name} is {shown(value)}; give something hashable, such as a number or a text", field=name
        ) from None


def check_callable(name: str, value: Callable[..., Any] | None) -> None:
    """Raise RequestError for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise RequestError(f"{name} is {shown(value)}; give a function, or None")


def check_path(name: str, value: object, instead: str = "") -> Path:
    """Return what names a file or a folder; instead: what else may be given, for the error. Raises: RequestError."""
    try:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
        if isinstance(text, str) and text and "\0" not in text:
            os.fsencode(text)
            return expand_home(text)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise RequestError(f"{name} is {shown(value)}; give the path of a file or folder as text{instead}")


def shown(value: object) -> str:
    """A value as an error shows it: short, and in characters that every terminal can print."""
    try:
        text = ascii(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def half_character(text: str) -> int | None:
    """The position of the first surrogate in a text, which is no character by itself and cannot be encoded; or None."""
    return next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)


def owned(value: Any) -> Any:
    """Return a copy of lists, tuples, mappings and arrays, at every level; other values as they are.

    A mapping comes back as a dict. A part that occurs several times is copied once, so that values which refer to
    themselves, or share much, cost no more than their own size.
    """
    return _copied(value, {}, _MOST_LEVELS)


def _copied(value: Any, known: dict[int, Any], levels: int) -> Any:
    # Where there is an array NumPy is imported; importing it here would slow `--help` down.
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    if not levels or not (is_array or isinstance(value, list | tuple | Mapping)):
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
