"""From threads to the event loop: what threads leave for one coroutine, which wakes once per round of its loop."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Items in the order they were put; any thread puts, one coroutine takes. Made on the loop that takes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._filled = asyncio.Event()
        self._is_waking = False

    def put(self, item: Item) -> None:
        """Leave an item; after the loop has closed, for nobody."""
        self._items.append(item)
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                # The loop is closed: the server ended while a thread still worked.
                self._items.clear()

    async def take(self) -> Item:
        """Wait for the next item."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return self._items.popleft()

    def _wake(self) -> None:
        self._is_waking = False
        self._filled.set()
