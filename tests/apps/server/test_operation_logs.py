"""What is written down of requests: lines of JSON without a text, or everything in a private file where asked for."""

import io
import json
import logging
import stat
import sys

import httpx
import pytest
from local_servers import serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.app import LocalServer
from localinfer.apps.server.operation.logs import JsonFormatter, RequestLog
from localinfer.apps.server.replies.service import Observability
from localinfer.apps.server.transport.settings import ServerSettings, parse_tokens
from localinfer.errors import RequestError
from tests.support.limits import wait_until

PATH = "/v1/chat/completions"
SECRET = "a question about somebody"
SAID = "an answer that is nobody else's"
ASK = {"model": "says", "messages": [{"role": "user", "content": SECRET}], "temperature": 0, "max_tokens": 99}
SCRIPTS = {"says": SAID.encode(), "fails": [*b"abc", ValueError("a secret of /home/somebody")]}


@pytest.fixture
def watched(monkeypatch):
    """A client of a server with these parts of `Observability`."""
    made = []

    def make(**parts) -> httpx.Client:
        plain = LocalServer.__init__
        monkeypatch.setattr(
            LocalServer, "__init__", lambda self, *a, **k: plain(self, *a, **k, operation=Observability(**parts))
        )
        settings = ServerSettings(port=0, tokens=parse_tokens("alice: key-of-alice"))
        context = serving(settings, sources=scripted_sources(*SCRIPTS), load=loader(SCRIPTS))
        made.append(context)
        running = context.__enter__()
        client = running.client(headers={"authorization": "Bearer key-of-alice", "cookie": "id=key-of-alice"})
        made.append(client)
        return client

    yield make
    for context in reversed(made):
        context.__exit__(None, None, None)


@pytest.fixture
def lines():
    """What the log holds, as JSON, once it has so many lines of requests."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("localinfer")
    server = logging.getLogger("localinfer.server")
    level = server.level
    logger.addHandler(handler)
    server.setLevel(logging.DEBUG)

    def read(count: int) -> list[dict]:
        def requests() -> list[dict]:
            return [line for text in stream.getvalue().splitlines() if "request_id" in (line := json.loads(text))]

        assert wait_until(lambda: len(requests()) == count), stream.getvalue()
        assert SECRET not in stream.getvalue() and SAID not in stream.getvalue()
        assert "key-of-alice" not in stream.getvalue()
        return requests()

    yield read
    logger.removeHandler(handler)
    server.setLevel(level)


def test_a_line_of_json_says_what_a_request_was_and_cost(watched, lines):
    client = watched()
    whole = client.post(PATH, json=ASK).json()
    streamed = client.post(PATH, json={**ASK, "stream": True})
    assert streamed.status_code == 200
    client.post(PATH, json={**ASK, "model": "fails", "stream": True})
    client.post(PATH, json={**ASK, "temperature": SECRET})
    client.get("/v1/models", headers={"authorization": "none"})
    first, second, failed, wrong, refused = lines(5)
    expected = {"method": "POST", "route": "/chat/completions", "status": 200, "model": "says", "level": "info"}
    assert expected.items() <= first.items() and expected.items() <= second.items()
    assert first["token_name"] == "alice"
    assert first["reply_id"] == whole["id"]
    assert (first["input_tokens"], first["output_tokens"]) == (
        whole["usage"]["prompt_tokens"],
        whole["usage"]["completion_tokens"],
    )
    assert first["finish_reasons"] == second["finish_reasons"] == ["stop"]
    assert second["cached_tokens"] > 0 and second["output_tokens"] == first["output_tokens"]
    assert second["request_id"] == streamed.headers["x-request-id"]
    assert 0 <= first["time_to_first_token_seconds"] <= first["seconds"]
    assert (failed["status"], failed["error"], failed["finish_reasons"]) == (200, "ValueError", ["abort"])
    assert wrong["status"] == 400 and "model" not in wrong
    assert (refused["status"], refused["method"], refused.get("route")) == (401, "GET", None)


def test_requests_are_written_whole_where_asked_for_but_for_what_shows_who_somebody_is(watched, tmp_path):
    path = tmp_path / "requests.jsonl"
    with RequestLog(path) as log:
        client = watched(request_log=log)
        client.post(PATH, json=ASK)
        client.post(PATH, json={**ASK, "stream": True})
        client.post(PATH, content=b'{"messages', headers={"content-type": "application/json", "x-api-key": "k"})
        assert wait_until(lambda: path.read_text().count("\n") == 3)
    assert "key-of-alice" not in path.read_text()
    whole, streamed, broken = (json.loads(line) for line in path.read_text().splitlines())
    assert whole["request"]["body"] == ASK
    assert whole["request"]["headers"]["authorization"] == whole["request"]["headers"]["cookie"] == "redacted"
    assert whole["response"]["status"] == 200
    assert whole["response"]["body"]["choices"][0]["message"]["content"] == SAID
    assert whole["id"] == whole["response"]["headers"]["x-request-id"]
    assert streamed["response"]["body"].startswith("data: ") and streamed["response"]["body"].endswith("[DONE]\n\n")
    assert (broken["request"]["body"], broken["response"]["status"]) == ('{"messages', 400)
    assert broken["request"]["headers"]["x-api-key"] == "redacted"
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_of_requests_stays_within_its_bound(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("")
    path.chmod(0o644)
    with RequestLog(path, max_bytes=2000) as log:
        for number in range(100):
            log.write({"number": number, "text": "x" * 80})
    files = [path, tmp_path / "requests.jsonl.1"]
    assert sorted(tmp_path.iterdir()) == files
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [json.loads(line)["number"] for file in reversed(files) for line in file.read_text().splitlines()]
    assert kept == list(range(100 - len(kept), 100)) and len(kept) > 9
    if sys.platform != "win32":
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of Unix")
def test_requests_are_written_to_regular_files_only(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link", "missing/file", "."):
        with pytest.raises(RequestError, match="--log-requests"):
            RequestLog(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()
