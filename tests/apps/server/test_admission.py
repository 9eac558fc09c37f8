"""Around the first token: what is sent while a model is silent, and who waits, is refused or leaves."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from event_frames import DONE
from local_servers import STORY, ServedModel, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import has_unix_sockets
from tests.support.limits import seconds, wait_until

PATH = "/v1/chat/completions"
PING_SECONDS = 0.05
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
FILL = {"model": "waiting", "prompt": "a|", "temperature": 0, "prompt_cache_key": "file:7"}


class Waiting:
    """A server whose model says `a`, waits to be let go on, and says `b`; another waits before anything."""

    def __init__(self, served: ServedModel, gate: threading.Event) -> None:
        self.served = served
        self.gate = gate
        self.client = served.client()

    @property
    def num_replies(self) -> int:
        return len(self.served.server.service.replies())

    def wait_for(self, num_replies: int) -> None:
        assert wait_until(lambda: self.num_replies == num_replies), self.num_replies


@pytest.fixture(scope="module")
def gated() -> Iterator[Waiting]:
    gate = threading.Event()
    scripts = {"waiting": [ord("a"), gate, ord("b")], "silent": [gate, ord("c")]}
    settings = ServerSettings(port=0, ping_seconds=PING_SECONDS, progress_seconds=PING_SECONDS, max_generations=2)
    with serving(settings, sources=scripted_sources(*scripts), load=loader(scripts)) as served:
        made = Waiting(served, gate)
        yield made
        made.client.close()


@pytest.fixture
def waiting(gated: Waiting) -> Iterator[Waiting]:
    gated.gate.clear()
    try:
        yield gated
    finally:
        gated.gate.set()
        gated.wait_for(0)


def chunk_of(line: str) -> dict:
    return json.loads(line.removeprefix("data: "))


def test_first_chunk_leaves_before_the_prompt_is_computed(waiting):
    with waiting.client.stream("POST", PATH, json={**ASK, "model": "silent", "stream": True}) as response:
        lines = response.iter_lines()
        assert chunk_of(next(lines))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert waiting.served.server.service.replies()[0].num_tokens == 0
        waiting.gate.set()
        assert "c" in "".join(lines)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {**ASK, "model": "waiting"}),
        ("/v1/completions", FILL),
        ("/v1/messages", {**ASK, "model": "waiting", "max_tokens": 9}),
        ("/v1/responses", {"model": "waiting", "input": "hi"}),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
def test_silence_is_broken_by_comments_that_make_no_event(waiting, path, body):
    with waiting.client.stream("POST", path, json={**body, "stream": True}) as response:
        received = bytearray()
        for piece in response.iter_raw():
            received += piece
            if received.count(b": ping\n") == 2:
                waiting.gate.set()
    text = received.decode()
    assert ": ping\n: ping\n" in text
    assert ": ping\n\n" not in text
    frames = [line for line in text.split("\n") if line and not line.startswith(": ping")]
    assert all(line.startswith(("data: ", "event: ")) for line in frames)
    assert path != PATH or frames[-1] == f"data: {DONE}"


def test_progress_of_the_prompt_and_of_those_ahead_is_told_where_asked_for(waiting):
    body = {**ASK, "model": "silent", "stream": True, "return_progress": True}
    with waiting.client.stream("POST", PATH, json=body) as response, waiting.served.client() as other:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        first = chunk_of(next(lines))
        assert first["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
        progress = first["prompt_progress"]
        assert set(progress) == {"total", "cache", "processed", "time_ms", "position"}
        assert 0 <= progress["cache"] <= progress["processed"] <= progress["total"] == 5
        assert progress["position"] == 0
        with other.stream("POST", PATH, json=body) as behind:
            progress = (chunk_of(line).get("prompt_progress") for line in behind.iter_lines() if "progress" in line)
            assert next(progress)["position"] == 1
        waiting.gate.set()
        assert "prompt_progress" not in list(lines)[-1]


def test_one_more_than_may_run_is_refused_and_told_when_to_come_back(waiting):
    with (
        waiting.client.stream("POST", PATH, json={**ASK, "model": "waiting", "stream": True, "n": 2}) as response,
        waiting.served.client() as other,
    ):
        lines = response.iter_lines()
        next(lines)
        refused = other.post(PATH, json={**ASK, "model": "waiting"})
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert "x-should-retry" not in refused.headers
        assert other.get("/health").status_code == 200
        waiting.gate.set()
        choices = [chunk_of(line)["choices"][0] for line in lines if line.startswith("data: {")]
        assert "".join(one["delta"].get("content", "") for one in choices if one["index"] == 0) == "ab"
    assert waiting.client.post(PATH, json={**ASK, "model": "waiting"}).status_code == 200


def ask_in_thread(waiting: Waiting, path: str, body: dict) -> tuple[threading.Thread, list[httpx.Response]]:
    replies: list[httpx.Response] = []

    def ask() -> None:
        with waiting.served.client() as client:
            replies.append(client.post(path, json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, replies


def test_newest_completion_of_a_key_ends_the_one_before(waiting):
    first, former = ask_in_thread(waiting, "/v1/completions", FILL)
    waiting.wait_for(1)
    second, latter = ask_in_thread(waiting, "/v1/completions", FILL)
    first.join(seconds(10))
    assert (former[0].status_code, former[0].json()["error"]["code"]) == (409, "superseded")
    assert former[0].headers["x-should-retry"] == "false"
    waiting.gate.set()
    second.join(seconds(10))
    assert latter[0].json()["choices"][0]["text"] == "ab"


def test_newest_completion_of_a_key_ends_a_stream_that_has_begun(waiting):
    with waiting.client.stream("POST", "/v1/completions", json={**FILL, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert chunk_of(next(lines))["choices"][0]["text"] == "a"
        second, latter = ask_in_thread(waiting, "/v1/completions", FILL)
        *_, error, last = lines
    assert chunk_of(error)["error"]["code"] == "superseded"
    assert last == f"data: {DONE}"
    waiting.gate.set()
    second.join(seconds(10))
    assert latter[0].json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("path", ["/v1/completions", PATH])
def test_other_keys_and_chats_end_nobody(waiting, path):
    first, second = (
        (FILL, {**FILL, "prompt_cache_key": "file:8"})
        if path != PATH
        else ({**ASK, "model": "waiting", "prompt_cache_key": "chat"},) * 2
    )
    asked = [ask_in_thread(waiting, path, body) for body in (first, second)]
    waiting.wait_for(2)
    waiting.gate.set()
    for thread, _ in asked:
        thread.join(seconds(10))
    assert [replies[0].status_code for _, replies in asked] == [200, 200]


def test_client_that_leaves_before_its_turn_leaves_nothing_behind(waiting, caplog):
    caplog.set_level(logging.INFO, "localinfer.server")
    body = json.dumps({**ASK, "model": "silent"}).encode()
    for stream in (False, True):
        with waiting.served.connect() as connection:
            sent = body if not stream else body[:-1] + b', "stream": true}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
            waiting.wait_for(1)
        waiting.wait_for(0)
    assert any(" 499 " in record.getMessage() for record in caplog.records)
    waiting.gate.set()
    assert waiting.client.post(PATH, json={**ASK, "model": "silent"}).status_code == 200


@pytest.mark.skipif(not has_unix_sockets(), reason="a Unix socket holds little that nobody reads")
def test_client_that_reads_nothing_is_let_go_and_others_are_answered(served, tcp):
    body = json.dumps({"content": "a cat " * 12_000, "with_pieces": True}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(served.socket_path))
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = connection.recv(1 << 12)
        assert tcp.get("/health").status_code == 200
        time.sleep(2 * served.server.settings.slow_reader_seconds)
        connection.settimeout(5)
        try:
            while piece := connection.recv(1 << 20):
                received += piece
        except ConnectionResetError:
            pass
    assert received.startswith(b"HTTP/1.1 200") and not received.endswith((b"]}", b"0\r\n\r\n"))


def test_no_text_of_requests_and_replies_is_logged_or_counted(tcp, caplog):
    caplog.set_level(logging.DEBUG)
    word = "Xylophonist"
    asked = {"messages": [{"role": "user", "content": word}], "max_tokens": 30, "temperature": 0, "user": word}
    reply = tcp.post(PATH, json=asked).json()["choices"][0]["message"]["content"]
    tcp.post(PATH, json={**asked, "temperature": -1})
    tcp.post(PATH, json={**asked, "messages": [{"role": word, "content": word}]})
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("localinfer"))
    assert "/chat/completions 200" in logged and "/chat/completions 400" in logged
    metrics = tcp.get("/metrics").text
    for text in (logged, metrics):
        assert word not in text and reply[:20] not in text


def test_metrics_tell_times_tokens_cache_drafts_and_queue(tcp):
    asked = {"messages": STORY, "max_tokens": 40, "temperature": 0}
    story = tcp.post(PATH, json=asked).json()["choices"][0]["message"]["content"]
    tcp.post(PATH, json={**asked, "prediction": {"type": "content", "content": story}})
    text = tcp.get("/metrics").text
    for name in (
        'localinfer_requests_total{route="/chat/completions",status="200"}',
        "localinfer_time_to_first_token_seconds_bucket",
        "localinfer_inter_token_seconds_bucket",
        'localinfer_queue_wait_seconds_count{model="demo"}',
        'localinfer_prompt_tokens_total{model="demo"}',
        'localinfer_cached_prompt_tokens_total{model="demo"}',
        'localinfer_completion_tokens_total{model="demo"}',
        'localinfer_drafted_tokens_total{position="0"}',
        'localinfer_accepted_tokens_total{position="0"}',
        'localinfer_replies_total{ending="length"}',
        "localinfer_good_replies_total",
        "localinfer_running_generations 0.0",
        "localinfer_waiting_generations 0.0",
        "localinfer_loaded_models 1.0",
    ):
        assert name in text, name


def test_every_answer_names_its_request(http):
    answers = [
        http.get("/health"),
        http.get("/v1/nothing"),
        http.post(PATH, json={"messages": STORY, "max_tokens": 1}),
        http.post(PATH, json={"messages": STORY, "max_tokens": 1, "stream": True}),
        http.post(PATH, content=b"{"),
        http.get("/health", headers={"host": "evil"}),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids) and all(ids)
