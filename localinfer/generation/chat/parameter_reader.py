"""Reads arguments that stand one by one, each with its name: the JSON object that they mean, while they arrive."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from localinfer.generation.chat.matching import match_length
from localinfer.generation.chat.value_types import ANY_TYPE, TEXT, json_value
from localinfer.models.text.reply_format import ParameterFormat

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
"""Around text in XML that has letters of XML in it."""


class ReadParameters(NamedTuple):
    """What became certain of the arguments' JSON text, what is left of the reply's, and whether the object is whole."""

    json: str
    rest: str
    is_whole: bool


class ParameterReader:
    """Reads the parameters of one call, from the name of the first on; there is at least one.

    end: what ends the call. types: of each parameter that is known. Text becomes certain letter by letter, other values
    when they have ended.
    """

    def __init__(self, form: ParameterFormat, end: str, types: Mapping[str, frozenset[str]]) -> None:
        self._form = form
        self._end = end
        self._types = types
        self._lead = form.assign[len(form.assign.rstrip()) :]
        self._trail = ""
        self._value_end = form.value_end
        self._marker = form.value_marker
        self._behind = ""
        self._value_types = ANY_TYPE
        self._held = ""
        self._made: list[str] = []
        self._is_whole = False
        self._is_first = True
        self._state: Callable[[], bool] = self._name

    def read(self, text: str) -> ReadParameters:
        """Take what is left of the last call with what came since."""
        self._held = text
        while not self._is_whole and self._state():
            pass
        made = "".join(self._made)
        self._made.clear()
        return ReadParameters(made, self._held, self._is_whole)

    def flush(self, text: str) -> str:
        """What the arguments' text still gets where the reply ends too early: the value that is held back."""
        if self._state == self._text or (self._state == self._opened and self._value_types == TEXT):
            return _escaped(text)
        if self._state not in (self._value, self._opened) or not text:
            return ""
        return text if "string" not in self._value_types else f'"{_escaped(text)}'

    # Each state below consumes the buffered text, and returns whether to go on with what is left.

    def _name(self) -> bool:
        form = self._form
        place = -1
        while (place := self._held.find(form.assign.lstrip()[0], place + 1)) >= 0:
            before_text = match_length(self._held[place:], form.assign)
            before_json = -1 if form.json_assign is None else match_length(self._held[place:], form.json_assign)
            if before_text is None or (before_json is None and before_text < 0):
                return False
            length = max(before_text, before_json or -1)
            if length >= 0:
                name, rest = self._held[:place].strip(), self._held[place + length :]
                types = self._types.get(name, ANY_TYPE)
                if form.json_assign is not None:
                    types = TEXT if before_text >= 0 else ANY_TYPE - TEXT
                return self._begin_value(name, types, rest)
        return False

    def _begin_value(self, name: str, types: frozenset[str], rest: str) -> bool:
        self._made.append("{" if self._is_first else ", ")
        self._made.append(f"{json.dumps(name, ensure_ascii=False)}: ")
        self._is_first = False
        self._value_types = types
        self._value_end = self._form.named(self._form.value_end, name)
        self._marker = self._form.named(self._form.value_marker, name)
        self._trail = self._value_end[: len(self._value_end) - len(self._marker)]
        self._held = rest
        return self._go(self._before_value)

    def _before_value(self) -> bool:
        """Where the format may write a new line before the value."""
        if len(self._held) < len(self._lead) and self._lead.startswith(self._held):
            return False
        self._held = self._held.removeprefix(self._lead)
        if self._value_types == TEXT:
            self._made.append('"')
        return self._go(self._opened)

    def _opened(self) -> bool:
        """At the first letter of a value, where XML may mark text that has letters of XML in it."""
        if self._marker.startswith("</"):
            if _CDATA.startswith(self._held):
                return False
            if self._held.startswith(_CDATA):
                self._held = self._held[len(_CDATA) :]
                self._behind, self._marker, self._value_end, self._trail = self._marker, _CDATA_END, _CDATA_END, ""
                if self._value_types != TEXT:
                    self._made.append('"')
                return self._go(self._text)
        return self._go(self._text if self._value_types == TEXT else self._value)

    def _text(self) -> bool:
        """Inside a string."""
        before, found, after = self._held.partition(self._marker)
        if found:
            self._made.append(_escaped(before.removesuffix(self._trail)) + '"')
            self._held = after
            return self._go(self._after_text)
        kept = len(self._held) - self._overlap()
        self._made.append(_escaped(self._held[:kept]))
        self._held = self._held[kept:]
        return False

    def _after_text(self) -> bool:
        """Where the end of the parameter follows the end of marked text."""
        length = match_length(self._held, self._behind) if self._behind else 0
        if length is None:
            return False
        self._held = self._held[max(0, length) :]
        self._behind = ""
        return self._go(self._after_value)

    def _value(self) -> bool:
        """Inside another value, or one that may be."""
        before, found, after = self._held.partition(self._marker)
        if not found:
            return False
        self._made.append(json_value(before.removesuffix(self._trail), self._value_types))
        self._held = after
        return self._go(self._after_value)

    def _after_value(self) -> bool:
        if not self._held.strip():
            return False
        end, length = match_length(self._held, self._end), match_length(self._held, self._form.following)
        if length is None or (end is None and length >= 0):
            return False
        if length >= 0 and (end is None or end < 0):
            self._held = self._held[length:]
            return self._go(self._name)
        self._made.append("}")
        self._is_whole = True
        return True

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _overlap(self) -> int:
        """How many letters at the end may belong to what ends the value."""
        text, marker = self._held, self._marker
        for size in range(min(len(text), len(self._value_end) - 1), 0, -1):
            ending = text[-size:]
            if marker.startswith(ending) or self._value_end.startswith(ending):
                return size
        return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
