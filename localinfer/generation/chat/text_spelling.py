r"""Regular expressions of texts, and how their letters are spelled: as they are, or inside of a JSON string.

A grammar says what text a model may write. Where the model writes that text inside of JSON, a line break is the two
characters `\n`, and so on; `json.dumps` spells each character in one way, so an expression of letters becomes one of
their spellings, class by class. What is read is the syntax that llguidance has, Rust's, without what is not regular.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from localinfer.errors import ConstraintError
from localinfer.generation.chat.json_schema import MAX_COUNT, MAX_DEPTH

_RESPELLED = (*map(chr, range(0x20)), '"', "\\")
"""Characters that a JSON string spells otherwise."""
_NOT_RESPELLED = r'[^"\\\x00-\x1f]'
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_SPACES = "\t\n\v\f\r "
_HEX = re.compile(r"x\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})")
_PROPERTY = re.compile(r"([pP])(?:\{\^?([A-Za-z]{1,2})\}|([A-Z]))")
_COUNTS = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_FLAGS = re.compile(r"\?(-?)([a-zA-Z]+)([:)])")
_NAMED = re.compile(r"\?P?<[A-Za-z_]\w*>")


class TextSpelling(NamedTuple):
    """Spelling of a text within what a model writes."""

    is_json: bool
    """True inside of a JSON string, False as it is."""
    end: str = ""
    """The mark behind it where it stands as it is, which so cannot be in it."""

    def text(self, text: str) -> str:
        """A text, as it is spelled."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.is_json else text


@dataclass(frozen=True)
class LetterItem:
    """Part of a class of letters."""

    written: str
    """Regular expression of it in Rust's syntax, for the inside of brackets."""
    has: Callable[[str], bool] = field(compare=False)
    """Test of a letter for being among them."""


class Letters(NamedTuple):
    """One letter of a class."""

    items: tuple[LetterItem, ...]
    is_negated: bool = False
    ignores_case: bool = False

    def respelled(self) -> list[str]:
        """Those of its letters that JSON spells otherwise."""
        return _respelled(self.items, self.is_negated)

    def as_they_are(self, spelling: TextSpelling) -> str:
        """A regular expression of those that are spelled as they are; empty where there are none."""
        written = "".join(item.written for item in self.items)
        if not spelling.is_json:
            made = f"[{'^' * self.is_negated}{written}]" if written else "(?s:.)"
        elif not written:
            made = _NOT_RESPELLED
        elif self.is_negated:
            made = f"[{_NOT_RESPELLED}&&[^{written}]]"
        else:
            respelled = self.respelled()
            plain = "".join(item.written for item in self.items if item.written not in map(_code, respelled))
            made = (f"[{_NOT_RESPELLED}&&[{plain}]]" if respelled else f"[{plain}]") if plain else ""
        return f"(?i:{made})" if made and self.ignores_case else made


@lru_cache(maxsize=1024)
def _respelled(items: tuple[LetterItem, ...], is_negated: bool) -> list[str]:
    return [one for one in _RESPELLED if any(item.has(one) for item in items) != is_negated]


class Text(NamedTuple):
    """A text, to the letter."""

    text: str


class RuleName(NamedTuple):
    """Texts of the rule or terminal of this name."""

    name: str


class Joined(NamedTuple):
    """Parts, one behind the other."""

    parts: tuple["Expression", ...]


class OneOf(NamedTuple):
    """One of several."""

    choices: tuple["Expression", ...]


class Repeated(NamedTuple):
    """A part so many times; most: None for any number."""

    part: "Expression"
    least: int
    most: int | None


class Lexeme(NamedTuple):
    """An expression that is one word of a rule."""

    inner: "Expression"


Expression = Letters | Text | RuleName | Joined | OneOf | Repeated | Lexeme


class _Flags(NamedTuple):
    """Flags that hold in a part of an expression."""

    ignores_case: bool
    dot_is_all: bool


