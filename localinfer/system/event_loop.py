"""Threads that work for an asyncio event loop: what they tell it, and one that a task awaits.

The loop of asyncio, or one that takes its place, such as uvloop's. Nothing here uses the loop's default executor, whose
few threads other code may hold.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from localinfer.errors import RequestError

T = TypeVar("T")


class LoopCalls:
    """Calls from other threads, made on an event loop that is woken once for all that have come until it looked.

    Waking a loop costs a system call in the thread, which must then reacquire the interpreter's lock, and a round of
    the loop. One step of the engine has news for all streams that share it, and one loop has one of these.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._is_woken = threading.Lock()
        """Held from the first call until the loop looks: a flag that only one of several threads can set."""

    @staticmethod
    def of_running_loop() -> "LoopCalls":
        """Those of the loop that runs in this thread. Raises: RequestError without one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RequestError(
                "no asyncio event loop runs in this thread; await this under asyncio.run or a framework on asyncio; "
                "elsewhere, as in Trio, use what is not awaited (for, result, complete, chat, load) in a thread"
            ) from None
        calls = _OF_LOOP.get(loop)
        if calls is None:
            calls = _OF_LOOP[loop] = LoopCalls(loop)
        return calls

    def add(self, call: Callable[[], object]) -> bool:
        """Have a call made on the loop, in order; it must not raise. Return False if the loop is closed. Any thread."""
        self._calls.append(call)
        if not self.loop.is_closed():
            if not self._is_woken.acquire(blocking=False):
                return True
            try:
                self.loop.call_soon_threadsafe(self._make_calls)
            except RuntimeError:
                # It was closed just now.
                self._is_woken.release()
            else:
                return True
        self._calls.clear()
        return False

    def _make_calls(self) -> None:
        # In this order: a call that comes now is either made below, or wakes the loop again.
        self._is_woken.release()
        while self._calls:
            self._calls.popleft()()


_OF_LOOP: WeakValueDictionary[asyncio.AbstractEventLoop, LoopCalls] = WeakValueDictionary()
"""Kept as long as something uses them."""


async def in_thread(
    work: Callable[[], T], *, stop: Callable[[], None], name: str, discard: Callable[[T], object] = lambda _: None
) -> T:
    """Do work in a thread of its own, and return what it returns, or raise what it raises.

    stop: called when the task is cancelled; it has the work end soon, which is not waited for. discard: gets what it
    returns nevertheless. name: of the thread, which keeps no interpreter from ending.
    """
    calls = LoopCalls.of_running_loop()
    future: asyncio.Future[T] = calls.loop.create_future()

    def settle(found: T) -> None:
        if future.done():
            discard(found)
        else:
            future.set_result(found)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            found = work()
        except BaseException as error:
            calls.add(partial(fail, error))
            return
        if not calls.add(partial(settle, found)):
            discard(found)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await future
    except BaseException:
        stop()
        raise
