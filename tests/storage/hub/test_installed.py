"""Models that other programs hold: found by their names, never copied, and told when they are broken."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from localinfer.errors import RequestError
from localinfer.storage.hub.installed import find_installed, find_model
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.pull import remove_model
from tests.storage.hub.stand_in import places_in

GGUF = b"GGUF" + bytes(100)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return places_in(tmp_path)


def add(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def add_ollama(places: Places, manifest: str, content: bytes = GGUF, *more: str) -> Path:
    """A model as `ollama pull` leaves it; more: further kinds of layers."""
    folder = places.ollama[0]

    def blob(data: bytes) -> tuple[str, Path]:
        digest = hashlib.sha256(data).hexdigest()
        return f"sha256:{digest}", add(folder / "blobs" / f"sha256-{digest}", data)

    digest, path = blob(content)
    kinds = ["model", "template", *more]
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": len(content)} for kind in kinds
    ]
    config, _ = blob(b'{"model_format": "gguf", "file_type": "Q4_K_M"}')
    add(folder / "manifests" / manifest, json.dumps({"config": {"digest": config}, "layers": layers}).encode())
    return path


def add_to_cache(places: Places, repo: str, path: str, content: bytes = GGUF, commit: str = "c" * 40) -> Path:
    folder = places.hub_cache / f"models--{repo.replace('/', '--')}"
    blob = add(folder / "blobs" / hashlib.sha256(content).hexdigest(), content)
    pointer = folder / "snapshots" / commit / path
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return pointer


def listed(places: Places) -> dict[str, str]:
    """Names of all models, with the source of good ones and what is wrong with others."""
    return {model.name: model.problem or model.source for model in find_installed(places)}


def test_ollama_models_are_found_by_ollamas_names(places):
    small = add_ollama(places, "registry.ollama.ai/library/llama3.2/3b")
    latest = add_ollama(places, "registry.ollama.ai/library/qwen3/latest", GGUF + b"2")
    mine = add_ollama(places, "registry.ollama.ai/me/tuned/q8", GGUF + b"3")
    hub = add_ollama(places, "hf.co/org/Repo-GGUF/Q4_K_M", GGUF + b"4")
    assert find_model("llama3.2:3b", places) == small
    assert find_model("llama3.2", places) == small, "the only one of its name"
    assert find_model("qwen3", places) == find_model("qwen3:latest", places) == latest
    assert find_model("me/tuned:q8", places) == mine
    assert find_model("hf.co/org/Repo-GGUF:Q4_K_M", places) == hub
    assert find_model("org/Repo-GGUF:q4_k_m", places) == hub
    assert {model.quant for model in find_installed(places)} == {"Q4_K_M"}


def test_broken_models_of_ollama_are_told(places):
    add_ollama(places, "registry.ollama.ai/library/gone/1b").unlink()
    add_ollama(places, "registry.ollama.ai/library/short/1b", GGUF + b"5").write_bytes(b"GGUF")
    add_ollama(places, "registry.ollama.ai/library/lora/1b", GGUF + b"6", "adapter")
    add(places.ollama[0] / "manifests/registry.ollama.ai/library/odd/1b", b"[1")
    problems = listed(places)
    assert "missing" in problems["gone:1b"] and "`ollama pull gone:1b`" in problems["gone:1b"]
    assert "has 4 bytes in place of 105" in problems["short:1b"]
    assert "LoRA" in problems["lora:1b"]
    assert "cannot be read" in problems["odd:1b"]
    with pytest.raises(RequestError, match="gone:1b cannot be used: its file is missing"):
        find_model("gone", places)


def test_models_of_lm_studio_and_of_the_hubs_cache(places):
    studio = add(places.lm_studio[0] / "lmstudio-community/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf")
    add(places.lm_studio[0] / "lmstudio-community/Qwen3-4B-GGUF/mmproj-F16.gguf")
    cached = add_to_cache(places, "org/Other-GGUF", "sub/Other-Q8_0.gguf")
    folder = add_to_cache(places, "org/full", "config.json", b"{}").parent
    add_to_cache(places, "org/full", "model.safetensors", b"weights")
    assert listed(places) == {
        "lmstudio-community/Qwen3-4B-GGUF:Q4_K_M": "lm studio",
        "org/Other-GGUF:Q8_0": "hub cache",
        "org/full:safetensors": "hub cache",
    }
    for name in (
        "lmstudio-community/qwen3-4b-gguf:q4_k_m",
        "lmstudio-community/Qwen3-4B-GGUF",
        "Qwen3-4B",
        "Qwen3-4B:Q4_K_M",
    ):
        assert find_model(name, places) == studio, name
    assert find_model("org/other-gguf", places) == cached
    assert find_model("org/full", places) == folder


def test_broken_entries_of_the_hubs_cache_are_told(places):
    add_to_cache(places, "org/lost", "Lost-Q4_K_M.gguf").resolve().unlink()
    add_to_cache(places, "org/split", "S-Q4_K_M-00002-of-00003.gguf")
    add_to_cache(places, "org/parts", "config.json", b"{}")
    add_to_cache(places, "org/parts", "model-00001-of-00002.safetensors", b"weights")
    problems = listed(places)
    assert "link to a file that is gone" in problems["org/lost:Q4_K_M"]
    assert "part 1, 3 of 3 is missing" in problems["org/split:Q4_K_M"]
    assert "part 2 of 2 is missing" in problems["org/parts:safetensors"]


def test_the_newest_snapshot_is_the_one_of_main(places):
    old = add_to_cache(places, "org/two", "T-Q4_K_M.gguf", GGUF + b"old", commit="a" * 40)
    new = add_to_cache(places, "org/two", "T-Q4_K_M.gguf", GGUF + b"new", commit="b" * 40)
    main = add(places.hub_cache / "models--org--two/refs/main", b"a" * 40)
    assert find_model("org/two", places) == old
    main.write_text("b" * 40)
    assert find_model("org/two", places) == new


def test_a_path_that_exists_wins(places, tmp_path, monkeypatch):
    add_to_cache(places, "org/same", "Same-Q4_K_M.gguf")
    monkeypatch.chdir(tmp_path)
    here = add(tmp_path / "org/same")
    assert find_model("org/same", places) == Path("org/same") and here.exists()


def test_ambiguous_names_list_the_candidates(places):
    add_to_cache(places, "one/Model-GGUF", "Model-Q4_K_M.gguf", GGUF + b"1")
    add_to_cache(places, "two/Model-GGUF", "Model-Q4_K_M.gguf", GGUF + b"2")
    both = r"means several models; name one of: one/Model-GGUF:Q4_K_M \(hub cache\), two/Model-GGUF:Q4_K_M"
    for name in ("model", "Model-GGUF:Q4_K_M"):
        with pytest.raises(RequestError, match=both):
            find_model(name, places)
    assert "one--" in str(find_model("one/Model-GGUF", places))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("org/new-GGUF:Q4_K_M", "`localinfer pull org/new-GGUF:Q4_K_M` brings it"),
        ("org/new", "`localinfer pull org/new` brings it"),
        ("model.gguf", "model.gguf does not exist; check the path; `localinfer list --all`"),
        ("./folder/model", "does not exist; check the path"),
        ("/nowhere/model", "does not exist; check the path"),
        ("lama", "did you mean llama:1b"),
        ("xyz", "`localinfer list --all` shows the models on this machine, `localinfer pull org/repo` brings one"),
        ("", "give the path of a file"),
        ("a\0b", "give the path of a file"),
    ],
)
def test_unknown_names_tell_the_next_command(places, name, told):
    add_ollama(places, "registry.ollama.ai/library/llama/1b")
    with pytest.raises(RequestError) as raised:
        find_model(name, places)
    assert told in str(raised.value)


def test_models_of_others_are_not_removed(places):
    path = add_ollama(places, "registry.ollama.ai/library/llama3.2/3b")
    with pytest.raises(RequestError, match="another program .* use `ollama rm`"):
        remove_model("llama3.2:3b", places)
    assert path.exists()


def test_the_folders_are_those_that_the_programs_use(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "OLLAMA_MODELS", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    places = Places.of_user()
    assert places.hub_cache == tmp_path / ".cache/huggingface/hub"
    assert places.ollama[0] == tmp_path / ".ollama/models"
    assert places.lm_studio == (tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models")
    assert places.endpoint == "https://huggingface.co" and not places.is_offline
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "om"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Places.of_user().hub_cache == tmp_path / "hf/hub"
    assert Places.of_user().ollama[0] == tmp_path / "om"
    assert Places.of_user().is_offline
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert Places.of_user().hub_cache == tmp_path / "cache"
