"""Kernels compile before they are used, in other processes where that is possible, and say so while they do."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localinfer.kernels.jit.compile_ahead import STAGE
from tests.kernels.subprocesses import environment, run, run_in_copy, start
from tests.support.limits import seconds, wait_until

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the cache folder cannot be moved by a variable")
NAMES = ["packing.fold", "elementwise.scale", "elementwise.add"]

COMPILE = """
import json, sys
from localinfer.kernels.jit import compile_ahead
from localinfer.kernels.jit.object_cache import Kernel
names, starts = {words}
if not starts:
    compile_ahead.can_start_children = lambda: False
told = []
for _ in range(2):
    compile_ahead.compile_ahead(map(Kernel, names + names), lambda *words: told.append(words))
print(json.dumps([told, "numba" in sys.modules]))
"""


def compile_names(folder: Path, names: list[str], *, starts: bool, **settings: str) -> tuple[list[list[object]], bool]:
    """What was told, and whether Numba was imported in the process that asked."""
    code = COMPILE.replace("{words}", repr((names, starts)))
    told, has_numba = json.loads(run_in_copy(code, XDG_CACHE_HOME=str(folder), **settings)[0])
    return told, has_numba


@LINUX
@pytest.mark.parametrize("count", [1, 3])
def test_kernels_compile_in_children_that_are_reported(count: int, tmp_path: Path) -> None:
    """A single one too, which takes as long as its import of Numba; each where the application keeps its own."""
    names = NAMES[:count]
    chosen = f"import localinfer; localinfer.set_cache_folder({str(tmp_path / 'chosen')!r})\n" if count == 1 else ""
    code = chosen + COMPILE.replace("{words}", repr((names, True)))
    told, has_numba = json.loads(run_in_copy(code, XDG_CACHE_HOME=str(tmp_path / "user's"))[0])
    assert not has_numba
    assert {path.stem for path in tmp_path.rglob("*.o")} == set(names)
    assert [path.name for path in tmp_path.iterdir()] == ["chosen" if chosen else "user's"]
    check_told(told, names)


@LINUX
def test_kernels_that_no_child_compiles_are_reported_one_by_one(tmp_path: Path) -> None:
    told, has_numba = compile_names(tmp_path, NAMES[:2], starts=False)
    assert has_numba
    check_told(told, NAMES[:2])
    assert [done for _, done, _ in told] == [0, 1, 2]


@LINUX
@pytest.mark.parametrize("is_called", [True, False])
def test_a_frozen_application_compiles_in_itself_or_in_children_of_its_own(is_called: bool, tmp_path: Path) -> None:
    """`application` stands for the executable: it starts with its own words, as children of a frozen one do."""
    call = "localinfer.freeze_support()" if is_called else ""
    application, inside = tmp_path / "application", tmp_path / "inside.py"
    # A checkout knows only the digests of its files, which are not those of a frozen application.
    digests = "from localinfer.kernels import built_sources; built_sources.DIGESTS = {'kernels/layouts.py': '1'}"
    code = f"import sys, localinfer\nsys.executable, sys.frozen = {str(application)!r}, True\n{digests}\n{call}\n"
    # A child that was not asked to compile would say so in this file.
    inside.write_text(f"{code}open({str(tmp_path / 'started')!r}, 'a').write(str(sys.argv[1:]))\n")
    application.write_text(f'#!/bin/sh\nexec {sys.executable} {inside} "$@"\n')
    application.chmod(0o755)
    compiled = COMPILE.replace("{words}", repr((NAMES[:2], True)))
    folder = str(tmp_path / "cache")
    told, has_numba = json.loads(run(code + compiled, LOCALINFER_CACHE=folder)[0])
    assert has_numba is not is_called
    assert {path.stem for path in tmp_path.rglob("*.o")} == set(NAMES[:2])
    check_told(told, NAMES[:2])
    assert not (tmp_path / "started").exists()


def test_a_child_ends_with_its_parent_in_the_middle_of_a_kernel() -> None:
    code = """
import sys, threading
from localinfer.system import freezing
freezing.TASKS["cpu"] = "__main__"
def compile_share(share):
    print(share, flush=True)
    threading.Event().wait()
freezing.run_task("cpu", "at it")
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=environment(), stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline().strip() == b"at it"
        child.stdin.close()
        assert child.wait(seconds(10)) == 1


@LINUX
def test_kernels_compile_without_a_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # Nothing that everybody may rename is taken for a temporary folder of one's own.
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    told, _ = compile_names(tmp_path / "file", NAMES[:1], starts=True, TMPDIR=str(tmp_path / "shared"))
    check_told(told, NAMES[:1])


def check_told(told: list[list[object]], names: list[str]) -> None:
    """The first kernel that is missing by its name, how many are there, and the end; nothing where all are cached."""
    assert told[0] == [f"{STAGE}: {names[0]}", 0, len(names)]
    assert told.count([STAGE, len(names), len(names)]) == 1
    assert told[-1] == [STAGE, len(names), len(names)]
    assert {stage for stage, _, _ in told} <= {STAGE, *(f"{STAGE}: {name}" for name in names)}


STOPPED = """
import psutil
from localinfer.kernels.jit.compile_ahead import compile_ahead
from localinfer.kernels.jit.object_cache import Kernel

class Stop(OSError):
    pass

def progress(stage, done, total):
    children = psutil.Process().children()
    if children:
        raise Stop

try:
    compile_ahead(map(Kernel, {names}), progress)
except Stop:
    print(len(psutil.Process().children()))
"""

WAITING = """
import psutil, time
from localinfer.kernels.jit.compile_ahead import run_children

def go_on():
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    time.sleep(3600)

run_children("import time; time.sleep(3600)", [[], []], go_on)
"""


@LINUX
def test_what_progress_raises_ends_the_children(tmp_path: Path) -> None:
    """An OSError too, which is also what a child that cannot be started raises."""
    assert run_in_copy(STOPPED.replace("{names}", repr(NAMES)), XDG_CACHE_HOME=str(tmp_path))[0] == "0"
    assert not list(tmp_path.rglob("*.o"))


@LINUX
def test_children_end_with_a_process_that_is_killed() -> None:
    """Whatever they do: nothing of their own would tell them."""
    process = start(WAITING)
    assert process.stdout is not None and process.stderr is not None
    children = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    try:
        assert len(children) == 2
        assert wait_until(lambda: not any(map(is_running, children)))
    finally:
        for child in filter(is_running, children):
            child.kill()


def is_running(process: psutil.Process) -> bool:
    """A process whose parent does not wait for it stays as a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
