"""Compile missing kernels before a model runs, in child processes: one per core, so that Numba's memory is released.

If no child process can be started (a frozen application without `localinfer.freeze_support()`, no cache folder),
kernels are compiled in this process, one after the other, which is slower and needs about 100 MB more.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.kernels.jit import object_cache
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.system import freezing
from localinfer.system.folders import CACHE_VARIABLE, chosen_cache_folder
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from subprocess import Popen

STAGE = "compiling kernels (once per machine)"

LINK_STAGE = "linking kernels"

_CHILD = """
import json, sys
sys.path[:], task, share = json.loads(sys.argv[1])
from localinfer.system import freezing
freezing.run_task(task, share)
"""


def compile_share(names: Sequence[str]) -> None:
    """Compile those of these kernels that are not cached yet, in order, by name: the task of a child process."""
    # What is imported stays, so that it need not be looked through for what can go.
    from localinfer.kernels.jit import numba  # noqa: F401

    gc.collect()
    gc.freeze()
    for name in names:
        if not Kernel(name).is_cached:
            object_cache.store_compiled(name)


def shares_of(names: Sequence[str], count: int) -> list[list[str]]:
    """An order of all kernels for each of `count` processes: together they compile each once, until they meet.

    Kernels of a module follow each other, since they share functions. Every other process goes backwards, so that none
    is without work while another has more than one kernel left. Modules are in no order, so that programs that start
    together do not compile the same kernels at the same time: each finds what the other has stored.
    """
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.split(".")[0], []).append(name)
    order = [name for module in random.sample(list(modules), len(modules)) for name in modules[module]]
    shares = []
    for number in range(count):
        start = len(order) * (number + number % 2) // count
        turned = order[start:] + order[:start]
        shares.append(turned[::-1] if number % 2 else turned)
    return shares


def compile_ahead(kernels: Iterable[Kernel], progress: ProgressCallback | None = None) -> None:
    """Compile all kernels that are not cached, with progress.

    Compiling one kernel takes seconds, so none is left to be compiled on first use. An error of `progress` ends it, and
    the child processes; one that compiles in this process finishes its kernel.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.is_cached]
    if missing and object_cache.cache_folder() is not None and can_start_children():
        _compile_in_children(missing, progress)
    # Not in their order: programs that start together would compile the same ones at the same time.
    for kernel in map(Kernel, shares_of([kernel.name for kernel in missing], 1)[0]):
        if not kernel.is_cached:
            _report(missing, _waiting(missing), progress)
            assert kernel.address
    if missing:
        _report(missing, _waiting(missing), progress)


def link(kernels: Sequence[Kernel], progress: ProgressCallback | None = None) -> None:
    """Load compiled kernels into this process, a millisecond or two each, with progress."""
    for done, kernel in enumerate(kernels):
        if progress is not None:
            progress(LINK_STAGE, done, len(kernels))
        assert kernel.address, "compiled or loaded"


def _compile_in_children(missing: Sequence[Kernel], progress: ProgressCallback | None) -> None:
    """Compile in one process per core; failures are left for this process."""
    count = min(os.cpu_count() or 1, 8, (len(missing) + 1) // 2)

    def go_on() -> bool:
        # Do not wait for children to exit once all kernels are stored.
        waiting = _waiting(missing)
        if not waiting:
            return False
        _report(missing, waiting, progress)
        return True

    run_children("cpu", shares_of([kernel.name for kernel in missing], count), go_on)


def run_children(task: str, shares: Sequence[object], go_on: Callable[[], bool]) -> None:
    """Run a task of `freezing.TASKS` in child processes, one for each share, which is passed as JSON.

    Ends when all have ended, or `go_on`, called every 50 ms, returns False. Each child ends when this process does. Its
    failures are ignored; what `go_on` raises ends the children.
    """
    children: list[Popen[bytes]] = []
    try:
        for share in shares:
            try:
                children.append(_start(task, share))
            except OSError:
                return
        while any(child.poll() is None for child in children) and go_on():
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for child in children:
            # With the end of its standard input, `communicate` closes the pipe.
            child.communicate()


def _waiting(missing: Sequence[Kernel]) -> list[Kernel]:
    """Those that are not compiled yet."""
    return [kernel for kernel in missing if not kernel.is_cached]


def _report(missing: Sequence[Kernel], waiting: Sequence[Kernel], progress: ProgressCallback | None) -> None:
    """Report the first kernel that still waits, and the number of compiled ones."""
    if progress is not None:
        done = len(missing) - len(waiting)
        progress(f"{STAGE}: {waiting[0].name}" if waiting else STAGE, done, len(missing))


def can_start_children() -> bool:
    """True if sys.executable is a Python interpreter, or an application that lets its children compile."""
    return _is_python() or (bool(sys.executable) and freezing.is_supported())


def _is_python() -> bool:
    name = Path(sys.executable or "").name.lower()
    return not getattr(sys, "frozen", False) and name.startswith(("python", "pypy"))


def _start(task: str, share: object) -> "Popen[bytes]":
    # Most starts find their kernels compiled.
    import subprocess

    if _is_python():
        paths = [path or os.getcwd() for path in sys.path]
        words = [sys.executable, "-c", _CHILD, json.dumps([paths, task, share])]
    else:
        words = [sys.executable, freezing.CHILD_OPTION, json.dumps([task, share])]
    chosen = chosen_cache_folder()
    return subprocess.Popen(
        words,
        env=None if chosen is None else {**os.environ, CACHE_VARIABLE: str(chosen)},
        # Nothing is ever written: the system closes it when this process ends, however it ends.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
