"""Lines for a terminal, wrapped at words as the words arrive: what was written is never changed."""

import re
from collections.abc import Callable, Sequence

from localinfer.apps.terminal.display_width import joins, may_break, text_width

PLAIN = 0
STRONG = 1
EMPHASIS = 2
CODE = 4
LINK = 8
FAINT = 16
STRUCK = 32
TITLE = 64
MARKER = 128
_CODES = {STRONG: "1", EMPHASIS: "3", CODE: "36", LINK: "4", FAINT: "2", STRUCK: "9", TITLE: "1;35", MARKER: "35"}
"""SGR codes; colours are of the terminal's own sixteen, which its theme keeps readable."""
RESET = "\x1b[0m"
SMALLEST_WIDTH = 8
LEAST_TEXT_WIDTH = 12
"""Indents give way before text gets narrower than this."""
_SPACES = re.compile("( +)")

Piece = tuple[str, int]
"""Text and its style: a sum of the constants above."""


def style_sequence(style: int) -> str:
    """The escape sequence that begins a style."""
    return f"\x1b[{';'.join(code for flag, code in _CODES.items() if style & flag)}m"


class WrappedWriter:
    """Wraps styled text to the width of the terminal.

    width: columns of the terminal, asked at the start of every line.
    breaks_addresses: whether a web address longer than a line is broken like other words; else the terminal wraps it,
        so that it can be clicked and copied.
    smallest_width: what a narrower terminal is taken for.
    Every run of styled text ends its own style: between two calls of `take` anything may be printed.
    """

    def __init__(
        self,
        width: Callable[[], int],
        *,
        styles: bool,
        breaks_addresses: bool = False,
        smallest_width: int = SMALLEST_WIDTH,
    ) -> None:
        self._ask_width = width
        self._smallest_width = smallest_width
        self._styles = styles
        self._breaks_addresses = breaks_addresses
        self._sequences: dict[int, str] = {}
        self._output: list[str] = []
        self._hanging: Sequence[Piece] = ()
        self._indent = 0
        self._room = 0
        """Columns of the longest word that is not broken."""
        self._column = 0
        self._width = SMALLEST_WIDTH
        self._spaces = 0
        self._space_style = PLAIN
        self._word: list[Piece] = []
        self._word_text = ""
        self._word_width = 0
        self._is_breaking = False
        self._is_address = False
        self._cluster: Piece = "", PLAIN
        """Characters drawn in the cells of one, while a word is broken."""
        self.widest = 0
        """Columns of the longest line since `begin`, without the indent."""

    def take(self) -> str:
        """Take the output since the last call."""
        text = "".join(self._output)
        self._output.clear()
        return text

    @property
    def width(self) -> int:
        """Columns of a line that begins now."""
        return max(self._ask_width(), self._smallest_width)

    def begin(self, first: Sequence[Piece] = (), hanging: Sequence[Piece] = ()) -> None:
        """Start a line with the pieces `first`; the lines that it is wrapped to start with `hanging`."""
        self._hanging = hanging
        self.widest = 0
        self._start_line(first)

    def write(self, text: str, style: int = PLAIN) -> None:
        """Add text without line ends to the line; its last word is held until a space or the end of the line."""
        if " " not in text:
            self._add(text, style)
            return
        for part in _SPACES.split(text):
            if not part:
                continue
            if part[0] == " ":
                self._end_word()
                self._spaces += len(part)
                self._space_style = style
            else:
                self._add(part, style)

    def end(self) -> None:
        """End the line, without the spaces at its end."""
        self._end_word()
        self._spaces = 0
        self._output.append("\n")

    def raw_line(self, text: str) -> None:
        """A line that is printed as it is."""
        self._output.append(f"{text}\n")

    def pieces_line(self, pieces: Sequence[Piece]) -> None:
        """A line of pieces that is not wrapped, without the spaces at its end."""
        shown = list(pieces)
        while shown and not shown[-1][0].strip():
            shown.pop()
        if shown:
            shown[-1] = shown[-1][0].rstrip(), shown[-1][1]
        for text, style in shown:
            self._put(text, style)
        self._output.append("\n")

    def styled(self, text: str, style: int) -> str:
        """The text with the sequences of its style."""
        if not style or not self._styles:
            return text
        if style not in self._sequences:
            self._sequences[style] = style_sequence(style)
        return f"{self._sequences[style]}{text}{RESET}"

    def _put(self, text: str, style: int) -> None:
        self._output.append(self.styled(text, style))

    def _start_line(self, pieces: Sequence[Piece]) -> None:
        self._width = self.width
        pieces = fitting(pieces, self._width)
        for text, style in pieces:
            self._put(text, style)
        self._indent = self._column = piece_width(pieces)
        self._room = self._width - max(self._indent, piece_width(fitting(self._hanging, self._width)))
        self._spaces = 0

    def _wrap(self) -> None:
        self._output.append("\n")
        self._start_line(self._hanging)

    def _add(self, text: str, style: int) -> None:
        if text.isascii() and not self._is_breaking:
            before = self._word_text
            if (before.isascii() or not may_break(before, text[0])) and (self._word_width + len(text) <= self._room):
                self._append(text, style, self._word_width + len(text))
                return
        for character in text:
            self._add_character(character, style)

    def _append(self, text: str, style: int, width: int) -> None:
        if self._word and self._word[-1][1] == style:
            self._word[-1] = self._word[-1][0] + text, style
        else:
            self._word.append((text, style))
        self._word_text += text
        self._word_width = width

    def _add_character(self, character: str, style: int) -> None:
        if self._is_breaking:
            self._break_at(character, style)
            return
        if self._word_text and may_break(self._word_text, character):
            self._end_word()
        text = self._word_text + character
        width = self._word_width + 1 if text.isascii() else text_width(text)
        if width <= self._room:
            self._append(character, style, width)
            return
        # Longer than a line: it begins a line of its own, and is written as it comes from here on.
        pieces, self._word, self._word_text = self._word, [], ""
        if self._column > self._indent:
            self._wrap()
        self._spaces = 0
        self._is_breaking = True
        self._is_address = "://" in text and not self._breaks_addresses
        for piece, piece_style in [*pieces, (character, style)]:
            for one in piece:
                self._break_at(one, piece_style)

    def _break_at(self, character: str, style: int) -> None:
        if joins(self._cluster[0], character):
            self._cluster = self._cluster[0] + character, self._cluster[1]
        else:
            self._put_cluster()
            self._cluster = character, style

    def _put_cluster(self) -> None:
        text, style = self._cluster
        width = text_width(text)
        if self._column + width > self._width and self._column > self._indent:
            if self._is_address:
                self._column = 0
            else:
                self._wrap()
        self._put(text, style)
        self._column += width
        self.widest = max(self.widest, self._column - self._indent)

    def _end_word(self) -> None:
        if self._is_breaking:
            self._put_cluster()
            self._cluster = "", PLAIN
            self._is_breaking = False
        elif self._word:
            if self._column == self._indent:
                self._spaces = 0
            if self._column + self._spaces + self._word_width > self._width and self._column > self._indent:
                self._wrap()
            if self._spaces and self._word[0][1] == self._space_style:
                self._word[0] = " " * self._spaces + self._word[0][0], self._space_style
            elif self._spaces:
                self._put(" " * self._spaces, PLAIN)
            for text, style in self._word:
                self._put(text, style)
            self._column += self._spaces + self._word_width
            self._spaces = 0
            self.widest = max(self.widest, self._column - self._indent)
        self._word, self._word_text, self._word_width = [], "", 0


def fitting(pieces: Sequence[Piece], width: int) -> Sequence[Piece]:
    """The start of a line without the outermost indents and bars that would leave fewer than LEAST_TEXT_WIDTH columns.

    Its last piece, which may be the marker of an item, is always kept.
    """
    room = max(0, width - LEAST_TEXT_WIDTH)
    kept = list(pieces)
    excess = piece_width(kept) - room
    while excess > 0 and len(kept) > 1:
        place = next((place for place, (text, _) in enumerate(kept[:-1]) if not text.strip()), 0)
        excess -= text_width(kept[place][0])
        del kept[place]
    return kept


def piece_width(pieces: Sequence[Piece]) -> int:
    """Columns that pieces take on one line."""
    return sum(text_width(text) for text, _ in pieces)
