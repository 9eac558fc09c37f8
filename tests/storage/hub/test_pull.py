"""Pulling from a stand-in of the hub: whole, cut and resumed, damaged, without space; nothing broken is ever listed."""

import errno
import io
import os
import shutil
from pathlib import Path

import pytest

from localinfer.errors import DownloadError, LocalinferError, RequestError
from localinfer.storage.hub import download
from localinfer.storage.hub.download import HubClient, partial_path
from localinfer.storage.hub.installed import find_installed, find_model, find_pulled
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.pull import pull_model, read_reference, remove_model
from tests.storage.hub.conftest import CONTENT, NAME, REPO
from tests.storage.hub.stand_in import StandInHub


def pull(hub: StandInHub, places: Places, name: str = REPO, retries: int = 2, **more):
    return pull_model(read_reference(name), places, client=hub.client(retries), **more)


def sound_names(places: Places) -> list[str]:
    return [model.name for model in find_installed(places) if not model.problem]


def only_partial(places: Places) -> Path:
    [partial] = places.hub_cache.rglob("*.incomplete")
    return partial


def test_a_whole_pull_is_listed_and_found_by_its_names(hub, places):
    said: list[str] = []
    record = pull(hub, places, say=said.append)
    assert record.name == NAME
    assert any("1.0 MB" in line and "free" in line for line in said)
    path = find_model(NAME, places)
    assert path.name == "Tiny-Q4_K_M.gguf" and path.read_bytes() == CONTENT
    for name in (REPO, NAME.lower(), "tiny-gguf:q4_k_m", "Tiny", "Tiny-Q4_K_M", f"https://huggingface.co/{REPO}"):
        assert find_model(name, places) == path, name
    assert sound_names(places) == [NAME]
    assert [path for path, _ in hub.downloads] == ["Tiny-Q4_K_M.gguf"]


