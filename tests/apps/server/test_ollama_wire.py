"""Ollama's API as bytes: lines of JSON, their last one, options, names, errors of one text, and the gate before all."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from local_servers import STORY, ServedModel, serving
from scripted_models import filling_loader, loader, scripted_model, scripted_sources

from localinfer.apps.server.ollama.fields import OllamaCall, OllamaMessage, keep_alive_seconds, read_ollama_messages
from localinfer.apps.server.routes import ollama_routes
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import ServerSettings

SHORT = {"temperature": 0, "num_predict": 4}
CHAT = {"model": "demo", "messages": STORY, "options": SHORT}
GENERATE = {"model": "demo", "prompt": "Tell me a story.", "options": SHORT}
FIGURES = ["total_duration", "load_duration", "prompt_eval_count", "prompt_eval_cached_count", "prompt_eval_duration"]
FIGURES += ["eval_count", "eval_duration"]
ROUTES = [
    (path, method) for route in ollama_routes()[1:] for path in [route.path] for method in sorted(route.methods or ())
]


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_streams_are_lines_of_json_whose_last_one_has_the_figures(tcp):
    response = tcp.post("/api/chat", json=CHAT)
    assert response.headers["content-type"] == "application/x-ndjson"
    *lines, last = lines_of(response)
    assert [list(line) for line in lines] == [["model", "created_at", "message", "done"]] * 4
    assert all(line["message"]["role"] == "assistant" and not line["done"] for line in lines)
    assert list(last) == ["model", "created_at", "message", "done", "done_reason", *FIGURES]
    assert (last["message"], last["done_reason"]) == ({"role": "assistant", "content": ""}, "length")
    assert all(isinstance(last[name], int) for name in FIGURES)
    whole = tcp.post("/api/chat", json={**CHAT, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"]["content"] == "".join(line["message"]["content"] for line in lines)
    *lines, last = lines_of(tcp.post("/api/generate", json=GENERATE))
    assert "".join(line["response"] for line in lines) == whole.json()["message"]["content"]
    assert list(last) == ["model", "created_at", "response", "done", "done_reason", *FIGURES, "context"]
    assert last["created_at"].endswith("Z") and "T" in last["created_at"]


@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_the_gate_stands_before_every_route(served, path, method):
    for headers, status in (
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        *([({"content-type": "text/plain"}, 415)] if method == "POST" else []),
    ):
        with served.client() as http:
            response = http.request(method, path, headers=headers, content=b"{}")
        assert response.status_code == status, (path, headers)
        assert method == "HEAD" or isinstance(response.json()["error"], str)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_programs_need_not_say_that_they_send_json(tcp, kind):
    asked = json.dumps({**CHAT, "stream": False}).encode()
    headers = {} if kind is None else {"content-type": kind}
    assert tcp.post("/api/chat", content=asked, headers=headers).json()["done"]
    for path, more in (
        ("/api/chat", {"origin": str(tcp.base_url)}),
        ("/api/chat", {"sec-fetch-site": "same-origin"}),
        ("/v1/chat/completions", {}),
    ):
        assert tcp.post(path, content=asked, headers={**headers, **more}).status_code == 415


def test_the_token_is_wanted_on_every_route():
    settings = ServerSettings(port=0, token="s3cret")
    with serving(settings, sources=scripted_sources("demo"), load=loader({"demo": b"Hi."})) as running:
        with running.client() as http:
            for path, method in ROUTES:
                response = http.request(method, path, json={})
                assert response.status_code == 401, path
                assert method == "HEAD" or "token" in response.json()["error"]
            assert http.head("/").status_code == 200
        with running.client(headers={"authorization": "Bearer s3cret"}) as http:
            assert http.get("/api/tags").json()["models"][0]["name"] == "demo:latest"


def test_what_clients_probe_a_server_by(tcp):
    assert tcp.get("/", headers={"user-agent": "ollama-python/0.6.4"}).text == "Ollama is running"
    assert tcp.head("/").status_code == tcp.head("/api/version").status_code == tcp.head("/api/tags").status_code == 200
    page = tcp.get("/", headers={"accept": "text/html,application/xhtml+xml"})
    assert page.text.startswith("<!doctype html>")
    found = tcp.get("/api/version").json()
    assert [int(part) for part in found["version"].split(".")] > [0, 17, 6]


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("chat", {"model": None}, "model is required"),
        ("chat", {"options": {"temprature": 1}}, "options.temprature"),
        ("chat", {"options": {"mirostat": 1}}, "second version"),
        ("chat", {"options": {"vocab_only": True}}, "/tokenize"),
        ("chat", {"options": {"tfs_z": 0.5}}, "min_p"),
        ("chat", {"options": {"penalize_newline": False}}, "repeat_penalty"),
        ("chat", {"temperature": 0.5}, "give it in options"),
        ("chat", {"max_tokens": 5}, "options.num_predict"),
        ("chat", {"format": "yaml"}, "JSON Schema"),
        ("chat", {"format": "json", "options": {"regex": "a"}}, "choose one"),
        ("chat", {"think": True}, '"demo" does not support thinking'),
        ("chat", {"think": "hard"}, "low, medium, high, max"),
        ("chat", {"top_logprobs": 2}, "logprobs: true"),
        ("chat", {"keep_alive": "5 minutes"}, "1h30m"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, r"messages\[0\].images"),
        ("chat", {"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ("chat", {"tools": [{"type": "function"}]}, "name"),
        ("chat", {"messages": [{"role": "user", "content": "one two " * 2000}]}, "1024"),
        ("generate", {"images": ["aGk="]}, "images"),
        ("generate", {"template": "{{ .System }} {{ .Prompt }}"}, "raw: true"),
        ("generate", {"raw": True, "system": "x"}, "no system message"),
        ("generate", {"suffix": "x"}, "no tokens for filling in"),
        ("generate", {"suffix": "x", "raw": True}, "alone"),
        ("generate", {"context": [1, 2], "think": True}, "/api/chat"),
        ("generate", {"context": [1 << 20]}, "1048576"),
        ("embed", {"input": "one two " * 2000, "truncate": False}, "1024"),
        ("embed", {"input": [1, 2]}, "input"),
        ("embed", {"input": "x", "dimensions": 999}, "dimensions"),
        ("embed", {"prompt": "x"}, "/api/embeddings"),
        ("show", {"model": ""}, "model is required"),
        ("pull", {"model": "llama3.2:3b"}, "org/repo"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_text_with_a_way_out(tcp, path, more, words):
    asked = {"chat": CHAT, "generate": GENERATE}.get(path, {"model": "demo"})
    response = tcp.post(f"/api/{path}", json={**asked, **more})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    assert words.replace("\\", "") in response.json()["error"]


def test_options_that_change_no_reply_and_neutral_ones_pass(tcp):
    more = {"num_batch": 2, "num_gpu": 99, "main_gpu": 0, "num_thread": 8, "numa": False, "low_vram": False}
    more |= {"use_mmap": True, "use_mlock": False, "num_keep": 5, "draft_num_predict": 4, "tfs_z": 1, "f16_kv": True}
    more |= {"penalize_newline": True, "vocab_only": False, "logits_all": False, "num_ctx": 1024, "typical_p": 1.0}
    more |= {
        "top_k": -1,
        "stop": [""],
        "repeat_last_n": 33,
        "repeat_penalty": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 42,
    }
    plain = tcp.post("/api/chat", json={**CHAT, "stream": False}).json()
    reply = tcp.post("/api/chat", json={**CHAT, "stream": False, "options": {**SHORT, **more}, "think": False}).json()
    assert reply["message"] == plain["message"]
    assert "warnings" not in reply


HELLO = [{"role": "user", "content": "Hi"}]
EVERY_OPTION = {"num_ctx": 512, "num_predict": 2, "stop": ["x"], "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5}
EVERY_OPTION |= {"top_k": 40, "top_p": 0.9, "min_p": 0, "tfs_z": 1, "repeat_last_n": 64, "num_thread": 4, "num_gpu": 1}
EVERY_OPTION |= {"use_mmap": True, "use_mlock": False, "num_keep": 24, "num_batch": 512, "temperature": 0.7, "seed": 0}
GO_CALL = {"id": "call_1", "function": {"index": 0, "name": "look", "arguments": {"at": "b"}}}
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    # What has no value is written too.
    "ollama run, loading": ("generate", {"model": "demo", "prompt": "", "suffix": "", "system": "", "template": ""}),
    "ollama run": ("chat", {"messages": HELLO, "format": "", "options": {"num_predict": 2}, "keep_alive": "5m0s"}),
    "ollama run, tools": (
        "chat",
        {
            "messages": [
                *HELLO,
                {"role": "Assistant", "content": "", "tool_calls": [GO_CALL]},
                {"role": "tool", "content": "c", "tool_name": "look", "tool_call_id": "call_1"},
            ],
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
            "options": {"num_predict": 2},
        },
    ),
    "ollama show": ("show", {"system": "", "template": "", "verbose": False, "options": None, "name": ""}),
    "Open WebUI": (
        "chat",
        {"messages": HELLO, "options": EVERY_OPTION, "keep_alive": "5m", "think": None, "tools": None},
    ),
    "Open WebUI, documents": ("embed", {"input": ["a", "b"], "truncate": True}),
    "Home Assistant": ("chat", {"messages": HELLO, "options": {"num_ctx": 8192, "num_predict": 2}, "keep_alive": -1}),
    "Continue": ("generate", {"prompt": "a", "raw": True, "options": EVERY_OPTION, "keep_alive": 1800, "stream": True}),
    "LiteLLM": ("generate", {"prompt": "### User:\na\n\n", "options": {"num_predict": 2}, "images": []}),
    "LlamaIndex": ("chat", {"messages": [{**HELLO[0], "tool_calls": []}], "options": EVERY_OPTION, "format": None}),
}


@pytest.mark.parametrize("client", SENT)
def test_requests_of_clients_are_answered(tcp, client):
    path, body = SENT[client]
    response = tcp.post(f"/api/{path}", json={"model": "demo:latest", **body})
    assert response.status_code == 200, response.text
    assert "error" not in response.text


def test_results_name_their_calls_by_id_by_tool_or_by_order():
    look, count = ({"function": {"name": name, "arguments": {}}} for name in ("look", "count"))
    called = [OllamaMessage("assistant", tool_calls=msgspec.convert([look, count], list[OllamaCall]))]
    told = [OllamaMessage("tool", "1", tool_name="count"), OllamaMessage("tool", "2", tool_call_id="unknown")]
    read = read_ollama_messages([OllamaMessage("user", "a"), *called, *told])
    first, second = (call["id"] for call in read[1]["tool_calls"])
    assert [message["tool_call_id"] for message in read[2:]] == [second, first]


def test_options_reach_the_sampler(tcp):
    def text(**options: Any) -> str:
        asked = {**CHAT, "stream": False, "options": {"num_predict": 12, "temperature": 1.5, "top_k": 0, **options}}
        return str(tcp.post("/api/chat", json=asked).json()["message"]["content"])

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert text(top_k=1) == text(temperature=0)
    whole = text(temperature=0)
    assert whole.partition(" ")[2]
    assert text(temperature=0, stop=[" "]) == whole.partition(" ")[0]


def test_a_context_that_is_shorter_than_asked_for_is_told(tcp):
    asked = {**GENERATE, "stream": False, "options": {**SHORT, "num_ctx": 8192}}
    (warning,) = tcp.post("/api/generate", json=asked).json()["warnings"]
    assert "8192" in warning and "1024" in warning and "--context-length" in warning
    long = {"model": "demo", "input": ["one two " * 2000, "short"]}
    answer = tcp.post("/api/embed", json=long).json()
    assert len(answer["embeddings"]) == 2 and "1 texts" in answer["warnings"][0]


def test_an_assistants_last_message_is_continued(tcp):
    begun = [*STORY, {"role": "assistant", "content": "Once upon a"}]
    reply = tcp.post("/api/chat", json={**CHAT, "messages": begun, "stream": False}).json()
    assert reply["message"]["content"].startswith(" time")


@pytest.mark.parametrize("template", ["", "{{ .Prompt }}"])
def test_raw_prompts_are_read_as_they_are(served, tcp, template):
    rendered = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    more = {"template": template} if template else {"raw": True}
    reply = tcp.post("/api/generate", json={**GENERATE, **more, "prompt": rendered, "stream": False}).json()
    asked = tcp.post("/api/generate", json={**GENERATE, "stream": False}).json()
    assert reply["response"] == asked["response"]
    assert reply["prompt_eval_count"] == asked["prompt_eval_count"]
    assert "context" not in reply and len(asked["context"]) == asked["prompt_eval_count"] + 4


def test_json_mode(tcp):
    reply = tcp.post(
        "/api/generate", json={**GENERATE, "format": "json", "stream": False, "options": {"num_predict": 8}}
    )
    assert reply.json()["response"].startswith("{")
    assert tcp.post("/api/chat", json={**CHAT, "format": ""}).status_code == 200


def test_a_suffix_stands_behind_what_is_filled_in():
    asked: list[list[int]] = []

    with (
        serving(ServerSettings(port=0), sources=scripted_sources("code"), load=filling_loader(asked)) as running,
        running.client() as http,
    ):
        body = {"model": "code", "prompt": "def f(", "suffix": "): pass", "stream": False}
        reply = http.post("/api/generate", json=body).json()
    assert (reply["response"], reply["done_reason"]) == ("x", "stop")
    assert asked == [[256, 260, *b"def f(", 261, *b"): pass", 262]]


def test_a_call_that_was_cut_short_is_text(scripted):
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "count")]
    asked = {"model": "calls", "messages": STORY, "tools": tools, "options": {"num_predict": 77}}
    *_, cut, last = lines_of(scripted.post("/api/chat", json=asked))
    assert last["done_reason"] == "length"
    assert cut["message"]["content"].startswith('{"name": "look"') and "tool_calls" not in cut["message"]


def test_failures_in_a_stream_are_its_last_line(scripted):
    *lines, last = lines_of(scripted.post("/api/chat", json={"model": "failing", "messages": STORY}))
    assert lines and list(last) == ["error"]
    assert "/home" not in last["error"]


def test_unknown_paths_and_methods_have_errors_of_one_text(tcp):
    assert "/api/blobs/sha256:0" in tcp.post("/api/blobs/sha256:0", json={}).json()["error"]
    response = tcp.get("/api/chat")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "POST" in response.json()["error"]
    assert tcp.post("/v1/api/chat", json={}).json() == tcp.post("/api/chat", json={}).json()


@pytest.fixture
def silent() -> Iterator[tuple[ServedModel, threading.Event]]:
    gate = threading.Event()
    settings = ServerSettings(port=0, ping_seconds=0.02, max_generations=1)
    sources = scripted_sources("silent")
    with serving(settings, sources=sources, load=lambda source: scripted_model([gate, ord("c")])) as running:
        try:
            yield running, gate
        finally:
            gate.set()


def test_silence_is_broken_by_spaces_that_begin_a_line_and_a_full_queue_is_503(silent):
    running, gate = silent
    with running.client() as http, http.stream("POST", "/api/chat", json={"model": "silent", "messages": STORY}) as one:
        received = bytearray()
        for piece in one.iter_raw():
            if not received:
                with running.client() as other:
                    busy = other.post("/api/chat", json={"model": "silent", "messages": STORY})
                assert (busy.status_code, list(busy.json())) == (503, ["error"])
            received += piece
            if received.count(b" ") == 2:
                gate.set()
    assert received.startswith(b"  {")
    assert [json.loads(line)["message"]["content"] for line in received.splitlines()] == ["c", ""]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("0", 0),
        ("-1m", None),
        ("-1", None),
        ("300", 300),
        (0, 0),
        (2.5, 2.5),
        (-1, None),
    ],
)
def test_durations(value, seconds):
    assert keep_alive_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5 m", "1d", "5m5", "--1", "1e3", "9" * 50])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ApiError, match="keep_alive"):
        keep_alive_seconds(value)
