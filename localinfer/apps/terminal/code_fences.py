"""Fenced blocks of code while their lines arrive, and colours for these lines."""

import re
from typing import Any

_FEWEST_LINES = 12
"""Lines before the current one that are read again for its state, and those up to a place to begin."""
_MOST_CHARACTERS = 8_000
_LONGEST_LINE = 2_000
_SEQUENCES = {
    # Neither yellow nor bright black: light themes and Solarized show those hardly or not at all.
    "Comment": "\x1b[2m",
    "Keyword": "\x1b[35m",
    "Operator.Word": "\x1b[35m",
    "Literal.String": "\x1b[32m",
    "Literal.Number": "\x1b[36m",
    "Name.Function": "\x1b[34m",
    "Name.Class": "\x1b[34m",
    "Name.Decorator": "\x1b[36m",
    "Name.Builtin": "\x1b[36m",
    "Name.Exception": "\x1b[36m",
    "Name.Tag": "\x1b[34m",
    "Name.Attribute": "\x1b[36m",
    "Generic.Inserted": "\x1b[32m",
    "Generic.Deleted": "\x1b[31m",
    "Generic.Heading": "\x1b[34m",
    "Generic.Subheading": "\x1b[36m",
    "Generic.Prompt": "\x1b[34m",
}
_END = "\x1b[0m"


class CodeColours:
    """Styles the lines of one code block, each from the lines before it."""

    def __init__(self, language: str) -> None:
        self._lexer = _find_lexer(language)
        self._before = ""
        """Lines that the state of the next one is read from."""
        self._places: list[int] = []
        """Positions in them of lines that start something new, outside strings and comments."""

    def line(self, code: str) -> str:
        """The line, which has no line end, with colours; as it is where the language is unknown."""
        if self._lexer is None or len(code) > _LONGEST_LINE:
            return code
        start, text = len(self._before), f"{self._before}{code}\n"
        parts: list[str] = []
        position, is_inside = 0, False
        for _, kind, value in self._lexer.get_tokens_unprocessed(text):
            end = position + len(value)
            if position < start <= end:
                is_inside = str(kind).startswith(("Token.Literal.String", "Token.Comment.Multi"))
            if end > start:
                parts.append(_styled(text[max(position, start) : min(end, len(text) - 1)], kind))
            position = end
        if position != len(text):
            self._lexer = None
            return code
        if code[:1].strip() and code[0] not in "}])" and not is_inside:
            self._places.append(start)
        self._before = text
        self._forget()
        return "".join(parts)

    def _forget(self) -> None:
        """Keep the lines from the last place on that has enough lines after it."""
        while len(self._places) > 1 and self._before.count("\n", self._places[1]) >= _FEWEST_LINES:
            self._drop(self._places[1])
        if len(self._before) > _MOST_CHARACTERS:
            self._drop(self._before.index("\n", len(self._before) // 2) + 1)

    def _drop(self, length: int) -> None:
        self._before = self._before[length:]
        self._places = [place - length for place in self._places if place >= length]


def _find_lexer(language: str) -> Any:
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        # PHP from a model seldom has its opening tag.
        return get_lexer_by_name(language, startinline=True)
    except ClassNotFound:
        return None


def _styled(text: str, kind: Any) -> str:
    if not text.strip():
        return text
    names = str(kind).removeprefix("Token.").split(".")
    for count in range(len(names), 0, -1):
        sequence = _SEQUENCES.get(".".join(names[:count]))
        if sequence is not None:
            return f"{sequence}{text}{_END}"
    return text


_QUOTE_MARK = re.compile(r" {0,3}> ?")
_DEEPEST_CLOSING = 3
"""Spaces that a closing fence may have before it; with more it is code."""


class Fence:
    """The lines of a fenced block.

    run: the backticks or tildes that opened it; as many or more close it.
    quotes: block quotes that it is in, whose marks are no code.
    indent: columns of indent of the opening fence, which its lines may have too.
    colours: for its language; None to print it plain.
    """

    def __init__(self, run: str, *, quotes: int, indent: int, colours: CodeColours | None) -> None:
        self.colours = colours
        self._run = run
        self._quotes = quotes
        self._indent = indent
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """The code so far, without the last line end."""
        return "\n".join(self._lines)

    def code_of(self, line: str) -> str | None:
        """The code of a line, without quote marks and the fence's indent; None if the line is outside the quote."""
        for _ in range(self._quotes):
            mark = _QUOTE_MARK.match(line)
            if mark is None:
                return None
            line = line[mark.end() :]
        spaces = len(line) - len(line.lstrip(" "))
        return line[min(spaces, self._indent) :]

    def is_closed_by(self, code: str) -> bool:
        """True if the code of a line is the closing fence."""
        mark = code.strip()
        return (
            len(mark) >= len(self._run)
            and mark == self._run[0] * len(mark)
            and len(code) - len(code.lstrip(" ")) <= _DEEPEST_CLOSING
        )

    def add(self, code: str) -> None:
        """Add the code of a line."""
        self._lines.append(code)
