"""Models by Ollama's API: their names, how long they stay loaded, what is told of them, pulls and removals."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_servers import MODEL, STORY, serving
from scripted_models import scripted_model, scripted_sources

from localinfer.apps.server.ollama.fields import listed_name
from localinfer.apps.server.ollama.models import facts_of, human_count
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM
from localinfer.storage.hub.places import Places
from tests.storage.hub.stand_in import StandInHub, places_in
from tests.support.limits import wait_until

SETTINGS = ServerSettings(port=0)
NAMES = ("Qwen3-0.6B-Q4_K_M", "org/Tiny-GGUF:Q8_0", "letters")
REPO = "org/Tiny-GGUF"


@pytest.fixture
def several() -> Iterator[httpx.Client]:
    sources = scripted_sources(*NAMES)
    with (
        serving(SETTINGS, sources=sources, load=lambda source: scripted_model(b"Hi.")) as running,
        running.client() as client,
    ):
        yield client


def loaded(client: httpx.Client) -> list[str]:
    return [model["name"] for model in client.get("/api/ps").json()["models"]]


def test_names_with_tags_in_any_case_mean_the_models_here(several):
    assert [model["name"] for model in several.get("/api/tags").json()["models"]] == [listed_name(one) for one in NAMES]
    for asked in (
        "Qwen3-0.6B-Q4_K_M:latest",
        "qwen3-0.6b-q4_k_m",
        "qwen3-0.6b:q4_k_m",
        "org/Tiny-GGUF:Q8_0",
        "hf.co/org/tiny-gguf:q8_0",
        "letters:latest",
        "LETTERS",
    ):
        body = {"model": asked, "messages": STORY, "stream": False}
        reply = several.post("/api/chat", json=body).json()
        assert (reply["model"], reply["message"]["content"]) == (asked, "Hi.")
    for path in ("chat", "generate", "embed", "embeddings", "show"):
        response = several.post(f"/api/{path}", json={"model": "qwen3:8b"})
        assert response.status_code == 404
        assert "model 'qwen3:8b' not found" in response.json()["error"]


def test_one_model_answers_for_any_name_and_says_its_own(tcp):
    body = {"model": "llama3.2", "messages": STORY, "stream": False, "options": {"num_predict": 1}}
    assert tcp.post("/api/chat", json=body).json()["model"] == "demo:latest"


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_empty_requests_load_and_unload(several, path):
    answer = several.post(f"/api/{path}", json={"model": "letters"}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert loaded(several) == ["letters:latest"]
    answer = several.post(f"/api/{path}", json={"model": "letters", "keep_alive": 0}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "unload")
    assert loaded(several) == []


def test_keep_alive_says_how_long_a_model_stays(several):
    def ask(keep_alive: Any) -> str:
        body = {"model": "letters", "prompt": "a", "stream": False, "keep_alive": keep_alive}
        assert several.post("/api/generate", json=body).json()["response"] == "Hi."
        found = several.get("/api/ps").json()["models"]
        return str(found[0]["expires_at"]) if found else ""

    assert ask(-1).startswith("2300-")
    assert ask("1h") < ask("3h") < ask(1e9) < ask("-1m")
    several.post("/api/generate", json={"model": "letters", "prompt": "a", "stream": False, "keep_alive": "0s"})
    wait_until(lambda: loaded(several) == [], 10)
    several.post("/api/embed", json={"model": "letters", "input": [], "keep_alive": "1ms"})
    wait_until(lambda: loaded(several) == [], 10)


def test_a_model_that_answers_is_unloaded_after_that():
    gate = threading.Event()
    with (
        serving(
            SETTINGS, sources=scripted_sources("slow"), load=lambda source: scripted_model([gate, *b"ab"])
        ) as running,
        running.client() as client,
        running.client() as other,
    ):
        with client.stream("POST", "/api/chat", json={"model": "slow", "messages": STORY}) as response:
            answer = other.post("/api/generate", json={"model": "slow", "keep_alive": 0}).json()
            assert answer["done_reason"] == "unload"
            assert loaded(other) == ["slow:latest"]
            gate.set()
            texts = [json.loads(line)["message"]["content"] for line in response.iter_lines()]
        assert "".join(texts) == "ab"
        wait_until(lambda: loaded(other) == [], 10)


def test_details_of_a_file_and_of_one_that_cannot_be_read(tmp_path):
    facts = facts_of(MODEL)
    assert facts.details()["context_length"] == 1024
    assert facts.details()["parameter_size"] == "5.8M"
    assert len(facts.digest) == 64
    assert {"name": "token_embd.weight", "type": "F16", "shape": [4096, 256]} in facts.tensors
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for path in (broken, tmp_path / "missing.gguf"):
        found = facts_of(ModelSource(path.stem, path, 1))
        assert found.problem and found.family == "" and len(found.digest) == 64
    blob = tmp_path / f"sha256-{'ab' * 32}"
    blob.write_bytes(MODEL.path.read_bytes())
    assert facts_of(ModelSource("a", blob, 1)).digest == "ab" * 32


@pytest.mark.parametrize(
    ("count", "text"), [(5_770_496, "5.8M"), (134_515_008, "135M"), (1_543_714_304, "1.5B"), (70_553_706_496, "70.6B")]
)
def test_numbers_of_weights(count, text):
    assert human_count(count) == text


def test_tensors_are_listed_where_they_are_asked_for(tcp):
    assert "tensors" not in tcp.post("/api/show", json={"name": "demo"}).json()
    assert tcp.post("/api/show", json={"model": "demo", "verbose": True}).json()["tensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    content = MODEL.path.read_bytes()
    with StandInHub({REPO: {"Tiny-Q4_K_M.gguf": content, "Tiny-Q8_0.gguf": b"no model " * 100}}) as stand_in:
        places = places_in(tmp_path, stand_in.endpoint)
        monkeypatch.setattr(Places, "of_user", classmethod(lambda cls: places))
        yield stand_in


@pytest.fixture
def pulling(hub: StandInHub) -> Iterator[httpx.Client]:
    def load(source: ModelSource) -> LLM:
        return scripted_model(source.id.encode())

    with serving(SETTINGS, sources=scripted_sources("demo"), load=load) as running, running.client() as client:
        yield client


def test_a_pulled_model_is_served_and_may_be_deleted(pulling, tmp_path):
    name = f"{REPO}:Q4_K_M"
    response = pulling.post("/api/pull", json={"model": f"hf.co/{name}"})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [lines[0]["status"], lines[-1]["status"]] == ["pulling manifest", "success"]
    progress = [line for line in lines if "digest" in line]
    assert len({line["digest"] for line in progress}) == 1
    assert all(0 <= line["completed"] <= line["total"] == MODEL.path.stat().st_size for line in progress)
    assert str(tmp_path) not in response.text
    assert [model["name"] for model in pulling.get("/api/tags").json()["models"]] == ["demo:latest", name]
    body = {"model": name, "messages": STORY, "stream": False}
    assert pulling.post("/api/chat", json=body).json()["message"]["content"] == name
    again = pulling.post("/api/pull", json={"name": name, "stream": False, "insecure": False})
    assert (again.status_code, again.json()) == (200, {"status": "success"})
    assert pulling.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
    assert [model["name"] for model in pulling.get("/api/tags").json()["models"]] == ["demo:latest"]
    assert pulling.post("/api/chat", json=body).json()["model"] == "demo:latest"
    missing = pulling.request("DELETE", "/api/delete", json={"name": name})
    assert (missing.status_code, "not found" in missing.json()["error"]) == (404, True)


def test_what_is_not_ours_is_not_deleted(pulling):
    response = pulling.request("DELETE", "/api/delete", json={"model": "demo"})
    assert response.status_code == 400
    assert "not pulled by localinfer" in response.json()["error"]


def test_pulls_that_fail_say_why_and_name_no_folder(pulling, hub, tmp_path):
    for name, words in ((f"{REPO}:Q2_K", "Q2_K"), ("org/nothing", "org/nothing")):
        whole = pulling.post("/api/pull", json={"model": name, "stream": False})
        assert whole.status_code in (400, 500)
        last = json.loads(pulling.post("/api/pull", json={"model": name}).text.splitlines()[-1])
        assert list(whole.json()) == list(last) == ["error"]
        assert words in whole.json()["error"] and str(tmp_path) not in whole.text
    (tmp_path / "hub").write_bytes(b"in the way")
    response = pulling.post("/api/pull", json={"model": f"{REPO}:Q4_K_M", "stream": False})
    assert response.status_code == 500
    assert "the hub's cache" in response.json()["error"] and str(tmp_path) not in response.text


def test_a_client_that_leaves_stops_its_pull(pulling, hub):
    hub.stall_after = 1 << 20
    with pulling.stream("POST", "/api/pull", json={"model": f"{REPO}:Q4_K_M"}) as response:
        lines = response.iter_lines()
        while "completed" not in json.loads(next(lines)):
            pass
    hub.stalled.set()
    hub.stall_after = None
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "localinfer-load"], 10)
    assert [model["name"] for model in pulling.get("/api/tags").json()["models"]] == ["demo:latest"]
