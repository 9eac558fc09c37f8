"""How a chat template writes the arguments of a call one by one, each with its name, instead of as one JSON object."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

KEY = "zqxkey"
_LAST_KEY, _LAST_VALUE = "zqxlast", "zqxfinal"
_NUMBER = 90817263
_WHOLE_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")

Render = Callable[[Mapping[str, Any]], str | None]
"""Renders a chat that ends in one call with these arguments; None where the template does not write it."""


@dataclass(frozen=True, kw_only=True)
class ParameterFormat:
    """The text around the parameters of a call: `name assign value value_end`, joined by `following`.

    Values that are strings stand as they are, all others as JSON. empty: what stands behind the name of a call without
    parameters, its end included.
    """

    assign: str
    value_end: str
    following: str
    empty: str

    @property
    def value_marker(self) -> str:
        """What ends a value, and is in none: `value_end` without the white space before it."""
        return self.value_end.lstrip()


def learn_parameter_format(render: Render, name: str, value: str) -> ParameterFormat | None:
    """Learn how the parameters of a call to `name` are written; None where they do not stand one by one.

    value: of the parameter KEY, a string that occurs nowhere else. `empty` has all that follows in its text.
    """
    one, none = render({KEY: value}), render({})
    two, number = render({KEY: value, _LAST_KEY: _LAST_VALUE}), render({KEY: _NUMBER})
    if one is None or two is None or none is None or number is None:
        return None
    if number != one.replace(value, json.dumps(_NUMBER)):
        # Numbers have other marks than strings: this is a notation of its own.
        return None
    start = one.index(name) + len(name)
    found = _between(one, start, KEY, value)
    following = _between(two, start, value, _LAST_KEY)
    if found is None or following is None:
        return None
    assign, end = found
    after = one[end:]
    shared = commonprefix((following[0], after))
    value_end = after[: _marker_start(after, len(shared))].rstrip()
    if not value_end or not assign.strip() or not following[0].startswith(value_end):
        return None
    return ParameterFormat(
        assign=assign,
        value_end=value_end,
        following=following[0][len(value_end) :],
        empty=none[none.index(name) + len(name) :],
    )


def find_parameter(text: str, start: int, value: str, form: ParameterFormat) -> tuple[int, int] | None:
    """Where the only parameter of a call stands, its end included, from `start` on."""
    place = text.find(KEY, start)
    written = f"{KEY}{form.assign}{value}{form.value_end}"
    return (place, place + len(written)) if place >= 0 and text.startswith(written, place) else None


def _between(text: str, start: int, first: str, second: str) -> tuple[str, int] | None:
    """What stands between two words, and where the second one ends."""
    place = text.find(first, start)
    other = text.find(second, place + len(first))
    return None if place < 0 or other < 0 else (text[place + len(first) : other], other + len(second))


def _marker_start(text: str, place: int) -> int:
    """Where the marker begins that a place is inside of; the place itself where it is in none."""
    spans = (found.span() for found in _WHOLE_MARKER.finditer(text))
    return next((start for start, end in spans if start < place < end), place)
