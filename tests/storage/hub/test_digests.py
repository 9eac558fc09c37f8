"""Files that were changed after they were downloaded are told from those that were not, by the recorded checksums."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from localinfer.apps.show.verify import verify_model
from localinfer.loading.options import model_path
from localinfer.storage.hub.download import differing_files, recorded_files
from localinfer.storage.hub.installed import find_model
from localinfer.storage.hub.places import Places
from localinfer.storage.hub.pull import pull_model, read_reference
from tests.storage.hub.conftest import NAME, REPO
from tests.storage.hub.stand_in import StandInHub, places_in


def flip(path: Path, place: int = 1000) -> None:
    """Change a bit where a file lies, without changing its size."""
    with open(os.path.realpath(path), "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_a_pulled_file_that_changed_is_named_with_what_to_type(hub: StandInHub, places: Places) -> None:
    pull_model(read_reference(REPO), places, client=hub.client(2))
    path = find_model(NAME, places)
    told: list[tuple[int, int]] = []
    files = recorded_files([path], places)
    assert differing_files(files, lambda _, done, total: told.append((done, total))) == []
    assert told[-1] == (0, 0), "a megabyte is not reached"
    flip(path)
    (line,) = differing_files(files)
    assert line.startswith("Tiny-Q4_K_M.gguf is not the file that was downloaded: its SHA-256 is ")
    assert line.endswith(f"delete {os.path.realpath(path)} and run `localinfer pull {NAME}`")
    os.unlink(os.path.realpath(path))
    pull_model(read_reference(REPO), places, client=hub.client(2))
    assert differing_files(recorded_files([find_model(NAME, places)], places)) == [], "the way out is one"


@pytest.mark.parametrize("prefix", ["", "sha256-"])
def test_the_name_of_a_blob_is_its_checksum(prefix: str, tmp_path: Path) -> None:
    content = b"GGUF" + bytes(2000)
    blob = tmp_path / "blobs" / f"{prefix}{hashlib.sha256(content).hexdigest()}"
    blob.parent.mkdir()
    blob.write_bytes(content)
    link = tmp_path / "model.gguf"
    link.symlink_to(blob)
    places = places_in(tmp_path)
    assert differing_files(recorded_files([link], places)) == []
    flip(link)
    (line,) = differing_files(recorded_files([link], places))
    assert f"delete {blob} and download the model again" in line


def test_other_files_have_no_recorded_checksum(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 64)
    path.write_bytes(b"GGUF")
    assert recorded_files([path, tmp_path / "missing.gguf"], places_in(tmp_path)) == []


def test_verify_compares_checksums_and_goes_on(tmp_path: Path) -> None:
    digest = hashlib.sha256(model_path(None).read_bytes()).hexdigest()
    blob = tmp_path / "blobs" / digest
    blob.parent.mkdir()
    shutil.copy(model_path(None), blob)
    assert verify_model(str(blob)).findings == []
    flip(blob, blob.stat().st_size - 5000)
    assert [one.check for one in verify_model(str(blob)).findings] == ["checksum"]
