"""What a client waits for before the first token: nothing that computes."""

import socket
import threading
from typing import Any

import msgspec
import pytest
from local_servers import MODEL, ServedModel, serving

from localinfer.apps.server.replies.reply import AdmissionBarrier, ReplyThreads
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM
from tests.engine.fakes import FakeTemplate, fake_model
from tests.support.limits import seconds, wait_until

QUESTION = {"messages": [{"role": "user", "content": "Hm?"}], "max_tokens": 3, "stream": True, "ignore_eos": True}


def ask(served: ServedModel) -> socket.socket:
    """Send a question and return the connection, of which nothing was read."""
    body = msgspec.json.encode(QUESTION)
    connection = served.connect()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = bytearray()
    while end not in received:
        piece = connection.recv(1 << 16)
        assert piece, f"the reply ended without {end!r}: {received!r}"
        received += piece
    return bytes(received)


def test_first_bytes_and_health_wait_for_no_step() -> None:
    may_compute = threading.Event()
    model = fake_model(max_batch_rows=64, max_output_rows=8)
    model.chat_template = FakeTemplate()
    compute = model.program.run

    def run(batch: Any) -> Any:
        assert may_compute.wait(seconds(10))
        return compute(batch)

    model.program.run = run  # type: ignore[method-assign]

    def load(_: Any) -> LLM:
        return LLM(model)  # type: ignore[arg-type]

    try:
        with serving(ServerSettings(socket_path=None, port=0), sources=[MODEL], load=load) as served:
            connections = [ask(served) for _ in range(4)]
            heads = [read_until(connection, b'"role":"assistant"') for connection in connections]
            with served.client() as client:
                assert client.get("/health").json() == {"status": "ok"}
                assert len(client.get("/requests").json()) == 4
            may_compute.set()
            for head, connection in zip(heads, connections, strict=True):
                assert b"[DONE]" in head + read_until(connection, b"[DONE]")
                connection.close()
    finally:
        may_compute.set()


def test_prompts_wait_for_the_first_bytes_of_other_requests_but_not_for_ever() -> None:
    barrier = AdmissionBarrier()
    assert barrier.wait()
    barrier.begin()
    barrier.begin()
    assert not barrier.wait()
    barrier.end()
    assert not barrier.wait()
    barrier.end()
    assert barrier.wait()


def test_last_first_byte_wakes_the_prompts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localinfer.apps.server.replies.reply._BARRIER_SECONDS", seconds(30))
    barrier = AdmissionBarrier()
    barrier.begin()
    waited: list[bool] = []
    waiting = threading.Thread(target=lambda: waited.append(barrier.wait()))
    waiting.start()
    barrier.end()
    waiting.join(seconds(10))
    assert waited == [True]


def test_threads_are_kept_for_the_next_text_and_end_with_the_server() -> None:
    threads = ReplyThreads()
    names: list[int] = []
    for count in range(1, 6):
        threads.run(lambda: names.append(threading.get_ident()))
        assert wait_until(lambda: threads.num_idle and len(names) == count)  # noqa: B023
    assert len(set(names)) == 1
    may_end = threading.Event()
    for _ in range(3):
        threads.run(lambda: names.append(threading.get_ident()) or may_end.wait(seconds(10)))  # type: ignore[func-returns-value]
    assert wait_until(lambda: len(names) == 8)
    assert len(set(names)) == 3
    working = [thread for thread in threading.enumerate() if thread.ident in names]
    threads.close()
    may_end.set()
    for thread in working:
        thread.join(seconds(10))
        assert not thread.is_alive()
