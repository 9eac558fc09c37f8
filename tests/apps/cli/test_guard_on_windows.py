"""The guard of Windows ends a server that was asked to end and has not, and only that."""

import os
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest

from localinfer.apps.cli import guard, guard_on_windows
from localinfer.apps.cli.guard_on_windows import END, READY, watch


def watched(said: list[list[int]], *, loading: float = 0.0, ready: float = 0.0) -> int:
    """How often the server is ended; it is gone by then, or once all is said."""
    sayings: SimpleQueue[bytes] = SimpleQueue()
    for data in said:
        sayings.put(bytes(data))
    ends: list[bool] = []

    def end() -> None:
        ends.append(True)
        sayings.put(b"")

    watch(sayings, end, loading, ready)
    return len(ends)


def test_a_server_that_stays_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_on_windows, "_LOOK_SECONDS", 0.001)
    assert (guard.READY, guard.END) == (READY, END)
    assert watched([[END]]) == watched([[END], [END]]) == watched([[READY, END]]) == 1
    assert watched([[READY], [END]], loading=600) == 1


def test_a_server_that_goes_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_on_windows, "_LOOK_SECONDS", 0.001)
    assert watched([[]]) == watched([[READY], []]) == 0
    assert watched([[END], []], loading=600) == watched([[READY], [END], []], ready=600) == 0


def test_as_a_script_it_ends_a_process_and_removes_its_files(tmp_path: Path) -> None:
    left = tmp_path / "server.sock"
    left.touch()
    server = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    reading, writing = os.pipe()
    words = [sys.executable, "-I", "-S", guard_on_windows.__file__, str(server.pid), "0", "0", "0", str(left)]
    process = subprocess.Popen(words, stdin=reading)
    os.write(writing, bytes([END]))
    assert server.wait() != 0
    os.close(reading)
    os.close(writing)
    assert process.wait() == 0 and not left.exists()
    assert server.stdin is not None
    server.stdin.close()
