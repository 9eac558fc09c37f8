"""What people and programs ask of a server beside replies: whether it is there, what it has, and what is wrong."""

import gzip
import json
import shutil

import pytest
from local_servers import MODEL, STORY, serving

import localinfer
from localinfer.apps.server.router.model_folder import find_models
from localinfer.apps.server.transport.settings import ServerSettings

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TOOL = {"name": "find", "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}}


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """A server of two files, of which one can be cut, and a third that is no model."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("b_one", "c_two"):
        shutil.copy(MODEL.path, folder / f"{name}.gguf")
    (folder / "a_broken.gguf").write_bytes(b"GGUF" + bytes(4096))

    def load(source):
        return localinfer.load(source.path, threads=1, kv_memory=64 << 20)

    with serving(ServerSettings(port=0), sources=find_models(folder), load=load) as running, running.client() as client:
        yield client, folder


def test_a_broken_file_is_no_default_once_that_is_known(two_models):
    client, _ = two_models
    states = {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}
    assert states["a_broken"] == "failed"
    reply = client.post(CHAT, json={"messages": STORY, "max_tokens": 1})
    assert (reply.status_code, reply.json()["model"]) == (200, "b_one")


def test_a_file_that_is_cut_while_it_is_loaded_says_so_and_the_others_stay(two_models):
    client, folder = two_models
    for name in ("b_one", "c_two"):
        assert client.post(CHAT, json={"model": name, "messages": STORY, "max_tokens": 1}).status_code == 200
    whole = (folder / "c_two.gguf").read_bytes()
    with open(folder / "c_two.gguf", "r+b") as file:
        file.truncate(2_000_000)
    try:
        listed = client.get("/v1/models")
        assert listed.status_code == 200
        problems = {one["id"]: one["problem"] for one in listed.json()["data"]}
        assert "changed or cut" in problems["c_two"] and problems["b_one"] is None
        assert str(folder) not in listed.text
        for path in ("/api/tags", "/api/ps", "/props?model=c_two", "/props", "/v1/models/c_two", "/api/v0/models"):
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
        assert len(client.get("/api/ps").json()["models"]) == 2
    finally:
        (folder / "c_two.gguf").write_bytes(whole)


def test_root_names_the_server_and_is_ollama_to_its_clients(tcp):
    told = tcp.get("/", headers={"user-agent": "curl/8.5.0"}).text
    assert told.startswith("localinfer ") and "Ollama is running" in told
    for agent in ("ollama-python/0.6.4 (x86_64 linux)", "ollama/0.13.0 (amd64 linux) Go/go1.25", "ollama-js/0.6.4"):
        assert tcp.get("/", headers={"user-agent": agent}).text == "Ollama is running"
    page = tcp.get("/", headers={"accept": "text/html"})
    assert page.text.startswith("<!doctype html>")


def test_ping_and_models_as_others_have_them(tcp):
    for method in ("GET", "POST"):
        answer = tcp.request(method, "/ping", headers={"content-type": "application/json"})
        assert (answer.status_code, answer.content) == (200, b"")
    (card,) = tcp.get("/api/v0/models").json()["data"]
    assert tcp.get(f"/api/v0/models/{card['id']}").json() == card
    assert (card["type"], card["arch"], card["max_context_length"] > 0) == ("llm", "llama", True)
    assert tcp.get("/api/v0/models/none-such").status_code == 200, "one model answers to any name"


def test_encoded_bodies_are_decoded_within_bounds_or_named(tcp):
    body = gzip.compress(json.dumps({"messages": STORY, "max_tokens": 1}).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert tcp.post(CHAT, content=body, headers=headers).status_code == 200
    large = gzip.compress(json.dumps({"messages": STORY, "max_tokens": 1, "user": "a b c" * 30_000}).encode())
    assert tcp.post(CHAT, content=large, headers=headers).status_code == 200
    answer = tcp.post(CHAT, content=body, headers={**headers, "content-encoding": "br"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "encoding_not_read")
    assert "'br'" in answer.json()["error"]["message"]
    bomb = gzip.compress(b" " * (3 << 20))
    answer = tcp.post(CHAT, content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_names_and_notes_have_an_end(tcp):
    asked = {"messages": STORY, "max_tokens": 1}
    for path in (CHAT, MESSAGES, "/api/chat"):
        answer = tcp.post(path, json={**asked, "model": "m" * 100_000})
        assert answer.status_code == 400 and len(answer.text) < 500
    answer = tcp.post("/v1/responses", json={"input": "a", "metadata": {str(index): "" for index in range(1000)}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_a_call_that_is_cut_off_says_so(tcp):
    asked = {"messages": STORY, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "find"}, "temperature": 1.0}
    asked["output_config"] = None
    whole = None
    for limit in range(2, 40):
        reply = tcp.post(MESSAGES, json={**asked, "max_tokens": limit}).json()
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        if reply["stop_reason"] == "max_tokens" and calls:
            whole = reply
            break
    assert whole is not None, "no call was cut off"
    (call,) = calls
    assert call["input"] == {} and call["incomplete"] is True and isinstance(call["partial_json"], str)
    assert "was cut off" in whole["timings"]["notices"][0]
    lines = tcp.post(MESSAGES, json={**asked, "max_tokens": limit, "stream": True}).text
    assert "was cut off" in lines or '"stop_reason":"tool_use"' in lines
