"""The keyboard during a chat: its modes, Ctrl-C while a reply comes, and messages typed before the reply ends."""

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from localinfer.apps.terminal.display_width import cut_to_width, end_of_width, is_combining, most_columns
from localinfer.system import interruption
from localinfer.terminal import neutralise_controls
from localinfer.types import Closing

try:
    import termios
except ImportError:  # Windows: its console does not echo unread keys.
    HAS_TERMIOS = False
else:
    HAS_TERMIOS = True

_INPUT_MODES, _LOCAL_MODES, _CHARACTERS = 0, 3, 6
"""Indices into the result of `termios.tcgetattr`."""
_PASTE_MARKS_ON, _PASTE_MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"
_PASTE_BEGIN, _PASTE_END = b"\x1b[200~", b"\x1b[201~"
_PASTE_SECONDS = 1.0
"""Without anything of a paste after which its end is lost."""
_MOST_BEFORE = 1 << 16
_SHOW_CURSOR = "\x1b[?25h"


class Keystrokes(Closing):
    """Keeps keys typed between prompts; Ctrl-C still interrupts.

    By default a terminal echoes typed keys into the program's output, and turns Enter into a line feed, which a
    multi-line prompt cannot tell from Ctrl-J. Use it around all prompts: each restores the modes it found. Does nothing
    where `keyboard` is not such a terminal; is_held says whether it is one. A context manager that restores the modes.
    Source: POSIX.1-2017, chapter 11, "General Terminal Interface".
    """

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        self._screen = screen
        self._former: list[Any] | None = None
        self.descriptor = -1
        if HAS_TERMIOS and keyboard.isatty():
            try:
                self.descriptor = keyboard.fileno()
                self._former = termios.tcgetattr(self.descriptor)
            except (OSError, termios.error):
                return
            self.hold()

    @property
    def is_held(self) -> bool:
        """True if the keyboard is a terminal whose modes can be set."""
        return self._former is not None

    def hold(self) -> None:
        """Set the chat's modes."""
        if self._former is None:
            return
        held = list(self._former)
        held[_CHARACTERS] = list(held[_CHARACTERS])
        held[_INPUT_MODES] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        held[_LOCAL_MODES] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN)
        # Ctrl-C would discard what was typed before it, and half of a drawing.
        held[_LOCAL_MODES] |= termios.NOFLSH
        held[_CHARACTERS][termios.VMIN], held[_CHARACTERS][termios.VTIME] = 1, 0
        termios.tcsetattr(self.descriptor, termios.TCSANOW, held)
        self.mark_pastes()

    def typed_before(self) -> str:
        """Read the text typed so far; Enter is a line feed in it before the chat's modes were set, and a return later.

        A marked paste that has begun is waited for.
        """
        received = b""
        try:
            while len(received) < _MOST_BEFORE:
                is_within_paste = received.rfind(_PASTE_BEGIN) > received.rfind(_PASTE_END)
                if not select.select([self.descriptor], [], [], _PASTE_SECONDS if is_within_paste else 0)[0]:
                    break
                part = os.read(self.descriptor, _MOST_BEFORE)
                received += part
                if not part:
                    break
        except OSError:
            pass
        return received.decode(errors="replace")

    def mark_pastes(self) -> None:
        """Have pastes marked, so that one of many lines is one message; each prompt ends by switching that off."""
        if self._former is not None:
            self._write(_PASTE_MARKS_ON)

    def release(self) -> None:
        """Restore the modes that were found."""
        if self._former is not None:
            termios.tcsetattr(self.descriptor, termios.TCSANOW, self._former)
            self._write(f"{_PASTE_MARKS_OFF}{_SHOW_CURSOR}")

    def suspend(self) -> None:
        """Stop the process, as Ctrl-Z does, with the modes that were found until it continues."""
        if self._former is not None:
            self.release()
            signal.raise_signal(signal.SIGTSTP)
            # Here it continues, by `fg`.
            self.hold()

    def close(self) -> None:
        """Restore the modes that were found; may be called again."""
        self.release()
        self._former = None

    def _write(self, sequence: str) -> None:
        if os.environ.get("TERM") != "dumb":
            self._screen.write(sequence)
            self._screen.flush()


MOMENT_SECONDS = 1.5
"""A second Ctrl-C within it leaves."""


class _CountedInterrupt(KeyboardInterrupt):
    """Raised by a Ctrl-C that `Interrupts` counted as it came."""


