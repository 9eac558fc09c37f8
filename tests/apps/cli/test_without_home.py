"""A user without a home folder, or with one that cannot be written, gets every answer and a line of what it costs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from localinfer.errors import RequestError
from localinfer.kernels.jit import object_cache
from localinfer.system.folders import expand_home, temporary_folder, user_folder
from tests.kernels.subprocesses import REPOSITORY, environment
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython, run_copy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems keep users' folders in other ways")

NOBODY = """
import pwd, sys
def unknown(key): raise KeyError(key)
pwd.getpwuid = pwd.getpwnam = unknown
from localinfer.apps.cli import main
"""
"""Of a user whom the user database does not know."""
EACH = """
import json, os, tempfile
every, kept, done = json.load(sys.stdin), os.dup(1), {}
sys.stdin = open(os.devnull)
for words in every:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        code = main(words)
        sys.stdout.flush()
        done[words[0]] = code, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in (output, errors))
os.dup2(kept, 1)
json.dump(done, sys.stdout)
"""
"""Several commands one after the other, each as if it were the first: importing takes the most of their time."""
HOMES = {"none": None, "empty": "", "relative": "home", "not there": "/proc/nowhere", "a file": "/dev/null"}
DEMO = str(REPOSITORY / "models" / "demo" / "demo-f16.gguf")
QUIET = [["--version"], ["chat", "--help"], ["tokenize", "--ids", "Hi"], ["show", DEMO]]


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where temporary files go, with the kernels that are compiled already: compiling is not what is tested here."""
    folder = tmp_path_factory.mktemp("temporary")
    words = [sys.executable, "-m", "localinfer", "run", "-p", "Once", "-n", "2", "--threads", "1", "--no-disk-cache"]
    done = run_copy(words, env=environment(), timeout=seconds(57.5))
    assert done.returncode == 0, done.stderr
    compiled = object_cache.cache_folder()
    if compiled is not None:
        kernels = folder / f"localinfer-{os.getuid()}" / "kernels" / compiled.name
        kernels.parent.mkdir(mode=0o700, parents=True)
        shutil.copytree(compiled, kernels)
        for path in (kernels, *kernels.parents[:2]):
            path.chmod(0o700)
    return folder


def settings(home: str | None, temporary: Path) -> dict[str, str]:
    kept = {name: value for name, value in environment().items() if name != "HOME" and not name.startswith("XDG_")}
    return kept | {"TMPDIR": str(temporary)} | ({} if home is None else {"HOME": home})


@pytest.fixture(scope="module", params=HOMES.values(), ids=HOMES.keys())
def done(
    request: pytest.FixtureRequest, temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of each command, run in an empty folder, in which they must leave nothing."""
    folder = tmp_path_factory.mktemp("empty")
    ended = run_copy(
        [sys.executable, "-c", NOBODY + EACH],
        cwd=folder,
        env=settings(request.param, temporary),
        input=json.dumps([*QUIET, ["cache"], ["run", "-p", "Once", "-n", "2", "--threads", "1"]]),
        timeout=seconds(50),
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert not list(folder.iterdir())
    return json.loads(ended.stdout)


def test_run_answers_and_says_what_is_not_kept_where_it_belongs(done) -> None:
    code, output, errors = done["run"]
    assert code == 0 and output.strip()
    assert errors.count("compiled kernels are kept in") == 1
    has_home = "not cached on disk" in errors
    assert has_home != ("no home folder" in errors and "nothing else is cached" in errors)
    assert len(errors.splitlines()) == 1 + has_home


def test_commands_that_keep_nothing_do_their_work(done) -> None:
    for name, *_ in QUIET:
        code, output, errors = done[name]
        assert code == 0 and output, name
        assert len(errors.splitlines()) <= 1, errors


def test_cache_says_where_it_is_or_that_there_is_none(done) -> None:
    code, output, errors = done["cache"]
    assert (code, "0 bytes" in output) == (0, True) or (code == 2 and "--disk-cache-folder" in errors)


def test_serve_starts_for_a_user_that_the_system_does_not_know(temporary: Path, tmp_path: Path) -> None:
    program = f"{NOBODY}sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "serve", "--port", "0", "--threads", "1"]
    pipe = subprocess.PIPE
    streams = {"stdout": pipe, "stderr": subprocess.STDOUT}
    with WarmPython(words, cwd=tmp_path, env=settings(None, temporary), text=True, **streams) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("serving"):
                break
        server.send_signal(signal.SIGINT)
        lines += server.stdout.readlines()
    assert any(line.startswith("serving") for line in lines), lines
    assert "Traceback" not in "".join(lines)


def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(key: object) -> None:
        raise KeyError(key)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.mark.parametrize("home", [None, "", "home"])
@pytest.mark.parametrize("path", ["~", "~/model.gguf", "~nobody-at-all/model.gguf"])
def test_a_path_in_a_home_that_is_not_known_is_refused(
    home: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown_user(monkeypatch)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(RequestError, match="give the whole path"):
        expand_home(path)
    assert expand_home("./~/model.gguf") == Path("./~/model.gguf")


@pytest.mark.parametrize("kind", ["cache", "state", "config", "data"])
@pytest.mark.parametrize("home", ["/home/me", "/"])
@pytest.mark.parametrize("variable", [None, "", "/else/where"])
def test_folders_are_where_other_programs_of_this_system_expect_them(
    kind, home: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv(f"XDG_{kind.upper()}_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", variable)
    assert str(user_folder(kind)) == getattr(platformdirs, f"user_{kind}_dir")("localinfer", appauthor=False)


@pytest.mark.parametrize(
    ("kind", "folder"),
    [("cache", ".cache"), ("state", ".local/state"), ("config", ".config"), ("data", ".local/share")],
)
@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="these systems have folders of their own")
def test_each_kind_has_its_own_folder_and_none_without_a_home(
    kind, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(f"XDG_{kind.upper()}_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert user_folder(kind) == Path("/home/me") / folder / "localinfer"
    monkeypatch.setenv("HOME", "")
    assert user_folder(kind) is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o755])
def test_a_temporary_folder_counts_only_where_nobody_else_can_rename_what_is_in_it(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    (shared / "inside").mkdir(parents=True)
    shared.chmod(mode)
    is_safe = mode in (0o1777, 0o755)
    for folder in (shared, shared / "inside"):
        monkeypatch.setattr("tempfile.gettempdir", lambda folder=folder: str(folder))
        found = temporary_folder()
        assert (found is not None) == is_safe
        assert found is None or found.parent == folder.resolve()
