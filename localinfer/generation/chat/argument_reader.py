"""Reads the arguments of tool calls, while they arrive, as the JSON that they mean.

Arguments stand one by one, each with its name (`ParameterReader`), or in a notation of their own such as Python's
(`NotationReader`). Texts of a format are matched leniently: white space may differ, and names, numbers and ids are the
model's own.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from localinfer.generation.chat.value_types import ANY_TYPE, TEXT, json_value
from localinfer.models.text.reply_format import (
    CALL_ID,
    CALL_NAME,
    CALL_NUMBER,
    TYPE_NAME,
    ParameterFormat,
)

_HOLES = {CALL_ID: r"[A-Za-z0-9_.:-]", CALL_NUMBER: "[0-9]", CALL_NAME: r"[A-Za-z0-9_.:-]", TYPE_NAME: "[a-z]"}
_LETTER_OF = {hole: re.compile(letters) for hole, letters in _HOLES.items()}


def match_length(text: str, literal: str) -> int | None:
    """Length of a literal at the start of a text, ignoring white space; -1 if it is not there, None while it may be."""
    place = 0
    for letter in literal:
        if letter.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if (allowed := _LETTER_OF.get(letter)) is not None:
            start = place
            while place < len(text) and allowed.match(text[place]):
                place += 1
            if place < len(text) and place == start:
                return -1
        if place == len(text):
            return None
        if letter not in _LETTER_OF:
            if text[place] != letter:
                return -1
            place += 1
    return place


def id_in(text: str, literal: str) -> str | None:
    """The id in a text that spells a literal; None if the literal has none."""
    if CALL_ID not in literal:
        return None
    letters = (letter for letter in literal if not letter.isspace())
    parts = (f"({_HOLES[letter]}+)" if letter in _HOLES else re.escape(letter) for letter in letters)
    which = sum(letter in _HOLES for letter in literal[: literal.index(CALL_ID)]) + 1
    found = re.match(r"\s*".join(parts), text.lstrip())
    return None if found is None else found[which]


def name_length(text: str, run: int, following: list[str]) -> int | None:
    """Length of the name at the start of a text that one of several texts follows; None while that may yet come.

    run: letters of names at the start; a text that follows may begin with such letters too. All of them are the name
    where nothing follows.
    """
    is_open = False
    for length in range(run, 0, -1):
        found = [match_length(text[length:], one) for one in following if one]
        if any(size is not None and size >= 0 for size in found):
            return length
        is_open = is_open or None in found
    return None if is_open else run


_CDATA, _CDATA_END = "<![CDATA[", "]]>"
"""Around text in XML that has letters of XML in it."""


class ReadParameters(NamedTuple):
    """Certain part of the arguments' JSON text, rest of the reply's text, and whether the object is complete."""

    json: str
    rest: str
    is_whole: bool


class _Reader:
    """Base class of readers of arguments: a machine of states over the text that is held.

    state: consumes held text, and returns True to parse the rest.
    """

    def __init__(self, types: Mapping[str, frozenset[str]], state: Callable[[], bool]) -> None:
        self._types = types
        self._state = state
        self._held = ""
        self._made: list[str] = []
        self._is_whole = False
        self._is_first = True

    def read(self, text: str) -> ReadParameters:
        """Take the rest of the last call with the text since."""
        self._held = text
        while not self._is_whole and self._state():
            pass
        made = "".join(self._made)
        self._made.clear()
        return ReadParameters(made, self._held, self._is_whole)


class ParameterReader(_Reader):
    """Reads the parameters of one call, from the name of the first on; there is at least one.

    end: what ends the call. types: of each parameter that is known. Text becomes certain letter by letter, other values
    when they have ended.
    """

    def __init__(self, form: ParameterFormat, end: str, types: Mapping[str, frozenset[str]]) -> None:
        super().__init__(types, self._name)
        self._form = form
        self._end = end
        self._lead = form.assign[len(form.assign.rstrip()) :]
        self._trail = ""
        self._value_end = form.value_end
        self._marker = form.value_marker
        self._behind = ""
        self._value_types = ANY_TYPE

    def flush(self, text: str) -> str:
        """The value that was held back, as it completes the arguments' text where the reply ends too early."""
        if self._state == self._text or (self._state == self._opened and self._value_types == TEXT):
            return _escaped(text)
        if self._state not in (self._value, self._opened) or not text:
            return ""
        return text if "string" not in self._value_types else f'"{_escaped(text)}'

    # Each state below consumes the buffered text, and returns True to parse the rest.

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
        """Before a value, where the format may write a new line."""
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
        """Behind marked text, before the end of the parameter."""
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
        """Number of letters at the end that may begin the marker of the value's end."""
        text, marker = self._held, self._marker
        for size in range(min(len(text), len(self._value_end) - 1), 0, -1):
            ending = text[-size:]
            if marker.startswith(ending) or self._value_end.startswith(ending):
                return size
        return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_WORDS = {"True": "true", "False": "false", "None": "null", "nil": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_WIDE_ESCAPES = {"x": 2, "u": 4, "U": 8}
_OTHER_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = range(0xD800, 0xDC00)
_END_OF_WORD = re.compile(r"[,\]})]")
_CLOSING = {"{": "}", "[": "]", "(": "]"}


class NotationReader(_Reader):
    """Reads the arguments of one call, from the name of the first to what ends the call, as `ParameterReader` does.

    types: of each parameter that is known: where only text fits, a word without quotation marks is text. Strings become
    certain letter by letter, other values when they have ended.
    """

    def __init__(self, form: ParameterFormat, types: Mapping[str, frozenset[str]]) -> None:
        super().__init__(types, self._item)
        notation = form.notation
        assert notation is not None, "the format has a notation"
        self._quotes = notation.quotes
        self._has_escapes = any(len(quote) == 1 for quote in notation.quotes)
        self._assign = form.assign.strip()
        self._closing: list[str] = []
        self._quote = ""
        self._is_key = False
        self._needs_comma = False
        self._name = ""

    def flush(self, text: str) -> str:
        """The value that was held back, as it completes the arguments' text where the reply ends too early."""
        if self._state != self._string or self._is_key:
            return ""
        return '"' if text.strip() == self._quote else _escaped(text)

    # Each state below consumes the buffered text, and returns True to parse the rest.

    def _item(self) -> bool:
        """Before a name in an object, an item of a list, or the end of either."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        letter = self._held[0]
        if letter == ",":
            self._held = self._held[1:]
            return True
        if letter in "}])":
            if not self._closing:
                self._made.append("{}" if self._is_first else "}")
                self._is_whole = True
                return True
            self._made.append(self._closing.pop())
            self._held = self._held[1:]
            self._needs_comma = True
            return True
        in_list = bool(self._closing) and self._closing[-1] == "]"
        return self._go(self._value if in_list else self._key)

    def _key(self) -> bool:
        opened = self._open_quote()
        if opened is None:
            return False
        if opened:
            self._is_key = True
            self._begin_key()
            self._made.append('"')
            return self._go(self._string)
        assign = ":" if self._closing else self._assign
        place = self._held.find(assign)
        if place < 0:
            return False
        name = self._held[:place].strip()
        self._begin_key()
        self._made.append(f"{json.dumps(name, ensure_ascii=False)}: ")
        self._held = self._held[place + len(assign) :]
        if not self._closing:
            self._name = name
        return self._go(self._value)

    def _after_key(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held[0] in ":=":
            self._held = self._held[1:]
        self._made.append(": ")
        return self._go(self._value)

    def _value(self) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._needs_comma:
            self._comma()
        opened = self._open_quote()
        if opened is None:
            return False
        if opened:
            self._is_key = False
            self._made.append('"')
            return self._go(self._string)
        letter = self._held[0]
        if letter in _CLOSING:
            self._held = self._held[1:]
            self._made.append("{" if letter == "{" else "[")
            self._closing.append(_CLOSING[letter])
            self._needs_comma = False
            return self._go(self._item)
        found = _END_OF_WORD.search(self._held)
        if found is None:
            return False
        word = self._held[: found.start()].strip()
        self._held = self._held[found.start() :]
        is_text = not self._closing and self._types.get(self._name) == TEXT
        self._made.append(json.dumps(word, ensure_ascii=False) if is_text else _as_json(word))
        self._needs_comma = True
        return self._go(self._item)

    def _string(self) -> bool:
        """Inside a string, or a name in quotation marks."""
        while self._held:
            end = self._held.find(self._quote)
            escape = self._held.find("\\") if self._has_escapes and len(self._quote) == 1 else -1
            if escape >= 0 and (escape < end or end < 0):
                self._made.append(_escaped(self._held[:escape]))
                self._held = self._held[escape:]
                read = _read_escape(self._held)
                if read is None:
                    return False
                letter, length = read
                self._made.append(_escaped(letter))
                self._held = self._held[length:]
                continue
            if end >= 0 and len(self._quote) == 1:
                # Templates print such strings as they are: a mark inside is followed by what no value is followed by.
                behind = self._held[end + 1 :].lstrip()
                if not behind:
                    self._made.append(_escaped(self._held[:end]))
                    self._held = self._held[end:]
                    return False
                if behind[0] not in ",)]}:":
                    self._made.append(_escaped(self._held[: end + 1]))
                    self._held = self._held[end + 1 :]
                    continue
            if end >= 0:
                self._made.append(_escaped(self._held[:end]) + '"')
                self._held = self._held[end + len(self._quote) :]
                self._needs_comma = not self._is_key
                return self._go(self._after_key if self._is_key else self._item)
            kept = len(self._held) - _overlap(self._held, self._quote)
            self._made.append(_escaped(self._held[:kept]))
            self._held = self._held[kept:]
            return False
        return False

    def _open_quote(self) -> bool | None:
        """True if a string begins here; None while it may yet."""
        for quote in self._quotes:
            if self._held.startswith(quote):
                self._quote = quote
                self._held = self._held[len(quote) :]
                return True
            if quote.startswith(self._held):
                return None
        return False

    def _begin_key(self) -> None:
        if self._is_first:
            self._made.append("{")
        self._is_first = False
        self._comma()

    def _comma(self) -> None:
        if self._needs_comma:
            self._made.append(", ")
        self._needs_comma = False

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True


def _as_json(word: str) -> str:
    """A word without quotation marks as JSON: a string where it is no number, and no word of JSON or Python."""
    word = _WORDS.get(word, word)
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(word, ensure_ascii=False)
    return word


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _read_escape(text: str) -> tuple[str, int] | None:
    """Value of an escape sequence and its length; None while it is incomplete."""
    if len(text) < 2:
        return None
    width = _WIDE_ESCAPES.get(text[1])
    if width is None:
        return _ESCAPES.get(text[1], text[1] if text[1] in "\\'\"/" else text[:2]), 2
    if len(text) < 2 + width:
        return None
    try:
        code = int(text[2 : 2 + width], 16)
    except ValueError:
        return text[:2], 2
    if code in _HALF and text[1] == "u":
        # JSON spells what is beyond 16 bits in two halves.
        rest = text[6:12]
        if _OTHER_HALF.fullmatch(rest):
            return json.loads(f'"{text[:12]}"'), 12
        if len(rest) < 6 and _OTHER_HALF.fullmatch(rest + "\\uDC00"[len(rest) :]):
            return None
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd", 2 + width


def _overlap(text: str, marker: str) -> int:
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)
