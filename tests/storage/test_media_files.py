"""Embeddings of pictures and sounds on disk: over restarts, per owner, in the budget, and damaged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.storage import embedding_files
from localinfer.storage.budget import clear, stored_files
from localinfer.storage.prompt_cache import DiskCache, DiskOptions
from tests.engine.media_texts import WIDTH, Encoder, Pieces, cold, media_model, tokens
from tests.storage.test_prompt_cache import FakeIdentity

GREEDY = SamplingParams(temperature=0)


def opened(folder: Path, *, max_bytes: int = 1 << 20) -> tuple[Engine, DiskCache]:
    """An engine over a folder as after a restart."""
    engine = Engine(media_model())
    options = DiskOptions(folder / "conversations", max_bytes)
    return engine, DiskCache(engine, FakeIdentity(), options, embedding_width=WIDTH, in_background=False)  # type: ignore[arg-type]


def asked(folder: Path, pieces: Any, *, salt: bytes = b"", **options: Any) -> list[str]:
    """Names of the pictures that a restarted engine encodes for a prompt, whose answer is that of a cold one."""
    encoder = Encoder()
    engine, disk = opened(folder, **options)
    made: Pieces = pieces(encoder)
    assert tokens(engine, made, GREEDY, cache_hints=CacheHints(salt=salt)) == cold(pieces(Encoder()), GREEDY)
    disk.close()
    engine.close()
    return encoder.asked


def delete(folder: Path, suffix: str) -> int:
    found = list(folder.rglob(f"*{suffix}"))
    for file in found:
        file.unlink()
    return len(found)


def two(encoder: Encoder) -> Pieces:
    return [[1], encoder.picture("one", 3, 3), [2, 3], encoder.sound("two", 7), [4]]


def long(encoder: Encoder) -> Pieces:
    return [[1], encoder.picture("long", 5, 14), [2]]


@pytest.mark.parametrize("pieces", [two, long])
def test_a_picture_whose_pages_are_gone_is_not_encoded_again(tmp_path: Path, pieces: Any) -> None:
    assert asked(tmp_path, pieces)
    assert delete(tmp_path, ".page")
    assert asked(tmp_path, pieces) == []


def test_embeddings_of_one_owner_are_not_found_by_another(tmp_path: Path) -> None:
    assert asked(tmp_path, two, salt=b"alice") == ["one", "two"]
    delete(tmp_path, ".page")
    assert asked(tmp_path, two, salt=b"bob") == asked(tmp_path, two) == ["one", "two"]
    delete(tmp_path, ".page")
    assert asked(tmp_path, two, salt=b"alice") == asked(tmp_path, two, salt=b"bob") == []
    # Nor in memory.
    engine, encoder = Engine(media_model()), Encoder()
    for salt in (b"alice", b"bob", b"alice"):
        tokens(engine, two(encoder), GREEDY, cache_hints=CacheHints(salt=salt))
        with engine.exclusive_cache() as cache:
            cache.clear()
    assert encoder.asked == ["one", "two", "one", "two"]


def test_damaged_and_foreign_files_are_left_aside(tmp_path: Path) -> None:
    assert asked(tmp_path, long) == ["long"]
    first, *others = sorted(tmp_path.rglob("*.embedding"))
    assert len(others) == 2
    whole = first.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), others[0].read_bytes(), b""):
        delete(tmp_path, ".page")
        first.write_bytes(damaged)
        assert asked(tmp_path, long) == ["long"]
        # It is written anew.
        assert first.read_bytes() == whole


def test_they_are_in_the_budget_and_deleted_with_the_cache(tmp_path: Path) -> None:
    assert asked(tmp_path, two)
    folder = tmp_path / "conversations"
    assert {Path(file.path).suffix for file in stored_files(folder)} == {".json", ".page", ".embedding"}
    clear(folder)
    assert not list(tmp_path.rglob("*.embedding"))
    # A budget of less than a file keeps none, and changes no answer.
    assert asked(tmp_path, two, max_bytes=100) == ["one", "two"]
    assert not list(tmp_path.rglob("*.embedding"))


def test_another_program_or_width_finds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(tmp_path, two)
    delete(tmp_path, ".page")
    monkeypatch.setattr(embedding_files, "program", lambda: "another version")
    assert asked(tmp_path, two) == ["one", "two"]
    engine, disk = opened(tmp_path)
    run = Encoder().picture("one", 3, 3)
    files = embedding_files.EmbeddingFiles(tmp_path / "conversations", WIDTH + 1, engine.embeddings, 1 << 20)
    assert disk.embeddings is not None
    assert files.find(run.ids, b"") is None
    found = disk.embeddings.find(run.ids, b"")
    assert found is not None
    np.testing.assert_array_equal(found, run.embed())
    disk.close()
