"""Responses and conversations on disk and in memory: at once, within a budget, for a time, and in private."""

import os
import threading
import time
from pathlib import Path

import pytest

from localinfer.apps.cli import main
from localinfer.storage.response_store import ResponseStore, ResponseStoreOptions

DAY = 86400.0


def name(number: int, suffix: str = "json") -> str:
    return f"resp_{number:024x}.{suffix}"


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "responses" if request.param == "disk" else None


def test_content_is_there_at_once_and_until_it_is_deleted(folder):
    with ResponseStore(ResponseStoreOptions(folder)) as store:
        for number in range(20):
            store.put(name(number), b"one")
            store.put(name(number), b"two")
            assert store.get(name(number)) == b"two"
        store.delete(name(3))
        assert store.get(name(3)) is None
        assert store.get(name(3, "events")) is None
        store.delete(name(99))


def test_closed_store_has_written_everything(tmp_path):
    options = ResponseStoreOptions(tmp_path / "a" / "responses")
    with ResponseStore(options) as store:
        for number in range(50):
            store.put(name(number), b"%d" % number)
        store.delete(name(7))
    with ResponseStore(options) as other:
        found = {number for number in range(50) if other.get(name(number)) == b"%d" % number}
    assert found == set(range(50)) - {7}
    assert {path.stat().st_mode & 0o777 for path in options.folder.iterdir()} == {0o600}
    assert options.folder.stat().st_mode & 0o777 == 0o700


def test_least_recently_used_is_forgotten_first(folder):
    options = ResponseStoreOptions(folder, max_bytes=10_000)
    with ResponseStore(options) as store:
        for number in range(9):
            store.put(name(number), bytes(1000))
    if folder is not None:
        for number in range(9):
            os.utime(folder / name(number), (time.time() - 100 + number,) * 2)
        store = ResponseStore(options)
    store.get(name(0))
    for number in range(9, 12):
        store.put(name(number), bytes(1000))
    store.close()
    kept = {number for number in range(12) if store.get(name(number)) is not None}
    assert {0, 9, 10, 11} <= kept
    assert not {1, 2} & kept
    assert sum(1000 for _ in kept) <= 10_000


def test_what_was_not_used_for_long_is_gone(tmp_path):
    options = ResponseStoreOptions(tmp_path, expiry_seconds=DAY)
    with ResponseStore(options) as store:
        store.put(name(1), b"old")
        store.put(name(2), b"older")
    for number, days in ((1, 0.9), (2, 1.1)):
        os.utime(tmp_path / name(number), (time.time() - days * DAY,) * 2)
    with ResponseStore(options) as store:
        assert store.get(name(1)) == b"old"
        store.put(name(3), b"new")
    # What nobody asks for any more is deleted too, and what is asked for is used.
    assert sorted(path.name for path in tmp_path.iterdir()) == [name(1), name(3)]
    assert (tmp_path / name(1)).stat().st_mtime > time.time() - 0.5 * DAY
    os.utime(tmp_path / name(1), (0, 0))
    with ResponseStore(ResponseStoreOptions(tmp_path, expiry_seconds=0)) as store:
        assert store.get(name(1)) == b"old"


@pytest.mark.parametrize("other", ["../x", "/etc/passwd", "resp_1.json", f"{name(1)}\n", "", f"..{os.sep}{name(1)}"])
def test_no_other_file_is_read_or_deleted(tmp_path, other):
    with ResponseStore(ResponseStoreOptions(tmp_path / "responses")) as store:
        (tmp_path / name(1)).write_bytes(b"x")
        (tmp_path / "x").write_bytes(b"x")
        assert store.get(other) is None
        store.delete(other)
    assert (tmp_path / name(1)).exists()
    assert (tmp_path / "x").exists()


def test_files_of_others_are_not_counted_or_deleted(tmp_path):
    (tmp_path / "notes.txt").write_bytes(bytes(5000))
    with ResponseStore(ResponseStoreOptions(tmp_path, max_bytes=2000)) as store:
        for number in range(9):
            store.put(name(number), bytes(900))
    assert (tmp_path / "notes.txt").exists()
    assert sum(path.stat().st_size for path in tmp_path.glob("resp_*")) <= 2000


def test_disk_that_refuses_costs_no_response(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localinfer.storage.records.write_atomically", refuse)
    with ResponseStore(ResponseStoreOptions(tmp_path)) as store:
        for number in range(3):
            store.put(name(number), b"x")
    assert [store.get(name(number)) for number in range(3)] == [b"x"] * 3
    assert caplog.text.count("No space left on device") == 1


def test_threads_share_a_store(folder):
    with ResponseStore(ResponseStoreOptions(folder)) as store:

        def work(start: int) -> None:
            for number in range(start, start + 40):
                store.put(name(number), b"%d" % number)
                assert store.get(name(number)) == b"%d" % number
                if number % 3 == 0:
                    store.delete(name(number))

        threads = [threading.Thread(target=work, args=(start,)) for start in (0, 40, 80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {number for number in range(120) if store.get(name(number)) is not None}
    assert found == {number for number in range(120) if number % 3}


def test_clearing_the_cache_says_what_is_kept_and_deletes_it_when_asked(tmp_path, capsys):
    with ResponseStore(ResponseStoreOptions(tmp_path / "responses")) as store:
        store.put(name(1), b"12345")
    command = ["cache", "--disk-cache-folder", str(tmp_path), "--clear"]
    assert main(command) == 0
    assert "kept 70 bytes of responses and conversations" in capsys.readouterr().out
    assert main([*command, "--responses"]) == 0
    assert "deleted 70 bytes of responses and conversations" in capsys.readouterr().out
    assert not list((tmp_path / "responses").iterdir())


def test_a_damaged_file_is_forgotten_and_one_of_a_former_version_is_read(tmp_path):
    options = ResponseStoreOptions(tmp_path)
    with ResponseStore(options) as store:
        for number in range(3):
            store.put(name(number), b'{"a": "kept"}')
    flipped, torn, whole = (tmp_path / name(number) for number in range(3))
    flipped.write_bytes(flipped.read_bytes().replace(b"kept", b"left"))
    torn.write_bytes(torn.read_bytes()[:-4] + bytes(4))
    (tmp_path / name(3)).write_bytes(b'{"of": "a former version"}')
    with ResponseStore(options) as store:
        found = [store.get(name(number)) for number in range(4)]
    assert found == [None, None, b'{"a": "kept"}', b'{"of": "a former version"}']
    assert sorted(tmp_path.iterdir()) == [whole, tmp_path / name(3)]
