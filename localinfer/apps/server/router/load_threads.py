"""Threads that load models, which neither the event loop nor the interpreter waits for."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


class LoadThreads:
    """Does work in threads of its own, none of which keeps the event loop or the interpreter from ending.

    A server that ends need not wait for them: compiled code cannot be interrupted. stopping: set when work is to end;
    work that looks at it now and then ends early, by raising what it likes. is_beside_replies: whether what is
    loaded now should leave the processors to models that answer.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.is_beside_replies = False
        self._running: set[threading.Thread] = set()

    async def run(self, work: Callable[[], Result], discard: Callable[[Result], object]) -> Result:
        """Return what the work returns. When this is cancelled, its result goes to `discard` as soon as it is there.

        Raises: what the work raises.
        """
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        future: Future[Result] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self._running.discard(thread)
            # Where the loop was closed, nothing waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(has_ended.set)

        thread = threading.Thread(target=do, name="localinfer-load", daemon=True)
        self._running.add(thread)
        thread.start()
        try:
            await has_ended.wait()
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.exception() or discard(done.result()))
            raise
        return future.result()

    def join(self, seconds: float) -> bool:
        """Wait for work that still runs, so long together; return whether all has ended. Called off the event loop."""
        deadline = time.monotonic() + seconds
        for thread in list(self._running):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._running))
