"""The standard streams: model text without terminal controls, checked input, a progress line."""

import io
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from localinfer.arguments import half_character
from localinfer.errors import RequestError
from localinfer.types import Closing

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats
    from localinfer.types import ProgressCallback

DIM = "\x1b[2m"
RESET = "\x1b[0m"
SILENT_SECONDS = 0.4
"""A start shorter than this shows no progress line."""
LINE_SECONDS = 2.0
"""Between two lines of progress where a line cannot be drawn anew."""
REDRAW_SECONDS = 0.1
CLEAR_LINE = "\r\x1b[2K"

_BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def _control_table() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"}
    table[0x0D] = ""
    table[0x7F] = "\u2421"
    table.update(dict.fromkeys(range(0x80, 0xA0), "\ufffd"))
    table.update(dict.fromkeys(map(ord, _BIDI_CONTROLS), "\ufffd"))
    return table


_CONTROLS = _control_table()


def neutralise_controls(text: str) -> str:
    """Replace characters that could move the cursor, rewrite the screen or reorder text; newlines and tabs are kept.

    Works on single characters, so a control sequence split over two deltas is caught as well.
    """
    return text.translate(_CONTROLS)


class ModelOutput:
    """Writes model text as it streams: unchanged into a pipe or file, with controls neutralised on a terminal."""

    def __init__(self, stream: TextIO, *, is_terminal: bool) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._last = "\n"

    def write(self, text: str) -> None:
        """Print one delta and flush."""
        if not text:
            return
        if self._is_terminal:
            text = neutralise_controls(text)
        self._stream.write(text)
        self._stream.flush()
        self._last = text[-1:] or self._last

    def end_line(self) -> None:
        """Start a new line unless the output is at the start of one."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
            self._last = "\n"


def draws(stream: TextIO) -> bool:
    """True if the stream is a terminal that obeys escape sequences."""
    if sys.platform == "win32" and stream.isatty():
        from localinfer.system.windows import shows_escape_sequences

        try:
            return shows_escape_sequences(stream.fileno())
        except OSError:
            # A terminal that the host program shows has no descriptor, and no console to ask.
            return True
    return stream.isatty()


def has_colour(stream: TextIO) -> bool:
    """True if text is styled: on a terminal that is not dumb, with `NO_COLOR` empty or unset."""
    return draws(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """`text`, dimmed if the stream allows styles."""
    return f"{DIM}{text}{RESET}" if has_colour(stream) else text


def prepare_streams() -> None:
    """Set the standard streams to UTF-8 in pipes, without encoding errors.

    Bytes of standard input that are not UTF-8 are read as lone surrogates, which `check_text` refuses.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="replace")
            else:
                stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def check_text(text: str, what: str) -> str:
    """Return `text` if it can be encoded; lone surrogates (undecodable bytes of the command line) cannot.

    Raises: RequestError naming `what` and the first bad character.
    """
    place = half_character(text)
    if place is not None:
        raise RequestError(
            f"{what} holds U+{ord(text[place]):04X} at character {place}, half of a character or a byte that is "
            "not UTF-8; pass valid UTF-8 text"
        )
    return text


def _describe_drafts(stats: "Stats") -> str:
    places = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = " ".join(f"{100 * accepted / drafted:.0f}" for accepted, drafted in places if drafted)
    named = ", ".join(f"{name} {accepted} of {drafted}" for name, (drafted, accepted) in stats.drafted_by.items())
    return (
        f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted ({named}), by position {shares} %, "
        f"{stats.tokens_per_pass:.2f} tokens per pass, {stats.speculation_speedup:.2f} x plain decoding"
    )


def describe_stats(stats: "Stats") -> str:
    """The statistics of one generation on one line."""
    return "; ".join(stats_parts(stats))


def stats_parts(stats: "Stats") -> list[str]:
    """The statistics of one generation by topic."""
    parts = [
        f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} of them cached",
        f"first token after {stats.time_to_first_token_seconds:.3f} s",
        f"completion {stats.completion_tokens} tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"seed {stats.seed}",
    ]
    if stats.drafted_tokens:
        parts.insert(3, _describe_drafts(stats))
    if stats.dropped_tokens:
        parts.append(f"{stats.dropped_tokens} tokens dropped at the end of the context")
    if stats.cache_miss is not None:
        parts.append(f"cache: {neutralise_controls(stats.cache_miss)}")
    parts += [f"notice: {neutralise_controls(notice)}" for notice in stats.notices]
    return parts


