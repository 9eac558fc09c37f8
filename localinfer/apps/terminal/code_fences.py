"""A fenced block of code while its lines arrive."""

import re

from localinfer.apps.terminal.code_colours import CodeColours

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
        """Whether the code of a line is the closing fence."""
        mark = code.strip()
        return (
            len(mark) >= len(self._run)
            and mark == self._run[0] * len(mark)
            and len(code) - len(code.lstrip(" ")) <= _DEEPEST_CLOSING
        )

    def add(self, code: str) -> None:
        """Add the code of a line."""
        self._lines.append(code)