def test_the_hub_learns_nothing_of_what_runs_the_pull(hub, places, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr("huggingface_hub.utils._headers.detect_agent", lambda: "an-agent", raising=False)
    pull(hub, places)
    assert hub.user_agents and not any("agent/" in str(told) for told in hub.user_agents)


def test_other_programs_find_what_was_pulled(hub, places):
    from huggingface_hub import hf_hub_download, scan_cache_dir, try_to_load_from_cache

    pull(hub, places)
    path = find_model(NAME, places)
    assert try_to_load_from_cache(REPO, "Tiny-Q4_K_M.gguf", cache_dir=places.hub_cache) == str(path)
    found = hf_hub_download(REPO, "Tiny-Q4_K_M.gguf", cache_dir=places.hub_cache, endpoint=hub.endpoint)
    assert found == str(path)
    assert len(hub.downloads) == 1, "it is not downloaded again"
    scanned = scan_cache_dir(places.hub_cache)
    assert not scanned.warnings
    assert [repo.repo_id for repo in scanned.repos] == [REPO]


def test_what_another_program_downloaded_is_used_and_survives_rm(hub, places):
    from huggingface_hub import hf_hub_download

    theirs = hf_hub_download(REPO, "Tiny-Q4_K_M.gguf", cache_dir=places.hub_cache, endpoint=hub.endpoint)
    pull(hub, places)
    assert len(hub.downloads) == 1
    told = remove_model(NAME, places)
    assert "0 bytes freed" in told and "stay in the hub's cache" in told
    assert Path(theirs).read_bytes() == CONTENT
    with pytest.raises(RequestError, match="another program"):
        remove_model(NAME, places)


def test_a_cut_connection_is_continued_in_the_same_pull(hub, places):
    hub.cut_after = [300_000, 200_000, None]
    pull(hub, places)
    ranges = [asked for _, asked in hub.downloads]
    last = len(CONTENT) - 1
    assert ranges == [None, f"bytes=300000-{last}", f"bytes=500000-{last}"]
    assert find_model(NAME, places).read_bytes() == CONTENT


def test_a_pull_that_stopped_is_resumed_by_the_next(hub, places):
    hub.cut_after = [400_000]
    with pytest.raises(DownloadError, match="lost at 400.0 kB of 1.0 MB"):
        pull(hub, places, retries=0)
    assert only_partial(places).stat().st_size == 400_000
    assert sound_names(places) == []
    [unfinished] = find_pulled(places)
    assert unfinished.is_unfinished and "400.0 kB of 1.0 MB" in unfinished.problem
    with pytest.raises(RequestError, match="localinfer pull org/Tiny-GGUF:Q4_K_M"):
        find_model(NAME, places)
    said: list[str] = []
    pull(hub, places, say=said.append)
    assert hub.downloads[1:] == [("Tiny-Q4_K_M.gguf", f"bytes=400000-{len(CONTENT) - 1}")]
    assert "400.0 kB of it here already" in " ".join(said)
    assert find_model(NAME, places).read_bytes() == CONTENT
    assert sound_names(places) == [NAME]


def test_a_server_without_ranges_begins_anew(hub, places):
    hub.cut_after, hub.ignores_ranges = [400_000], True
    pull(hub, places)
    assert find_model(NAME, places).read_bytes() == CONTENT


def test_an_unfinished_pull_can_be_removed(hub, places):
    hub.cut_after = [400_000]
    with pytest.raises(DownloadError):
        pull(hub, places, retries=0)
    assert "400.0 kB freed" in remove_model(NAME, places)
    assert find_installed(places) == []
    assert not list(places.hub_cache.rglob("*Tiny-Q4*")) and not list(places.hub_cache.rglob("*.incomplete"))


@pytest.mark.parametrize("size", [len(CONTENT), 100])
def test_a_wrong_checksum_is_refused_and_deleted(hub, places, size):
    # Large files have a SHA-256, small ones an id of git.
    hub.repositories[REPO]["Tiny-Q4_K_M.gguf"] = CONTENT[:size]
    hub.wrong.add("Tiny-Q4_K_M.gguf")
    with pytest.raises(DownloadError, match="damaged and was deleted: its (SHA-256|git id) is"):
        pull(hub, places)
    assert sound_names(places) == []
    assert not list(places.hub_cache.rglob("*.incomplete"))
    hub.wrong.clear()
    pull(hub, places)
    assert sound_names(places) == [NAME]


def test_a_disk_without_enough_space_is_refused_before(hub, places, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(DownloadError, match=r"needs 1\.0 MB more .* 5\.0 kB are free"):
        pull(hub, places)
    assert hub.downloads == [] and find_installed(places) == []


def test_a_disk_that_fills_up_keeps_what_arrived(hub, places, monkeypatch):
    write_all = download.write_all

    def fill(file: io.RawIOBase, data: bytes) -> None:
        if file.tell() > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    monkeypatch.setattr(download, "write_all", fill)
    with pytest.raises(DownloadError, match="is full; free some space"):
        pull(hub, places)
    assert sound_names(places) == []
    held = only_partial(places).stat().st_size
    monkeypatch.setattr(download, "write_all", write_all)
    pull(hub, places)
    assert hub.downloads[1][1] == f"bytes={held}-{len(CONTENT) - 1}"
    assert sound_names(places) == [NAME]


def test_without_a_network_what_is_here_still_works(hub, places):
    pull(hub, places)
    # Nothing listens at port 9.
    client = HubClient("http://127.0.0.1:9", timeout_seconds=30)
    with pytest.raises(DownloadError, match=f"cannot be reached.*; usable without a network: {NAME}"):
        pull_model(read_reference(REPO), places, client=client)
    assert find_model(NAME, places).read_bytes() == CONTENT


def test_offline_mode_asks_nothing(hub, places):
    from dataclasses import replace

    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        pull_model(read_reference(REPO), replace(places, is_offline=True))
    assert hub.tokens == []


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (404, "RepoNotFound", "no model org/Tiny-GGUF, or it is private.*hf auth login"),
        (401, "RepoNotFound", "no model org/Tiny-GGUF, or it is private.*hf auth login"),
        (
            401,
            "GatedRepo",
            "gated: .*terms accepted first; do so at .*/org/Tiny-GGUF, then log in with `hf",
        ),
        (403, "GatedRepo", "gated"),
        (403, "", "refuses org/Tiny-GGUF with status 403"),
        (429, "", "answers 429 .*some minutes"),
        (500, "", "answers 500 .*try again later"),
    ],
)
def test_refusals_tell_the_way_out(hub, places, status, code, told):
    hub.refused[REPO] = status, code
    with pytest.raises(DownloadError, match=told):
        pull(hub, places)
    assert find_installed(places) == []


