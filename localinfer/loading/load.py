"""`localinfer.load` and `aload`: from a path and options to an `LLM`. Naming them imports little; see `imports.py`."""

import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from localinfer.errors import LoadCancelledError
from localinfer.loading.imports import import_modules, shown_progress, stoppable
from localinfer.loading.load_options import LoadOptions, takes

if TYPE_CHECKING:
    import os

    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")


@takes(LoadOptions)
def load(options: LoadOptions) -> "LLM":
    """Load a model and return it ready to answer.

    Raises: ModelFileError, RequestError, BackendUnavailableError, OutOfMemoryError, LoadCancelledError,
        MissingPackageError.
    """
    with shown_progress(options.progress) as told:
        report = stoppable(told, options.cancel)
        import_modules(report)
        from localinfer.loading.build import build_llm
        from localinfer.loading.options import check_options

        checked = check_options(replace(options, progress=report))
        try:
            return build_llm(checked)
        except LoadCancelledError as error:
            cancelled = str(error)
    # A new one: as long as an app keeps the first, its frames would keep the weights.
    raise LoadCancelledError(cancelled)


def _with_parameters_of(
    _: Callable[P, T],
) -> Callable[[Callable[..., Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Tell type checkers that a coroutine function takes the parameters of another function."""
    return lambda function: function


@_with_parameters_of(load)
async def aload(*arguments: Any, **options: Any) -> "LLM":
    """Load a model as `load` does, with its arguments, in a thread of its own.

    Cancelling the task stops the load: it sets `cancel`, one of its own or the one given. progress: called on the event
    loop, so that it may touch what belongs to the loop; what it raises ends the load. Raises: as `load`.
    """
    from localinfer.system.event_loop import LoopCalls, in_thread

    calls = LoopCalls.of_running_loop()
    cancel = options.get("cancel")
    if cancel is None:
        cancel = options["cancel"] = threading.Event()
    progress = options.get("progress")
    raised: list[BaseException] = []

    def report(stage: str, done: int, total: int) -> None:
        if raised:
            return
        try:
            progress(stage, done, total)  # type: ignore[misc]
        except BaseException as error:
            raised.append(error)
            cancel.set()

    if callable(progress):
        options["progress"] = lambda stage, done, total: calls.add(lambda: report(stage, done, total))

    def work() -> "LLM":
        return load(*arguments, **options)

    try:
        llm = await in_thread(work, stop=cancel.set, name="localinfer-load", discard=lambda llm: llm.close())
    except Exception:
        if raised:
            raise raised[0] from None
        raise
    if raised:
        llm.close()
        raise raised[0]
    return llm


def load_tokenizer(model: "str | os.PathLike[str] | None" = None) -> "Tokenizer":
    """Load only the tokenizer, of a GGUF file with or without tensors, or of a folder; None: the demo model's.

    Raises: ModelFileError.
    """
    import_modules(None)
    from localinfer.loading.options import model_path
    from localinfer.models.load.loader import load_tokenizer as tokenizer_of

    return tokenizer_of(model_path(model))
