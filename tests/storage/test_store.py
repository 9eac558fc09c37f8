"""The disk tier: what is saved is found by token ids, comes back byte for byte, or is not used at all."""

import errno
import os
import stat
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.media import ShortRuns, media_ids
from localinfer.storage import page_store
from localinfer.storage.budget import clear
from localinfer.storage.page_store import PageFormat, PageRecord, Rejection, Restored, read_page, write_page
from localinfer.system import disk as disk_module
from tests.storage.damage import full_disk_after
from tests.storage.disk_pages import (
    FINGERPRINT,
    PAGE_BYTES,
    PAGE_TOKENS,
    computed,
    files,
    fresh,
    ids,
    numbered,
    restored,
    source,
    tier,
)

FORM = PageFormat(PAGE_TOKENS, PAGE_BYTES)


def test_saved_history_comes_back_byte_for_byte(tmp_path: Path):
    history = numbered(11)
    saved = tier(tmp_path).save(history, source(history))
    assert (saved.num_written, saved.num_present, saved.failure) == (3, 0, None)
    num_tokens, pages = restored(tier(tmp_path), history)
    assert num_tokens == 11 and pages == computed(history)


@pytest.mark.parametrize("length", range(1, 14))
def test_prompt_that_goes_on_finds_every_saved_token(tmp_path: Path, length: int):
    history = numbered(length)
    tier(tmp_path).save(history, source(history))
    assert tier(tmp_path).find(numbered(40)).num_tokens == length


@pytest.mark.parametrize("common", range(12))
def test_prompt_that_parts_inside_a_page_finds_its_tokens_up_to_there(tmp_path: Path, common: int):
    tier(tmp_path).save(numbered(11), source(numbered(11)))
    prompt = np.concatenate((numbered(common), numbered(9, start=100)))
    num_tokens, pages = restored(tier(tmp_path), prompt)
    assert num_tokens == min(common, 11)
    assert pages == computed(numbered(11))[: len(pages)]


def test_of_several_continuations_the_longest_is_taken(tmp_path: Path):
    disk = tier(tmp_path)
    for tail in ([1], [1, 2], [1, 2, 3, 4], [1, 9, 9, 9]):
        history = np.concatenate((numbered(4), ids(*tail)))
        disk.save(history, source(history))
    assert disk.find(np.concatenate((numbered(4), ids(1, 2, 3, 7)))).num_tokens == 7
    assert disk.find(np.concatenate((numbered(4), ids(1, 9)))).num_tokens == 6


def test_pages_before_the_first_wanted_need_no_files(tmp_path: Path):
    history = numbered(16)
    tier(tmp_path).save(history, source(history))
    for path in files(tmp_path):
        if path.name.startswith(FINGERPRINT.hex()[:32]):
            path.unlink()
    disk = tier(tmp_path)
    assert disk.find(history).num_tokens == 0
    num_tokens, pages = restored(disk, history, first_page=1)
    assert num_tokens == 16 and pages == computed(history)[1:]


def test_nothing_found_leaves_the_tokens_before_the_first_wanted_page(tmp_path: Path):
    assert tier(tmp_path).find(numbered(10), first_page=1).num_tokens == 4
    assert tier(tmp_path).find(ids()).num_tokens == 0


def test_conversations_with_a_common_beginning_share_its_files(tmp_path: Path):
    disk = tier(tmp_path)
    for start in (100, 200, 300):
        history = np.concatenate((numbered(40), numbered(4, start)))
        disk.save(history, source(history))
    assert len(files(tmp_path)) == 10 + 3
    assert disk.counters.pages_written == 13


def test_saving_again_writes_only_what_is_new(tmp_path: Path):
    disk = tier(tmp_path)
    disk.save(numbered(10), source(numbered(10)))
    assert disk.save(numbered(10), source(numbered(10))).num_written == 0
    saved = disk.save(numbered(15), source(numbered(15)))
    assert (saved.num_written, saved.num_present) == (2, 2)


def test_grown_page_replaces_the_file_of_its_beginning(tmp_path: Path):
    disk = tier(tmp_path)
    for length in (5, 6, 8, 9):
        disk.save(numbered(length), source(numbered(length)))
    assert len(files(tmp_path)) == 3


