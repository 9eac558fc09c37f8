"""The progress line: only on terminals, only when a start is slow, and gone afterwards."""

import io

from localinfer import progress as progress_module
from localinfer.progress import CLEAR_LINE, Progress


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


def test_progress_of_a_quick_start_is_never_shown(monkeypatch):
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 1000.0)
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress("compiling kernels", 3, 40)
    assert terminal.getvalue() == ""
