"""A terminal's screen as pyte keeps it, corrected where terminals of today do otherwise."""

import pyte
from pyte.modes import LNM
from wcwidth import wcwidth


class TerminalScreen(pyte.HistoryScreen):
    """A screen with its scrollback."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines, history=100_000)
        self._stream = pyte.ByteStream(self)
        self._answers: list[str] = []

    def show(self, received: bytes | str) -> bytes:
        """Draw what a program sent; return what the terminal answers."""
        self._stream.feed(received.encode() if isinstance(received, str) else received)
        answered, self._answers = "".join(self._answers), []
        return answered.encode()

    def write_process_input(self, data: str) -> None:
        """Keep an answer until the drawing is done."""
        self._answers.append(data)

    def start_lines_at_newlines(self) -> None:
        """Have a line feed begin a line, as the kernel's terminal has for programs."""
        self.set_mode(LNM)

    def draw(self, data: str) -> None:
        """Draw text; a wide character never begins in the last column."""
        for char in data:
            if self.cursor.x == self.columns - 1 and wcwidth(char) == 2:
                self.cursor.x = self.columns
            super().draw(char)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """Resize: lines under the cursor go first, then those at the top, into the scrollback; the cursor moves along.

        Lines are cut at the new width, as xterm does; others reflow them.
        """
        lines = self.lines if lines is None else lines
        excess = max(0, self.cursor.y + 1 - lines)
        row, column = self.cursor.y - excess, self.cursor.x
        self.cursor.y = self.lines - 1
        for _ in range(excess):
            self.index()
        kept = {y: self.buffer[y] for y in range(lines) if y in self.buffer}
        super().resize(lines, columns)
        for y in range(lines):
            self.buffer[y] = kept.get(y, self.buffer[y])
        self.cursor.y, self.cursor.x = row, min(column, self.columns - 1)

    @property
    def shown_lines(self) -> list[str]:
        """The screen's lines, without spaces at their ends."""
        return [line.rstrip() for line in self.display]

    @property
    def scrollback(self) -> list[str]:
        """Lines that have left the screen at its top."""
        return ["".join(line[x].data for x in range(max(line, default=-1) + 1)).rstrip() for line in self.history.top]

    @property
    def text(self) -> str:
        """Scrollback and screen."""
        return "\n".join([*self.scrollback, *self.shown_lines])