def test_a_gated_file_and_a_token(hub, places, monkeypatch):
    hub.refused[REPO], hub.refuses_files_only = (403, "GatedRepo"), True
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    with pytest.raises(DownloadError, match="gated: .*then pull again"):
        pull(hub, places)
    assert hub.tokens == ["Bearer hf_abc"]
    assert sound_names(places) == []


def test_split_files_come_all_or_nothing(hub, places):
    parts = {f"big/X-Q4_K_M-0000{number}-of-00003.gguf": bytes([number]) * 5000 for number in (1, 2, 3)}
    hub.repositories["org/big"] = parts | {"mmproj-F16.gguf": b"x" * 300}
    said: list[str] = []
    # The library's own lines count as three answers: two parts arrive, the third is cut.
    hub.cut_after = [None, None, 100]
    with pytest.raises(DownloadError):
        pull(hub, places, "org/big", retries=0, say=said.append)
    assert "with mmproj-F16.gguf" in said[0]
    assert sound_names(places) == []
    pull(hub, places, "org/big", with_encoders=False)
    path = find_model("org/big", places)
    assert path.name == "X-Q4_K_M-00001-of-00003.gguf"
    assert [one.read_bytes() for one in sorted(path.parent.iterdir())] == list(parts.values())
    assert len(hub.downloads) == 4
    pull(hub, places, "org/big")
    assert (path.parent.parent / "mmproj-F16.gguf").read_bytes() == b"x" * 300
    del hub.repositories["org/big"]["big/X-Q4_K_M-00002-of-00003.gguf"]
    with pytest.raises(RequestError, match="part 2 of 3 is missing"):
        pull(hub, places, "org/big")


def test_a_folder_of_safetensors_comes_without_pickles(hub, places):
    wanted = {"config.json": b"{}", "tokenizer.json": b"{ }", "1_Pooling/config.json": b"{  }"}
    wanted |= {"model.safetensors": b"w" * 3000}
    hub.repositories["org/full"] = wanted | {"pytorch_model.bin": b"p" * 900, "onnx/model.onnx": b"o" * 900}
    hub.cut_after = [None, None, None, 10]
    with pytest.raises(DownloadError):
        pull(hub, places, "org/full", retries=0)
    assert sound_names(places) == [], "a folder without all of its files is no model"
    pull(hub, places, "org/full")
    path = find_model("org/full", places)
    assert {one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()} == wanted.keys()
    assert find_model("org/full:safetensors", places) == path


def test_a_new_commit_replaces_the_old_one(hub, places):
    pull(hub, places)
    old = find_model(NAME, places)
    said: list[str] = []
    pull(hub, places, say=said.append)
    assert "here already" in said[-1] and len(hub.downloads) == 1
    hub.repositories[REPO]["Tiny-Q4_K_M.gguf"] = CONTENT[::-1]
    hub.cut_after = [1000]
    with pytest.raises(DownloadError):
        pull(hub, places, retries=0)
    assert find_model(NAME, places) == old, "the former one works until the new one is whole"
    pull(hub, places)
    assert find_model(NAME, places).read_bytes() == CONTENT[::-1]
    assert not old.exists() and len(list(places.hub_cache.rglob("blobs/*"))) == 1


def test_rm_keeps_what_another_snapshot_still_uses(hub, places):
    from huggingface_hub import hf_hub_download

    pull(hub, places)
    old = find_model(NAME, places)
    hub.repositories[REPO]["README.md"] = b"other words"
    theirs = Path(hf_hub_download(REPO, "Tiny-Q4_K_M.gguf", cache_dir=places.hub_cache, endpoint=hub.endpoint))
    assert theirs != old and theirs.samefile(old)
    assert "0 bytes freed; 1 of its files" in remove_model(NAME, places)
    assert theirs.read_bytes() == CONTENT and not old.is_symlink()


