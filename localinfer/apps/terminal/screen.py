"""Text that only ever grows, above a few rows at the bottom of a terminal that change while it does.

The cursor stays where the text ends, hidden, and the rows under it are drawn in one write from there. So whatever
happens to the window, what lies under the cursor is the rows and nothing else: they are erased without knowing where
they are, and a terminal that scrolls or reflows its lines never moves them into the text. A region that scrolls apart
from the rows would have to be set anew after each resize, and keeps some terminals from filling their scrollback.
"""

from collections.abc import Callable, Sequence

from localinfer.apps.terminal.display_width import ColumnTracker

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_PLAIN = "\x1b[m"
_ERASE_BELOW = f"{_SAVE}{_PLAIN}\x1b[J{_RESTORE}"
_ERASE_LINE_END = "\x1b[K"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
"""Synchronised output: a terminal that knows it shows all of an update at once, others ignore it."""
_LINE_DOWN = "\x1bD"
"""Index: down a line in the same column, scrolling at the bottom."""


class Screen:
    """Draws text and the rows under it; one thread at a time.

    send: writes to the terminal, at once. size: columns and lines of the terminal, asked before each drawing.
    """

    def __init__(self, send: Callable[[str], None], size: Callable[[], tuple[int, int]]) -> None:
        self._send = send
        self._ask_size = size
        self._size = (0, 0)
        self._tracker = ColumnTracker()
        self._withheld = ""
        self._rows: list[str] = []
        self._live_line = ""
        self._is_drawn = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        return self._ask_size()

    def draw(self, text: str, live_line: str, rows: Sequence[str]) -> None:
        """Append `text`, and show `live_line` in the line after it and `rows` at the bottom until the next drawing.

        live_line, rows: shorter than the terminal is wide, with or without styles. live_line is shown only where the
        text ends with a line. Rows for which the terminal has too few lines are left out, the last ones first.
        """
        columns, lines = size = self._ask_size()
        is_resized = self._is_drawn and size != self._size
        if is_resized and self._tracker.column >= columns:
            # Where lines are cut instead of reflowed, the place at which the text ended is gone.
            text = f"\n{text}"
        shown, self._withheld, left_line = self._tracker.advance(self._withheld + text, columns)
        if self._tracker.column or self._withheld:
            live_line = ""
        redraws = is_resized or left_line or (bool(shown) and self._tracker.is_uncertain)
        drawn_rows = list(rows[: max(0, lines - 1)])
        update = self._update(shown, live_line, drawn_rows, lines, redraws=redraws)
        self._rows, self._live_line, self._size = drawn_rows, live_line, size
        if update:
            self._send(f"{_BEGIN_UPDATE}{update}{_END_UPDATE}")
            self._is_drawn = True

    def clear(self) -> None:
        """Erase everything under the text, and show the cursor, at its end."""
        if self._is_drawn or self._withheld:
            self._send(f"{_ERASE_BELOW}{self._withheld}{_SHOW_CURSOR}")
        self._withheld = ""
        self._tracker.column = 0
        self.forget()

    def suspend(self) -> None:
        """Erase everything under the text until the next drawing, which may be in another state of the terminal."""
        if self._is_drawn:
            self._send(f"{_ERASE_BELOW}{self._withheld}\n{_SHOW_CURSOR}")
        self._withheld = ""
        self._tracker.column = 0
        self.forget()

    def forget(self) -> None:
        """Draw everything anew the next time."""
        self._rows, self._live_line, self._is_drawn = [], "", False

    def _update(self, text: str, live_line: str, rows: list[str], lines: int, *, redraws: bool) -> str:
        """The sequence that brings the terminal to its next state, "" if it is there."""
        redraws = (
            redraws
            or len(rows) != len(self._rows)
            or live_line != self._live_line
            or bool(text and live_line)
            or not self._is_drawn
        )
        if not redraws:
            changed = [place for place, row in enumerate(rows) if row != self._rows[place]]
            return text + (self._drawn(rows, changed, lines) if changed else "")
        if not self._is_drawn and not rows and not live_line:
            return text
        room = f"{_LINE_DOWN * len(rows)}\x1b[{len(rows)}A" if rows else ""
        return (
            f"{_HIDE_CURSOR}{_ERASE_BELOW}{text}{room}{_SAVE}{_PLAIN}{live_line}{_RESTORE}"
            f"{self._drawn(rows, range(len(rows)), lines)}"
        )

    @staticmethod
    def _drawn(rows: list[str], places: Sequence[int], lines: int) -> str:
        if not places:
            return ""
        first_line = lines - len(rows) + 1
        drawn = "".join(f"\x1b[{first_line + place};1H{_PLAIN}{rows[place]}{_ERASE_LINE_END}" for place in places)
        return f"{_SAVE}{drawn}{_RESTORE}"
