"""Compile the kernels a model lacks before it runs, in child processes: one per core, and none of Numba's memory stays.

Where no child can be started (a frozen application, no cache folder, a platform that refuses), kernels compile in this
process, one after the other; that is slower and needs about 100 MB more, and nothing else.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from localinfer.kernels.jit import object_cache
from localinfer.kernels.jit.object_cache import Kernel

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the units in all."""

STAGE = "compiling kernels (once per machine)"

_CHILD = """
import json, sys
sys.path[:], names = json.loads(sys.argv[1])
from localinfer.kernels.jit.object_cache import Kernel
for name in names:
    assert Kernel(name).address
"""


def compile_ahead(kernels: Iterable[Kernel], progress: ProgressCallback | None = None) -> None:
    """Compile what is not cached yet, and say what is being compiled; returns when all is.

    A single kernel takes seconds too, so nothing is left to be compiled where it is first used, under the name of
    whatever stage that is.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.is_cached]
    if missing and object_cache.CACHE_FOLDER is not None and can_start_python():
        _compile_in_children(missing, progress)
    for kernel in missing:
        if not kernel.is_cached:
            _report(missing, progress)
            assert kernel.address
    if missing:
        _report(missing, progress)


def _compile_in_children(missing: Sequence[Kernel], progress: ProgressCallback | None) -> None:
    """Compile in as many processes as there are cores; what they do not get done is left."""
    count = min(os.cpu_count() or 1, 8, (len(missing) + 1) // 2)

    def go_on() -> bool:
        # A child that has stored its last kernel takes a while to end, for which nothing waits.
        if all(kernel.is_cached for kernel in missing):
            return False
        _report(missing, progress)
        return True

    # Neighbours on a tape are alike in size, so dealing them out in turns balances the work.
    run_children(_CHILD, [[kernel.name for kernel in missing[first::count]] for first in range(count)], go_on)


def run_children(code: str, shares: Sequence[object], go_on: Callable[[], bool]) -> None:
    """Run Python code in child processes until all have ended, or `go_on`, asked every 50 ms, says False.

    Each child finds [sys.path, its share] as JSON in sys.argv[1]. What fails in it, or cannot be started, is left.
    """
    children: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            children.append(_start(code, share))
        while any(child.poll() is None for child in children) and go_on():
            time.sleep(0.05)
    except OSError:
        return
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _report(missing: Sequence[Kernel], progress: ProgressCallback | None) -> None:
    """Name the first kernel that is not there yet, and count those that are."""
    if progress is not None:
        waiting = [kernel.name for kernel in missing if not kernel.is_cached]
        done = len(missing) - len(waiting)
        progress(f"{STAGE}: {waiting[0]}" if waiting else STAGE, done, len(missing))


def can_start_python() -> bool:
    """Whether sys.executable is a Python interpreter, and not an application that carries one."""
    name = Path(sys.executable or "").name.lower()
    return not getattr(sys, "frozen", False) and name.startswith(("python", "pypy"))


def _start(code: str, share: object) -> subprocess.Popen[bytes]:
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([paths, share])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
