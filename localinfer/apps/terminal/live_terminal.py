"""A terminal while a reply comes: one thread reads its keys, and draws the text above a few rows that change.

The thread that generates only hands text over, so a key is answered, and a slow terminal waited for, without it; and
Ctrl-C, which interrupts that thread, never interrupts a drawing.

The cursor stays where the text ends, hidden, and the rows under it are drawn in one write from there. So whatever
happens to the window, the rows and nothing else lie under the cursor: they are erased without knowing their position,
and a terminal that scrolls or reflows its lines never moves them into the text. A region that scrolls apart from the
rows would have to be set anew after each resize, and keeps some terminals from filling their scrollback.
"""

import codecs
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from localinfer.apps.terminal.display_width import ColumnTracker, cut_to_width
from localinfer.apps.terminal.keyboard import Interrupts, Keystrokes, TypedAhead
from localinfer.apps.terminal.status_line import REFRESH_SECONDS, StatusLine
from localinfer.terminal import DIM, RESET

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
            # Where lines are cut instead of reflowed, the position at which the text ended is gone.
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


_FRAME_SECONDS = 1 / 60
"""Text is drawn at most so often; keys are at once."""
_ESCAPE_SECONDS = 0.05
"""After an escape character alone, a key that sends a sequence has sent the rest of it."""
_PASTE_SECONDS = 1.0
"""A paste that stops in its midst for so long is taken as what has come of it."""
_ROOMY_LINES = 12
"""A terminal of so many lines has one to spare between the text and the rows."""
_UNKNOWN_SIZE = 80, 24
"""Used if a terminal reports 0, as some over serial lines do."""
_READ_BYTES = 1 << 16


class LiveTerminal:
    """A stream for the output of a chat: written through between replies, drawn above the changing rows during one.

    typed: takes the keys. status: the last row. suspended: the terminal's modes as the shell expects them.
    """

    def __init__(
        self,
        output: TextIO,
        keystrokes: Keystrokes,
        typed: TypedAhead,
        status: StatusLine,
        interrupts: Interrupts,
        *,
        has_styles: bool,
    ) -> None:
        self._output = output
        self._keystrokes = keystrokes
        self._typed = typed
        self._status = status
        self._interrupts = interrupts
        self._has_styles = has_styles
        self._screen = Screen(self._send, self._size)
        self._lock = threading.Lock()
        self._pending: deque[str] = deque()
        self._live_line: Callable[[], str] = str
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._error: Exception | None = None
        self._wake = -1
        self._is_woken = False

    def write(self, text: str) -> int:
        """Print text: now, or during a reply as soon as the last drawing was some time ago."""
        if self._thread is None:
            return self._output.write(text)
        self._pending.append(text)
        return len(text)

    def flush(self) -> None:
        """Have what was written shown soon."""
        if self._thread is None:
            self._output.flush()
        elif not self._is_woken:
            self._is_woken = True
            os.write(self._wake, b".")

    def isatty(self) -> bool:
        """It is a terminal."""
        return True

    @property
    def columns(self) -> int:
        """Columns of the terminal now."""
        return self._screen.size[0]

    @contextmanager
    def reply(self, live_line: Callable[[], str]) -> Iterator[None]:
        """Read keys and draw until the block ends. live_line: shown in the line after the text, asked often.

        Raises: OSError of a terminal that is gone, and what else failed in drawing, at the end of the block.
        """
        self._output.flush()
        self._live_line, self._is_ending, self._is_woken, self._error = live_line, False, False, None
        woken, self._wake = os.pipe()
        thread = threading.Thread(target=self._run, args=(woken,), name="chat-terminal", daemon=True)
        try:
            with self._interrupts.during_reply(), _stopping_for_shell(self._suspend, self._resume):
                try:
                    thread.start()
                    self._thread = thread
                    yield
                finally:
                    self._is_ending = True
                    os.write(self._wake, b".")
                    thread.join()
        finally:
            self._thread = None
            os.close(self._wake)
            os.close(woken)
        if self._error is not None:
            raise self._error

    def _run(self, woken: int) -> None:
        keyboard = self._keystrokes.descriptor
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        watched = [keyboard, woken]
        now = time.monotonic()
        draws_at = drawn_at = keys_at = now
        try:
            while True:
                wait = max(0.0, draws_at - now)
                ready = select.select(watched, [], [], wait)[0]
                now = time.monotonic()
                has_keys = False
                if woken in ready:
                    os.read(woken, _READ_BYTES)
                    self._is_woken = False
                if keyboard in ready:
                    received = self._read(keyboard)
                    if received:
                        self._typed.feed(decoder.decode(received))
                        has_keys, keys_at = True, now
                    else:
                        watched.remove(keyboard)
                        self._typed.leaves = True
                elif now - keys_at > _ESCAPE_SECONDS and not self._typed.is_within_paste:
                    self._typed.flush()
                if self._is_ending and (now - keys_at > _PASTE_SECONDS or not self._typed.is_within_paste):
                    break
                if has_keys or now >= draws_at or (self._pending and now - drawn_at >= _FRAME_SECONDS):
                    self._draw()
                    drawn_at = now
                draws_at = drawn_at + (_FRAME_SECONDS if self._pending else REFRESH_SECONDS)
            self._typed.flush()
            with self._lock:
                self._screen.draw(self._take_pending(), "", ())
                self._screen.clear()
        except Exception as error:
            # Raised where the reply ends, by the thread that waits for this one.
            self._error = error

    @staticmethod
    def _read(keyboard: int) -> bytes:
        try:
            return os.read(keyboard, _READ_BYTES)
        except OSError:
            # Of a terminal that was closed, as the end of the input is read from others.
            return b""

    def _draw(self) -> None:
        with self._lock:
            columns, lines = self._screen.size
            text = self._take_pending()
            live_line = cut_to_width(self._live_line(), columns - 1)
            status = self._status.text(columns)
            rows = self._typed.rows(columns, has_styles=self._has_styles)
            if status:
                rows.append(self._dimmed(status))
            if lines >= _ROOMY_LINES:
                rows.insert(0, "")
            self._screen.draw(text, self._dimmed(live_line) if live_line else "", rows)

    def _dimmed(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if self._has_styles else text

    def _take_pending(self) -> str:
        taken = []
        while self._pending:
            taken.append(self._pending.popleft())
        return "".join(taken)

    def _send(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()

    def _size(self) -> tuple[int, int]:
        size = os.get_terminal_size(self._output.fileno())
        return size.columns or _UNKNOWN_SIZE[0], size.lines or _UNKNOWN_SIZE[1]

    def _suspend(self) -> None:
        """Give the terminal back as it was before the chat; nothing is drawn until `_resume`."""
        self._lock.acquire()
        self._screen.suspend()
        self._keystrokes.release()

    def _resume(self) -> None:
        self._keystrokes.hold()
        self._lock.release()


@contextmanager
def _stopping_for_shell(suspend: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """Answer Ctrl-Z: stop between `suspend` and `resume`."""

    def stop(number: int, _frame: FrameType | None) -> None:
        suspend()
        try:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Here it continues, by `fg`.
            signal.signal(number, stop)
        finally:
            resume()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTSTP)
    if former != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, former)
