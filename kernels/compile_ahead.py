"""Compile the kernels a model lacks before it runs, in child processes: one per core, and none of Numba's memory stays.

Where no child can be started (a frozen application, no cache folder, a platform that refuses), kernels compile in this
process when they are first asked for; that is slower and needs about 100 MB more, and nothing else.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from localinfer.kernels import object_cache
from localinfer.kernels.object_cache import Kernel

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the units in all."""

STAGE = "compiling kernels (once per machine)"

_CHILD = """
import json, sys
sys.path[:], names = json.loads(sys.argv[1])
from localinfer.kernels.object_cache import Kernel
for name in names:
    assert Kernel(name).address
"""


def compile_ahead(kernels: Iterable[Kernel], progress: ProgressCallback | None = None) -> None:
    """Compile what is not cached yet; returns when all is, or when the children have given up."""
    missing = [kernel for kernel in dict.fromkeys(kernels) if not kernel.is_cached]
    if len(missing) < 2 or object_cache.CACHE_FOLDER is None or not can_start_python():
        return
    count = min(os.cpu_count() or 1, 8, (len(missing) + 1) // 2)
    children = []
    try:
        # Neighbours on a tape are alike in size, so dealing them out in turns balances the work.
        children = [_start([kernel.name for kernel in missing[first::count]]) for first in range(count)]
        while any(child.poll() is None for child in children):
            if progress is not None:
                progress(STAGE, sum(kernel.is_cached for kernel in missing), len(missing))
            time.sleep(0.05)
    except OSError:
        return
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def can_start_python() -> bool:
    """Whether sys.executable is a Python interpreter, and not an application that carries one."""
    name = Path(sys.executable or "").name.lower()
    return not getattr(sys, "frozen", False) and name.startswith(("python", "pypy"))


def _start(names: list[str]) -> subprocess.Popen[bytes]:
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps([paths, names])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
