"""Offline mode: what is of this machine is reached, and nothing else, whatever asks."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from localinfer.apps.cli import main
from localinfer.errors import LocalinferError, OfflineError
from localinfer.system import network_log, offline
from tests.support.limits import seconds
from tests.support.warm_python import run_copy

HERE = ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"]
ELSEWHERE = [
    "example.org",
    "192.0.2.1",
    "10.0.0.1",
    "::ffff:192.0.2.1",
    "2001:db8::1",
    "fe80::1%eth0",
    "localhost.example",
]

PROGRAM = """
import asyncio, json, os, socket, subprocess, sys, urllib.request
import localinfer

def happened(act):
    try:
        act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "done"

udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
child = "import localinfer, socket; socket.create_connection(('192.0.2.1', 80), 1)"
found = {
    "connect": happened(lambda: socket.create_connection(("192.0.2.1", 80), 1)),
    "look up": happened(lambda: socket.getaddrinfo("example.org", 80)),
    "urllib": happened(lambda: urllib.request.urlopen("http://example.org", timeout=1)),
    "asyncio": happened(lambda: asyncio.run(asyncio.open_connection("192.0.2.1", 80))),
    "udp": happened(lambda: udp.sendto(b"x", ("192.0.2.1", 53))),
    "child": subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stderr.splitlines()[-1],
    "here": happened(lambda: socket.create_connection(("localhost", port)).close()),
    "number": happened(lambda: socket.getaddrinfo("192.0.2.1", 80)),
    "bind": happened(lambda: socket.create_server(("", 0)).close()),
}
if hasattr(socket, "socketpair"):
    found["pair"] = happened(lambda: socket.socketpair()[0].close())
print(json.dumps(found))
"""


def test_addresses_of_this_machine() -> None:
    for host in HERE:
        assert offline.needs_no_search(host)
        assert offline.leads_here(socket.AF_INET6, (host, 80, 0, 0)), host
    for host in ELSEWHERE:
        assert not offline.leads_here(socket.AF_INET, (host, 80)), host
    assert [offline.needs_no_search(host) for host in ELSEWHERE] == [False, True, True, True, True, True, False]
    assert offline.needs_no_search(None) and offline.needs_no_search(b"localhost") and offline.needs_no_search("")
    assert not offline.needs_no_search(b"example.org") and not offline.needs_no_search(("example.org", 80))
    strange: list[Any] = [None, (), (None, 80), b"/a", 7]
    assert not any(offline.leads_here(socket.AF_INET, address) for address in strange)
    if hasattr(socket, "AF_UNIX"):
        assert offline.leads_here(socket.AF_UNIX, "/tmp/a.sock")


@pytest.mark.parametrize(("value", "is_asked"), [("", False), ("0", False), ("off", False), ("1", True), ("yes", True)])
def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch, value: str, is_asked: bool) -> None:
    monkeypatch.setenv(offline.VARIABLE, value)
    assert offline.is_asked() is is_asked


def test_other_errors_of_connections_hold_for_it() -> None:
    assert issubclass(OfflineError, LocalinferError) and issubclass(OfflineError, ConnectionError)


def test_nothing_else_is_reached_by_a_process_or_its_children() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, offline.VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=seconds(30),
        check=True,
    )
    found = json.loads(done.stdout)
    for name in ("here", "number", "bind", "pair"):
        assert found.get(name, "done") == "done"
    for name in ("connect", "look up", "asyncio", "udp"):
        assert found[name].startswith("OfflineError: __main__ wanted to reach "), found
    for name in ("urllib", "child"):
        assert "OfflineError" in found[name] or "--offline" in found[name], found


def test_a_command_says_that_the_hub_may_not_be_asked() -> None:
    command = [sys.executable, "-m", "localinfer", "--offline", "pull", "org/repo"]
    done = run_copy(command, timeout=seconds(30))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--offline forbids asking the hub" in done.stderr


LOGGED = """
import socket, sys
from localinfer.system import network_log, offline
network_log.begin("pull")
for address in [("192.0.2.1", 80), ("127.0.0.1", 9), ("192.0.2.1", 80)]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(address)
try:
    socket.getaddrinfo("no-such-host.invalid", 443)
except OSError:
    pass
offline.begin()
try:
    socket.getaddrinfo("refused.invalid", 443)
except ConnectionError:
    pass
"""


def test_what_commands_reach_is_recorded_once_each(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", LOGGED], timeout=seconds(30), check=True)
    file = network_log.path()
    assert file == tmp_path / "localinfer" / "network.jsonl"
    found = network_log.read(file)
    assert {(one.target, one.module, one.command, one.times) for one in found} == {
        ("192.0.2.1:80", "__main__", "pull", 2),
        ("no-such-host.invalid", "__main__", "pull", 2),
    }
    with open(file, "ab") as opened:
        opened.write(b'{"target": "cut o')
    network_log._write_merged(file)
    assert file.read_bytes().count(b"\n") == 2 and network_log.read(file) == found
    assert main(["doctor", "--network"]) == 0
    shown = capsys.readouterr().out
    assert "192.0.2.1:80" in shown and "no-such-host.invalid" in shown
    file.unlink()
    assert main(["doctor", "--network", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["reached"] == [] and facts["file"] == str(file) and facts["writable"]


def test_a_program_that_imports_localinfer_has_no_hook(tmp_path) -> None:
    program = "import localinfer, sys; localinfer.load; from localinfer.system import offline; print(offline.is_on())"
    program += "; print('localinfer.system.network_log' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds(60), check=True
    )
    assert done.stdout.split() == ["False", "False"]
