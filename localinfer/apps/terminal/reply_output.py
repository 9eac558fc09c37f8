"""Print replies: Markdown rendered as it comes, reasoning folded into one line, the last exchange of a saved chat."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TextIO

from localinfer.apps.terminal.keyboard import sent
from localinfer.apps.terminal.live_terminal import LiveTerminal
from localinfer.apps.terminal.status_line import StatusLine
from localinfer.storage.conversations import turn_text
from localinfer.terminal import describe_duration, dim, draws, has_colour, neutralise_controls


class TextRenderer(Protocol):
    """Turns streamed model text into what to print of it, only ever appended."""

    def feed(self, text: str) -> str:
        """Take more text; return the text to print now."""

    def end(self) -> str:
        """Return the text to print at the end of the reply."""


class _PlainText:
    """Text as it is, with controls neutralised on a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def feed(self, text: str) -> str:
        return neutralise_controls(text) if self._is_terminal else text

    def end(self) -> str:
        return ""


def terminal_columns() -> int:
    """Columns of the terminal now."""
    return shutil.get_terminal_size().columns


def text_renderer(output: TextIO, columns: Callable[[], int]) -> TextRenderer:
    """The Markdown renderer for a terminal; the text as it is for a dumb one, and elsewhere."""
    if not draws(output) or os.environ.get("TERM") == "dumb":
        return _PlainText(is_terminal=output.isatty())
    from localinfer.apps.terminal.markdown import MarkdownStream

    return MarkdownStream(columns, styles=has_colour(output))


class ReplyOutput:
    """Prints one reply after the other: text to `output`, reasoning to `notices` where that is a terminal.

    last_reasoning: of the last reply that had any. renderer: of the last reply; the Markdown renderer on terminals.
    live: what draws on the terminal while a reply comes; None where nothing does.
    """

    def __init__(
        self, output: TextIO, notices: TextIO, *, live: LiveTerminal | None = None, status: StatusLine | None = None
    ) -> None:
        self.last_reasoning = ""
        self.renderer: TextRenderer = _PlainText(is_terminal=output.isatty())
        self._output = output
        self._notices = notices
        self._live = live
        self._status = status
        self._shows_reasoning = False
        self._reasoning_lock = threading.Lock()
        self._reasoning: list[str] = []
        self._reasoning_began = 0.0
        self._num_events = 0
        self._has_ended = True
        self._num_shown = 0
        self._line = ""
        self._last = "\n"

    @property
    def shows_reasoning(self) -> bool:
        """Print reasoning in full instead of one line: from now on, with what has come of it; any thread may set it."""
        return self._shows_reasoning

    @shows_reasoning.setter
    def shows_reasoning(self, shows_reasoning: bool) -> None:
        with self._reasoning_lock:
            self._shows_reasoning = shows_reasoning
            self._show_reasoning()

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Print one reply: keys are read, and the rows under it drawn, until the block ends, however it does."""
        self.renderer, self._last, self._has_ended = text_renderer(self._output, self.columns), "\n", False
        self._reasoning, self._num_events, self._num_shown, self._line = [], 0, 0, ""
        with nullcontext() if self._live is None else self._live.reply(self._live_line):
            try:
                yield
            finally:
                if self._status is not None:
                    self._status.refresh(is_last=True)
                self.end()

    def write(self, text: str) -> None:
        """Print one delta of the reply; those without text are counted as reasoning, if some has come."""
        if self._status is not None:
            self._status.refresh()
        if not text:
            self._num_events += 1
        else:
            self.end_reasoning()
            self._print(self.renderer.feed(text))

    def write_reasoning(self, text: str) -> None:
        """Take one delta of reasoning, which a pipe never gets."""
        if not text or not self._notices.isatty():
            return
        with self._reasoning_lock:
            if not self._reasoning:
                self._reasoning_began = time.monotonic()
            self._reasoning.append(text)
            self._show_reasoning()

    def end_reasoning(self) -> None:
        """Say how long the reasoning was, if there was some since this was last called."""
        with self._reasoning_lock:
            if not self._reasoning:
                return
            self._line = ""
            before = "" if not self._num_shown else "\n" if self._reasoning[-1].endswith("\n") else "\n\n"
            self._notice(f"{before}{dim(f'thought for {self._reasoning_length()}', self._notices)}\n\n")
            self.last_reasoning = "".join(self._reasoning)
            self._reasoning, self._num_shown = [], 0

    def end(self) -> None:
        """Print what is held back, and start a new line unless the output is at the start of one; once per reply."""
        if self._has_ended:
            return
        self._has_ended = True
        self.end_reasoning()
        self._print(self.renderer.end())
        if self._last != "\n":
            self._print("\n")

    def _print(self, text: str) -> None:
        if text:
            self._output.write(text)
            self._output.flush()
            self._last = text[-1]

    def _notice(self, text: str) -> None:
        self._notices.write(text)
        self._notices.flush()

    def _show_reasoning(self) -> None:
        """Print what was not printed yet, or say in the line how long it is; the lock is held."""
        unfolded = "".join(self._reasoning[self._num_shown :])
        if self._shows_reasoning and unfolded:
            self._line = ""
            self._num_shown = len(self._reasoning)
            self._notice(dim(neutralise_controls(unfolded), self._notices))
        elif self._reasoning and not self._num_shown:
            self._line = f"thinking ... {self._reasoning_length()}"

    def _reasoning_length(self) -> str:
        # Each event is a token, and one of reasoning may bring no text yet.
        num_tokens = max(len(self._reasoning), self._num_events)
        return f"{num_tokens:,} tokens, {describe_duration(time.monotonic() - self._reasoning_began)}"

    def _live_line(self) -> str:
        """The line under the text, while there is no text."""
        return self._line or ("" if self._status is None else self._status.waiting())

    def columns(self) -> int:
        """Columns of the terminal now."""
        return terminal_columns() if self._live is None else self._live.columns


_MOST_LINES = 12
"""Of a question; the rest is counted."""


def last_exchange(turns: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The last message of the user and what follows it; the last turn where the user said nothing."""
    questions = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    return turns[questions[-1] :] if questions else turns[-1:]


def show_last_exchange(turns: Sequence[Mapping[str, Any]], output: TextIO, notices: TextIO) -> None:
    """Show the question's beginning, to `notices`, and the whole reply, to `output`, as they were shown at first."""
    for turn in last_exchange(turns):
        if turn["role"] == "user":
            lines = neutralise_controls(turn_text(turn)).splitlines() or [""]
            left = [f"({len(lines) - _MOST_LINES:,} more lines)"] if len(lines) > _MOST_LINES else []
            for line in lines[:_MOST_LINES] + left:
                notices.write(f"{sent(line, has_styles=has_colour(notices))}\n")
            notices.flush()
        elif turn["role"] == "assistant":
            renderer = text_renderer(output, terminal_columns)
            text = renderer.feed(turn["content"]) + renderer.end()
            output.write(text if text.endswith("\n") or not text else f"{text}\n")
            output.flush()
