"""One line on a terminal that says what a slow start is doing; silent everywhere else."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from localinfer.closing import Closing

SILENT_SECONDS = 0.4
"""A start shorter than this shows nothing at all."""
REDRAW_SECONDS = 0.1
CLEAR_LINE = "\r\x1b[2K"


def with_time_left(report: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Wrap a callback so that stages carry the time that the rest will take, at the mean speed since they began.

    A stage begins where the units in all change, or those done go back.
    """
    first_done, first_total, last_done, started = 0, -1, 0, 0.0

    def add_time(stage: str, done: int, total: int) -> None:
        nonlocal first_done, first_total, last_done, started
        if total != first_total or done < last_done:
            first_done, first_total, started = done, total, time.monotonic()
        last_done = done
        elapsed, gained = time.monotonic() - started, done - first_done
        left = f", {_duration(elapsed * (total - done) / gained)} left" if gained and elapsed > SILENT_SECONDS else ""
        report(f"{stage}{left}", 0, 0)

    return add_time


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress(Closing):
    """Callable that loaders and compilers report to, drawn on stderr while that is a terminal.

    Call it with the stage's name, the units done and the units in all (0 when unknown). A new stage is drawn at once,
    so that the line never names one that is over; during the first SILENT_SECONDS, when they have passed, even if the
    stage says nothing more. Use it as a context manager: leaving erases the line, so that what follows starts
    on a clean one.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty()
        self._silent_until = time.monotonic() + SILENT_SECONDS
        self._next_draw_seconds = 0.0
        self._told = ("", 0, 0)
        self._drawn_stage: str | None = None
        self._lock = threading.Lock()
        self._first_draw: threading.Timer | None = None
        self._is_closed = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._is_shown:
            return
        with self._lock:
            self._told = stage, done, total
            now = time.monotonic()
            if now < self._silent_until:
                self._draw_when_due(self._silent_until - now)
            elif stage != self._drawn_stage or now >= self._next_draw_seconds:
                self._draw(now)

    def close(self) -> None:
        """Erase the line; calling it again does nothing."""
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
            self._first_draw = threading.Timer(seconds, self._draw_what_was_told)
            self._first_draw.daemon = True
            self._first_draw.start()

    def _draw_what_was_told(self) -> None:
        with self._lock:
            if not self._is_closed and self._drawn_stage is None:
                self._draw(time.monotonic())

    def _draw(self, now: float) -> None:
        stage, done, total = self._told
        count = f" {done}/{total}" if total > 0 else ""
        self._stream.write(f"{CLEAR_LINE}{stage}{count} ...")
        self._stream.flush()
        self._drawn_stage = stage
        self._next_draw_seconds = now + REDRAW_SECONDS