def test_beginning_of_a_saved_page_is_not_saved_again(tmp_path: Path):
    disk = tier(tmp_path)
    disk.save(numbered(8), source(numbered(8)))
    assert disk.save(numbered(6), source(numbered(6))).num_written == 0
    assert len(files(tmp_path)) == 2


def test_pages_of_another_fingerprint_are_never_found(tmp_path: Path):
    tier(tmp_path).save(numbered(8), source(numbered(8)))
    assert tier(tmp_path, fingerprint=bytes(32)).find(numbered(8)).num_tokens == 0


@pytest.mark.skipif(sys.platform == "win32", reason="modes mean something else there")
def test_files_are_readable_by_their_owner_only(tmp_path: Path):
    tier(tmp_path).save(numbered(8), source(numbered(8)))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path))


def flip(path: Path, offset: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= bit
    path.write_bytes(content)


def test_one_bit_changed_anywhere_is_refused(tmp_path: Path):
    record, page = PageRecord(FINGERPRINT, ids(5, 6, 7)), tmp_path / "page"
    write_page(page, FORM, record, computed(ids(5, 6, 7))[0])
    content = page.read_bytes()
    for offset in range(FORM.file_bytes):
        page.write_bytes(content)
        assert read_page(page, FORM, record, fresh(1)[0]) is None
        flip(page, offset, 1 << offset % 8)
        found = read_page(page, FORM, record, fresh(1)[0])
        assert found in (Rejection.ALTERED, Rejection.FOREIGN), offset


def test_pages_with_short_pictures_are_found_for_the_same_pictures_only(tmp_path: Path):
    """Whose ids another process may have let stand for others."""
    short = media_ids(b"encoder", b"picture", 2)
    for size in (3, 4, 7, 11):
        folder = tmp_path / str(size)
        tiers, texts = {}, np.concatenate((numbered(size), short, numbered(6, 50)))
        for content in (b"one", b"two", b""):
            known = ShortRuns()
            known.bind(short, content, NO_SALT)
            tiers[content] = tier(folder, contents=known.contents)
        for content in (b"one", b"two"):
            tiers[content].save(texts, source(texts))
        for content in (b"one", b"two"):
            found = tiers[content].find(texts)
            assert found.num_tokens == texts.size
            assert tiers[content].restore(found, fresh(len(found.pages))).num_tokens == texts.size
            # A text that shares no more than the picture, within its last page.
            other = np.concatenate((numbered(size), short, numbered(3, 90)))
            found = tiers[content].find(other)
            assert found.num_tokens == size + 2
            assert tiers[content].restore(found, fresh(len(found.pages))).num_tokens == size + 2
        found = tiers[b""].find(texts)
        assert found.num_tokens == size - size % PAGE_TOKENS, "whole pages before the picture"
        assert all(one.counters.rejected.total() == 0 for one in tiers.values())
        assert len(files(folder)) == 2 * -(-texts.size // PAGE_TOKENS) - size // PAGE_TOKENS


def test_sound_file_under_a_wrong_name_is_refused(tmp_path: Path):
    disk = tier(tmp_path)
    for start in (0, 100):
        disk.save(numbered(4, start), source(numbered(4, start)))
    first, second = files(tmp_path)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert [restored(disk, numbered(4, start))[0] for start in (0, 100)] == [0, 0]
    assert disk.counters.rejected == {Rejection.FOREIGN: 2}


DAMAGES: dict[str, tuple[Callable[[Path], object], Rejection]] = {
    "cut short": (lambda path: os.truncate(path, 100), Rejection.TORN),
    "emptied": (lambda path: os.truncate(path, 0), Rejection.TORN),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"x"), Rejection.TORN),
    "zeroed": (lambda path: path.write_bytes(bytes(FORM.file_bytes)), Rejection.FOREIGN),
    "edited": (lambda path: flip(path, FORM.header_bytes + 5), Rejection.ALTERED),
    "another version": (lambda path: flip(path, 8), Rejection.FOREIGN),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_page_ends_what_is_restored_and_is_written_anew(tmp_path: Path, damage: str):
    history = numbered(15)
    disk = tier(tmp_path)
    disk.save(history, source(history))
    path = disk.find(history).pages[2].path
    harm, rejection = DAMAGES[damage]
    harm(path)
    num_tokens, pages = restored(disk, history)
    assert num_tokens == 8 and pages[:2] == computed(history)[:2]
    assert disk.counters.rejected == {rejection: 1}
    assert not path.exists()
    assert disk.save(history, source(history)).num_written == 1
    assert restored(disk, history)[0] == 15


def test_folder_in_place_of_a_page_is_replaced_only_if_it_is_empty(tmp_path: Path):
    disk = tier(tmp_path)
    disk.save(numbered(4), source(numbered(4)))
    path = files(tmp_path)[0]
    path.unlink()
    (path / "theirs").mkdir(parents=True)
    assert restored(disk, numbered(4))[0] == 0
    assert "cannot be written" in (disk.save(numbered(4), source(numbered(4))).failure or "")
    assert (path / "theirs").is_dir()
    (path / "theirs").rmdir()
    assert restored(disk, numbered(4))[0] == 0
    assert disk.save(numbered(4), source(numbered(4))).failure is None
    assert restored(disk, numbered(4))[0] == 4


def test_page_that_vanishes_after_it_was_found_ends_what_is_restored(tmp_path: Path):
    disk = tier(tmp_path)
    disk.save(numbered(12), source(numbered(12)))
    found = disk.find(numbered(12))
    found.pages[1].path.unlink()
    assert disk.restore(found, fresh(3)) == Restored(4, Rejection.MISSING)
    assert not disk.counters.rejected


@pytest.mark.parametrize("failing", [OSError(errno.EIO, "I/O error"), PermissionError(errno.EACCES, "not allowed")])
@pytest.mark.parametrize("position", [0, 1])
def test_failure_of_any_read_is_a_miss(
    tmp_path: Path, failing: OSError, position: int, monkeypatch: pytest.MonkeyPatch
):
    disk = tier(tmp_path, threads=1)
    disk.save(numbered(4), source(numbered(4)))
    calls = 0

    def read_all(*arguments: object) -> bool:
        nonlocal calls
        calls += 1
        if calls > position:
            raise failing
        return True

    monkeypatch.setattr(page_store, "read_all", read_all)
    assert restored(disk, numbered(4))[0] == 0
    assert disk.counters.rejected == {Rejection.UNREADABLE: 1}


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Slow(FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            return super().write(data[:7])

        def readinto(self, data: memoryview) -> int:  # type: ignore[override]
            return super().readinto(data[:11])

    monkeypatch.setattr(disk_module, "FileIO", Slow)
    monkeypatch.setattr(page_store, "open_regular", Slow)
    tier(tmp_path).save(numbered(7), source(numbered(7)))
    num_tokens, pages = restored(tier(tmp_path), numbered(7))
    assert num_tokens == 7 and pages == computed(numbered(7))


def test_file_that_ends_while_it_is_read_is_torn(tmp_path: Path):
    record = PageRecord(FINGERPRINT, ids(1))
    write_page(tmp_path / "page", FORM, record, computed(ids(1))[0])

    class Ending(FileIO):
        def readinto(self, data: memoryview) -> int:  # type: ignore[override]
            return 0 if self.tell() else super().readinto(data[:9])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_store, "open_regular", Ending)
        assert read_page(tmp_path / "page", FORM, record, fresh(1)[0]) is Rejection.TORN


WRITE_FAILURES = {
    "temporary file": (disk_module.os, "open"),
    "write": (page_store, "write_all"),
    "rename": (disk_module.os, "replace"),
}


@pytest.mark.parametrize("step", WRITE_FAILURES)
@pytest.mark.parametrize("after", range(3))
def test_full_disk_at_any_step_keeps_what_was_written_and_leaves_no_rest(
    tmp_path: Path, step: str, after: int, monkeypatch: pytest.MonkeyPatch
):
    history = numbered(12)
    disk = tier(tmp_path, threads=1)
    owner, name = WRITE_FAILURES[step]

    monkeypatch.setattr(owner, name, full_disk_after(after, getattr(owner, name)))
    saved = disk.save(history, source(history))
    monkeypatch.undo()
    assert saved.failure is not None and "No space left on device" in saved.failure
    assert len(files(tmp_path)) == saved.num_written < 3
    num_tokens, pages = restored(disk, history)
    assert num_tokens == 4 * saved.num_written and pages == computed(history)[: saved.num_written]
    assert disk.save(history, source(history)).failure is None
    assert restored(disk, history)[0] == 12


def test_file_that_cannot_be_replaced_because_it_is_open_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = tier(tmp_path, threads=1)

    def written_by_another(temporary: str, path: str) -> None:
        Path(path).write_bytes(Path(temporary).read_bytes())
        raise PermissionError(errno.EACCES, "open in another process")

    monkeypatch.setattr(disk_module.os, "replace", written_by_another)
    assert disk.save(numbered(8), source(numbered(8))).failure is None
    assert restored(disk, numbered(8))[0] == 8


def test_save_whose_pages_are_had_no_more_keeps_the_beginning(tmp_path: Path):
    disk = tier(tmp_path)
    history = numbered(80)
    answers = iter([source(history), lambda indices: None])
    saved = disk.save(history, lambda indices: next(answers)(indices))
    assert saved.num_written == disk.pages_at_once and saved.failure is None
    assert restored(disk, history)[0] == 4 * disk.pages_at_once


def test_budget_deletes_what_was_used_longest_ago_from_its_end(tmp_path: Path):
    disk = tier(tmp_path, max_bytes=16 * FORM.file_bytes)
    histories = [numbered(24, start) for start in (0, 1000)]
    for history in histories:
        disk.save(history, source(history))
    disk.mark_used(disk.find(histories[0]))
    new = numbered(24, 2000)
    disk.save(new, source(new))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 16 * FORM.file_bytes
    assert [disk.find(history).num_tokens for history in (*histories, new)] == [24, 12, 24]
    assert disk.counters.bytes_deleted == 3 * FORM.file_bytes


def test_budget_smaller_than_a_page_saves_nothing(tmp_path: Path):
    disk = tier(tmp_path, max_bytes=FORM.file_bytes - 1)
    assert "smaller than one page" in (disk.save(numbered(4), source(numbered(4))).failure or "")
    assert not files(tmp_path)


def test_rest_of_a_killed_writer_is_deleted_after_an_hour(tmp_path: Path):
    disk = tier(tmp_path)
    disk.folder.mkdir()
    for name, seconds in (("tmpold.tmp", 4000), (".0123456789ab.tmp", 4000), (".ba9876543210.tmp", 10)):
        path = disk.folder / name
        path.write_bytes(b"half a page")
        used = path.stat().st_mtime - seconds
        os.utime(path, (used, used))
    disk.save(numbered(4), source(numbered(4)))
    assert [path.name for path in disk.folder.glob("*.tmp")] == [".ba9876543210.tmp"]


def test_budget_leaves_what_another_process_is_writing(tmp_path: Path):
    disk = tier(tmp_path, max_bytes=2 * FORM.file_bytes)
    disk.folder.mkdir()
    (disk.folder / ".0123456789ab.tmp").write_bytes(bytes(3 * FORM.file_bytes))
    disk.save(numbered(8), source(numbered(8)))
    assert [path.name for path in files(tmp_path)] == [".0123456789ab.tmp"]


def test_files_of_others_in_the_folder_are_never_deleted(tmp_path: Path):
    disk = tier(tmp_path, max_bytes=2 * FORM.file_bytes)
    (disk.folder / "a").mkdir(parents=True)
    theirs = [tmp_path / "letter.txt", disk.folder / "letter.page", disk.folder / "a" / "photo.tmp"]
    for path in theirs:
        path.write_bytes(bytes(10_000))
        os.utime(path, (0, 0))
    for start in range(0, 500, 100):
        disk.save(numbered(8, start), source(numbered(8, start)))
    clear(tmp_path)
    assert files(tmp_path) == sorted(theirs)


def test_many_siblings_are_looked_into_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = tier(tmp_path)
    for start in range(6):
        disk.save(ids(start, 50, 51), source(ids(start, 50, 51)))
    monkeypatch.setattr(page_store, "_MAX_SIBLINGS", 3)
    hits = [disk.find(ids(start, 50, 99)).num_tokens for start in range(6)]
    assert sorted(hits) == [0, 0, 0, 2, 2, 2]
