"""The progress line: only on terminals, only when a start is slow, and gone afterwards."""

import io
import sys
import threading
import time

import pytest

from localinfer import terminal as progress_module
from localinfer.loading.imports import shown_progress
from localinfer.terminal import CLEAR_LINE, Pace, Progress, draws, with_time_left
from tests.support.limits import seconds, set_clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_patient(monkeypatch) -> None:
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", -1.0)
    monkeypatch.setattr(progress_module, "REDRAW_SECONDS", 0.0)


def test_progress_shows_stage_and_count_then_erases_them(monkeypatch):
    make_patient(monkeypatch)
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress("compiling kernels", 3, 40)
        assert terminal.getvalue() == f"{CLEAR_LINE}compiling kernels 3/40 ..."
        progress("reading", 0, 0)
        assert terminal.getvalue().endswith(f"{CLEAR_LINE}reading ...")
    assert terminal.getvalue().endswith(CLEAR_LINE)
    shown = terminal.getvalue()
    progress.close()
    assert terminal.getvalue() == shown


def test_progress_is_silent_away_from_a_terminal(monkeypatch):
    make_patient(monkeypatch)
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("compiling kernels", 3, 40)
    assert stream.getvalue() == ""


def test_progress_of_a_program_writes_lines_where_none_can_be_drawn_anew(monkeypatch):
    make_patient(monkeypatch)
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 1000.0)
    stream = io.StringIO()
    with Progress(stream, writes_lines=True) as progress:
        progress("compiling kernels", 3, 40)
        progress("compiling kernels", 4, 40)
    assert stream.getvalue() == "compiling kernels 3/40 ...\n"
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with shown_progress(True) as told:
        assert told is not None
        told("importing", 0, 0)
    assert stream.getvalue() == "importing ...\n"
    for given, meant in ((None, None), (False, None), (print, print)):
        with shown_progress(given) as told:
            assert told is meant


def test_progress_of_a_quick_start_is_never_shown(monkeypatch):
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 1000.0)
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress("compiling kernels", 3, 40)
    assert terminal.getvalue() == ""


def test_new_stage_is_drawn_at_once_and_counts_of_the_same_are_not(monkeypatch):
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", -1.0)
    monkeypatch.setattr(progress_module, "REDRAW_SECONDS", 1000.0)
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress("loading weights (MB)", 0, 1)
        progress("loading weights (MB)", 1, 1)
        progress("compiling kernels", 0, 1)
        assert terminal.getvalue() == f"{CLEAR_LINE}loading weights (MB) 0/1 ...{CLEAR_LINE}compiling kernels 0/1 ..."


def test_stage_that_says_nothing_more_is_shown_once_the_start_is_slow(monkeypatch):
    """What a kernel does that compiles for seconds: told once, in the silent time, then nothing."""
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.05)
    drawn = threading.Event()

    class Watched(Terminal):
        def flush(self) -> None:
            drawn.set()

    terminal = Watched()
    with Progress(terminal) as progress:
        progress("reading the vocabulary", 0, 0)
        progress("compiling kernels", 0, 1)
        assert drawn.wait(timeout=seconds(15))
        assert terminal.getvalue() == f"{CLEAR_LINE}compiling kernels 0/1 ..."
    assert terminal.getvalue().endswith(CLEAR_LINE)


def test_what_is_counted_shows_the_time_it_has_left(monkeypatch):
    make_patient(monkeypatch)
    now = iter([0.0, 10.0, 20.0, 30.0, 300.0, 4000.0])
    pace = Pace()
    set_clock(monkeypatch, progress_module, monotonic=lambda: next(now))
    assert pace.time_left(2, 10) == "", "where a stage begins is not what it has done"
    assert pace.time_left(4, 10) == ", 30 s left"
    assert pace.time_left(10, 10) == ", 0 s left"
    assert pace.time_left(0, 100) == ""
    assert pace.time_left(50, 100) == ", 4 min 30 s left"
    assert pace.time_left(1, 100) == "", "fewer than before: the next stage of the same size"


def test_line_has_count_and_time_left_and_wrapped_stages_the_time_alone(monkeypatch):
    make_patient(monkeypatch)
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress("compiling kernels: a", 0, 4)
        progress("compiling kernels: b", 4, 4)
        assert terminal.getvalue().endswith(f"{CLEAR_LINE}compiling kernels: b 4/4, 0 s left ...")
        progress("measuring", 0, 0)
        assert terminal.getvalue().endswith(f"{CLEAR_LINE}measuring ...")
    seen = []
    report = with_time_left(lambda *told: seen.append(told))
    report("weights", 0, 7)
    report("weights", 7, 7)
    assert seen == [("weights", 0, 0), ("weights, 0 s left", 0, 0)]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_line_never_fills_a_narrow_terminal(monkeypatch):
    import os
    import termios

    make_patient(monkeypatch)
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 25))
    with os.fdopen(master, "rb", buffering=0) as screen, os.fdopen(slave, "w") as terminal, Progress(terminal) as line:
        line("compiling kernels (once per machine)", 3, 40)
        assert screen.read(100).decode() == f"{CLEAR_LINE}compiling kernels (once "


def test_closed_progress_draws_nothing_later(monkeypatch):
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.05)
    num_threads = threading.active_count()
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress("compiling kernels", 0, 1)
    deadline = time.monotonic() + seconds(60)
    while threading.active_count() > num_threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert terminal.getvalue() == ""


def test_a_terminal_that_the_host_program_shows_is_drawn_on_where_windows_asks_consoles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert draws(Terminal()) and not draws(io.StringIO())
