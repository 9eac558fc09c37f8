r"""Lark grammars of custom tools, as rules of texts.

Supported is what OpenAI's API documents and agents send: rules and terminals, texts and regular expressions with flags,
ranges, alternatives, groups, `[...]`, `?`, `*`, `+`, `~n..m`, `%import common.NAME` and `%ignore`. Priorities, aliases
and the marks `?` and `!` before a rule are read and left out: they choose among parses of a text, not among texts. All
else is refused with its rule and line, as are llguidance's own forms, by which a control token could be written.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from localinfer.errors import ConstraintError
from localinfer.generation.chat.json_schema import MAX_COUNT, MAX_DEPTH
from localinfer.generation.chat.spelled_grammar import TextGrammar
from localinfer.generation.chat.text_spelling import (
    Expression,
    Letters,
    Lexeme,
    OneOf,
    RegexReader,
    Repeated,
    RuleName,
    character,
    joined,
    letter_range,
    literal,
)

MAX_RULES = 2_000
MAX_CHARACTERS = 1 << 16
"""Of a grammar, and of a regular expression: all of one is read before anything else is done for its request."""
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\f\r]+|(?://|\#)[^\n]*|\\[ \t]*\r?\n)
    |(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>_*[A-Za-z][A-Za-z0-9_]*(?:\.-?\d+)?)
    |(?P<count>\{\d{1,9}(?:,\d{0,9})?\}|~[ \t]*\d{1,9}(?:[ \t]*\.\.[ \t]*\d{1,9})?)
    |(?P<statement>%[a-z]+)
    |(?P<sign>\.\.|->|[:|()\[\]?!*+.,])
    |(?P<unknown>[^\n]+)
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_DECIMAL = r"[0-9]+\.[0-9]*|\.[0-9]+"
_FLOAT = rf"[0-9]+[eE][+-]?[0-9]+|(?:{_DECIMAL})(?:[eE][+-]?[0-9]+)?"
_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"[+-]?(?:{_FLOAT})",
    "NUMBER": rf"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": rf"[+-]?(?:{_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of `%import common`: the texts that each has in Lark's own library."""


class _Token(NamedTuple):
    """Piece of a grammar: its kind, a name of a group of `_TOKEN`, its text, and its line."""

    kind: str
    text: str
    line: int


