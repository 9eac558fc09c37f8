"""Embeddings and layouts of pictures and sounds on disk: over restarts, per owner, in the budget, and damaged."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.media import EmbeddingStore
from localinfer.engine.sampling.params import SamplingParams
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.media import MediaReader
from localinfer.storage import media_files
from localinfer.storage.budget import clear, stored_files
from localinfer.storage.page_store import finished
from localinfer.storage.prompt_cache import DiskCache, DiskOptions
from tests.engine.media_texts import WIDTH, Encoder, Pieces, cold, media_model, tokens, unstopped
from tests.generation.chat.test_media_parts import DATA, FakeModel
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


def small(encoder: Encoder) -> Pieces:
    return [[1], encoder.picture("small", 1, 3), [2], encoder.sound("short", 1), [3]]


@pytest.mark.parametrize("pieces", [two, long, small])
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


def test_they_are_in_the_budget_and_shown_and_deleted_with_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(tmp_path, two)
    folder = tmp_path / "conversations"
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.embedding"))
    assert main(["cache", "--disk-cache-folder", str(tmp_path)]) == 0
    assert f"embeddings of pictures and sounds: {size:,} bytes" in capsys.readouterr().out
    assert {Path(file.path).suffix for file in stored_files(folder)} == {".json", ".page", ".embedding"}
    clear(folder)
    assert not list(tmp_path.rglob("*.embedding"))
    # A budget of less than a file keeps none, and changes no answer.
    assert asked(tmp_path, two, max_bytes=100) == ["one", "two"]
    assert not list(tmp_path.rglob("*.embedding"))


def test_another_program_or_width_finds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(tmp_path, two)
    delete(tmp_path, ".page")
    monkeypatch.setattr(media_files, "program", lambda: "another version")
    assert asked(tmp_path, two) == ["one", "two"]
    engine, disk = opened(tmp_path)
    run = Encoder().picture("one", 3, 3)
    files = media_files.MediaFiles(tmp_path / "conversations", WIDTH + 1, engine.embeddings, 1 << 20)
    assert disk.media is not None
    assert files.find(run.ids, b"") is None
    found = disk.media.find(run.ids, b"")
    assert found is not None
    np.testing.assert_array_equal(found, run.embed(unstopped))
    disk.close()


def ids_read(folder: Path, model: FakeModel, salt: bytes = b"") -> list[list[int]]:
    """Ids of a picture for a restarted reader, which then writes."""
    files = media_files.MediaFiles(folder, WIDTH, EmbeddingStore(), 1 << 20)
    reader = MediaReader(model, localinfer.load_tokenizer())
    reader.files = files
    source = MediaSource("image", DATA, "messages[0].content[0]")
    found = [run.ids.tolist() for run in reader.read([source], salt)[0].held.runs]
    finished(files.saving(threads=1, should_stop=lambda: False))
    return found


def test_a_picture_is_not_decoded_again_after_a_restart(tmp_path: Path) -> None:
    first, again = FakeModel(), FakeModel()
    wanted = ids_read(tmp_path, first)
    assert ids_read(tmp_path, again) == wanted and len(wanted) == 2
    assert len(first.prepared) == 1 and not again.prepared
    (file,) = tmp_path.rglob("*.layout")
    assert str(file) in {one.path for one in stored_files(tmp_path)}
    # Whose owner, encoder or way of preparing is another, knows nothing of it.
    for change in ({"identity": b"other"}, {"preparation": b"other"}, {}):
        other = FakeModel()
        vars(other).update(change)
        assert (ids_read(tmp_path, other, b"" if change else b"bob") == wanted) == ("identity" not in change)
        assert len(other.prepared) == 1
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole.replace(b"1", b"2"), b"", sealed(b"[]"), sealed(b'{"pieces": [3]}')):
        file.write_bytes(damaged)
        again = FakeModel()
        assert ids_read(tmp_path, again) == wanted
        assert len(again.prepared) == 1 and file.read_bytes() == whole


def sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content
