"""From threads to the event loop: what threads leave for coroutines, which are woken once for all that has come."""

import asyncio
from collections import deque
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class LoopNotifier:
    """Wakes a loop for those inboxes that were filled: once, however many, until it has looked. Made on that loop.

    A step of the engine fills the inboxes of all who share it. Waking the loop costs a system call in the thread, which
    must then win back the interpreter's lock, and a round of the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled: deque[EventQueue[Any]] = deque()
        self._is_ringing = False

    def ring(self, inbox: "EventQueue[Any]") -> None:
        """Have an inbox looked at; after the loop has closed, by nobody. Any thread."""
        self._filled.append(inbox)
        if not self._is_ringing:
            self._is_ringing = True
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                # The loop is closed: the server ended while a thread still worked.
                self._filled.clear()

    def _answer(self) -> None:
        self._is_ringing = False
        while self._filled:
            self._filled.popleft().look()


class EventQueue(Generic[Item]):
    """Items in the order they were put; any thread puts, one coroutine takes. Made on the loop that takes."""

    def __init__(self, bell: LoopNotifier) -> None:
        self._bell = bell
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Leave an item."""
        self._items.append(item)
        self._bell.ring(self)

    async def take(self) -> Item:
        """Wait for the next item."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def look(self) -> None:
        """Wake who takes, if there is something; by the bell."""
        if self._waiter is not None and not self._waiter.done() and self._items:
            self._waiter.set_result(None)
