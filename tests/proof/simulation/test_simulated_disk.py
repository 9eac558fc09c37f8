"""The simulated disk: what its calls do, and what faults, kills and power cuts leave."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

if sys.platform == "win32":
    pytest.skip("it simulates a POSIX file system", allow_module_level=True)

from localinfer.system import disk as calls
from localinfer.system.files import OutputFile, read_bounded, write_all, write_atomically
from tests.proof.simulation.clock import Clock
from tests.proof.simulation.disk import Disk, Killed


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk(Random(7), Clock())
    with disk.installed():
        yield disk
    assert not disk.forgotten


def write(path: Path, content: bytes) -> None:
    write_atomically(path, partial(write_all, data=content))


def test_files_are_written_read_listed_and_deleted(disk: Disk):
    folder = disk.root / "some" / "folder"
    assert calls.make_folder(folder) == [str(folder.parent), str(folder)]
    assert calls.make_folder(folder) == []
    write(folder / "one", b"first")
    write(folder / "one", b"second")
    assert read_bounded(folder / "one", 100) == b"second"
    assert [entry.name for entry in calls.entries(folder)] == ["one"]
    status = calls.status(folder / "one")
    assert (status.st_mode & 0o777, status.st_size) == (0o600, 6)
    assert status.st_mtime_ns <= disk.clock.time_ns()
    with pytest.raises(FileExistsError):
        calls.make_folder(folder / "one")
    calls.delete(folder / "one")
    assert not calls.exists(folder / "one") and not disk.open_files


def test_paths_of_the_real_disk_stay_there(disk: Disk, tmp_path: Path):
    write(tmp_path / "file", b"real")
    assert (tmp_path / "file").read_bytes() == b"real"
    assert read_bounded(tmp_path / "file", 10) == b"real"
    assert not disk.files


def test_an_output_file_is_written_and_keeps_the_mode_of_the_former(disk: Disk):
    path = disk.root / "out"
    for content in (b"a", b"b" * 20_000):
        with OutputFile(path, is_private=True) as file:
            file.write(content)
    assert read_bounded(path, 1 << 20) == b"b" * 20_000
    assert calls.status(path).st_mode & 0o777 == 0o600


def test_a_number_is_given_again_once_its_file_is_gone(disk: Disk):
    write(disk.root / "one", b"1")
    number = calls.status(disk.root / "one").st_ino
    calls.delete(disk.root / "one")
    write(disk.root / "two", b"2")
    assert calls.status(disk.root / "two").st_ino == number


def test_a_kill_at_any_operation_leaves_the_former_file_or_the_new_one(disk: Disk):
    path, outcomes = disk.root / "file", set()
    for after in range(12):
        disk.restart(power_cut=False)
        write(path, b"former")
        disk.kill_after(after)
        try:
            write(path, b"new")
        except Killed:
            with pytest.raises(Killed):
                calls.status(path)
            outcomes.add("killed")
        disk.restart(power_cut=False)
        outcomes.add(read_bounded(path, 10).decode())
    assert outcomes == {"killed", "former", "new"}


def test_a_lock_is_released_by_the_end_of_its_process(disk: Disk):
    other = disk.start_process("other")
    with disk.running(other):
        theirs = calls.open_lock(disk.root / "lock")
        assert calls.try_lock(theirs)
    with calls.open_lock(disk.root / "lock") as lock:
        assert not calls.try_lock(lock)
        disk.end(other)
        assert calls.try_lock(lock)
    del theirs


def after_power_cuts(disk: Disk, name: str) -> set[bytes | None]:
    """What many power cuts leave of a file."""
    state, found = disk.snapshot(), set()
    for _ in range(200):
        disk.restore(state)
        disk.restart(power_cut=True)
        found.add(disk.files.get(f"{disk.root}/{name}"))
    disk.restore(state)
    return found


def test_a_power_cut_tears_and_loses_what_was_not_synced(disk: Disk):
    write(disk.root / "file", bytes([1]) * 200)
    found = after_power_cuts(disk, "file")
    assert {None, b"", bytes([1]) * 200} < found and len(found) > 5


def test_a_power_cut_keeps_a_file_that_was_synced_with_its_folder(disk: Disk):
    def synced(file: object, content: bytes) -> None:
        write_all(file, content)  # type: ignore[arg-type]
        calls.sync(file)  # type: ignore[arg-type]

    write_atomically(disk.root / "file", partial(synced, content=b"former"))
    calls.sync_folder(disk.root)
    assert after_power_cuts(disk, "file") == {b"former"}
    write_atomically(disk.root / "file", partial(synced, content=b"new"))
    assert after_power_cuts(disk, "file") == {b"former", b"new"}
    calls.sync_folder(disk.root)
    assert after_power_cuts(disk, "file") == {b"new"}


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("torn_write", None),
        ("bit_flip", None),
        ("short_read", None),
        ("full_disk", "No space"),
        ("permission_lost", "Permission"),
        ("failed_read", "Input/output"),
        ("failed_sync", "Input/output"),
    ],
)
def test_faults_are_errors_or_other_bytes(disk: Disk, fault: str, error: str | None):
    write(disk.root / "file", bytes(100))
    setattr(disk.faults, fault, 1.0 if error else 0.5)
    outcomes = set()
    for _ in range(40):
        try:
            with calls.create(disk.root / f"new-{len(outcomes)}-{_}", 0o600) as file:
                write_all(file, bytes(100))
                calls.sync(file)
            outcomes.add(read_bounded(disk.root / "file", 100))
        except OSError as found:
            outcomes.add(str(found))
    if error is None:
        assert bytes(100) in outcomes
        assert len(outcomes) > (fault != "short_read")
    else:
        assert all(isinstance(outcome, str) and error in outcome for outcome in outcomes)


def test_a_disk_without_room_refuses(disk: Disk):
    disk.capacity = 150
    write(disk.root / "one", bytes(100))
    with pytest.raises(OSError, match="No space left"):
        write(disk.root / "two", bytes(100))
    assert list(disk.files) == [f"{disk.root}/one"]


def test_a_file_that_nobody_closes_is_named(disk: Disk):
    file = calls.open_lock(disk.root / "lock")
    assert disk.open_files == [f"{disk.root}/lock"]
    del file
    assert disk.forgotten == [f"{disk.root}/lock"] and not disk.open_files
    disk.forgotten.clear()
