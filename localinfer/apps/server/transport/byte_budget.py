"""A number of bytes that requests share: one that finds too few left waits for its turn, for a while.

Turns go by time of arrival plus what a request's bytes would take at a fair pace, so that a smaller one passes larger
ones that came a little earlier, and none waits for ever. A part is kept for small ones, which large ones cannot take.
"""

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from localinfer.errors import RequestError

SMALL_BYTES = 1 << 20
"""Requests up to this size have a part of the budget for themselves."""
_TURN_BYTES_PER_SECOND = 16 << 20
_LOOK_SECONDS = 0.25
_SMALL_PART, _MOST_FOR_SMALL = 8, 16 * SMALL_BYTES


class Share:
    """Bytes that a request holds, until it is closed or the context is left.

    end_if_slow: asks the client that holds them to hurry or to leave, while others wait.
    """

    def __init__(self, budget: "ByteBudget", num_bytes: int, is_small: bool, end_if_slow: Callable[[], object]) -> None:
        self.num_bytes = num_bytes
        self.is_small = is_small
        self.end_if_slow = end_if_slow
        self._budget = budget

    def shrink(self, num_bytes: int) -> None:
        """Give back what is more than so many bytes."""
        if num_bytes < self.num_bytes:
            given, self.num_bytes = self.num_bytes - num_bytes, num_bytes
            self._budget.give_back(self, given)

    def close(self) -> None:
        """Give all back; may be called again."""
        self.shrink(0)

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ByteBudget:
    """So many bytes, of which `SMALL_BYTES` or less at a time also come from an eighth that is kept for them.

    most: the largest share; a request for more gets it, and is alone then.
    on_given_back: told how many bytes came back. Used on one event loop. Raises: RequestError for less than a byte.
    """

    def __init__(self, total: int, on_given_back: Callable[[int], object] = lambda num_bytes: None) -> None:
        if total < 1:
            raise RequestError(f"a budget of {total} bytes holds nothing; give more")
        small = min(total // _SMALL_PART, _MOST_FOR_SMALL)
        self.most = total - small
        self._free = {True: small, False: self.most}
        self._on_given_back = on_given_back
        self._shares: set[Share] = set()
        self._queue: list[tuple[float, int, int, asyncio.Future[Share], Callable[[], object]]] = []
        self._numbers = count()

    @property
    def num_held(self) -> int:
        """Bytes that are held now."""
        return sum(share.num_bytes for share in self._shares)

    async def take(self, num_bytes: int, seconds: float, end_if_slow: Callable[[], object] = lambda: None) -> Share:
        """So many bytes, as soon as it is their turn. Raises: TimeoutError after so many seconds without."""
        num_bytes = min(num_bytes, self.most)
        if (share := self._try(num_bytes, end_if_slow, is_behind=bool(self._queue))) is not None:
            return share
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[Share] = loop.create_future()
        turn = loop.time() + num_bytes / _TURN_BYTES_PER_SECOND
        heappush(self._queue, (turn, next(self._numbers), num_bytes, granted, end_if_slow))
        deadline = loop.time() + seconds
        try:
            while not granted.done():
                await asyncio.wait([granted], timeout=min(_LOOK_SECONDS, max(0.0, deadline - loop.time())))
                if not granted.done():
                    for share in list(self._shares):
                        share.end_if_slow()
                    if not granted.done() and loop.time() >= deadline:
                        raise TimeoutError
            return granted.result()
        except BaseException:
            if granted.done() and not granted.cancelled():
                granted.result().close()
            granted.cancel()
            self._queue = [one for one in self._queue if one[3] is not granted]
            heapify(self._queue)
            self._serve()
            raise

    def give_back(self, share: Share, num_bytes: int) -> None:
        """Take bytes back from a share, and serve those that wait."""
        self._free[share.is_small] += num_bytes
        if not share.num_bytes:
            self._shares.discard(share)
        self._serve()
        self._on_given_back(num_bytes)

    def _try(self, num_bytes: int, end_if_slow: Callable[[], object], *, is_behind: bool) -> Share | None:
        """A share, if there are bytes. is_behind: others wait for those that are not kept for small ones."""
        parts = (*((True,) if num_bytes <= SMALL_BYTES else ()), *(() if is_behind else (False,)))
        for is_small in parts:
            if num_bytes <= self._free[is_small]:
                self._free[is_small] -= num_bytes
                share = Share(self, num_bytes, is_small, end_if_slow)
                if num_bytes:
                    self._shares.add(share)
                return share
        return None

    def _serve(self) -> None:
        """Give the first in the queue what they wait for; small ones also where the first is large and has to wait."""
        waiting: list[tuple[float, int, int, asyncio.Future[Share], Callable[[], object]]] = []
        while self._queue:
            one = heappop(self._queue)
            _, _, num_bytes, granted, end_if_slow = one
            if granted.done():
                continue
            share = self._try(num_bytes, end_if_slow, is_behind=bool(waiting))
            if share is None:
                waiting.append(one)
            else:
                granted.set_result(share)
        self._queue = waiting