class Interrupts:
    """Remembers when Ctrl-C was pressed, in replies and at prompts.

    leaves: it was pressed twice within a moment.
    """

    def __init__(self) -> None:
        self.leaves = False
        self._pressed_at = float("-inf")
        self._is_stopping = False

    def press(self) -> bool:
        """Ctrl-C was pressed; return whether it was the second within a moment."""
        now = time.monotonic()
        self.leaves = self.leaves or now - self._pressed_at <= MOMENT_SECONDS
        self._pressed_at = now
        return self.leaves

    @property
    def was_just_pressed(self) -> bool:
        """True if a Ctrl-C now would be the second within a moment."""
        return time.monotonic() - self._pressed_at <= MOMENT_SECONDS

    def answer(self, interrupt: KeyboardInterrupt) -> None:
        """Take a Ctrl-C that raised, and count it if the handler of a reply did not."""
        interruption.take()
        if not isinstance(interrupt, _CountedInterrupt):
            self.press()

    @contextmanager
    def during_reply(self) -> Iterator[None]:
        """Have the first Ctrl-C of the block raise KeyboardInterrupt, once, so that what stops is not stopped again.

        One that follows is only counted; a third one raises as well, should stopping take too long.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = signal.getsignal(signal.SIGINT)
        if not interruption.raises_interrupts():
            # The process was started to ignore it, or another handler answers.
            yield
            return
        self._is_stopping = False
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            try:
                yield
            finally:
                # From here on only counted: what follows restores the terminal.
                self._is_stopping = True
        finally:
            signal.signal(signal.SIGINT, former)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        was_leaving, was_stopping = self.leaves, self._is_stopping
        self._is_stopping = True
        self.press()
        if not was_stopping or was_leaving:
            raise _CountedInterrupt


PROMPT = "> "
_WAITING_MARK = "next: "
_SHOWN_MESSAGES = 3
_SHOWN_CHARACTERS = 2000
"""Of a message on the screen; a line of a terminal has fewer."""
_LEAST_COLUMNS = 8
_LINE_MARK = "↵"
_REVERSED, _DIM, _PLAIN = "\x1b[7m", "\x1b[2m", "\x1b[m"
_BOLD = "\x1b[1m"
_PROMPT_STYLE = "\x1b[1;36m"
_PASTE_END_KEYS = "\x1b[201~"


class TypedAhead:
    """Keys become messages: Enter ends one, Alt-Enter and Ctrl-J start a line of it, a paste is text.

    Left, Right, Home, End, Backspace, Delete, Ctrl-A, E, U, K and W edit the unfinished message; Up takes the last
    finished one back. on_unfold: called for Ctrl-O.
    leaves: Ctrl-D was pressed with nothing typed.
    """

    def __init__(self, on_unfold: Callable[[], None]) -> None:
        self.text = ""
        self.leaves = False
        self._on_unfold = on_unfold
        self._cursor = 0
        self._messages: deque[str] = deque()
        self._is_after_escape = False
        self._parser = Vt100Parser(self.press)

    @property
    def is_within_paste(self) -> bool:
        """True while the end of a paste has not come yet."""
        return bool(self._parser._in_bracketed_paste)

    def begin(self, text: str) -> None:
        """Take what was typed before keys were read: a line that ends is a message, several are one to look at.

        An Enter is a line feed in it where it came before the chat's modes were set, and a return behind that. Key
        sequences and marked pastes, which may come then, are keys as ever.
        """
        if "\x1b" in text:
            self.feed(text)
            if self.is_within_paste:
                self.feed(_PASTE_END_KEYS)
            self.flush()
            return
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        is_message = lines.endswith("\n") and lines.count("\n") == 1
        # Ctrl-J, not Enter.
        self.feed(f"{lines[:-1]}\r" if is_message else lines.rstrip("\n"))

    def feed(self, keys: str) -> None:
        """Take what a terminal sent; a key sequence, or a paste, may be split anywhere."""
        self._parser.feed(keys)

    def flush(self) -> None:
        """Take what has come as whole keys, because nothing follows."""
        self._parser.flush()
        self._is_after_escape = False

    def press_all(self, key_presses: Iterable[KeyPress]) -> None:
        """Take keys that were recognised elsewhere."""
        for key_press in key_presses:
            self.press(key_press)

    def press(self, key_press: KeyPress) -> None:
        """Take one key; keys without a meaning here do nothing."""
        key, data = key_press.key, key_press.data
        is_after_escape, self._is_after_escape = self._is_after_escape, key == Keys.Escape
        if key == Keys.ControlM and not is_after_escape:
            self._finish_message()
        elif key in (Keys.ControlM, Keys.ControlJ):
            self._insert("\n")
        elif key == Keys.BracketedPaste:
            self._insert(data.replace("\r\n", "\n").replace("\r", "\n"))
        elif key == Keys.Up:
            self._take_back()
        elif key == Keys.ControlD and not self.text:
            self.leaves = True
        elif key == Keys.ControlO:
            self._on_unfold()
        elif key in _EDITS:
            self.text, self._cursor = _EDITS[key](self.text, self._cursor)
        elif isinstance(key, str) and not isinstance(key, Keys) and not is_after_escape:
            self._insert(data)

    def take_message(self) -> str | None:
        """Remove and return the message that was finished first, None if there is none."""
        return self._messages.popleft() if self._messages else None

    def take_text(self) -> str:
        """Remove and return the unfinished message."""
        text, self.text, self._cursor = self.text, "", 0
        return text

    def rows(self, width: int, *, has_styles: bool) -> list[str]:
        """Rows of less than `width` columns that show it: finished messages, then the unfinished one."""
        columns = width - 1
        if columns < _LEAST_COLUMNS:
            return []
        waiting = list(self._messages)
        shown = waiting[:_SHOWN_MESSAGES]
        rows = [cut_to_width(_WAITING_MARK + _on_one_line(message), columns) for message in shown]
        if len(waiting) > len(shown):
            rows.append(cut_to_width(f"{len(waiting) - len(shown)} more", columns))
        if self.leaves:
            rows.append(cut_to_width("leaves after this reply", columns))
        rows = [f"{_DIM}{row}{_PLAIN}" if has_styles else row for row in rows]
        if self.text:
            rows.append(self._unfinished_row(columns, has_styles=has_styles))
        return rows

    def _unfinished_row(self, columns: int, *, has_styles: bool) -> str:
        """The unfinished message around the cursor, which is a reversed cell: the real one stays in the reply."""
        num_lines = self.text.count("\n") + 1
        label = f"({num_lines:,} lines) " if num_lines > 3 and columns > 30 else ""
        room = columns - len(PROMPT) - len(label)
        before = _visible(self.text[max(0, self._cursor - _SHOWN_CHARACTERS) : self._cursor])
        after = _visible(self.text[self._cursor : self._cursor + _SHOWN_CHARACTERS])
        at_cursor, after = (after[0], after[1:]) if after else (" " if has_styles else "_", "")
        while after and is_combining(after[0]):
            at_cursor, after = at_cursor + after[0], after[1:]
        before = end_of_width(before, room - most_columns(at_cursor))
        after = cut_to_width(after, room - most_columns(before) - most_columns(at_cursor), mark="")
        if not has_styles:
            return f"{PROMPT}{label}{before}{at_cursor}{after}"
        cursor = f"{_REVERSED}{at_cursor}{_PLAIN}"
        return f"{_PROMPT_STYLE}{PROMPT}{_PLAIN}{label}{_BOLD}{before}{cursor}{_BOLD}{after}{_PLAIN}"

    def _finish_message(self) -> None:
        if self.text.strip():
            self._messages.append(self.text)
        self.take_text()

    def _take_back(self) -> None:
        if not self.text and self._messages:
            self.text = self._messages.pop()
            self._cursor = len(self.text)

    def _insert(self, text: str) -> None:
        self.text = self.text[: self._cursor] + text + self.text[self._cursor :]
        self._cursor += len(text)


def sent(first_line: str, *, has_styles: bool) -> str:
    """The first line of a message as the prompt shows it."""
    return f"{_PROMPT_STYLE}{PROMPT}{_PLAIN}{_BOLD}{first_line}{_PLAIN}" if has_styles else PROMPT + first_line


def _visible(text: str) -> str:
    return neutralise_controls(text).replace("\n", _LINE_MARK).replace("\t", " ")


def _on_one_line(message: str) -> str:
    num_lines = message.count("\n") + 1
    label = f"({num_lines:,} lines) " if num_lines > 1 else ""
    return label + _visible(message[:_SHOWN_CHARACTERS])


def _before(text: str, cursor: int) -> int:
    """The start of the character before the cursor, with its combining ones."""
    place = cursor - 1
    while place > 0 and is_combining(text[place]) and text[place] != "\n":
        place -= 1
    return max(0, place)


def _after(text: str, cursor: int) -> int:
    """The end of the character at the cursor, with its combining ones."""
    place = cursor + 1
    while place < len(text) and is_combining(text[place]) and text[place] != "\n":
        place += 1
    return min(len(text), place)


def _word_before(text: str, cursor: int) -> int:
    return len(text[:cursor].rstrip().rpartition(" ")[0]) + 1 if " " in text[:cursor].rstrip() else 0


def _without(text: str, begin: int, end: int) -> tuple[str, int]:
    return text[:begin] + text[end:], begin


_Edit = Callable[[str, int], tuple[str, int]]
_EDITS: dict[Keys | str, _Edit] = {
    Keys.Left: lambda text, cursor: (text, _before(text, cursor)),
    Keys.ControlB: lambda text, cursor: (text, _before(text, cursor)),
    Keys.Right: lambda text, cursor: (text, _after(text, cursor)),
    Keys.ControlF: lambda text, cursor: (text, _after(text, cursor)),
    Keys.Home: lambda text, _: (text, 0),
    Keys.ControlA: lambda text, _: (text, 0),
    Keys.End: lambda text, _: (text, len(text)),
    Keys.ControlE: lambda text, _: (text, len(text)),
    Keys.ControlH: lambda text, cursor: _without(text, _before(text, cursor), cursor),
    Keys.Delete: lambda text, cursor: _without(text, cursor, _after(text, cursor)),
    Keys.ControlD: lambda text, cursor: _without(text, cursor, _after(text, cursor)),
    Keys.ControlU: lambda text, cursor: _without(text, 0, cursor),
    Keys.ControlK: lambda text, cursor: (text[:cursor], cursor),
    Keys.ControlW: lambda text, cursor: _without(text, _word_before(text, cursor), cursor),
}
