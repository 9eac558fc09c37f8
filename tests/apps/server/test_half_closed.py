"""Clients that end what they send after their request, as `nc -N` does: answered all the same, unless they left."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest
from local_servers import STORY, ServedModel, read_all, serving
from scripted_models import scripted_model, scripted_sources

from localinfer.apps.server.transport.connection import Connection
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import has_unix_sockets
from tests.support.limits import wait_until

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


def chat(stream: bool, version: bytes = b"1.1") -> bytes:
    body = json.dumps({"messages": STORY, "max_tokens": 8, "stream": stream}).encode()
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return (
        b"POST /v1/chat/completions HTTP/%b\r\n" % version
        + HOST
        + b"Content-Type: application/json\r\n"
        + length
        + body
    )


@pytest.fixture
def pause() -> threading.Event:
    return threading.Event()


@pytest.fixture
def slow(runtime_folder, pause) -> Iterator[ServedModel]:
    """A server whose model says two letters, the second when the pause is over."""
    path = runtime_folder / "half.sock" if has_unix_sockets() else None
    with serving(
        ServerSettings(port=0, socket_path=path),
        sources=scripted_sources("slow"),
        load=lambda source: scripted_model([ord("a"), pause, ord("b")]),
    ) as running:
        try:
            yield running
        finally:
            pause.set()


@pytest.fixture
def probes(monkeypatch) -> list[int]:
    """Numbers of the times that the server has asked whether a client still listens, soon after one another."""
    asked: list[int] = []
    probe = Connection._probe

    def noted(connection: Connection, count: int) -> None:
        probe(connection, count)
        asked.append(count)

    monkeypatch.setattr("localinfer.apps.server.transport.connection._PROBE_SECONDS", (0.001, 0.005, 0.025))
    monkeypatch.setattr(Connection, "_probe", noted)
    return asked


@pytest.fixture(params=["tcp", "unix"])
def connection(request, slow) -> Iterator[socket.socket]:
    if request.param == "tcp":
        with slow.connect() as made:
            yield made
        return
    if slow.socket_path is None:
        pytest.skip("this system has no Unix sockets for Python")
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(10)
        made.connect(str(slow.socket_path))
        yield made


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_sends_no_more_has_its_whole_answer(slow, connection, pause, stream, version, probes):
    connection.sendall(chat(stream, version))
    connection.shutdown(socket.SHUT_WR)
    assert wait_until(lambda: any(reply.num_tokens for reply in slow.server.service.replies()))
    # After the server has asked as often as it ever does whether somebody still listens.
    assert wait_until(lambda: probes == [0, 1, 2, 3])
    pause.set()
    reply = read_all(connection, 5)
    interim, _, answer = reply.rpartition(b"HTTP/1.1 200")
    assert interim.count(b"HTTP/1.1 100") <= 4
    assert reply.count(b"HTTP/1.1 ") == interim.count(b"HTTP/1.1 100") + 1
    head, _, body = answer.partition(b"\r\n\r\n")
    if stream:
        assert b'"content":"a"' in body and b'"content":"b"' in body and b"data: [DONE]" in body
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("rest", [HEALTH, b"no request\r\n\r\n"], ids=["request", "other"])
def test_what_comes_behind_a_last_request_leaves_it_its_answer(slow, connection, pause, rest):
    connection.sendall(chat(False).replace(HOST, HOST + b"Connection: close\r\n"))
    assert wait_until(lambda: any(reply.num_tokens for reply in slow.server.service.replies()))
    connection.sendall(rest)
    threading.Timer(0.1, pause.set).start()
    reply = read_all(connection, 5)
    assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"HTTP/1.1 ") == 1


def test_requests_that_wait_behind_one_another_are_all_answered(connection, pause):
    pause.set()
    connection.sendall(HEALTH + chat(False) + HEALTH)
    connection.shutdown(socket.SHUT_WR)
    assert read_all(connection, 5).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("start", [HEALTH[:-2], chat(False)[:-1], b"G"], ids=["head", "body", "line"])
def test_half_a_request_that_ends_is_not_waited_for(connection, start):
    connection.sendall(start)
    connection.shutdown(socket.SHUT_WR)
    assert b"HTTP/1.1 200" not in read_all(connection, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_is_told_from_one_that_sends_no_more(slow, connection, stream):
    connection.sendall(chat(stream))
    assert wait_until(slow.server.service.replies)
    connection.close()
    assert wait_until(lambda: not slow.server.service.replies())
