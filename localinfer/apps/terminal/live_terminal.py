"""A terminal while a reply comes: one thread reads its keys, and draws the text with the rows under it.

The thread that generates only hands text over, so a key is answered, and a slow terminal waited for, without it; and
Ctrl-C, which interrupts that thread, never interrupts a drawing.
"""

import codecs
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from localinfer.apps.terminal.display_width import cut_to_width
from localinfer.apps.terminal.keyboard import Interrupts, Keystrokes
from localinfer.apps.terminal.screen import Screen
from localinfer.apps.terminal.status_line import REFRESH_SECONDS, StatusLine
from localinfer.apps.terminal.typed_ahead import TypedAhead
from localinfer.terminal import DIM, RESET

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
