"""llama-server's routes beside its completions: slots and their files, properties, models, vectors, metrics."""

import os
from typing import Any

import numpy as np
import pytest
from local_servers import MODEL, START_SECONDS, serving

from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from tests.support.limits import wait_until

PROMPT = "The capital of a country that nobody has heard of"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def client(folder):
    with serving(ServerSettings(port=0, num_slots=3, slot_folder=folder)) as running, running.client() as client:
        yield client


def asked(client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def generated(client, prompt: str, slot: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True, "id_slot": slot}
    made = asked(client, "/completion", **body)
    assert made["id_slot"] == slot
    return made


def test_a_slot_is_saved_erased_and_restored(client, folder):
    first = generated(client, PROMPT, 1)
    count = first["tokens_evaluated"] + 4 - 1
    saved = asked(client, "/slots/1?action=save", filename="one.bin")
    path = folder / "one.bin"
    assert (saved["id_slot"], saved["n_saved"], saved["n_written"]) == (1, count, path.stat().st_size)
    if os.name == "posix":
        assert path.stat().st_mode & 0o77 == 0
    # Without a body, as curl sends it.
    erased = client.post("/slots/1?action=erase").json()
    assert erased == {"id_slot": 1, "n_erased": count}
    assert client.post("/slots/1?action=save", json={"filename": "two.bin"}).status_code == 400
    assert generated(client, PROMPT, 2)["timings"]["cache_n"] <= 1
    asked(client, "/slots/2?action=erase")
    assert asked(client, "/slots/0?action=restore", filename="one.bin")["n_restored"] == count
    again = generated(client, PROMPT, 0)
    assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1
    assert again["content"] == first["content"]


def test_erasing_leaves_what_another_text_begins_with(client):
    generated(client, "One two three four five", 0)
    longer = generated(client, "One two three four five six seven eight", 1)
    assert longer["timings"]["cache_n"] > 1
    asked(client, "/slots/0?action=erase")
    again = generated(client, "One two three four five six seven eight", 1)
    assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", "", ".hidden", "/etc/x", "x\0", "CON", "nul.bin", "x.", "y" * 200]
)
def test_names_of_files_lead_nowhere_else(client, name):
    generated(client, PROMPT, 1)
    for action in ("save", "restore"):
        response = client.post(f"/slots/1?action={action}", json={"filename": name})
        assert response.status_code == 400
        assert "one.bin" not in response.text


def test_files_that_are_no_sessions_are_refused_without_their_place(client, folder):
    (folder / "other.bin").write_bytes(b"something else")
    for name in ("other.bin", "missing.bin"):
        response = client.post("/slots/1?action=restore", json={"filename": name})
        assert response.status_code == 400
        assert str(folder) not in response.text
    for path in ("/slots/9?action=erase", "/slots/x?action=erase", "/slots/0", "/slots/0?action=copy"):
        assert client.post(path).status_code == 400, path


def test_slots_show_what_runs_without_its_text(client):
    with client.stream(
        "POST", "/completion", json={"prompt": "secret", "n_predict": 400, "stream": True, "id_slot": 2}
    ):
        listed = client.get("/slots").json()
        assert [slot["is_processing"] for slot in listed] == [False, False, True]
        (running,) = client.get("/requests").json()
        assert listed[2]["id_task"] == running["id"]
        assert "secret" not in str(listed)
        for action in ("save", "erase"):
            assert client.post(f"/slots/2?action={action}", json={"filename": "x"}).status_code == 409
        client.post(f"/requests/{running['id']}/cancel")
    wait_until(lambda: not any(slot["is_processing"] for slot in client.get("/slots").json()), START_SECONDS)


def test_routes_can_be_left_out_and_vectors_given_per_token():
    settings = ServerSettings(port=0, shows_slots=False, shows_metrics=False, pooling="none")
    with serving(settings) as running, running.client() as client:
        (per_token,) = asked(client, "/embedding", input=[5, 6, 7])
        assert len(per_token["embedding"]) == 3
        (vectors,) = asked(client, "/v1/embeddings", input=[5, 6, 7])["data"]
        assert np.shape(vectors["embedding"]) == np.shape(per_token["embedding"])
        packed = {"input": [5, 6, 7], "encoding_format": "base64"}
        assert client.post("/v1/embeddings", json=packed).status_code == 400
        for path in ("/slots", "/metrics"):
            assert client.get(path).json()["error"]["type"] == "not_supported_error"
        assert client.post("/slots/0?action=save", json={"filename": "x"}).status_code == 501
        assert client.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).status_code == 501
        assert client.get("/lora-adapters").json() == []
        assert client.post("/props", json={}).status_code == 501


def test_properties_are_those_of_the_model(client, llm):
    found = client.get("/props").json()
    assert found["model_path"] == MODEL.path.name
    assert found["default_generation_settings"]["n_ctx"] == llm.context_length
    assert found["total_slots"] == 3
    assert (found["bos_token"], found["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert found["chat_template"] == llm.info.chat_template
    assert found["build_info"].startswith("b")
    assert not found["is_sleeping"]


def test_models_are_loaded_and_unloaded_by_name():
    sources = [MODEL, ModelSource("second", MODEL.path, 0)]
    with serving(ServerSettings(port=0), sources=sources) as running, running.client() as client:

        def is_sleeping(name: str) -> bool:
            return client.get(f"/props?model={name}").json()["is_sleeping"]

        assert client.get("/props").json()["role"] == "router"
        assert is_sleeping("second")
        assert asked(client, "/models/load", model="second") == {"success": True, "model": "second"}
        wait_until(lambda: not is_sleeping("second"), START_SECONDS)
        asked(client, "/models/unload", model="second")
        wait_until(lambda: is_sleeping("second"), START_SECONDS)
        assert client.post("/models/load", json={"model": "third"}).status_code == 404


def test_vectors_come_in_a_list_per_prompt(client, llm):
    for path in ("/embedding", "/embeddings"):
        first, second = asked(client, path, content=["a b", [5, 6]])
        assert first["embedding"][0] == pytest.approx(llm.embed("a b").tolist(), abs=1e-6)
        assert second["index"] == 1
    (plain,) = asked(client, "/embedding", input="a b", embd_normalize=-1)
    assert plain["embedding"][0] == pytest.approx(llm.embed("a b", normalize=False).tolist(), abs=1e-6)
    for wrong in ({}, {"input": "a", "content": "b"}, {"input": []}, {"input": {"content": [{"type": "image_url"}]}}):
        assert client.post("/embedding", json=wrong).status_code == 400, wrong
    assert "data" in asked(client, "/v1/embeddings", input=["a", {"prompt_string": "b"}, [5, "c"]])


def test_metrics_have_llama_cpps_names_too(client):
    def value(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        (found,) = [line for line in lines if line.startswith(f"llamacpp:{name} ")]
        assert f"# TYPE llamacpp:{name} " in "\n".join(lines)
        return float(found.split(" ")[1])

    before = {
        name: value(name) for name in ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
    }
    made = generated(client, "Something new, " * 5, 0)
    asked(client, "/v1/embeddings", input="a b c")
    after = {name: value(name) for name in before}
    assert after["tokens_predicted_total"] - before["tokens_predicted_total"] == 4
    assert after["prompt_tokens_cached_total"] - before["prompt_tokens_cached_total"] == made["timings"]["cache_n"]
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] > made["timings"]["prompt_n"]
    assert value("requests_processing") == 0
    assert value("predicted_tokens_seconds") == 0
    assert client.get("/metrics").headers["process-start-time-unix"].isdecimal()
