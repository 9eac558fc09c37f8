"""Windows, as near as another system comes: everything is imported and the main commands run without what it lacks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localinfer.storage.hub.variants import is_safe_path
from localinfer.system import disk, files
from localinfer.system.files import OutputFile
from localinfer.system.windows import extended_path, refused_name

SCRIPT = Path(__file__).with_name("as_on_windows.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are found in /proc")
def test_everything_is_imported_and_runs_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_DATA_HOME": str(tmp_path / "data")}
    repository = SCRIPT.parents[3]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, env=environment, cwd=repository
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("imports") == {}
    assert found.pop("refused") == []
    assert {name: one["failed"] for name, one in found.items() if isinstance(one, dict)} == {}
    assert found["run"] and found["show"] and found["run of a pipe"]


@pytest.mark.parametrize(
    "name",
    [
        "CON",
        "nul",
        "aux.gguf",
        "COM1.txt",
        "lpt9 .x",
        "a:b",
        "a?b",
        "a*b",
        'a"b',
        "a<b",
        "a|b",
        "a\n",
        "dot.",
        "end ",
    ],
)
def test_names_that_windows_keeps_are_told(name: str) -> None:
    assert refused_name(name) is not None and not is_safe_path(f"folder/{name}")


@pytest.mark.parametrize(
    "name", ["model-q4.gguf", "console", "null.txt", "COM10", "auxiliary", ".hidden", "..", "日本"]
)
def test_other_names_are_taken(name: str) -> None:
    assert refused_name(name) is None


def test_long_paths_get_the_prefix_that_allows_them() -> None:
    long = "\\".join(["folder"] * 50)
    assert extended_path(f"C:\\{long}") == f"\\\\?\\C:\\{long}"
    assert extended_path(f"C:/{long.replace(chr(92), '/')}/../x") == f"\\\\?\\C:\\{long.removesuffix('folder')}x"
    assert extended_path(f"\\\\server\\share\\{long}") == f"\\\\?\\UNC\\server\\share\\{long}"
    for text in (f"\\\\?\\C:\\{long}", "C:\\short", "\\\\.\\NUL", "beside.txt"):
        assert extended_path(text) == text


def test_what_killed_writers_left_is_deleted_after_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_RENAMES_OPEN_FILES", False)
    target, is_open = tmp_path / "out", []
    for _ in range(2):
        with OutputFile(target) as file:
            file.write(b"whole")
            (unfinished,) = tmp_path.glob(".*.tmp")
    unfinished.write_bytes(b"half")
    open_lock, delete = disk.open_lock, disk.delete

    def opened(path: disk.AnyPath) -> disk.FileIO:
        is_open.append(open_lock(path))
        return is_open[-1]

    def refuse_open(path: disk.AnyPath) -> None:
        if not all(file.closed for file in is_open):
            raise PermissionError(errno.EACCES, "the file is in use by a process")
        delete(path)

    monkeypatch.setattr(disk, "open_lock", opened)
    monkeypatch.setattr(disk, "delete", refuse_open)
    with OutputFile(target) as file:
        file.write(b"new")
        assert not unfinished.exists()
    assert is_open and target.read_bytes() == b"new" and list(tmp_path.iterdir()) == [target]