class RegexReader:
    """Reads one regular expression. flags: letters behind it. Raises: ConstraintError naming what is not supported."""

    def __init__(self, pattern: str, flags: str = "") -> None:
        for flag in flags:
            if flag not in "imsu":
                raise _refused(f"has the flag {flag!r}; give i or s, or none")
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._first = _Flags("i" in flags, "s" in flags)

    def read(self) -> Expression:
        """The expression."""
        ends = self._pattern.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$\Z", self._pattern)
        if self._pattern.startswith("^"):
            self._at = 1
        if ends:
            self._pattern = self._pattern[:-1]
        made = self._choices(self._first)
        if self._at < len(self._pattern):
            raise _refused("has a ')' that closes nothing")
        if isinstance(made, OneOf) and (ends or self._pattern.startswith("^")):
            raise _refused("has anchors that hold for one of its alternatives; expressions are about whole texts")
        return made

    def _peek(self, size: int = 1) -> str:
        return self._pattern[self._at : self._at + size]

    def _choices(self, flags: _Flags) -> Expression:
        """Alternatives up to a closing bracket or the end."""
        choices: list[Expression] = []
        parts: list[Expression] = []
        while (letter := self._peek()) and letter != ")":
            self._at += 1
            if letter == "|":
                choices.append(joined(parts))
                parts = []
            elif letter == "(" and (changed := self._flags_from_here(flags)) is not None:
                flags = changed
            else:
                parts.append(self._repeated(self._one(letter, flags)))
        return OneOf((*choices, joined(parts))) if choices else joined(parts)

    def _flags_from_here(self, flags: _Flags) -> _Flags | None:
        """The flags behind `(?s)`; None where no such group begins."""
        found = _FLAGS.match(self._pattern, self._at)
        if found is None or found[3] != ")":
            return None
        self._at = found.end()
        return _changed(flags, found)

    def _repeated(self, one: Expression) -> Expression:
        """A part with what repeats it."""
        letter = self._peek()
        if not letter or letter not in "*+?{":
            return one
        if letter == "{":
            found = _COUNTS.match(self._pattern, self._at)
            if found is None:
                raise _refused(f"has {self._peek(8)!r}, which repeats nothing; write \\{{ for the character")
            if max(int(found[1]), int(found[3] or 0)) > MAX_COUNT:
                raise _refused(f"repeats a part {found[0]} times; wanted at most {MAX_COUNT}")
            repeat = found[0]
            most = int(found[1]) if found[2] is None else int(found[3]) if found[3] else None
            bounds = int(found[1]), most
        else:
            repeat, bounds = letter, {"*": (0, None), "+": (1, None), "?": (0, 1)}[letter]
        self._at += len(repeat)
        if self._peek() and self._peek() in "?+*{":
            kind = {"?": "a lazy quantifier", "+": "a possessive quantifier"}.get(self._peek(), "two quantifiers")
            raise _refused(f"has {kind}, {repeat}{self._peek()}, which is not supported")
        return Repeated(one, *bounds)

    def _one(self, letter: str, flags: _Flags) -> Expression:
        match letter:
            case "(":
                return self._group(flags)
            case "[":
                return self._class(flags)
            case ".":
                return Letters(() if flags.dot_is_all else (character("\n"),), is_negated=True)
            case "\\":
                return Letters((self._escape(),), ignores_case=flags.ignores_case)
            case "^" | "$":
                raise _refused(f"has the anchor {letter} within it; expressions are about whole texts")
            case "*" | "+" | "?" | "{":
                raise _refused(f"has {letter!r}, which repeats nothing; write \\{letter} for the character")
        return Letters((character(letter),), ignores_case=flags.ignores_case)

    def _group(self, flags: _Flags) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"is nested more than {MAX_DEPTH} deep")
        if self._peek() == "?":
            named, changed = _NAMED.match(self._pattern, self._at), _FLAGS.match(self._pattern, self._at)
            if self._peek(2) == "?:":
                self._at += 2
            elif named is not None:
                self._at = named.end()
            elif changed is not None:
                self._at, flags = changed.end(), _changed(flags, changed)
            else:
                kind = "looks ahead or behind" if self._peek(2) in ("?=", "?!", "?<") else "has a kind of group"
                raise _refused(f"{kind}, ({self._peek(3)}, which is not supported")
        made = self._choices(flags)
        if self._peek() != ")":
            raise _refused("has a '(' that nothing closes")
        self._at += 1
        self._depth -= 1
        return made

    def _class(self, flags: _Flags) -> Letters:
        """A class of letters, from behind its opening bracket."""
        is_negated = self._peek() == "^"
        self._at += is_negated
        items: list[LetterItem] = []
        while True:
            letter = self._peek()
            if not letter:
                raise _refused("has a '[' that nothing closes")
            self._at += 1
            if letter == "]" and items:
                return Letters(tuple(items), is_negated, flags.ignores_case)
            if letter == "[" or self._pattern[self._at - 1 : self._at + 1] in ("&&", "--", "~~"):
                raise _refused(f"has {letter!r} within a class, which is not supported; write \\{letter}")
            item = self._escape() if letter == "\\" else character(letter)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._peek()
                self._at += 1
                item = letter_range(item, self._escape() if last == "\\" else character(last))
            items.append(item)

    def _escape(self) -> LetterItem:
        """The letters that an escape stands for, from behind its backslash."""
        letter = self._peek()
        if not letter:
            raise _refused("ends with a backslash")
        if (found := _HEX.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            code = int(found[found.lastindex or 1], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise _refused(f"has \\{found[0]}, which is no character")
            return character(chr(code))
        if (found := _PROPERTY.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            name = found[2] or found[3]
            is_other = (found[1] == "P") != ("^" in found[0])
            return LetterItem(f"\\{found[0]}", lambda one: unicodedata.category(one).startswith(name) != is_other)
        self._at += 1
        if letter in _SIMPLE:
            return character(_SIMPLE[letter])
        match letter:
            case "d" | "w":
                return LetterItem(f"\\{letter}", lambda one: one == "_" if letter == "w" else False)
            case "D" | "W":
                return LetterItem(f"\\{letter}", lambda one: True)
            case "s" | "S":
                return LetterItem(f"\\{letter}", lambda one: (one in _SPACES) == (letter == "s"))
        if letter.isalnum():
            raise _refused(f"has \\{letter}, which is not supported")
        return character(letter)


def _changed(flags: _Flags, found: re.Match[str]) -> _Flags:
    for flag in found[2]:
        if flag not in "imsu":
            raise _refused(f"has the flag {flag!r}; give i or s, or none")
    is_on = not found[1]
    return _Flags(is_on if "i" in found[2] else flags.ignores_case, is_on if "s" in found[2] else flags.dot_is_all)


def _code(letter: str) -> str:
    return letter if letter.isalnum() and letter.isascii() else f"\\x{{{ord(letter):x}}}"


def joined(parts: Sequence[Expression]) -> Expression:
    """Parts, one behind the other; the part itself if it is alone."""
    return parts[0] if len(parts) == 1 else Joined(tuple(parts))


def literal(text: str, *, ignores_case: bool = False) -> Expression:
    """A text, perhaps in letters of either case."""
    return joined([Letters((character(one),), ignores_case=True) for one in text]) if ignores_case else Text(text)


def character(letter: str) -> LetterItem:
    """One letter of a class."""
    return LetterItem(_code(letter), lambda one: one == letter)


def letter_range(first: LetterItem, last: LetterItem) -> LetterItem:
    """Letters from one to another. Raises: ConstraintError."""
    ends = [_only(item) for item in (first, last)]
    if None in ends or ends[0] > ends[1]:  # type: ignore[operator]
        raise _refused(f"has a range from {first.written} to {last.written}, which has no characters")
    return LetterItem(f"{first.written}-{last.written}", lambda one: ends[0] <= one <= ends[1])  # type: ignore[operator]


def _only(item: LetterItem) -> str | None:
    """The character of an item that has one."""
    found = re.fullmatch(r"\\x\{([0-9a-f]+)\}", item.written)
    return chr(int(found[1], 16)) if found is not None else item.written if len(item.written) == 1 else None


def _refused(found: str) -> ConstraintError:
    return ConstraintError(f"the regular expression {found}")
