"""Under a service manager such as systemd: sockets that it has bound, and what it is told."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from localinfer.apps.server.transport import sockets as server_sockets
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import given_sockets, settings_of_sockets, tell_manager
from localinfer.errors import RequestError
from tests.support.limits import seconds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors and sockets of Unix")
START = """
import fcntl, os, sys
for number, copy in enumerate([fcntl.fcntl(int(word), fcntl.F_DUPFD, 100) for word in sys.argv[1:3]]):
    os.dup2(copy, 3 + number)
    os.close(copy)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


@contextmanager
def activated(folder: Path, *sockets: socket.socket) -> Iterator[tuple[subprocess.Popen, socket.socket]]:
    """A server with two sockets of its manager, and the one that the manager is told by."""
    numbers = [listener.fileno() for listener in sockets]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(folder / "notify"))
        told.settimeout(seconds(8))
        words = ["-m", "localinfer", "serve", "--threads", "1", "--no-disk-cache", "--port", "1"]
        process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, numbers), *words, "--socket", "/nowhere/s.sock"],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify")},
        )
        try:
            yield process, told
        finally:
            process.kill()
            process.wait(seconds(10))


def test_server_answers_on_sockets_of_its_manager_and_says_how_it_is(runtime_folder):
    folder = runtime_folder / "activated"
    folder.mkdir(mode=0o700)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(folder / "given.sock"))
        (folder / "given.sock").chmod(0o600)
        unix.listen()
        # Asked before the server runs: the manager's socket holds the request until it does.
        early = socket.create_connection(tcp.getsockname(), timeout=seconds(8))
        early.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with early, activated(folder, tcp, unix) as (process, told):
            assert told.recv(4096) == b"READY=1"
            assert early.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
            url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
            assert httpx.get(f"{url}/health", timeout=seconds(15)).json() == {"status": "ok"}
            transport = httpx.HTTPTransport(uds=str(folder / "given.sock"))
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=seconds(15)) as client:
                assert client.get("/health").json() == {"status": "ok"}
            process.send_signal(signal.SIGHUP)
            assert told.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert told.recv(4096) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert told.recv(4096) == b"STOPPING=1"
            assert process.wait(seconds(15)) == 0
        # It is the manager's, which starts the server again with it.
        assert (folder / "given.sock").exists()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch):
    """Give sockets as a manager does, from any number on."""

    def give(*sockets: socket.socket) -> list[socket.socket]:
        copies = [os.dup(one.fileno()) for one in sockets]
        first = min(copies)
        assert copies == list(range(first, first + len(copies)))
        monkeypatch.setattr(server_sockets, "_FIRST_DESCRIPTOR", first)
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", str(len(copies)))
        return given_sockets()

    return give


def test_sockets_are_taken_once_and_only_those_for_this_process(given, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (found,) = given(listener)
        with found:
            assert found.getsockname() == listener.getsockname()
            assert (found.proto, found.getblocking(), os.get_inheritable(found.fileno())) == (
                socket.IPPROTO_TCP,
                False,
                False,
            )
            settings = settings_of_sockets(ServerSettings(port=5), [found])
            assert (settings.host, settings.port, settings.socket_path) == (*listener.getsockname(), None)
    assert not {"LISTEN_PID", "LISTEN_FDS"} & set(os.environ)
    assert given_sockets() == []
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert given_sockets() == []
    assert settings_of_sockets(ServerSettings(port=5), []) == ServerSettings(port=5)


def test_sockets_that_others_could_use_are_refused(given, runtime_folder):
    with socket.socket() as deaf, pytest.raises(RequestError, match="ListenStream"):
        given(deaf)
    path = runtime_folder / "open.sock"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        path.chmod(0o666)
        with pytest.raises(RequestError, match="SocketMode=0600"):
            given(unix)
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        (found,) = given(everywhere)
        with found, pytest.raises(RequestError, match="--token-file"):
            settings_of_sockets(ServerSettings(), [found])


def test_a_manager_that_does_not_listen_is_no_error(monkeypatch, runtime_folder):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    tell_manager("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(runtime_folder / "nobody"))
    tell_manager("READY=1")
    if sys.platform == "linux":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind("\0localinfer-test-of-its-manager")
            monkeypatch.setenv("NOTIFY_SOCKET", "@localinfer-test-of-its-manager")
            tell_manager("STATUS=fine", "READY=1")
            assert told.recv(100) == b"STATUS=fine\nREADY=1"
