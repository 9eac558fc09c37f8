"""Learns how the parameters of a call are written that stand one by one: as text, as JSON, or in their own notation."""

import re
from collections.abc import Callable, Mapping
from os.path import commonprefix
from typing import Any, NamedTuple

from localinfer.models.text.probes import KEY, LAST_KEY, LAST_VALUE, MOST_KEY, NUMBER, marker_around
from localinfer.models.text.reply_format import PARAMETER_NAME, TYPE_NAME, ParameterFormat, ValueNotation

_PYTHON_QUOTES = ("'", '"')
Render = Callable[[Mapping[str, Any]], str | None]


class _Written(NamedTuple):
    """What stands between a parameter's name and its value, and behind that."""

    assign: str
    after: str


def learn_parameter_format(render: Render, name: str, value: str) -> ParameterFormat | None:
    """Learn how the parameters of a call to `name` are written; None where they do not stand one by one.

    render: a call with arguments. value: of the parameter KEY, a string that occurs nowhere else. `empty` has all that
    follows in its text.
    """
    two, none = render({KEY: value, LAST_KEY: LAST_VALUE}), render({})
    text, number = (
        _written(render({KEY: one}), name, written) for one, written in ((value, value), (NUMBER, str(NUMBER)))
    )
    if two is None or none is None or text is None or number is None or not number.assign.strip():
        return None
    start = two.find(value, two.index(name) + len(name))
    end = two.find(LAST_KEY, start)
    if start < 0 or end < 0:
        return None
    between = two[start + len(value) : end]
    empty = none[none.index(name) + len(name) :]
    quote = text.assign[len(number.assign) :] if text.assign.startswith(number.assign) else ""
    if quote and text.after.startswith(quote) and text.after[len(quote) :] == number.after:
        notation = _notation(render, name, quote)
        if notation is None or not between.startswith(quote):
            return None
        return ParameterFormat(
            assign=number.assign, value_end="", following=between[len(quote) :], empty=empty, notation=notation
        )
    if text.after != number.after:
        # Numbers end as strings do not: this is a notation of its own.
        return None
    json_assign = None if text.assign == number.assign else _typed(render, name, number.assign)
    after = text.after
    value_end = after[: marker_around(after, len(commonprefix((between, after))))[0]].rstrip()
    if not value_end and KEY in after:
        value_end = after[: after.rindex(KEY)]
    following = between
    if KEY in value_end or KEY in between:
        # The name comes again behind the value.
        named = value_end.replace(KEY, PARAMETER_NAME)
        value_end = named
        following = between.replace(KEY, PARAMETER_NAME)
    if not value_end or not text.assign.strip() or not following.startswith(value_end):
        return None
    return ParameterFormat(
        assign=text.assign,
        value_end=value_end,
        following=following[len(value_end) :],
        empty=empty,
        json_assign=json_assign,
    )


def _written(text: str | None, name: str, value: str) -> _Written | None:
    if text is None:
        return None
    key = text.find(KEY, text.index(name) + len(name))
    place = text.find(value, key)
    return None if key < 0 or place < 0 else _Written(text[key + len(KEY) : place], text[place + len(value) :])


def _typed(render: Render, name: str, assign: str) -> str:
    """What stands before values that are no strings, where it names their type."""
    other = _written(render({KEY: {}}), name, "{}")
    if other is None or other.assign == assign:
        return assign
    words = re.findall(r"\w+|\W+", assign), re.findall(r"\w+|\W+", other.assign)
    if len(words[0]) != len(words[1]):
        return assign
    return "".join(one if one == same else TYPE_NAME for one, same in zip(*words, strict=True))


def _notation(render: Render, name: str, quote: str) -> ValueNotation | None:
    """The notation of values whose strings stand in such quotes."""
    text = render({KEY: {LAST_KEY: LAST_VALUE, MOST_KEY: NUMBER}})
    if text is None:
        return None
    found = re.search(
        rf"{LAST_KEY}(?P<quote>\S*?)(?P<key>:\s*)\S*?{LAST_VALUE}\S*?(?P<item>,\s*)", text[text.index(name) :]
    )
    if found is None:
        return None
    has_bare_keys = not found["quote"]
    quotes = (quote, *(other for other in _PYTHON_QUOTES if other != quote)) if quote in _PYTHON_QUOTES else (quote,)
    return ValueNotation(quotes=quotes, has_bare_keys=has_bare_keys, item=found["item"], key=found["key"])
