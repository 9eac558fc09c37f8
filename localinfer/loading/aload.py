"""`localinfer.aload`: `load` for an event loop. Nothing heavy is imported on the loop's thread, but in the load's."""

import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from localinfer.system.event_loop import LoopCalls, in_thread

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.loading.load import load

P = ParamSpec("P")
T = TypeVar("T")


def _with_parameters_of(
    _: Callable[[], Callable[P, T]],
) -> Callable[[Callable[..., Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Tell type checkers that a coroutine function takes what another function takes; that one is not looked up."""
    return lambda function: function


@_with_parameters_of(lambda: load)
async def aload(*arguments: Any, **options: Any) -> "LLM":
    """Load a model as `load` does, with its arguments, in a thread of its own.

    Cancelling the task stops the load: it sets `cancel`, one of its own or the one given. progress: called on the event
    loop, so that it may touch what belongs to the loop; what it raises ends the load. Raises: as `load`.
    """
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
        from localinfer.loading.load import load

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
