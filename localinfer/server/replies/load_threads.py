"""Threads that load models, which a server that ends need not wait for: compiled code cannot be interrupted."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class LoadThreads:
    """Does work in threads of its own, none of which keeps the event loop or the interpreter from ending.

    stopping: set when work is to end; work that looks at it now and then ends early, by raising what it likes.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._running: set[threading.Thread] = set()

    async def run(self, work: Callable[[], Result], discard: Callable[[Result], object]) -> Result:
        """Return what the work returns. When this is cancelled, its result goes to `discard` as soon as it is there.

        Raises: what the work raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        lock = threading.Lock()
        is_abandoned = False

        def take(result: Result | None, error: BaseException | None) -> None:
            if future.cancelled():
                if error is None:
                    discard(result)  # type: ignore[arg-type]
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def do() -> None:
            result: Result | None = None
            failure: BaseException | None = None
            try:
                result = work()
            except BaseException as error:
                failure = error
            try:
                with lock:
                    if not is_abandoned:
                        loop.call_soon_threadsafe(take, result, failure)
                        return
            except RuntimeError:
                # The loop was closed: nobody waits any more.
                pass
            finally:
                self._running.discard(thread)
            if failure is None:
                discard(result)  # type: ignore[arg-type]

        thread = threading.Thread(target=do, name="localinfer-load", daemon=True)
        self._running.add(thread)
        thread.start()
        try:
            return await future
        except asyncio.CancelledError:
            with lock:
                is_abandoned = True
            if future.done() and not future.cancelled() and future.exception() is None:
                discard(future.result())
            raise

    def join(self, seconds: float) -> bool:
        """Wait for work that still runs; return whether all has ended. Called off the event loop."""
        for thread in list(self._running):
            thread.join(seconds)
        return not any(thread.is_alive() for thread in list(self._running))