def test_rm_deletes_what_was_pulled_and_nothing_else(hub, places):
    pull(hub, places)
    pull(hub, places, f"{REPO}:Q8_0")
    with pytest.raises(RequestError, match="several models"):
        remove_model(REPO, places)
    assert remove_model("tiny-gguf:q4_k_m", places) == f"removed {NAME}: 1.0 MB freed"
    assert sound_names(places) == [f"{REPO}:Q8_0"]
    assert "2.0 MB freed" in remove_model(REPO, places)
    assert not [path for path in places.hub_cache.rglob("*") if path.is_file() and ".locks" not in path.parts]
    with pytest.raises(RequestError, match="localinfer list"):
        remove_model(REPO, places)


def test_deleted_and_damaged_files_are_named_as_broken(hub, places):
    pull(hub, places)
    path = find_model(NAME, places)
    blob = path.resolve()
    blob.write_bytes(CONTENT[:-1])
    assert sound_names(places) == []
    with pytest.raises(RequestError, match="cannot be used: .*has 1,023,999 bytes in place of 1,024,000; `local"):
        find_model(NAME, places)
    pull(hub, places)
    assert find_model(NAME, places).read_bytes() == CONTENT
    blob.unlink()
    [broken] = find_pulled(places)
    assert "is missing" in broken.problem
    pull(hub, places)
    assert find_model(NAME, places).read_bytes() == CONTENT


def test_a_damaged_record_is_named(hub, places):
    pull(hub, places)
    [record] = places.records.glob("*.json")
    record.write_text('{"version": 1, "files": [{"path": "../../x"')
    [broken] = find_pulled(places)
    assert "delete" in broken.problem and str(record) in broken.problem


def test_paths_that_leave_their_folder_are_passed_over(hub, places):
    hub.repositories["org/evil"] = {"../../x-Q4_K_M.gguf": b"x" * 300, "/etc/y.gguf": b"y" * 300}
    with pytest.raises(RequestError, match="has no model that runs here"):
        pull(hub, places, "org/evil")
    assert hub.downloads == []


def test_unknown_quantizations_list_what_there_is(hub, places):
    with pytest.raises(RequestError, match=r"no Q3_K_M; it has Q4_K_M \(1\.0 MB\), Q8_0 \(2\.0 MB\); `localinfer pull"):
        pull(hub, places, f"{REPO}:Q3_K_M")


@pytest.mark.parametrize("text", ["tiny", "org/", "a/b/c", "../x/y", "org/repo:", "org/re po"])
def test_names_that_the_hub_cannot_have(text):
    with pytest.raises(LocalinferError, match="give org/repo"):
        read_reference(text)


def test_a_damaged_file_of_another_program_is_left_to_it(hub, places):
    from huggingface_hub import hf_hub_download

    theirs = Path(hf_hub_download(REPO, "Tiny-Q4_K_M.gguf", cache_dir=places.hub_cache, endpoint=hub.endpoint))
    theirs.resolve().write_bytes(CONTENT[::-1])
    with pytest.raises(DownloadError, match="damaged: its SHA-256 .* delete .* and pull again"):
        pull(hub, places)
    assert theirs.read_bytes() == CONTENT[::-1]


def test_a_stopped_pull_leaves_a_good_beginning(hub, places, monkeypatch):
    monkeypatch.setattr("localinfer.storage.hub.pull.REPORT_SECONDS", 0)

    def stop(stage: str, done: int, total: int) -> None:
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(hub, places, progress=stop)
    held = only_partial(places).read_bytes()
    assert held == CONTENT[: len(held)]
    assert sound_names(places) == []
    pull(hub, places)
    assert sound_names(places) == [NAME]


def test_the_partial_file_is_where_the_hubs_library_had_it(tmp_path):
    assert partial_path(tmp_path / "abc").name == "abc.incomplete"
