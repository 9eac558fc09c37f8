"""Windows, as near as another system comes: everything is imported and the main commands run without what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localinfer.storage.hub.places import blob_path, lock_path, pointer_path, set_main, snapshots
from localinfer.storage.hub.variants import Repository, StoredFile, is_safe_path
from localinfer.system import disk
from localinfer.system.windows import extended_path, refused_name, starting_process

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="open files are found in /proc")
def test_everything_is_imported_and_runs_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_DATA_HOME": str(tmp_path / "data")}
    words = [sys.executable, "-m", "tests.apps.cli.as_on_windows", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
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


def test_room_for_what_follows_counts_as_part_of_a_path() -> None:
    short = "C:\\" + "\\".join(["folder"] * 10)
    assert extended_path(short) == extended_path(short, 247 - len(short)) == short
    assert extended_path(short, 248 - len(short)) == f"\\\\?\\{short}"


def test_all_of_the_hubs_cache_is_below_folders_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, prefixed = tmp_path / "cache", tmp_path / "prefixed"
    cache.mkdir()
    prefixed.symlink_to(cache)
    monkeypatch.setattr(
        disk, "path_with_room", lambda path, room: str(path).replace(str(cache), str(prefixed)) if room > 100 else path
    )
    file = StoredFile("folder/model.gguf", 3, sha256="0" * 64)
    repository = Repository("org/repo", "c" * 40, (file,))
    for path_of in (blob_path, pointer_path, lock_path):
        path = path_of(cache, repository, file)
        assert path.is_relative_to(prefixed)
        path.parent.mkdir(parents=True)
    set_main(cache, repository)
    assert list(snapshots(cache)) == [("org/repo", prefixed / "models--org--repo" / "snapshots" / ("c" * 40))]


VENV, BASE = "C:\\app\\venv\\Scripts", "C:\\Python311"


@pytest.mark.parametrize(
    ("above", "executable", "image", "script", "wanted"),
    [
        pytest.param([f"{BASE}\\python.exe"], f"{BASE}\\python.exe", f"{BASE}\\python.exe", "m.py", 0, id="a Python"),
        pytest.param(
            [f"{VENV}\\Python.exe", "C:\\app\\app.exe"],
            *(f"{VENV}\\python.exe", f"{BASE}\\python.exe", "m.py", 1),
            id="an environment's Python",
        ),
        pytest.param(
            [f"{VENV}\\python.exe", f"{BASE}\\python.exe", f"{VENV}\\python.exe", "C:\\Windows\\explorer.exe"],
            *(f"{VENV}\\python.exe", f"{BASE}\\python.exe", "m.py", 1),
            id="an application of the same environment",
        ),
        pytest.param(
            [f"{VENV}\\python.exe", f"{VENV}\\localinfer.exe", "C:\\app\\app.exe"],
            *(f"{VENV}\\python.exe", f"{BASE}\\python.exe", f"{VENV}\\localinfer", 2),
            id="a command of an environment",
        ),
        pytest.param(
            [f"{VENV}\\python.exe", "C:\\Users\\me\\.local\\bin\\LocalInfer.exe", "C:\\app\\app.exe"],
            *(f"{VENV}\\python.exe", f"{BASE}\\python.exe", "C:/Users/me/.local/bin/localinfer.exe", 2),
            id="a copied command",
        ),
        pytest.param(
            [f"{BASE}\\Scripts\\localinfer.exe", "C:\\app\\localinfer.exe"],
            *(f"{BASE}\\python.exe", f"{BASE}\\python.exe", f"{BASE}\\Scripts\\localinfer-script.py", 1),
            id="a command of a Python",
        ),
        pytest.param(
            ["C:\\Windows\\py.exe", "C:\\Windows\\System32\\cmd.exe"],
            *(f"{BASE}\\python.exe", f"{BASE}\\python.exe", "m.py", 1),
            id="py",
        ),
        pytest.param([f"{VENV}\\python.exe"], f"{VENV}\\python.exe", f"{BASE}\\python.exe", "m.py", None, id="ended"),
        pytest.param([None, "C:\\x.exe"], f"{VENV}\\python.exe", f"{BASE}\\python.exe", "m.py", 0, id="another user's"),
    ],
)
def test_the_process_that_is_watched_is_above_all_launchers(
    above: list[str | None],
    executable: str,
    image: str,
    script: str,
    wanted: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Process:
        def __init__(self, index: int = -1) -> None:
            self.index, self.pid = index, 100 + index

        def exe(self) -> str:
            path = image if self.index < 0 else above[self.index]
            if path is None:
                raise psutil.AccessDenied
            return path

        def parent(self) -> "Process | None":
            return Process(self.index + 1) if self.index + 1 < len(above) else None

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "argv", [script])
    assert starting_process() == (0 if wanted is None else 100 + wanted)
