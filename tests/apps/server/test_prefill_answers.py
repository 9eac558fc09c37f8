"""Answers of a prefill server, as HTTP may give them: each is taken, or given up at the deadline; none is an error."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localinfer.apps.server.kv_transfer import (
    HttpPrefillServer,
    KVTransferClient,
    PrefillAnswer,
    PrefillCancelled,
    PrefillFailed,
)
from localinfer.apps.server.operation.observation import Metrics
from localinfer.apps.server.transport.settings import KVTransferOptions, PrefillAddress
from tests.support.limits import seconds

LINES = b'{}\n{"computed_tokens": 4}\n{"stored_tokens": 7, "cached_tokens": 3, "problem": null, "has_failed": false}\n'
DONE = PrefillAnswer(7, 3)
PATIENCE = 0.1
"""Seconds of the deadline where it is to be met."""

Talk = Callable[[socket.socket], Any]


def chunked(content: bytes, size: int) -> bytes:
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def head(*fields: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"HTTP/{version} 200 OK", *fields, "", "")).encode()


def whole(*parts: bytes) -> Talk:
    return lambda sock: sock.sendall(b"".join(parts))


def dripping(first: bytes, drop: bytes) -> Talk:
    """Some bytes, and then one after the other for as long as they are taken."""

    def talk(sock: socket.socket) -> None:
        sock.sendall(first)
        while True:
            sock.sendall(drop)
            time.sleep(0.02)

    return talk


def waiting(first: bytes) -> Talk:
    def talk(sock: socket.socket) -> None:
        sock.sendall(first)
        sock.settimeout(seconds(10))
        sock.recv(1)

    return talk


@contextmanager
def answering(talk: Talk) -> Iterator[HttpPrefillServer]:
    """A server that reads one request, and answers it so."""

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            sock.settimeout(seconds(10))
            while b"}" not in sock.recv(1 << 16):
                pass
            with suppress(OSError):
                talk(sock)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield HttpPrefillServer(PrefillAddress(f"http://127.0.0.1:{listening.getsockname()[1]}"))
        finally:
            thread.join(seconds(10))
            assert not thread.is_alive()


def asked(talk: Talk, patience: float = 30.0, is_cancelled: Callable[[], bool] = lambda: False) -> PrefillAnswer:
    with answering(talk) as server:
        return server.ask(b"{}", deadline=time.monotonic() + patience, is_cancelled=is_cancelled)


LENGTH = f"Content-Length: {len(LINES)}"
CHUNKED = "Transfer-Encoding: chunked"
CLOSE = "Connection: close"


@pytest.mark.parametrize(
    "talk",
    [
        whole(head(CHUNKED), chunked(LINES, 9)),
        whole(head(CHUNKED, CLOSE), chunked(LINES, len(LINES))),
        whole(head(LENGTH), LINES),
        whole(head(LENGTH, CLOSE), LINES),
        whole(head(CLOSE), LINES),
        whole(head(), LINES),
        whole(head(version="1.0"), LINES),
        whole(head(LENGTH, "Connection: keep-alive", version="1.0"), LINES),
        whole(b"HTTP/1.1 100 Continue\r\n\r\n", head(LENGTH), LINES),
        waiting(head(CHUNKED) + chunked(LINES, 50)[:-5]),
        waiting(head() + LINES),
    ],
)
def test_an_answer_is_taken_however_it_is_framed(talk: Talk) -> None:
    assert asked(talk) == DONE


@pytest.mark.parametrize(
    ("talk", "told"),
    [
        (dripping(b"", b"H"), "slower than the deadline"),
        (dripping(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), "deadline|100 headers"),
        (dripping(b"HTTP/1.1 200 OK\r\nX: ", b"y"), "slower than the deadline"),
        (dripping(head(CLOSE), b" "), "slower than the deadline"),
        (dripping(head(CHUNKED), b"1\r\n \r\n"), "slower than the deadline"),
        (dripping(head(CHUNKED), b"0"), "slower than the deadline"),
        (dripping(head(CLOSE), b"{}\n"), "slower than the deadline"),
        (dripping(b"HTTP/1.1 503 No\r\nContent-Length: 900\r\n\r\n", b"x"), "slower than the deadline"),
        (waiting(b""), "slower than the deadline"),
        (waiting(head(CHUNKED)), "slower than the deadline"),
        (waiting(head(LENGTH) + LINES[:8]), "slower than the deadline"),
        (whole(), "went away"),
        (whole(b"SSH-2.0-x\r\n"), "cannot be reached, or went away"),
        (whole(head(CHUNKED), b"zz\r\n{}\r\n"), "went away"),
        (whole(head(CHUNKED), chunked(LINES, 9)[:30]), "went away"),
        (whole(head(LENGTH), LINES[:9]), "went away"),
        (whole(head("Content-Length: -4"), LINES[:9]), "went away"),
        (whole(head(CLOSE), b"[]\n"), "none of a prefill server"),
        (whole(head(CLOSE), b"\xff\n"), "none of a prefill server"),
        (whole(head(CLOSE), b"x" * (1 << 17)), "went away"),
        (whole(b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}"), "status 503"),
        (whole(b"HTTP/1.1 204 None\r\n\r\n"), "status 204"),
        (whole(head(CLOSE), b'{"error": {"message": "no\\nroom"}}\n'), "no room"),
    ],
)
def test_what_is_no_answer_is_given_up_at_the_deadline(talk: Talk, told: str) -> None:
    with pytest.raises(PrefillFailed, match=told):
        asked(talk, PATIENCE)


def test_a_reset_connection_has_gone() -> None:
    def reset(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()

    with pytest.raises(PrefillFailed, match="went away"):
        asked(reset)


@pytest.mark.parametrize("talk", [waiting(b""), waiting(head(CHUNKED)), dripping(head(CLOSE), b" ")])
def test_nobody_is_waited_for_whose_client_has_left(talk: Talk) -> None:
    looks = iter([False] * 3)
    with pytest.raises(PrefillCancelled):
        asked(talk, is_cancelled=lambda: next(looks, True))


class Servers:
    """Prefill servers without a socket, each of which does one thing."""

    def __init__(self, *works: Callable[[], PrefillAnswer]) -> None:
        self.asked: list[str] = []
        self.all = [SimpleNamespace(name=f"s{i}", ask=self._asker(f"s{i}", work)) for i, work in enumerate(works)]

    def _asker(self, name: str, work: Callable[[], PrefillAnswer]) -> Callable[..., PrefillAnswer]:
        def ask(body: bytes, **_options: Any) -> PrefillAnswer:
            assert json.loads(body)["token_ids"]
            self.asked.append(name)
            return work()

        return ask


class Model:
    """Of an LLM what a handover asks: nothing is known, and so much is on disk once it was asked for."""

    handover_folder = "folder"

    def __init__(self, on_disk: int = 0) -> None:
        self.on_disk = on_disk
        self.was_asked = False

    def cached_tokens(self, *_: Any) -> int:
        return 0

    def stored_tokens(self, *_: Any) -> int:
        found = self.on_disk if self.was_asked else 0
        self.was_asked = True
        return found

    def fetch_prompt(self, *_: Any) -> int:
        return self.on_disk

    def handover_fingerprint(self) -> Any:
        return SimpleNamespace(parts={})


def prepared(
    servers: Servers, model: Model, handover: KVTransferClient | None = None
) -> tuple[KVTransferClient, list[int]]:
    made = handover or KVTransferClient(KVTransferOptions(threshold=10), Metrics(), servers.all)  # type: ignore[arg-type]
    noted: list[int] = []
    hints = SimpleNamespace(salt=b"", system_tokens=0, branch_tokens=())
    request = SimpleNamespace(head=np.arange(100, dtype=np.int32), hints=hints, is_over=False, owner="x")
    stream = SimpleNamespace(request=request, note_prefilled=lambda count, seconds: noted.append(count))
    model.was_asked = False
    made.prepare(model, "m", stream, lambda: False)  # type: ignore[arg-type]
    return made, noted


def raising(error: Exception) -> Callable[[], PrefillAnswer]:
    def work() -> PrefillAnswer:
        raise error

    return work


def test_whatever_a_server_raises_the_next_is_asked_and_the_text_is_made(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    servers = Servers(raising(AttributeError("sock")), lambda: PrefillAnswer(99, 0))
    _, noted = prepared(servers, Model(99))
    assert (servers.asked, noted) == (["s0", "s1"], [99])
    assert "AttributeError" in caplog.text


def test_an_error_of_this_process_is_logged_and_the_text_is_made(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Model):
        def cached_tokens(self, *_: Any) -> int:
            raise ZeroDivisionError("here")

    _, noted = prepared(Servers(), Broken())
    assert noted == [] and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_handover_in_part_is_no_failure_unless_the_disk_has_failed(has_failed: bool) -> None:
    answer = PrefillAnswer(32, 0, "of 99 tokens 32 could be written", has_failed)
    servers, model = Servers(lambda: answer), Model(32)
    handover, noted = prepared(servers, model)
    assert noted == [32]
    prepared(servers, model, handover)
    assert servers.asked == (["s0"] if has_failed else ["s0", "s0"]), "who has failed is left alone for a while"
