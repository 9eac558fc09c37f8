"""`localinfer.warm_up`: compile what a model needs before its first load, such as when an application is installed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localinfer.arguments import check_callable, check_number, shown
from localinfer.errors import BackendUnavailableError, LoadCancelledError, RequestError
from localinfer.loading.imports import import_modules
from localinfer.loading.load import load

if TYPE_CHECKING:
    import os
    import threading

    from localinfer.types import ProgressCallback

STAGE = "reading the model"


@dataclass(frozen=True)
class WarmUp:
    """The result of `warm_up`."""

    num_kernels: int
    """Kernels that the models need on the CPU."""
    num_compiled: int
    """Number of them that were missing."""
    seconds: float
    """Time that it took."""
    is_kept: bool
    """True if the next process finds them: not without a folder for caches."""


def warm_up(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    kv_type: str = "f16",
    kv_window: int | None = None,
    draft: str | os.PathLike[str] | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> WarmUp:
    """Compile every kernel that a model needs and no earlier start compiled, without reading its weights.

    Models of the same architecture and tensor types need the same kernels, so a small one warms up for a large one.
    Kernels are compiled by child processes, of a frozen application where it called `freeze_support`.

    model, device, kv_type, kv_window, draft: as `load` will get them. With a GPU the model is loaded once, and closed.
    progress: called with a stage's name, the kernels done and the total, several times a second.
    cancel: once it is set, from any thread, children end and LoadCancelledError is raised; what is compiled is kept.
    Raises: ModelFileError, RequestError, BackendUnavailableError, OutOfMemoryError, LoadCancelledError.
    """
    began = time.monotonic()
    check_callable("progress", progress)
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise RequestError(f"cancel is {shown(cancel)}; give a threading.Event, or None")

    def report(stage: str, done: int, total: int) -> None:
        if cancel is not None and cancel.is_set():
            raise LoadCancelledError("compiling ahead was cancelled; what is compiled is kept")
        if progress is not None:
            progress(stage, done, total)

    import_modules(report)
    from localinfer.kernels.jit import object_cache
    from localinfer.kernels.jit.compile_ahead import compile_ahead
    from localinfer.loading.options import model_path
    from localinfer.models.load.assistant import is_assistant
    from localinfer.models.load.device_request import named_gpus
    from localinfer.models.load.needed_kernels import needed_kernels
    from localinfer.system.machine_limits import has_driver

    try:
        named_gpus(device)
    except BackendUnavailableError as error:
        raise RequestError(str(error)) from None
    check_number("kv_window", kv_window, 1, none="for the default")
    report(STAGE, 0, 1)
    path, draft_path = model_path(model), None if draft is None else model_path(draft, "draft")
    assistant = draft_path if draft_path is not None and is_assistant(draft_path) else None
    kernels = needed_kernels(
        path,
        kv_type=kv_type,
        has_window=kv_window is not None,
        draft_layers=draft is None and kv_window is None,
        assistant=assistant,
    )
    if draft_path is not None and assistant is None:
        kernels = list(dict.fromkeys([*kernels, *needed_kernels(draft_path, kv_type=kv_type)]))
    report(STAGE, 1, 1)
    missing = [kernel for kernel in kernels if not kernel.is_cached]
    compile_ahead(missing, report)
    if device.startswith("cuda") or (device == "auto" and has_driver()):
        load(path, device=device, kv_type=kv_type, kv_window=kv_window, draft=draft, progress=report).close()
    return WarmUp(len(kernels), len(missing), time.monotonic() - began, is_kept=object_cache.cache_folder() is not None)
