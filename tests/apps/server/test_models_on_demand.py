"""Several models by name: loaded when asked for, unloaded when idle, and refused when they do not fit."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from local_servers import MODEL, STORY, serving
from scripted_models import loader, scripted_model, scripted_sources

from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource, measure_need
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import OutOfMemoryError
from localinfer.llm import LLM
from tests.support.limits import wait_until

SETTINGS = ServerSettings(port=0)
PATH = "/v1/chat/completions"
BODY = {"messages": STORY, "max_tokens": 2, "temperature": 0}


class CountingLoader:
    """Loads a model that always says the same under any name, slowly, and remembers for which."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def __call__(self, source: ModelSource) -> LLM:
        self.loaded.append(source.id)
        time.sleep(0.05)
        return scripted_model(b"Once.")


def test_models_are_loaded_when_asked_for_and_once(runtime_folder):
    counting = CountingLoader()
    with (
        serving(SETTINGS, sources=scripted_sources("first", "second"), load=counting) as running,
        running.client() as client,
    ):
        assert client.get("/health").status_code == 200
        listed = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["meta"]["loaded"]) for card in listed] == [("first", False), ("second", False)]
        client.get("/metrics")
        assert counting.loaded == []
        asking = [
            threading.Thread(target=lambda: client.post(PATH, json={**BODY, "model": "second"})) for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert counting.loaded == ["second"]
        assert client.post(PATH, json=BODY).json()["model"] == "first"
        for path, body in (
            (PATH, BODY),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", BODY),
            ("/v1/responses", {"input": "a"}),
            ("/tokenize", {"content": "a"}),
        ):
            refused = client.post(path, json={**body, "model": "third"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert client.get("/v1/models/third").status_code == 404


def test_cards_tell_of_models_that_are_not_loaded_and_of_files_that_cannot_be_read(runtime_folder, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"none")
    (named,) = scripted_sources("first")
    sources = [replace(named, aliases=("gpt-4o",)), ModelSource("broken", tmp_path / "broken.gguf", 1)]
    with serving(SETTINGS, sources=sources, load=CountingLoader()) as running, running.client() as client:
        first, broken = client.get("/v1/models").json()["data"]
        assert (first["state"], first["status"]["value"], first["aliases"]) == ("unloaded", "unloaded", ["gpt-4o"])
        assert first["context_length"] == first["meta"]["n_ctx_train"] == 1024
        assert first["capabilities"] == ["completion", "chat", "embeddings"]
        assert first["size_bytes"] == first["meta"]["size"] == MODEL.path.stat().st_size
        assert first["memory"]["fixed_bytes"] > 0 and first["memory"]["held_bytes"] == 0
        assert (broken["state"], broken["status"]["failed"], broken["context_length"]) == ("failed", True, None)
        assert client.post(PATH, json={**BODY, "model": "gpt-4o"}).json()["model"] == "first"
        first = client.get("/v1/models/gpt-4o").json()
        assert (first["id"], first["state"], first["meta"]["loaded"]) == ("first", "loaded", True)
        assert first["memory"]["held_bytes"] > first["memory"]["fixed_bytes"]
        failed = client.post(PATH, json={**BODY, "model": "broken"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_file")


def test_idle_models_are_unloaded_and_wake_again(runtime_folder):
    counting = CountingLoader()
    with (
        serving(SETTINGS, sources=scripted_sources("only"), load=counting, idle_unload_seconds=0.2) as running,
        running.client() as client,
    ):
        text = client.post(PATH, json=BODY).json()["choices"][0]["message"]["content"]
        assert wait_until(lambda: not client.get("/v1/models/only").json()["meta"]["loaded"])
        assert counting.loaded == ["only"]
        assert client.post(PATH, json=BODY).json()["choices"][0]["message"]["content"] == text
        assert counting.loaded == ["only", "only"]


def test_model_that_does_not_fit_is_refused_with_the_numbers(runtime_folder):
    counting = CountingLoader()
    options = {"sources": scripted_sources("only"), "load": counting, "memory_limit": 1 << 20}
    with serving(SETTINGS, **options) as running, running.client() as client:
        response = client.post(PATH, json=BODY)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "insufficient_memory")
        assert response.headers["x-should-retry"] == "false"
        assert "bytes" in error["message"]
        assert counting.loaded == []


def test_idle_model_makes_room_for_another(runtime_folder):
    counting = CountingLoader()
    limit = measure_need(MODEL.path, "f16").fixed_bytes * 3 // 2
    options = {"sources": scripted_sources("first", "second"), "load": counting, "memory_limit": limit}
    with serving(SETTINGS, **options) as running, running.client() as client:
        client.post(PATH, json={**BODY, "model": "first"})
        client.post(PATH, json={**BODY, "model": "second"})
        loaded = {card["id"]: card["meta"]["loaded"] for card in client.get("/v1/models").json()["data"]}
        assert loaded == {"first": False, "second": True}


def test_unknown_names_are_refused_where_asked_to(runtime_folder):
    settings = ServerSettings(port=0, strict_model=True)
    with (
        serving(settings, sources=scripted_sources("demo"), load=CountingLoader()) as running,
        running.client() as client,
    ):
        assert client.post(PATH, json={**BODY, "model": "gpt-4o"}).status_code == 404
        assert client.post(PATH, json={**BODY, "model": "openai/demo"}).status_code == 200
        assert client.post(PATH, json=BODY).status_code == 200


def test_need_names_the_largest_context_that_fits():
    need = MemoryNeed(fixed_bytes=1000, bytes_per_token=10, context_length=4096)
    need.check("m", 1000 + 10 * 4096, wanted_context=4096)
    assert need.largest_context(1000 + 10 * 600) == 600
    with pytest.raises(OutOfMemoryError, match="at most 600 tokens"):
        need.check("m", 1000 + 10 * 600, wanted_context=4096)
    with pytest.raises(OutOfMemoryError, match="smaller model"):
        need.check("m", 900, wanted_context=None)


def test_running_streams_go_on_while_others_are_loaded_and_wait_for_their_memory(runtime_folder):
    may_end = threading.Event()
    scripts = {"long": [*b"Once upon", may_end, *b" a time."], "small": [*b"Yes."], "large": [*b"No."]}
    limit = measure_need(MODEL.path, "f16").fixed_bytes * 5 // 2
    options = {"sources": scripted_sources(*scripts), "load": loader(scripts), "memory_limit": limit}
    body = {**BODY, "max_tokens": 50, "stream": True}
    with serving(SETTINGS, **options) as running, running.client() as client:
        with client.stream("POST", PATH, json={**body, "model": "long"}) as first:
            lines = first.iter_lines()
            begun = [next(lines) for _ in range(6)]
            assert client.post(PATH, json={**BODY, "model": "small"}).status_code == 200
            # The idle one makes room, not the one that streams.
            assert client.post(PATH, json={**BODY, "model": "large"}).status_code == 200
            states = {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}
            assert states == {"long": "loaded", "small": "unloaded", "large": "loaded"}
            may_end.set()
            frames = [line.removeprefix("data: ") for line in [*begun, *lines] if line]
        *chunks, end = [json.loads(frame)["choices"][0] for frame in frames[:-1] if '"choices":[{' in frame]
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Once upon a time."
        assert (end["finish_reason"], frames[-1]) == ("stop", "[DONE]")


def test_eight_streams_end_whole_before_a_model_takes_their_memory(runtime_folder):
    may_end = threading.Event()
    scripts = {"first": [*b"Once", may_end, *b" upon a time."], "other": [*b"Yes."]}
    limit = measure_need(MODEL.path, "f16").fixed_bytes * 3 // 2
    options = {"sources": scripted_sources(*scripts), "load": loader(scripts), "memory_limit": limit}
    with serving(SETTINGS, **options) as running, running.client() as client, ThreadPoolExecutor(10) as pool:

        def stream() -> str:
            body = {**BODY, "max_tokens": 50, "stream": True, "model": "first"}
            with client.stream("POST", PATH, json=body) as response:
                return "".join(response.iter_lines())

        def card(name: str) -> dict[str, Any]:
            return client.get(f"/v1/models/{name}").json()

        streams = [pool.submit(stream) for _ in range(8)]
        assert wait_until(lambda: card("first")["running"] == 8)
        waiting = pool.submit(client.post, PATH, json={**BODY, "model": "other"})
        assert wait_until(lambda: card("other")["waiting_for"] == ["first"])
        late = pool.submit(client.post, PATH, json={**BODY, "max_tokens": 50, "model": "first"})
        assert wait_until(lambda: card("first")["waiting"] == 1)
        assert client.get("/health").status_code == 200
        may_end.set()
        for text in (one.result() for one in streams):
            assert text.endswith("data: [DONE]") and '"finish_reason":"stop"' in text
        assert waiting.result().json()["choices"][0]["message"]["content"] == "Ye"
        assert late.result().json()["choices"][0]["message"]["content"] == "Once upon a time."
