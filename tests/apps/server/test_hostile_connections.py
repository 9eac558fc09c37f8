"""Connections that are no requests, never end, or come by the hundred: limits hold, and others are answered."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from local_servers import STORY, read_all

from localinfer.apps.server.transport.connection import Connection, _DrainingTransport
from localinfer.apps.server.transport.settings import ServerSettings
from tests.support.limits import seconds, wait_until

CHAT = json.dumps({"messages": STORY, "max_tokens": 2}).encode()
HOST = b"Host: localhost\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"


def status_and_error(reply: bytes) -> tuple[int, dict]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n" + HOST + b"\r\n",
        b"GET /\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"Bad Header\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    ],
    ids=[
        "garbage",
        "tls",
        "version",
        "HTTP/0.9",
        "bare LF",
        "no host",
        "two hosts",
        "64 KiB",
        "header",
        "length",
        "lengths",
        "chunk",
        "coding",
    ],
)
def test_bytes_that_are_not_http_are_refused_and_the_connection_closed(served, request_bytes):
    began = time.perf_counter()
    reply = served.exchange(request_bytes)
    if not reply:
        return
    if request_bytes.endswith(b"\n\n"):
        assert b"connection: close" in reply and time.perf_counter() - began < seconds(1)
    status, error = status_and_error(reply)
    assert status in (400, 403, 408, 501)
    assert {"message", "type", "param", "code"} <= set(error)


def test_length_beside_chunks_is_not_smuggled(served):
    body = b"5\r\nhello\r\n0\r\n\r\n"
    reply = served.exchange(HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    assert reply.count(b"HTTP/1.1 ") == 1
    assert reply.startswith(b"HTTP/1.1 400")


def test_bodies_may_have_32_mebibytes_unless_told_otherwise():
    assert ServerSettings().max_body_bytes == 32 << 20


def test_declared_length_over_the_limit_is_refused_before_the_body(served):
    with served.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 34603008\r\n\r\n")
        reply = connection.recv(1 << 16)
    assert reply.startswith(b"HTTP/1.1 413")


def test_chunks_over_the_limit_are_refused(served):
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with served.connect() as connection:
        connection.settimeout(10)
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        reply = b""
        try:
            for _ in range(6):
                connection.sendall(piece)
            reply = read_all(connection, 3)
        except OSError:
            reply = reply or b"HTTP/1.1 413"
    assert reply.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("close", ["close", "keep-alive"])
def test_client_that_sends_all_before_it_reads_learns_that_its_body_is_too_large(served, close):
    body = b'{"messages": "' + b"x" * (24 << 20) + b'"}'
    head = HEAD + b"Connection: %b\r\nContent-Length: %d\r\n\r\n" % (close.encode(), len(body))
    with served.connect() as connection:
        connection.sendall(head)
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        reply = read_all(connection, 3)
    assert status_and_error(reply)[0] == 413


def test_library_that_closes_after_each_request_reads_the_refusal(served):
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", b"x" * (24 << 20), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=seconds(10))
    with refused.value as answer:
        assert answer.code == 413
    request = urllib.request.Request(f"{served.url}/v1/completions", b"x" * (3 << 20), {"content-type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=seconds(10))
    with refused.value as answer:
        assert answer.code == 415


@pytest.mark.parametrize(
    "start", [b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: local", b""], ids=["line", "header", "nothing"]
)
def test_request_that_never_ends_meets_its_deadline(served, start):
    began = time.perf_counter()
    reply = served.exchange(start)
    assert time.perf_counter() - began < seconds(4)
    assert not reply or status_and_error(reply)[0] == 408


@pytest.mark.parametrize(
    "rest", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"], ids=["length", "chunks"]
)
def test_body_that_never_ends_meets_its_deadline(served, rest):
    began = time.perf_counter()
    reply = served.exchange(HEAD + rest)
    assert status_and_error(reply)[0] == 408
    assert time.perf_counter() - began < seconds(4)


def test_body_that_came_while_the_server_was_held_up_is_read(served, monkeypatch):
    """Longer than the deadline of bodies, by other work on the event loop; the client was in time."""
    body = json.dumps({"content": "hello " * 30_000}).encode()
    head = HEAD.replace(b"/v1/chat/completions", b"/tokenize") + b"Content-Length: %d\r\n\r\n" % len(body)
    is_held_up, is_sent = threading.Event(), threading.Event()

    def hold_up() -> None:
        is_held_up.set()
        is_sent.wait(seconds(10))
        time.sleep(2 * served.server.settings.body_seconds)

    def resume_body(connection: Connection) -> None:
        resume(connection)
        connection.loop.call_soon(hold_up)

    resume = Connection.resume_body
    monkeypatch.setattr(Connection, "resume_body", resume_body)
    with served.connect() as connection:
        connection.sendall(head + body[:10])
        assert is_held_up.wait(seconds(10))
        sender = threading.Thread(target=connection.sendall, args=(body[10:],))
        sender.start()
        sender.join(0.2)
        is_sent.set()
        connection.settimeout(seconds(10))
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200")
        sender.join()


def test_writing_to_a_client_that_left_warns_of_nothing(caplog):
    """As asyncio's transports would, where many events of a stream are written at once."""

    async def write(wraps: bool) -> int:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        theirs.close()
        written = _DrainingTransport(transport, SimpleNamespace(is_draining=False)) if wraps else transport
        caplog.clear()
        for _ in range(10):
            written.write(b"data: x\n\n")
        transport.abort()
        await asyncio.sleep(0)
        return sum("socket.send() raised" in record.message for record in caplog.records)

    assert asyncio.run(write(False)) > 0, "asyncio warns of it"
    assert asyncio.run(write(True)) == 0


