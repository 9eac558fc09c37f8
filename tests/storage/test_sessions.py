"""A conversation as one file: it comes back whole, or is refused with an error that says why."""

import errno
import io
import json
import os
import stat
import struct
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import SessionFileError, SessionMismatchError
from localinfer.storage.page_store import PageFormat, checksum
from localinfer.storage.sessions import FORMAT_VERSION, SessionContent, SessionReader, write_session
from localinfer.system import disk
from tests.storage.damage import full_disk_after
from tests.storage.disk_pages import PAGE_BYTES, PAGE_TOKENS, computed, fresh, numbered

FORM = PageFormat(PAGE_TOKENS, PAGE_BYTES)
PARTS = {"weights": "abc", "tokenizer": "def"}


def saved(path: Path, length: int = 50) -> bytes:
    """Save a session and return the file's content."""
    history = numbered(length)
    num_bytes = write_session(path, SessionContent(PARTS, history, FORM), computed(history))
    content = path.read_bytes()
    assert len(content) == num_bytes
    return content


def loaded(path: Path) -> list[memoryview]:
    with SessionReader(path) as session:
        session.check_fingerprint(PARTS)
        pages = fresh(session.content.num_pages)
        session.read_pages(pages)
        return pages


@pytest.mark.parametrize("length", [1, 4, 5, 50, 163])
def test_session_comes_back_byte_for_byte(tmp_path: Path, length: int):
    saved(tmp_path / "session", length)
    assert loaded(tmp_path / "session") == computed(numbered(length))
    with SessionReader(tmp_path / "session") as session:
        np.testing.assert_array_equal(session.content.token_ids, numbered(length))
        assert session.content.form == FORM and session.content.fingerprint == PARTS


def test_contents_of_short_pictures_come_back_and_others_are_read_without(tmp_path: Path):
    contents, path = {-5: (b"picture", 0), -9: (b"picture", 1)}, tmp_path / "session"
    history = np.array([1, -5, -9, 2], np.int32)
    write_session(path, SessionContent(PARTS, history, FORM, contents=contents), computed(history))
    with SessionReader(path) as session:
        assert session.content.contents == contents
    saved(path)
    assert b"contents" not in path.read_bytes()
    with SessionReader(path) as session:
        assert not session.content.contents


@pytest.mark.skipif(sys.platform == "win32", reason="modes mean something else there")
def test_file_is_readable_by_its_owner_only(tmp_path: Path):
    saved(tmp_path / "session")
    assert stat.S_IMODE((tmp_path / "session").stat().st_mode) == 0o600


def test_one_byte_changed_anywhere_is_refused(tmp_path: Path):
    path = tmp_path / "session"
    content = saved(path, 6)
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1 << offset % 8]) + content[offset + 1 :])
        with pytest.raises(SessionFileError, match="session"):
            loaded(path)


def test_file_cut_or_grown_anywhere_is_refused(tmp_path: Path):
    path = tmp_path / "session"
    content = saved(path, 6)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(SessionFileError, match="damaged"):
            loaded(path)
    path.write_bytes(content + b"x")
    with pytest.raises(SessionFileError, match="bytes where"):
        loaded(path)


def test_foreign_fingerprint_is_refused_and_what_differs_is_named(tmp_path: Path):
    saved(tmp_path / "session")
    with SessionReader(tmp_path / "session") as session:
        with pytest.raises(SessionMismatchError, match=r"weights: abc in the file, xyz here\); load the model"):
            session.check_fingerprint({**PARTS, "weights": "xyz"})
        with pytest.raises(SessionMismatchError, match=r"tokenizer: def in the file, not named here"):
            session.check_fingerprint({"weights": "abc"})


