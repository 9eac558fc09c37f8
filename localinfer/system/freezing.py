"""Applications that are frozen into one executable, whose children are the same executable: some of them compile.

A frozen application has no Python interpreter that could be started to compile kernels. It calls `freeze_support` first
of all; a child that was started with `CHILD_OPTION` compiles there and ends.
"""

import contextlib
import sys
from collections.abc import Callable

CHILD_OPTION = "--localinfer-compile"
"""The first word of the command line of a child that compiles; the second is [task, share] as JSON."""

TASKS = {
    "cpu": "localinfer.kernels.jit.compile_ahead",
    "packs": "localinfer.kernels.jit.packs",
    "cuda": "localinfer.kernels.cuda.kernel_cache",
}
"""Modules whose `compile_share` a child may be asked to run."""

_supported: set[str] = set()


def freeze_support() -> None:
    """Let children of a frozen application compile kernels; called first thing in its main module.

    Without it a frozen application compiles in its own process, which takes longer and does not report while it
    compiles one kernel. In a child that compiles it does not return; elsewhere it costs nothing.
    """
    if len(sys.argv) == 3 and sys.argv[1] == CHILD_OPTION:
        import json

        task, share = json.loads(sys.argv[2])
        run_task(task, share)
        sys.exit(0)
    _supported.add(sys.executable)


def is_supported() -> bool:
    """True if this executable, started with `CHILD_OPTION`, compiles."""
    return sys.executable in _supported


def run_task(task: str, share: object) -> None:
    """Do the share of a child process, which ends when its standard input does: when its parent has ended.

    Raises: KeyError for a task that is none.
    """
    import threading
    from importlib import import_module

    threading.Thread(target=_end_with_parent, daemon=True).start()
    _lower_priority()
    compile_share: Callable[[object], None] = import_module(TASKS[task]).compile_share
    compile_share(share)


def _lower_priority() -> None:
    """Ask the system for less than the program that waits, whose window is drawn meanwhile."""
    import psutil

    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS if sys.platform == "win32" else 5)


def _end_with_parent() -> None:
    import os

    os.read(0, 1)
    # In the middle of a kernel too.
    os._exit(1)
