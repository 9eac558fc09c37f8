"""Folders of models as people and other programs lay them out, and the names that clients may use."""

import os
import sys
from pathlib import Path

import pytest
from local_servers import STORY, serving
from scripted_models import scripted_model

from localinfer.apps.server.router import model_folder
from localinfer.apps.server.router.model_folder import MAX_FOLDER_DEPTH, find_models, matching_names, model_source
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import RequestError

TREE = """
flat.gguf
split-00001-of-00002.gguf
split-00002-of-00002.gguf
notes.txt
folder/config.json
.hidden.gguf
.cache/inside.gguf
alpha/Story-GGUF/Story-Q4_K_M.gguf
alpha/Story-GGUF/Story-Q8_0.gguf
alpha/Story-GGUF/mmproj-Story-f16.gguf
alpha/Story-GGUF/Story.MMPROJ.gguf
alpha/Story-GGUF/README.md
beta/Story-GGUF/Story-Q4_K_M.gguf
beta/Parts-GGUF/Parts-00001-of-00003.gguf
beta/Parts-GGUF/Parts-00002-of-00003.gguf
beta/Parts-GGUF/Parts-00003-of-00003.gguf
beta/Described-GGUF/config.json
beta/Described-GGUF/Described.GGUF
gamma/checkpoint/config.json
gamma/checkpoint/model.safetensors
gamma/checkpoint/onnx/model.gguf
models--delta--deep/snapshots/0123abcd/config.json
models--delta--deep/snapshots/0123abcd/model.safetensors
models--delta--deep/refs/main
empty/nothing/readme.txt
"""
FOUND = [
    "flat",
    "folder",
    "split",
    "alpha/Story-GGUF/Story-Q4_K_M",
    "alpha/Story-GGUF/Story-Q8_0",
    "beta/Described-GGUF/Described",
    "beta/Parts-GGUF/Parts",
    "beta/Story-GGUF/Story-Q4_K_M",
    "gamma/checkpoint",
    "models--delta--deep/snapshots/0123abcd",
]


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}" if path.suffix == ".json" else b"")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    make(tmp_path, *TREE.split())
    return tmp_path


def test_models_are_found_in_folders_below_and_named_by_their_place(tree: Path):
    found = find_models(tree)
    assert [source.id for source in found] == FOUND
    for source in found:
        assert source.path.exists() and source.path.is_relative_to(tree)
    assert {s.id: s.path.name for s in found}["beta/Parts-GGUF/Parts"] == "Parts-00001-of-00003.gguf"


def test_files_lie_as_deep_as_the_limit_and_no_deeper(tmp_path: Path):
    folders = [f"f{number}" for number in range(MAX_FOLDER_DEPTH + 1)]
    make(tmp_path, "/".join([*folders[:-1], "last.gguf"]), "/".join([*folders, "lost.gguf"]))
    assert [source.path.name for source in find_models(tmp_path)] == ["last.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_are_followed_once_and_loops_end(tmp_path: Path):
    make(tmp_path, "real/inner/a.gguf")
    (tmp_path / "real" / "inner" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "real" / "self").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "real" / "broken.gguf").symlink_to(tmp_path / "missing")
    (tmp_path / "real" / "round.gguf").symlink_to(tmp_path / "real" / "round.gguf")
    assert [source.id for source in find_models(tmp_path)] == ["real/inner/a"]
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "there").symlink_to(tmp_path / "real" / "inner", target_is_directory=True)
    (linked / "also.gguf").symlink_to(tmp_path / "real" / "inner" / "a.gguf")
    assert [source.id for source in find_models(linked)] == ["also", "there/a"]


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() == 0, reason="nothing is closed to this user")
def test_folders_that_cannot_be_entered_are_passed_over(tree: Path):
    (tree / "alpha").chmod(0)
    try:
        assert "flat" in [source.id for source in find_models(tree)]
    finally:
        (tree / "alpha").chmod(0o700)


def test_somebodys_whole_disk_is_refused(tree: Path, monkeypatch):
    monkeypatch.setattr(model_folder, "MAX_ENTRIES", 10)
    with pytest.raises(RequestError, match="name the one with the models"):
        find_models(tree)


def test_folders_without_models_and_with_two_of_a_name_are_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="holds no model"):
        find_models(tmp_path)
    make(tmp_path, "in/a.gguf", "in/a-00001-of-00001.gguf")
    with pytest.raises(RequestError, match="one name"):
        find_models(tmp_path)
    with pytest.raises(RequestError, match="not a folder"):
        find_models(tmp_path / "missing")
    make(tmp_path / "checkpoint", "config.json", "model.safetensors")
    with pytest.raises(RequestError, match="serve it with -m"):
        find_models(tmp_path / "checkpoint")


def test_later_parts_and_projectors_are_no_models(tree: Path):
    assert model_source(tree / "split-00002-of-00002.gguf") is None
    assert model_source(tree / "alpha/Story-GGUF/mmproj-Story-f16.gguf") is None


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        *((name, [name]) for name in FOUND),
        ("Story-Q8_0", ["alpha/Story-GGUF/Story-Q8_0"]),
        ("Story-GGUF/Story-Q8_0", ["alpha/Story-GGUF/Story-Q8_0"]),
        ("Story-Q4_K_M", ["alpha/Story-GGUF/Story-Q4_K_M", "beta/Story-GGUF/Story-Q4_K_M"]),
        ("beta/Story-GGUF", ["beta/Story-GGUF/Story-Q4_K_M"]),
        ("Parts-GGUF", ["beta/Parts-GGUF/Parts"]),
        ("alpha/Story-GGUF", ["alpha/Story-GGUF/Story-Q4_K_M", "alpha/Story-GGUF/Story-Q8_0"]),
        ("checkpoint", ["gamma/checkpoint"]),
        ("Q8_0", []),
        ("ory-GGUF", []),
        ("alpha/flat", []),
    ],
)
def test_the_end_of_a_name_or_of_its_folder_will_do(wanted, expected):
    assert matching_names(wanted, FOUND) == expected


def test_server_takes_short_names_and_lists_those_that_several_have(tree: Path):
    with (
        serving(
            ServerSettings(port=0), sources=find_models(tree), load=lambda source: scripted_model(b"Yes.")
        ) as running,
        running.client() as client,
    ):
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == FOUND
        for name, expected in (
            ("alpha/Story-GGUF/Story-Q8_0", "alpha/Story-GGUF/Story-Q8_0"),
            ("Story-Q8_0", "alpha/Story-GGUF/Story-Q8_0"),
            ("Story-Q8_0.gguf", "alpha/Story-GGUF/Story-Q8_0"),
            ("openai/flat", "flat"),
            ("beta/Parts-GGUF", "beta/Parts-GGUF/Parts"),
        ):
            reply = client.post("/v1/chat/completions", json={"messages": STORY, "model": name})
            # How much memory a file takes is read off it, and these are empty.
            assert client.get(f"/v1/models/{name}").json()["id"] == expected
            assert f"{expected!r}" in reply.json()["error"]["message"]
        answer = client.post("/v1/chat/completions", json={"messages": STORY, "model": "Story-Q4_K_M"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_ambiguous", "model")
        assert error["candidates"] == ["alpha/Story-GGUF/Story-Q4_K_M", "beta/Story-GGUF/Story-Q4_K_M"]
        assert all(name in error["message"] for name in error["candidates"])
        assert client.get("/v1/models/Story-Q4_K_M").status_code == 404
        assert client.get("/v1/models/Story").json()["error"]["code"] == "model_not_found"