def test_body_longer_than_its_length_is_cut_there_and_its_rest_is_no_request(served):
    reply = served.exchange(HEAD + b"Content-Length: %d\r\n\r\n" % len(CHAT) + CHAT + b'{"messages": []}\r\n\r\n')
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.count(b"HTTP/1.1 200") == 1
    assert b"bad_http" in reply


def test_pipelined_requests_are_answered_in_order(served):
    request = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
    last = b"GET /version HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    reply = served.exchange(request * 3 + last)
    assert reply.count(b"HTTP/1.1 200") == 4
    assert reply.rindex(b"version") > reply.rindex(b'"ok"')


def test_expectation_is_met(served):
    with served.connect() as connection:
        connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(CHAT))
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 100")
        connection.sendall(CHAT)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_hundreds_of_idle_and_half_sent_connections_leave_room_for_others(served, tcp):
    opened: list[socket.socket] = []
    try:
        for index in range(400):
            connection = served.connect()
            opened.append(connection)
            if index % 2:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        began = time.perf_counter()
        assert tcp.get("/health").status_code == 200
        assert time.perf_counter() - began < seconds(2)
    finally:
        for connection in opened:
            connection.close()


def wait_until_idle(served) -> None:
    assert wait_until(lambda: not served.server.service.replies())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_client_that_leaves_stops_its_work(served, stream, reset):
    body = json.dumps(
        {"messages": STORY, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": stream}
    ).encode()
    connection = served.connect()
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    if stream:
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200")
    assert wait_until(lambda: len(served.server.service.replies()) == 1)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    wait_until_idle(served)


def test_client_that_leaves_before_its_body_leaves_nothing_behind(served, tcp):
    for sent in (b"", CHAT[:5]):
        with served.connect() as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(CHAT) + sent)
    assert served.server.service.replies() == []
    assert tcp.post("/v1/chat/completions", json={"messages": STORY, "max_tokens": 1}).status_code == 200


def test_running_reply_is_listed_and_can_be_cancelled_by_id(served, tcp):
    body = {"messages": STORY, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": True}
    with served.client() as other, other.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        (slot,) = tcp.get("/requests").json()
        assert slot["id"] == first["id"]
        assert "content" not in slot
        cancelled = tcp.post(f"/v1/requests/{first['id']}/cancel", json={})
        assert cancelled.json()["cancelled"] is True
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    wait_until_idle(served)
    assert tcp.delete(f"/v1/requests/{first['id']}").status_code == 404
