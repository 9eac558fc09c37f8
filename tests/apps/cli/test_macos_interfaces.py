"""What macOS answers otherwise than Linux: polls of devices and of a pipe's end, and the call that syncs files."""

import errno
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from localinfer.apps.cli import guard
from localinfer.apps.doctor import checks
from localinfer.system import disk

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its own calls there")

F_FULLFSYNC = 51


class MacPoll:
    """`select.poll` as macOS has it: no event that was not asked for, no wait beside what it refuses, no devices."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._asked: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        self._asked[descriptor] = events
        self._poll.register(descriptor, events | select.POLLIN)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        refused = [one for one, events in self._asked.items() if events and os.isatty(one)]
        found = {one: select.POLLNVAL for one in refused}
        for one, events in self._poll.poll(0 if refused else timeout):
            told = events & (self._asked[one] | select.POLLHUP if self._asked[one] else 0)
            if one not in refused and told:
                found[one] = told
        return list(found.items())


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: getattr(select, name) for name in ("POLLIN", "POLLHUP", "POLLERR", "POLLNVAL")}
    monkeypatch.setattr(guard, "select", SimpleNamespace(poll=MacPoll, **names))
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(guard, "_LOOK_SECONDS", 0.001)


@pytest.fixture
def standard_input() -> Iterator[None]:
    """Restores descriptor 0."""
    former = os.dup(0)
    yield
    os.dup2(former, 0)
    os.close(former)


def watch(monkeypatch: pytest.MonkeyPatch, looks: int, end_input: int | None = None) -> list[int]:
    """Run the guard over a server that answers and is gone after so many looks at its parent; the signals that it got.

    end_input: a descriptor that is closed at the second look.
    """
    reading, writing = os.pipe()
    os.write(writing, bytes([guard.READY]))
    seen, killed = [], []

    def kill(number: int, what: int) -> None:
        if what:
            killed.append(what)
            os.close(writing)
            return
        seen.append(number)
        if len(seen) == 2 and end_input is not None:
            os.close(end_input)
        if len(seen) == looks:
            os.close(writing)

    monkeypatch.setattr(os, "kill", kill)
    guard.main([str(reading), "0.0", "0.0", str(os.getppid())])
    os.close(reading)
    return killed


@pytest.mark.usefixtures("mac", "standard_input")
def test_a_server_goes_on_while_its_terminal_is_there_and_is_ended_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    os.dup2(terminal, 0)
    os.close(terminal)
    assert watch(monkeypatch, looks=5) == []
    assert len(watch(monkeypatch, looks=50, end_input=controller)) == 1


@pytest.mark.usefixtures("mac", "standard_input")
def test_a_server_is_ended_with_the_pipe_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    os.write(writing, b"not read yet")
    assert watch(monkeypatch, looks=5) == []
    assert len(watch(monkeypatch, looks=50, end_input=writing)) == 1


@pytest.mark.usefixtures("mac", "standard_input")
def test_a_server_whose_input_is_no_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    assert watch(monkeypatch, looks=5) == []


def test_what_shall_outlive_a_power_cut_is_written_by_the_disk_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[int] = []
    plain: list[int] = []
    monkeypatch.setattr(os, "fsync", plain.append)
    monkeypatch.setattr(disk.fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(disk.fcntl, "fcntl", lambda descriptor, command: full.append(command))
    with disk.create(tmp_path / "file", 0o600) as file:
        disk.sync(file)
    disk.sync_folder(tmp_path)
    assert (full, plain) == ([F_FULLFSYNC] * 2, [])


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL])
def test_a_file_system_without_that_call_syncs_as_it_can(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise OSError(number, os.strerror(number))

    plain: list[int] = []
    monkeypatch.setattr(os, "fsync", plain.append)
    monkeypatch.setattr(disk.fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    disk.sync_folder(tmp_path)
    assert len(plain) == 1
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_folder(tmp_path)


def test_doctor_says_that_apples_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localinfer.system.machine_limits.has_driver", lambda: False)
    assert "NVIDIA driver" in checks.CHECKS["gpu"]()["reason"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Metal" in checks.CHECKS["gpu"]()["reason"]
