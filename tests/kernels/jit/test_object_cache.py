"""The cache of compiled kernels: private, keyed by all that a kernel depends on, hit by the next process, optional."""

import hashlib
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest

from localinfer.errors import RequestError
from localinfer.kernels.jit import isa, object_cache
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.jit.numba import compile_kernel
from localinfer.kernels.jit.object_cache import note_use
from localinfer.kernels.versions import digests_of
from localinfer.system.folders import set_cache_folder, user_folder
from tests.kernels.subprocesses import REPOSITORY, finish, run, run_in_copy, start
from tests.support.warm_python import WarmPython

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps modes and owners another way")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the cache folder cannot be moved by a variable")

FOLDER = "from localinfer.kernels.jit import object_cache; print(object_cache.cache_folder())"
COMPILE = """
import sys
from localinfer.kernels.jit import object_cache
assert object_cache.Kernel("elementwise.scale").address
print(object_cache.cache_folder())
"""


def cached_files(folder: Path) -> dict[str, int]:
    """Object files with the time each was last written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.o")}


@LINUX
def test_the_next_process_hits_the_cache_in_a_private_folder_and_never_imports_numba(tmp_path: Path) -> None:
    code = COMPILE + "print('numba' in sys.modules)"
    name, has_numba = run(code, XDG_CACHE_HOME=str(tmp_path))[0].split("\n")
    folder = Path(name)
    first = cached_files(folder)
    assert folder.parent == tmp_path / "localinfer" / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert set(first) == {"elementwise.scale.o"} and has_numba == "True"
    assert run(code, XDG_CACHE_HOME=str(tmp_path)) == (f"{folder}\nFalse", "")
    assert cached_files(folder) == first


@LINUX
def test_the_folder_of_the_variable_or_of_the_application_keeps_them_instead(tmp_path: Path) -> None:
    places = {"XDG_CACHE_HOME": str(tmp_path / "user's"), "LOCALINFER_CACHE": str(tmp_path / "of variable")}
    assert Path(run_in_copy(FOLDER, **places)[0]).parent == tmp_path / "of variable" / "kernels"
    chosen = f"import localinfer; localinfer.set_cache_folder({str(tmp_path / 'ä b')!r})\n"
    assert Path(run_in_copy(chosen + FOLDER, **places)[0]).parent == tmp_path / "ä b" / "kernels"
    assert {path.name for path in tmp_path.iterdir()} == {"of variable", "ä b"}


def test_the_folder_may_be_chosen_again_and_given_back(tmp_path: Path) -> None:
    usual = object_cache.cache_folder()
    try:
        for name in ("one", "other"):
            set_cache_folder(tmp_path / name)
            found = object_cache.cache_folder()
            assert found is not None and found.parent == tmp_path / name / "kernels"
            assert user_folder("cache") == tmp_path / name
    finally:
        set_cache_folder(None)
    assert object_cache.cache_folder() == usual
    for wrong in ("", 5, b"bytes"):
        with pytest.raises(RequestError, match="give the path of a folder"):
            set_cache_folder(wrong)


def test_keys_that_nobody_used_for_long_are_removed_and_no_others(tmp_path: Path) -> None:
    long_ago = time.time() - object_cache.KEPT_SECONDS - 60
    for name in ("unused", "used", "young", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.o").touch()
    (tmp_path / "used" / "last-used").touch()
    for name in ("unused", "used", "mine"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    note_use(tmp_path / "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"used", "young", "mine"}
    assert time.time() - (tmp_path / "mine" / "last-used").stat().st_mtime < object_cache.NOTED_SECONDS
    # Others are looked at once a day.
    os.utime(tmp_path / "used" / "last-used", (long_ago, long_ago))
    note_use(tmp_path / "mine")
    assert (tmp_path / "used").exists()
    os.utime(tmp_path / "mine" / "last-used", (long_ago, long_ago))
    note_use(tmp_path / "mine")
    assert not (tmp_path / "used").exists()


@LINUX
def test_processes_that_compile_at_the_same_time_all_succeed(tmp_path: Path) -> None:
    processes = [start(COMPILE, kind=WarmPython, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    folders = {finish(process) for process in processes}
    assert len(folders) == 1
    assert cached_files(Path(folders.pop()[0]))


@LINUX
def test_without_a_cache_folder_kernels_compile_and_one_warning_says_so(tmp_path: Path) -> None:
    blocked, temporary = tmp_path / "file", tmp_path / "anybody's"
    blocked.touch()
    temporary.mkdir()
    temporary.chmod(0o777)
    output, errors = run_in_copy(COMPILE, XDG_CACHE_HOME=str(blocked), TMPDIR=str(temporary))
    assert output == "None"
    assert errors.count("RuntimeWarning") == 1
    assert str(blocked) in errors and "kernels are compiled at every start" in errors
    assert blocked.read_bytes() == b""
    assert not list(temporary.iterdir())


@LINUX
def test_without_a_cache_folder_a_temporary_one_keeps_kernels_and_one_warning_says_so(tmp_path: Path) -> None:
    settings = {"XDG_CACHE_HOME": "/proc/nowhere", "TMPDIR": str(tmp_path)}
    output, errors = run_in_copy(COMPILE, **settings)
    folder = tmp_path / f"localinfer-{os.getuid()}"
    assert Path(output).parent == folder / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(Path(output).stat().st_mode) == 0o700
    assert errors.count("RuntimeWarning") == 1
    assert "/proc/nowhere" in errors and str(folder) in errors
    first = cached_files(Path(output))
    assert first and run_in_copy(COMPILE, **settings)[0] == output
    assert cached_files(Path(output)) == first


@LINUX
@pytest.mark.parametrize("planted", ["open to all", "link", "file"])
def test_a_planted_temporary_folder_is_not_used(tmp_path: Path, planted: str) -> None:
    folder = tmp_path / f"localinfer-{os.getuid()}"
    if planted == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    output, errors = run_in_copy(FOLDER, XDG_CACHE_HOME="/proc/nowhere", TMPDIR=str(tmp_path))
    assert output == "None" and errors.count("RuntimeWarning") == 1
    assert sorted(tmp_path.rglob("*")) == sorted({folder, *([tmp_path / "real"] if planted == "link" else [])})


@LINUX
def test_nothing_is_written_beside_the_installed_sources(tmp_path: Path) -> None:
    package = tmp_path / "site" / "localinfer"
    shutil.copytree(REPOSITORY / "localinfer", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [package.parent, *package.parent.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(package.rglob("*"))
    settings = {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for _ in range(2):
            code = COMPILE + "print(object_cache.__file__)"
            output, errors = run(code, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), **settings)
            folder, file = output.split("\n")
            assert errors == ""
            assert Path(file) == package / "kernels" / "jit" / "object_cache.py"
            assert cached_files(Path(folder))
        assert sorted(package.rglob("*")) == before
    finally:
        for path in [package.parent, *package.parent.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_the_key_changes_with_any_source_even_one_that_only_others_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(REPOSITORY / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(object_cache, "source_digests", lambda package: digests_of(package, tmp_path / package))
    keys = {object_cache.cache_key()}
    for name in ("cpu/compiled/emit.py", "cpu/layouts.py", "ops.py"):
        with (tmp_path / "kernels" / name).open("a") as file:
            file.write("# changed\n")
        keys.add(object_cache.cache_key())
    sources = tmp_path / "kernels" / "cpu" / "compiled"
    (sources / "emit.py").rename(sources / "lines.py")
    keys.add(object_cache.cache_key())
    assert len(keys) == 5


def test_the_key_is_the_same_wherever_the_sources_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = object_cache.cache_key()
    shutil.copytree(REPOSITORY / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(object_cache, "source_digests", lambda package: digests_of(package, tmp_path / package))
    assert object_cache.cache_key() == wanted


def test_the_key_changes_with_the_instruction_set_and_with_numbas_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for path in ISA:
        monkeypatch.setattr(isa, "SELECTED", path)
        keys.add(object_cache.cache_key())
    assert len(keys) == len(ISA)
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT", "NUMBA_ENABLE_AVX"):
        monkeypatch.setenv(name, "1")
        keys.add(object_cache.cache_key())
    assert len(keys) == len(ISA) + 4
    monkeypatch.setattr(object_cache, "installed_version", lambda package: f"another {package}")
    keys.add(object_cache.cache_key())
    assert len(keys) == len(ISA) + 5 and "another localinfer" in str(object_cache.cache_key())


def test_both_guard_modes_have_the_key_of_kernels_that_check_alignments(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {}
    for mode in ("", "1", "before"):
        monkeypatch.setenv("LOCALINFER_GUARD", mode)
        keys[mode] = object_cache.cache_key()
    assert keys["1"] == keys["before"] != keys[""]


@POSIX
@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_folder_of_ours_that_others_can_only_read_is_made_private(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    assert object_cache.private_folder(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o722, 0o1777])
def test_a_folder_that_others_could_write_is_not_used(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    assert object_cache.private_folder(folder) is None


@POSIX
def test_a_planted_folder_or_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    assert object_cache.private_folder(link) is None
    (tmp_path / "file").touch()
    assert object_cache.private_folder(tmp_path / "file") is None
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert object_cache.private_folder(real) is None


@LINUX
def test_a_home_that_cannot_be_found_does_not_make_folders_where_the_process_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "home")
    monkeypatch.setattr(object_cache, "temporary_folder", lambda: None)
    with pytest.warns(RuntimeWarning, match="no home folder, so kernels are compiled at every start"):
        assert object_cache._cache_folder.__wrapped__(None) is None
    assert not list(tmp_path.iterdir())


def test_a_kernel_compiles_once_and_keeps_its_address() -> None:
    scale = object_cache.Kernel("elementwise.scale")
    assert scale.address == object_cache.Kernel("elementwise.scale").address > 0
    assert scale == object_cache.Kernel("elementwise.scale") != object_cache.Kernel("elementwise.add")
    assert scale.is_cached


@pytest.mark.parametrize("damage", ["torn", "edited", "empty", "foreign"])
def test_a_damaged_object_is_compiled_anew(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "elementwise.scale"
    compiled: list[str] = []
    code = compile_kernel(name)
    monkeypatch.setattr("localinfer.kernels.jit.numba.compile_kernel", lambda name: compiled.append(name) or code)
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path)
    path = tmp_path / f"{name}.o"
    for _ in range(2):
        assert object_cache._code(name) == code and compiled == [name]
    whole = path.read_bytes()
    damaged = {
        "torn": whole[: len(whole) // 2],
        "edited": whole[:-1] + bytes([whole[-1] ^ 1]),
        "empty": b"",
        "foreign": b"\x80\x04not an object at all" * 9,
    }
    path.write_bytes(damaged[damage])
    assert object_cache._code(name) == code and compiled == [name, name]
    assert path.read_bytes() == whole == hashlib.sha256(code).digest() + code


def test_every_kernel_the_python_side_names_has_a_source_of_the_same_signature() -> None:
    from localinfer.kernels.cpu import program, sampling
    from localinfer.kernels.jit.numba import source_of

    functions = [*sampling.KERNELS, *program.POOL_KERNELS]
    for function in functions:
        source = source_of(function.name)
        assert (source.result, source.arguments) == (function.result, function.arguments)
