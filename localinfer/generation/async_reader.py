"""Reads a generation for an event loop: a thread takes its events, and the loop gets all that have come at once.

The thread lives while the reader keeps up: with many events unread it ends, and another begins when they are read. So
a reader that stops in the middle, or a loop that is closed, leaves no thread, and memory is bounded.
"""

import asyncio
import threading
from collections import deque
from typing import NamedTuple

from localinfer.generation.stream import StreamEvent
from localinfer.generation.text_generation import TextGeneration, second_reader_error
from localinfer.system.event_loop import LoopCalls

MOST_UNREAD = 64
"""Events at which the thread ends."""
_FEW_UNREAD = 16
"""Events at which another one begins: late enough to be worth its start, and before the reader has to wait."""


class _End(NamedTuple):
    """Marker behind the last event, with the error that ended the generation, if one did."""

    error: Exception | None


class AsyncReader:
    """One generation, read on one event loop. Its methods are called there, except where said otherwise.

    is_awaited: whether a task waits for an event, or for the result.
    """

    def __init__(self, generation: TextGeneration, calls: LoopCalls) -> None:
        self.calls = calls
        self.is_awaited = False
        self._generation = generation
        self._arrived: deque[StreamEvent | _End] = deque()
        """From the thread, until the loop's next round takes it: a reader that never waits cannot starve the loop."""
        self._unread: deque[StreamEvent] = deque()
        self._end: _End | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_reading = False
        self._has_read_all = False
        self._discards = False

    async def next(self) -> StreamEvent | None:
        """Wait for the next event and return it; None after the last. A task that is cancelled here cancels it all.

        Raises: RequestError while another task waits; what ended the generation, once.
        """
        if self.is_awaited:
            raise second_reader_error()
        self.is_awaited = True
        try:
            if len(self._unread) + len(self._arrived) <= _FEW_UNREAD:
                self._begin()
            while not self._unread and self._end is None:
                await self._wait()
        except BaseException:
            self._generation.cancel()
            raise
        finally:
            self.is_awaited = False
        if self._unread:
            return self._unread.popleft()
        assert self._end is not None, "it was waited for"
        error, self._end = self._end.error, _End(None)
        if error is not None:
            raise error
        return None

    async def result(self) -> None:
        """Wait until the generation has ended by itself, without a round of the loop for each event.

        Events that were not read are dropped. A task that is cancelled here cancels the generation.
        Raises: RequestError while another task waits.
        """
        if self.is_awaited:
            raise second_reader_error()
        self.is_awaited = True
        try:
            await self.end()
        except BaseException:
            self._generation.cancel()
            raise
        finally:
            self.is_awaited = False

    async def end(self, *, discards: bool = True) -> None:
        """Wait until the generation has ended, and so has the thread. discards: drop the events until then."""
        if discards:
            with self._lock:
                self._discards = True
                self._unread.clear()
        self._begin()
        while self._end is None:
            await self._wait()
        if self._thread is not None:
            # It has nothing left to do.
            self._thread.join()

    def abandon(self) -> None:
        """Let the thread end soon, as there is no reader. Never waits: for the garbage collector, in any thread."""
        self._generation.leave()

    async def _wait(self) -> None:
        """Wait for the loop's next round in which something has come."""
        waiter = self.calls.loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _begin(self) -> None:
        """Have a thread read on, unless one does, or all was read."""
        with self._lock:
            if self._is_reading or self._has_read_all:
                return
            thread = threading.Thread(target=self._read, name="localinfer-stream", daemon=True)
            thread.start()
            self._thread, self._is_reading = thread, True

    def _read(self) -> None:
        """Take events, in the thread, until all were taken, many are unread, or the loop is closed."""
        generation, arrived, loop = self._generation, self._arrived, self.calls.loop
        is_reading = True
        while is_reading:
            item: StreamEvent | _End
            try:
                item = next(generation)
            except StopIteration:
                item = _End(None)
            except Exception as error:
                item = _End(error)
            with self._lock:
                self._has_read_all = isinstance(item, _End)
                if self._has_read_all or not self._discards:
                    arrived.append(item)
                is_first = len(arrived) == 1
                is_full = len(arrived) + len(self._unread) >= MOST_UNREAD
                is_full = is_full and not self._discards and not generation.is_cancelled
                is_reading = self._is_reading = not self._has_read_all and not is_full
            # For those that come behind the first, it looks anyway.
            if is_first:
                self.calls.add(self._take_arrived)
            if loop.is_closed():
                generation.close()

    def _take_arrived(self) -> None:
        while self._arrived:
            item = self._arrived.popleft()
            if isinstance(item, _End):
                self._end = item
            elif not self._discards:
                self._unread.append(item)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
