"""Imports of a load, one module after the other, and its cancellation, also while it imports.

`localinfer.load` and its kin import next to nothing when they are named: half a second of imports would hold up the
thread that does it, such as a window's. They are made in the thread that loads, which looks at `cancel` in between.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from localinfer.arguments import check_callable, shown
from localinfer.errors import BackendUnavailableError, LoadCancelledError, RequestError

if TYPE_CHECKING:
    import threading

    from localinfer.types import ProgressCallback

STAGE = "importing"

MODULES = (
    "numpy",
    "localinfer.kernels.kv_layout",
    "localinfer.llm",
    "localinfer.engine.cache.prefix_cache",
    "localinfer.kernels.graph_builder",
    "llvmlite.binding",
    "localinfer.kernels.jit.object_cache",
    "localinfer.kernels.cpu.lower",
    "localinfer.quant.gguf.reader",
    "localinfer.models.decoder.config",
    "localinfer.quant.checkpoint.model_file",
    "localinfer.models.decoder.architectures",
    "localinfer.models.decoder.decoder",
    "localinfer.models.text.tokenizer",
    "localinfer.models.checks.quick",
    "localinfer.models.load.weights",
    "localinfer.models.load.device_request",
    "localinfer.models.load.loader",
    "localinfer.loading.memory.plan",
    "localinfer.engine.engine",
    "localinfer.generation.text_generation",
    "localinfer.loading.build",
)
"""In the order in which they need each other, so that each adds 6 to 80 milliseconds of imports to those before it."""


def import_modules(report: ProgressCallback | None) -> None:
    """Import what a load uses; report: called before each module that is not imported yet, and may end it.

    Raises: OutOfMemoryError where the address space is too small for NumPy and LLVM; what `report` raises.
    """
    from localinfer.kernels.address_space import require_libraries

    _check_interpreter()
    require_libraries()
    # Imports leave no cycles behind, and looking for them would take a tenth of their time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number, name in enumerate(MODULES):
            if name not in sys.modules:
                if report is not None:
                    report(STAGE, number, len(MODULES))
                import_module(name)
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def shown_progress(progress: ProgressCallback | bool | None) -> Iterator[ProgressCallback | None]:
    """Callback of the stages: for True one that writes to standard error, drawn or in lines; None for False."""
    if progress is not True or sys.stderr is None:
        yield None if isinstance(progress, bool) else progress
        return
    from localinfer.terminal import Progress

    with Progress(writes_lines=True) as shown:
        yield shown


def _check_interpreter() -> None:
    """Raise BackendUnavailableError in a subinterpreter, where neither NumPy nor threads are supported."""
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            interpreters = import_module(name)
        except ImportError:
            continue
        if interpreters.get_current() != interpreters.get_main():
            raise BackendUnavailableError(
                "this is a subinterpreter, in which neither NumPy nor threads work as a model needs them; load it in "
                "the main interpreter, or in a process of its own (mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
            )
        return


def stoppable(progress: ProgressCallback | None, cancel: threading.Event | None) -> ProgressCallback | None:
    """Callback of a load's stages: calls `progress`, and raises LoadCancelledError as soon as `cancel` is set.

    Every stage reports several times in 200 ms of work, so that a load needs no other check.
    """
    check_callable("progress", progress)
    if cancel is None:
        return progress
    if not callable(getattr(cancel, "is_set", None)):
        raise RequestError(f"cancel is {shown(cancel)}; give a threading.Event, or None")

    def report(stage: str, done: int, total: int) -> None:
        if not cancel.is_set() and progress is not None:
            progress(stage, done, total)
        if cancel.is_set():
            raise LoadCancelledError(f"loading was cancelled while {stage}; load the model again to use it")

    return report