class LarkReader:
    """Reads one grammar. Raises: ConstraintError naming the rule, the line and what was found there."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0
        self._where = "line 1"
        self._rules: dict[str, Expression] = {}
        self._terminals: set[str] = set()
        self._used: dict[str, str] = {}
        self._is_terminal = False

    def read(self) -> TextGrammar:
        """The grammar."""
        ignored: list[Expression] = []
        while (token := self._peek()) is not None:
            self._where = f"line {token.line}"
            match token.kind:
                case "line":
                    self._at += 1
                case "sign" if token.text in "?!":
                    self._at += 1
                case "statement" if token.text == "%import":
                    self._at += 1
                    self._import()
                case "statement" if token.text == "%ignore":
                    self._at += 1
                    ignored.append(self._body(is_terminal=True))
                case "name":
                    self._rule()
                case _:
                    raise self._refused(f"has {token.text!r:.40}, which is not supported here")
            if len(self._rules) > MAX_RULES:
                raise self._refused(f"is the {MAX_RULES + 1}st rule; wanted at most {MAX_RULES}")
        for name, where in self._used.items():
            if name not in self._rules:
                raise ConstraintError(f"the Lark grammar, {where}, uses {name!r:.60}, which no rule defines; add one")
        if "start" not in self._rules:
            raise ConstraintError("the Lark grammar has no rule 'start'; name the rule that it begins with so")
        return TextGrammar(self._rules, frozenset(self._terminals), tuple(ignored))

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> _Token:
        token = self._peek()
        if token is None:
            raise self._refused("ends too early")
        self._at += 1
        return token

    def _takes(self, *signs: str) -> bool:
        """Step over one of some signs, if one is next."""
        token = self._peek()
        found = token is not None and token.kind == "sign" and token.text in signs
        self._at += found
        return found

    def _refused(self, found: str) -> ConstraintError:
        return ConstraintError(f"the Lark grammar, {self._where}, {found}")

    def _rule(self) -> None:
        token = self._next()
        name = _name(token)
        self._where = f"rule {name!r:.60}, line {token.line}"
        if not self._takes(":"):
            raise self._refused("has no ':' behind its name; templates are not supported")
        if name in self._rules:
            raise self._refused("defines a name that was defined before")
        is_terminal = name.lstrip("_").isupper()
        self._rules[name] = self._body(is_terminal=is_terminal)
        if is_terminal:
            self._terminals.add(name)

    def _body(self, *, is_terminal: bool) -> Expression:
        """The body of a rule or terminal, up to the end of its lines."""
        self._is_terminal = is_terminal
        body = self._choices()
        token = self._peek()
        if token is not None and token.kind != "line":
            raise self._refused(f"has {token.text!r:.40}, which is not supported there")
        return body

    def _choices(self) -> Expression:
        """Alternatives up to a closing bracket, or the end of the rule."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"is nested more than {MAX_DEPTH} deep")
        choices: list[Expression] = []
        parts: list[Expression] = []
        while self._peek() is not None:
            if self._is_continued():
                continue
            if self._takes("|"):
                choices.append(joined(parts))
                parts = []
            elif self._takes("->"):
                self._next()
            elif (part := self._part()) is not None:
                parts.append(part)
            else:
                break
        self._depth -= 1
        return OneOf((*choices, joined(parts))) if choices else joined(parts)

    def _is_continued(self) -> bool:
        """Step over the ends of lines that end no rule: inside of brackets, and where the next line begins with `|`."""
        end = self._at
        while end < len(self._tokens) and self._tokens[end].kind == "line":
            end += 1
        if end == self._at:
            return False
        goes_on = self._depth > 1 or (end < len(self._tokens) and self._tokens[end].text == "|")
        if goes_on:
            self._at = end
        return goes_on

    def _part(self) -> Expression | None:
        """One part with what repeats it; None where none begins."""
        token = self._peek()
        assert token is not None
        if self._takes("(", "["):
            one = self._choices()
            if not self._takes(")" if token.text == "(" else "]"):
                raise self._refused(f"has a {token.text!r} that nothing closes")
            if token.text == "[":
                one = Repeated(one, 0, 1)
        elif token.kind in ("text", "regex", "name"):
            self._at += 1
            one = self._leaf(token)
        else:
            return None
        for sign, bounds in (("?", (0, 1)), ("*", (0, None)), ("+", (1, None))):
            if self._takes(sign):
                return Repeated(one, *bounds)
        token = self._peek()
        if token is not None and token.kind == "count":
            self._at += 1
            return self._counted(one, token.text)
        return one

    def _counted(self, one: Expression, text: str) -> Repeated:
        """A part that is repeated so many times."""
        least, *others = map(int, re.findall(r"\d+", text))
        most = others[0] if others else None if "," in text else least
        if max(least, most or 0) > MAX_COUNT or (most is not None and most < least):
            raise self._refused(f"repeats a part {text} times; wanted a range up to {MAX_COUNT}")
        return Repeated(one, least, most)

    def _leaf(self, token: _Token) -> Expression:
        if token.kind == "name":
            name = _name(token)
            self._used.setdefault(name, self._where)
            if self._is_terminal and not name.lstrip("_").isupper():
                raise self._refused(f"is a terminal that uses the rule {name!r:.60}; only terminals may stand in it")
            return RuleName(name)
        if token.kind == "regex":
            pattern, _, flags = token.text[1:].rpartition("/")
            try:
                return Lexeme(RegexReader(pattern, flags).read())
            except ConstraintError as error:
                raise self._refused(f"has {token.text!r:.60}: {error}") from None
        text, _, flag = token.text[1:].rpartition('"')
        text = self._unescaped(text)
        if self._takes(".."):
            last = self._next()
            end = self._unescaped(last.text[1:-1]) if last.kind == "text" else ""
            if len(text) != 1 or len(end) != 1 or text > end:
                raise self._refused("has a range that is not from one character to a later one")
            return Lexeme(Letters((letter_range(character(text), character(end)),)))
        return Lexeme(literal(text, ignores_case=bool(flag)))

    def _unescaped(self, text: str) -> str:
        def one(found: re.Match[str]) -> str:
            code = found[1] or found[2] or found[3]
            if code is not None:
                number = int(code, 16)
                if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                    raise self._refused(f"has {found[0]}, which is no character")
                return chr(number)
            if found[4].isalnum() and found[4] not in _LETTERS:
                raise self._refused(f"has {found[0]} in a text, which is not supported; write \\\\ for a backslash")
            return _LETTERS.get(found[4], found[4])

        return _ESCAPE.sub(one, text)

    def _import(self) -> None:
        """`common.A`, `common.A -> B` or `common (A, B)`."""
        library = self._next()
        if library.text != "common":
            # A name with a number behind a point is read as one of a priority.
            raise self._refused(f"imports from {library.text!r:.40}; only %import common.NAME is supported")
        names = []
        if self._takes("."):
            names.append(self._next())
        elif self._takes("("):
            names.append(self._next())
            while self._takes(","):
                names.append(self._next())
            if not self._takes(")"):
                raise self._refused("has a '(' that nothing closes")
        found = [_name(token) for token in names if token.kind == "name"]
        for name in found:
            if name not in _COMMON:
                raise self._refused(f"imports common.{name:.40}, which is not supported; define it")
        if not found:
            raise self._refused("imports nothing")
        called = found
        if self._takes("->"):
            called = [_name(self._next())]
        for name, source in zip(called, found, strict=False):
            self._rules.setdefault(name, RegexReader(_COMMON[source]).read())
            self._terminals.add(name)


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_CHARACTERS:
        raise ConstraintError(f"the Lark grammar has {len(text)} characters; wanted at most {MAX_CHARACTERS}")
    tokens = []
    line = 1
    for found in _TOKEN.finditer(text):
        if (kind := found.lastgroup) != "space" and kind is not None:
            tokens.append(_Token(kind, found[0], line))
        line += found[0].count("\n")
    return tokens


def _name(token: _Token) -> str:
    """The name of a rule or terminal, without its priority."""
    return token.text.partition(".")[0]


def regex_grammar(pattern: str) -> TextGrammar:
    """A regular expression as a grammar. Raises: ConstraintError."""
    if len(pattern) > MAX_CHARACTERS:
        raise ConstraintError(f"the regular expression has {len(pattern)} characters; wanted at most {MAX_CHARACTERS}")
    return TextGrammar({"start": Lexeme(RegexReader(pattern).read())}, frozenset())
