"""What becomes of a replica that says nothing: its answers are given up, and it is ended where it does not answer.

Serve's own health checks find it too, but give it as long to end as running replies get when a replica is removed,
and its place is not filled meanwhile. What has said nothing for so long has no running replies: they went on elsewhere.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from localinfer.apps.fleet.answer_parts import AnswerPart
from localinfer.apps.fleet.relay import ReplicaLostError

logger = logging.getLogger(__name__)

SILENT_SECONDS = 3.0
"""After so long without a batch, of which a replica sends an empty one each second, it is taken for lost: what another
one needs to go on is left of the five seconds that no stream is to be silent."""
_LOOK_SECONDS = 0.25
HUNG_SECONDS = 15.0
"""Without an answer since it was first silent: one that is only slow, on a busy machine, is not to be started anew."""
_PAUSE_SECONDS = 1.0


async def unless_silent(
    batches: AsyncIterator[list[AnswerPart]], may_leave: Callable[[], bool] = lambda: True
) -> AsyncGenerator[list[AnswerPart]]:
    """Batches of a replica as they come.

    may_leave: asked after SILENT_SECONDS without one whether another replica would do better: where all are slow, as on
    a machine that is busy with other things, one that goes on is as good as any. Raises: ReplicaLostError, if so; what
    the iterator raises.
    """
    loop, is_waiting = asyncio.get_running_loop(), True
    last, timer = loop.time(), loop.call_later(SILENT_SECONDS, lambda: look())

    def look() -> None:
        nonlocal timer
        # What the client takes to read is not the replica's.
        left = last + SILENT_SECONDS - loop.time() if is_waiting else SILENT_SECONDS
        if left <= 0 and may_leave():
            limit.reschedule(loop.time())
        else:
            timer = loop.call_later(left if left > 0 else _LOOK_SECONDS, look)

    try:
        async with asyncio.timeout(None) as limit:
            async for batch in batches:
                is_waiting = False
                yield batch
                is_waiting, last = True, loop.time()
    except TimeoutError:
        if not limit.expired():
            raise
        raise ReplicaLostError(f"it has said nothing for {loop.time() - last:.1f} s") from None
    finally:
        timer.cancel()


class ReplicaWatch:
    """The replicas of which an ingress has heard nothing.

    ask: asks a replica whether it lives. suspect: told whether a replica is to be left out.
    end: ends a replica's process. seconds: that it gets to answer.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[object]],
        suspect: Callable[[str, bool], Awaitable[object]],
        end: Callable[[str], Awaitable[object]],
        seconds: float = HUNG_SECONDS,
    ) -> None:
        self._ask, self._suspect, self._end = ask, suspect, end
        self._seconds = seconds
        self._watched: dict[str, asyncio.Task[None]] = {}

    @property
    def watched(self) -> frozenset[str]:
        """Replicas that have not answered yet."""
        return frozenset(self._watched)

    def notice(self, replica: str) -> None:
        """A replica was silent, or is gone; it is watched until it answers or has ended."""
        if replica and replica not in self._watched:
            task = self._watched[replica] = asyncio.ensure_future(self._watch(replica))
            task.add_done_callback(lambda done: self._forget(replica, done))

    async def _watch(self, replica: str) -> None:
        await self._suspect(replica, True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        while (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._ask(replica)
            except TimeoutError:
                break
            except Exception:
                # It is gone, or about to be; then its end is nothing more.
                await asyncio.sleep(min(_PAUSE_SECONDS, left))
                continue
            await self._suspect(replica, False)
            return
        logger.warning("replica %s has said nothing for %g s; its process is ended", replica, self._seconds)
        await self._end(replica)

    def _forget(self, replica: str, done: "asyncio.Task[None]") -> None:
        del self._watched[replica]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("replica %s could not be ended: %s", replica, " ".join(str(error).split())[:200])
