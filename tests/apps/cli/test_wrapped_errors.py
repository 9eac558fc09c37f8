"""Errors and warnings are wrapped at words on a terminal, and one line each elsewhere."""

import os
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace

import pytest

from localinfer.apps.cli import messages
from localinfer.apps.cli.messages import wrapped_for
from tests.kernels.subprocesses import environment
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython

TEXT = "error: a model is named by -m: type `localinfer chat -m tiny.gguf` in place of this long list of words"


@pytest.fixture
def terminal(monkeypatch):
    """A stream to a terminal of so many columns."""

    def of(columns: int) -> SimpleNamespace:
        monkeypatch.setattr(messages.os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
        return SimpleNamespace(isatty=lambda: True, fileno=lambda: 2)

    return of


@pytest.mark.parametrize("columns", [20, 25, 40, 60, 80])
def test_lines_fit_and_hang_behind_the_first_word(terminal, columns):
    lines = wrapped_for(terminal(columns), TEXT).split("\n")
    assert len(lines) > 1 and " ".join(line.strip() for line in lines) == TEXT
    assert all(line.startswith(" " * (7 if columns > 21 else 2)) for line in lines[1:])
    assert all(len(line) < columns for line in lines)


def test_a_command_is_broken_only_where_it_cannot_fit(terminal):
    assert "\n       `localinfer chat -m tiny.gguf` in" in wrapped_for(terminal(50), TEXT)
    assert "`localinfer\n" in wrapped_for(terminal(30), TEXT)


def test_wide_characters_take_two_columns(terminal):
    assert wrapped_for(terminal(24), "error: " + "漢字漢字 " * 3).rstrip().split("\n") == [
        "error: 漢字漢字",
        "       漢字漢字",
        "       漢字漢字",
    ]


@pytest.mark.parametrize("columns", [0, 5])
def test_a_terminal_that_tells_no_width_and_no_terminal_get_one_line(terminal, columns):
    assert wrapped_for(terminal(columns), TEXT) == TEXT
    assert wrapped_for(StringIO(), TEXT) == wrapped_for(None, TEXT) == TEXT


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_command_wraps_its_error_for_a_terminal(is_terminal):
    pty = pytest.importorskip("pty", reason="needs the terminals of Unix")
    termios = pytest.importorskip("termios", reason="needs the terminals of Unix")
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 40))
    try:
        with WarmPython(
            [sys.executable, "-m", "localinfer", "chat", "-m", "nothing-of-this-name.gguf", "-p", "Hi"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=slave if is_terminal else subprocess.PIPE,
            env=environment(),
        ) as process:
            code = process.wait(seconds(50))
            told = (process.stderr.read() if process.stderr is not None else os.read(master, 1 << 16)).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert code == 2
    lines = told.splitlines()
    assert lines[0].startswith("error: ") and (len(lines) > 1) is is_terminal
    assert all(line.startswith("       ") for line in lines[1:])
