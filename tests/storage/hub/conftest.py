"""A stand-in of the hub with one repository, and folders of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localinfer.storage.hub.places import Places
from tests.storage.hub.stand_in import StandInHub, places_in

REPO = "org/Tiny-GGUF"
NAME = f"{REPO}:Q4_K_M"
CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    files = {"README.md": b"words", "Tiny-Q4_K_M.gguf": CONTENT, "Tiny-Q8_0.gguf": CONTENT[::-1] * 2}
    with StandInHub({REPO: files}) as stand_in:
        yield stand_in


@pytest.fixture
def places(tmp_path: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return places_in(tmp_path, hub.endpoint)
