"""What writers leave that are killed in the midst of a file, and who deletes it."""

import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from localinfer.errors import RequestError
from localinfer.quant.pipeline.quantize import PartialResults
from localinfer.storage.conversations import ConversationStore, SavedConversation
from localinfer.storage.hub.places import set_main
from localinfer.storage.hub.variants import Repository
from localinfer.system.files import OutputFile, delete_abandoned, write_atomically
from tests.kernels.subprocesses import start

fcntl = pytest.importorskip("fcntl", reason="locks as on Unix")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is killed there as on Unix")

_KILLED = """
import os, signal
from localinfer.system.files import OutputFile
with OutputFile({path!r}) as file:
    file.write(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""
_LEFT = ".0123456789ab.tmp"
_HOURS_AGO = 1_000_000_000


def kill_writer(path: Path) -> None:
    process = start(_KILLED.format(path=str(path)))
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_next_writer_of_an_output_deletes_what_killed_ones_left(tmp_path: Path) -> None:
    kill_writer(tmp_path / "model.gguf")
    kill_writer(tmp_path / "model.gguf")
    kill_writer(tmp_path / "other.gguf")
    (tmp_path / _LEFT).touch()
    with OutputFile(tmp_path / "model.gguf") as file:
        file.write(b"whole")
    left = [name for name in names(tmp_path) if name != _LEFT]
    assert len(left) == 2 and "model.gguf" in left, "what other outputs may still be written to stays"
    with OutputFile(tmp_path / "other.gguf") as file:
        file.write(b"whole")
    assert names(tmp_path) == sorted([_LEFT, "model.gguf", "other.gguf"])


def test_writers_of_one_output_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with OutputFile(path) as first:
        first.write(b"first")
        with OutputFile(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first" and names(tmp_path) == ["model.gguf"]


def test_nothing_is_taken_for_abandoned_where_the_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with OutputFile(tmp_path / "model.gguf") as first:
        first.write(b"first")
        with OutputFile(tmp_path / "model.gguf") as second:
            second.write(b"second")
    assert (tmp_path / "model.gguf").read_bytes() == b"first" and names(tmp_path) == ["model.gguf"]


def test_only_old_unfinished_files_are_abandoned(tmp_path: Path) -> None:
    for name in (_LEFT, ".ba9876543210.tmp", "notes.tmp"):
        (tmp_path / name).touch()
    for name in (_LEFT, "notes.tmp"):
        os.utime(tmp_path / name, (_HOURS_AGO, _HOURS_AGO))
    delete_abandoned(tmp_path)
    assert names(tmp_path) == [".ba9876543210.tmp", "notes.tmp"]
    delete_abandoned(tmp_path / "missing")


def test_every_change_of_saved_conversations_deletes_what_killed_ones_left(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "conversations")
    store.save(SavedConversation.begin("demo", name="one").with_turns([{"role": "user", "content": "hi"}], system=None))
    for change in (
        lambda: ConversationStore(store.folder).rename("one", "two"),
        lambda: ConversationStore(store.folder).delete("two"),
    ):
        (store.folder / _LEFT).touch()
        change()
        assert _LEFT not in names(store.folder)


def test_calibration_killed_in_its_first_file_does_not_block_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "target.gguf.partial"
    folder.mkdir()
    (folder / _LEFT).touch()
    results = PartialResults(folder, "identity")
    assert results.load() is None
    results.save(1, {}, [])
    assert _LEFT not in names(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(RequestError, match="holds something else"):
        PartialResults(tmp_path / "mine", "identity")


def test_reference_that_a_killed_pull_began_is_deleted(tmp_path: Path) -> None:
    repository = Repository("org/name", "c0ffee", ())
    set_main(tmp_path, repository)
    refs = tmp_path / "models--org--name" / "refs"
    write_atomically(refs / _LEFT, lambda file: None)
    os.utime(refs / _LEFT, (_HOURS_AGO, _HOURS_AGO))
    set_main(tmp_path, repository)
    assert names(refs) == ["main"]
