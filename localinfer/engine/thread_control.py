"""How many threads a loaded model computes with, and how much they ask of the system."""

from typing import TYPE_CHECKING

from localinfer.arguments import check_number, shown
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.engine.engine import Engine
    from localinfer.kernels.cpu.worker_threads import Priority
    from localinfer.models.load.loader import Model


class ThreadControl:
    """The part of an `LLM` that changes its threads while it is used."""

    if TYPE_CHECKING:
        _engine: Engine
        _model: Model

    def set_threads(self, threads: int | None) -> None:
        """Compute with so many CPU threads from the next step on, also of texts that are being generated.

        No text changes by it, not by a bit. threads: 1 to the hardware threads, for prompts and decoding alike; None:
        as loaded. Any thread may call it, and waits for nothing. Without effect on what a GPU computes.
        Raises: RequestError, ClosedError.
        """
        from localinfer.models.load.threads import checked_threads

        self._engine.check_usable()
        wanted = check_number("threads", threads, 1, none="for as many as loaded")
        self._model.pool.ask_threads(None if wanted is None else checked_threads(wanted))

    def set_priority(self, priority: "Priority") -> None:
        """Compute with threads of this priority from the next step on: "normal", or "background" beside other work.

        In the background the model's own threads ask the system for little (on Linux a nice value of 10, on macOS the
        quality of service "utility", on Windows the lowest priority; these two are untested) and sleep at once when
        there is nothing to do. The threads of the program itself keep their priority: the one that reads a stream,
        which otherwise takes part in the computing, only waits then. Any thread may call it, and waits for nothing.
        Raises: RequestError, ClosedError.
        """
        self._engine.check_usable()
        self._model.pool.ask_priority(checked_priority(priority))


def checked_priority(priority: object) -> "Priority":
    """Check a priority. Raises: RequestError."""
    from localinfer.kernels.cpu.worker_threads import PRIORITIES

    for known in PRIORITIES:
        if isinstance(priority, str) and priority == known:
            return known
    raise RequestError(f"priority is {shown(priority)}; give {' or '.join(map(repr, PRIORITIES))}")
