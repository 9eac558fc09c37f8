"""Reads arguments in a notation of their own, such as Python's, as the JSON that they mean, while they arrive."""

import json
import re
from collections.abc import Callable, Mapping

from localinfer.generation.chat.parameter_reader import ReadParameters
from localinfer.generation.chat.value_types import TEXT
from localinfer.models.text.reply_format import ParameterFormat

_WORDS = {"True": "true", "False": "false", "None": "null", "nil": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_WIDE_ESCAPES = {"x": 2, "u": 4, "U": 8}
_OTHER_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = range(0xD800, 0xDC00)
_END_OF_WORD = re.compile(r"[,\]})]")
_CLOSING = {"{": "}", "[": "]", "(": "]"}


class NotationReader:
    """Reads the arguments of one call, from the name of the first to what ends the call, as `ParameterReader` does.

    types: of each parameter that is known: where only text fits, a word without quotation marks is text. Strings become
    certain letter by letter, other values when they have ended.
    """

    def __init__(self, form: ParameterFormat, types: Mapping[str, frozenset[str]]) -> None:
        notation = form.notation
        assert notation is not None, "the format has a notation"
        self._quotes = notation.quotes
        self._has_escapes = any(len(quote) == 1 for quote in notation.quotes)
        self._assign = form.assign.strip()
        self._types = types
        self._held = ""
        self._made: list[str] = []
        self._closing: list[str] = []
        self._quote = ""
        self._is_key = False
        self._needs_comma = False
        self._is_first = True
        self._name = ""
        self._is_whole = False
        self._state: Callable[[], bool] = self._item

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
        if self._state != self._string or self._is_key:
            return ""
        return '"' if text.strip() == self._quote else _escaped(text)

    # Each state below consumes the buffered text, and returns whether to go on with what is left.

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
        """Whether a string begins here; None while it may yet."""
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
    """What a backslash and what follows stand for, and their length; None while more has to come."""
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


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