def forged(fields: object) -> bytes:
    """A file whose description is anything, with the right checksum."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    start = struct.pack("<8sIQ", b"LOCALSES", FORMAT_VERSION, len(text)) + text
    return start + checksum(start)


GOOD = {
    "fingerprint": PARTS,
    "token_ids": [1],
    "page_tokens": 4,
    "page_bytes": 192,
    "windowed_bytes": 64,
    "num_windowed": 1,
}
HOSTILE: dict[str, bytes] = {
    "no JSON": forged(b"\xff{"),
    "deep JSON": forged(b"[" * 100_000),
    "no object": forged([]),
    "missing field": forged({"token_ids": [1]}),
    "no tokens": forged({**GOOD, "token_ids": []}),
    "text as tokens": forged({**GOOD, "token_ids": "123"}),
    "huge token": forged({**GOOD, "token_ids": [2**40]}),
    "fractional token": forged({**GOOD, "token_ids": [1.5]}),
    "negative token": forged({**GOOD, "token_ids": [-1]}),
    "bool token": forged({**GOOD, "token_ids": [True]}),
    "no room": forged({**GOOD, "page_tokens": 0}),
    "huge page": forged({**GOOD, "page_bytes": 2**60}),
    "more windowed parts than pages": forged({**GOOD, "num_windowed": 2}),
    "more pages than bytes": forged({**GOOD, "token_ids": [1] * 1000, "page_tokens": 1}),
    "number in the fingerprint": forged({**GOOD, "fingerprint": {"weights": 1}}),
    "contents that are no list": forged({**GOOD, "state_bytes": 0, "positions": [], "contents": 3}),
    "contents that are no digest": forged({**GOOD, "state_bytes": 0, "positions": [], "contents": [[1, "x", 0]]}),
    "JSON longer than the file": struct.pack("<8sIQ", b"LOCALSES", FORMAT_VERSION, 2**62),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_description_is_refused(tmp_path: Path, name: str):
    (tmp_path / "session").write_bytes(HOSTILE[name])
    with pytest.raises(SessionFileError, match="damaged"):
        SessionReader(tmp_path / "session")


def test_newer_format_and_other_files_are_refused(tmp_path: Path):
    (tmp_path / "newer").write_bytes(struct.pack("<8sIQ", b"LOCALSES", FORMAT_VERSION + 1, 2) + b"{}")
    with pytest.raises(SessionMismatchError, match=f"format {FORMAT_VERSION + 1}"):
        SessionReader(tmp_path / "newer")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SessionFileError, match="not a saved session"):
        SessionReader(tmp_path / "model.gguf")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SessionFileError, match="not a regular file"):
        SessionReader(tmp_path / "folder")
    with pytest.raises(SessionFileError, match="does not exist"):
        SessionReader(tmp_path / "nothing")


class Counting(FileIO):
    """A file that lets somebody count what is written to it."""

    on_write: Callable[[], object] = staticmethod(lambda: None)

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        type(self).on_write()
        return super().write(data)


STEPS: dict[str, tuple[object, str]] = {
    "temporary file": (disk.os, "open"),
    "write": (Counting, "on_write"),
    "flush to disk": (disk.os, "fsync"),
    "rename": (disk.os, "replace"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_full_disk_while_saving_keeps_the_former_file_and_leaves_no_rest(
    tmp_path: Path, step: str, after: int, monkeypatch: pytest.MonkeyPatch
):
    owner, name = STEPS[step]
    if after and step != "write":
        pytest.skip("happens once")
    former = saved(tmp_path / "session", 3)

    with monkeypatch.context() as patch, pytest.raises(SessionFileError, match="No space left on device"):
        patch.setattr(disk, "FileIO", Counting)
        # Unbuffered, so that each write counts.
        patch.setattr(io, "BufferedWriter", lambda raw: raw)
        patch.setattr(owner, name, full_disk_after(after, getattr(owner, name)))
        saved(tmp_path / "session")
    assert (tmp_path / "session").read_bytes() == former
    assert os.listdir(tmp_path) == ["session"]


def test_missing_folder_and_folder_as_path_are_refused(tmp_path: Path):
    with pytest.raises(SessionFileError, match="cannot be written"):
        saved(tmp_path / "no" / "session")
    with pytest.raises(SessionFileError, match="cannot be written"):
        saved(tmp_path)


@pytest.mark.parametrize("after", range(6))
def test_failure_of_any_read_is_an_error_that_says_so(tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path / "session", 8)
    calls = 0

    class Failing(FileIO):
        def readinto(self, data: memoryview) -> int:  # type: ignore[override]
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(errno.EIO, "I/O error")
            return super().readinto(data)

    monkeypatch.setattr(disk, "FileIO", Failing)
    with pytest.raises(SessionFileError, match="cannot be read: I/O error"):
        loaded(tmp_path / "session")


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read_is_an_error(tmp_path: Path):
    saved(tmp_path / "session")
    (tmp_path / "session").chmod(0)
    with pytest.raises(SessionFileError, match="cannot be read"):
        loaded(tmp_path / "session")