class Pace:
    """Estimates the time that a stage has left, at its mean speed since it began.

    A stage begins when the total changes, or the units done decrease.
    """

    def __init__(self) -> None:
        self._first_done, self._last_done, self._total, self._started = 0, 0, -1, 0.0

    def time_left(self, done: int, total: int) -> str:
        """Text such as ", 5 s left", to be put behind a stage; empty while nothing can be said."""
        now = time.monotonic()
        if total != self._total or done < self._last_done:
            self._first_done, self._total, self._started = done, total, now
        self._last_done = done
        elapsed, gained = now - self._started, done - self._first_done
        if gained <= 0 or elapsed <= SILENT_SECONDS:
            return ""
        return f", {describe_duration(elapsed * (total - done) / gained)} left"


def with_time_left(report: "ProgressCallback") -> "ProgressCallback":
    """Wrap a callback so that stages show the estimated time left in place of their units."""
    pace = Pace()

    def add_time(stage: str, done: int, total: int) -> None:
        report(f"{stage}{pace.time_left(done, total)}", 0, 0)

    return add_time


def describe_duration(seconds: float) -> str:
    """A time as people say it: seconds below a minute, then minutes, then hours."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _counted(stage: str, done: int, total: int) -> str:
    return f"{stage} {done}/{total}" if total > 0 else stage


class Progress(Closing):
    """A progress line on stderr, if that is a terminal: a `ProgressCallback`.

    It has the time that is left, where units are counted. A new stage is drawn at once, or after the first
    SILENT_SECONDS. A context manager that erases the line.
    writes_lines: elsewhere, such as in a notebook, write a line of its own every LINE_SECONDS, which stays.
    """

    def __init__(self, stream: TextIO | None = None, *, writes_lines: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = draws(self._stream)
        self._writes_lines = writes_lines and not self._is_shown
        self._next_line_seconds = time.monotonic() + SILENT_SECONDS
        self._silent_until = time.monotonic() + SILENT_SECONDS
        self._next_draw_seconds = 0.0
        self._latest = ("", 0, 0)
        self._pace = Pace()
        self._time_left = ""
        self._drawn_stage: str | None = None
        self._lock = threading.Lock()
        self._first_draw: threading.Timer | None = None
        self._is_closed = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._writes_lines and time.monotonic() >= self._next_line_seconds:
            self._next_line_seconds = time.monotonic() + LINE_SECONDS
            self._stream.write(f"{_counted(stage, done, total)} ...\n")
            self._stream.flush()
        if not self._is_shown:
            return
        with self._lock:
            self._latest = stage, done, total
            self._time_left = self._pace.time_left(done, total) if total > 0 else ""
            now = time.monotonic()
            if now < self._silent_until:
                self._draw_when_due(self._silent_until - now)
            elif stage != self._drawn_stage or now >= self._next_draw_seconds:
                self._draw(now)

    def close(self) -> None:
        """Erase the line; may be called again."""
        with self._lock:
            self._is_closed = True
            if self._first_draw is not None:
                self._first_draw.cancel()
            if self._drawn_stage is not None:
                self._stream.write(CLEAR_LINE)
                self._stream.flush()
                self._drawn_stage = None

    def _draw_when_due(self, seconds: float) -> None:
        if self._first_draw is None:
            self._first_draw = threading.Timer(seconds, self._draw_latest)
            self._first_draw.daemon = True
            self._first_draw.start()

    def _draw_latest(self) -> None:
        with self._lock:
            if not self._is_closed and self._drawn_stage is None:
                self._draw(time.monotonic())

    def _draw(self, now: float) -> None:
        stage, done, total = self._latest
        line = f"{_counted(stage, done, total)}{self._time_left} ..."
        self._stream.write(f"{CLEAR_LINE}{self._fitting(line)}")
        self._stream.flush()
        self._drawn_stage = stage
        self._next_draw_seconds = now + REDRAW_SECONDS

    def _fitting(self, line: str) -> str:
        """As much of a line as the terminal has columns for: what is on a second row would not be erased."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            return line
        return line[: columns - 1] if columns > 1 else line
