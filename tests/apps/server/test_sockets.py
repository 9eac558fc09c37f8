"""The sockets themselves: permissions, what stands in the way, and that nothing foreign is ever removed."""

import asyncio
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from localinfer.apps.server.transport import sockets
from localinfer.apps.server.transport.sockets import (
    SocketTakenError,
    UnixListener,
    bind_tcp,
    default_socket_path,
    has_unix_sockets,
)
from localinfer.errors import RequestError

pytestmark = pytest.mark.skipif(not has_unix_sockets(), reason="this system has no Unix sockets for Python")


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="li-") as path:
        yield Path(path)


def test_socket_is_for_its_owner_only_and_goes_with_the_server(folder):
    place = folder / "localinfer" / "s.sock"
    with UnixListener(place):
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert list(place.parent.iterdir()) == []


def test_lock_of_another_server_stays(folder):
    place, lock = folder / "s.sock", folder / "s.sock.lock"
    listener = UnixListener(place)
    lock.unlink()
    lock.write_text("another's")
    listener.close()
    assert [path.name for path in folder.iterdir()] == ["s.sock.lock"]


def test_lock_whose_file_was_removed_meanwhile_is_taken_anew(folder, monkeypatch):
    place, lock = folder / "s.sock", folder / "s.sock.lock"
    opened, system_open = [], os.open

    def open_and_lose(path, *arguments):
        descriptor = system_open(path, *arguments)
        if path == lock:
            opened.append(descriptor)
            if len(opened) == 1:
                # As by a server that ended between this one's opening and locking.
                lock.unlink()
        return descriptor

    monkeypatch.setattr("os.open", open_and_lose)
    with UnixListener(place):
        assert len(opened) == 2
        with pytest.raises(SocketTakenError):
            UnixListener(place)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="folders of Linux")
def test_default_place_is_the_users_own_with_and_without_a_runtime_folder(folder, monkeypatch, recwarn):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_socket_path() == folder / "localinfer" / "server.sock"
    for unusable in ("", "relative", str(folder / "none")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        monkeypatch.setattr("tempfile.tempdir", None)
        place = default_socket_path()
        assert place is not None and place.is_absolute() and str(os.getuid()) in str(place)
        with UnixListener(place.with_name(f"test-{os.getpid()}.sock")) as listener:
            assert stat.S_IMODE(listener.path.parent.stat().st_mode) == 0o700
    assert not recwarn.list


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="folders of Linux")
def test_default_place_is_a_shorter_one_where_the_users_own_is_too_long_for_sockets(folder, monkeypatch):
    deep = folder / ("x" * 70)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    place = default_socket_path()
    assert place is not None and str(os.getuid()) in str(place)
    with UnixListener(place.with_name(f"{os.getpid():012}.sock")):
        pass
    monkeypatch.setattr(sockets, "temporary_folder", lambda: deep)
    assert default_socket_path() is None


def test_stale_socket_is_replaced(folder):
    place = folder / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    assert place.exists()
    with UnixListener(place), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place))


def test_live_server_is_left_alone(folder):
    place = folder / "s.sock"
    with UnixListener(place):
        with pytest.raises(RequestError, match="another server listens"):
            UnixListener(place)
        assert place.exists()


def test_live_program_without_a_lock_is_left_alone(folder):
    place = folder / "s.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        other.listen()
        with pytest.raises(RequestError, match="another program listens"):
            UnixListener(place)
        assert place.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "symlink", "dangling"])
def test_what_is_no_socket_is_never_removed(folder, kind):
    place, target = folder / "s.sock", folder / "target"
    match kind:
        case "file":
            place.write_text("mine")
        case "folder":
            place.mkdir()
        case "symlink":
            target.write_text("mine")
            place.symlink_to(target)
        case "dangling":
            place.symlink_to(target)
    with pytest.raises(RequestError, match="not a socket of yours"):
        UnixListener(place)
    assert os.path.lexists(place)


def test_socket_of_somebody_else_that_took_its_place_is_not_removed(folder):
    place = folder / "s.sock"
    listener = UnixListener(place)
    place.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        listener.close()
        assert place.exists()


def test_long_path_is_refused_with_a_way_out(folder):
    with pytest.raises(RequestError, match="shorter"):
        UnixListener(folder / ("x" * 200) / "s.sock")


def test_folder_that_others_can_enter_is_refused_and_left_as_it_is(folder):
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(RequestError, match="0700"):
        UnixListener(shared / "s.sock")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755


def test_lock_that_is_a_symlink_is_refused(folder):
    (folder / "s.sock.lock").symlink_to(folder / "elsewhere")
    with pytest.raises(RequestError, match="cannot be opened"):
        UnixListener(folder / "s.sock")
    assert not (folder / "elsewhere").exists()


def test_tokens_are_sent_at_once_by_tcp():
    async def is_delayed() -> bool:
        found = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(not writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=bind_tcp("127.0.0.1", 0)) as server:
            _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
            delayed = await found
            client.close()
            return delayed

    # Not by `asyncio.run`, which would also drop, without closing it, a loop that some library has made its own.
    loop = asyncio.new_event_loop()
    try:
        # Nagle's algorithm would hold a token back until the one before it is acknowledged, which takes clients 40 ms.
        assert not loop.run_until_complete(is_delayed())
    finally:
        loop.close()


def test_taken_port_is_refused_with_a_way_out():
    with bind_tcp("127.0.0.1", 0) as taken, pytest.raises(RequestError, match="--port"):
        bind_tcp("127.0.0.1", taken.getsockname()[1])


def test_foreign_address_is_refused():
    with pytest.raises(RequestError, match="--host"):
        bind_tcp("203.0.113.7", 0)
