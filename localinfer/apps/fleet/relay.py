"""The ingress's side of a relayed request: parts of an answer become messages, and another replica resumes a lost one.

A silent replica counts as lost; it is ended where it does not answer. Serve's own health checks find it too, but give
it as long to end as running replies get when a replica is removed, and start no other meanwhile.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import Message, Send

from localinfer.apps.fleet.replica import AnswerPart
from localinfer.apps.server.replies.relay import ReplyProgress, ReserveNote, Resumption
from localinfer.apps.server.transport.http import PING, ApiError

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 32
"""That may fail in a row before a reply is given up, in about a minute: as long as a replica takes to be replaced."""
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.25, 2.0
"""Before the next attempt after one that gave nothing, doubled each time up to the second."""
_PING_SECONDS = 2.0
"""After so long without bytes a client gets a sign that its stream of events is alive."""
_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
_PING: Message = {"type": "http.response.body", "body": PING, "more_body": True}

Open = Callable[[Resumption | None], AsyncGenerator[list[AnswerPart]]]
"""Starts or resumes the answer of a replica."""


class ReplicaLostError(Exception):
    """The replica that answered is gone."""


class BrokenAnswerError(Exception):
    """A part of an answer was sent that no replica can resume; the connection has to break."""


async def relay_answer(
    open_parts: Open,
    send: Send,
    path: str,
    progress: ReplyProgress | None = None,
    reserve: Callable[[int, int], Awaitable[object]] | None = None,
) -> int:
    """Relay an answer; where its replica is lost, another one resumes it. Returns the number of replicas lost.

    open_parts: called again for each that is lost. path: of the request, without `/v1`. progress: of the reply.
    reserve: takes the tokens of a `ReserveNote`, before anything is sent, or raises what the client gets in place
    of an answer. Raises: BrokenAnswerError; what `open_parts` raises but ReplicaLostError; what `reserve` raises.
    """
    with _Client(send) as client:
        return await _relay(open_parts, client, path, ReplyProgress() if progress is None else progress, reserve)


async def _relay(
    open_parts: Open,
    client: "_Client",
    path: str,
    progress: ReplyProgress,
    reserve: Callable[[int, int], Awaitable[object]] | None,
) -> int:
    num_lost = num_idle = 0
    while num_idle < _MOST_ATTEMPTS:
        if num_idle:
            await asyncio.sleep(min(_PAUSE_SECONDS * 2 ** (num_idle - 1), _MOST_PAUSE_SECONDS))
        num_before = progress.num_tokens
        resumption = progress.resumption()
        if client.has_begun and progress.is_whole:
            await client.send(_END)
            return num_lost
        if client.has_begun and resumption is None:
            raise BrokenAnswerError("a replica is gone, and its answer was no reply that another can resume")
        is_refused = False
        try:
            async with aclosing(open_parts(resumption)) as parts:
                async for batch in parts:
                    messages: list[Message] = []
                    for notes, message in batch:
                        for note in notes:
                            if isinstance(note, ReserveNote) and reserve is not None:
                                await reserve(note.least, note.most)
                        if message is None or is_refused:
                            continue
                        if message["type"] == "http.response.start":
                            # Full, ending or failing: what was taken on once is not given up for that.
                            is_refused = resumption is not None and message["status"] >= 400
                            if client.has_begun or is_refused:
                                continue
                        messages.append(message)
                    for message in _joined(messages):
                        await client.send(message)
                    for notes, _ in batch:
                        for note in notes:
                            progress.take(note)
            if not is_refused:
                return num_lost
        except ReplicaLostError as error:
            num_lost += 1
            if client.has_ended:
                # Only what it had to say of it, such as the tokens that were used, is lost.
                return num_lost
            logger.warning(
                "a replica is gone in the middle of an answer (%s); another resumes it after %d tokens",
                " ".join(str(error).split())[:200],
                progress.num_tokens,
            )
        num_idle = 0 if progress.num_tokens > num_before else num_idle + 1
    if client.has_begun:
        raise BrokenAnswerError(f"{num_lost} replicas were lost, or refused to resume it")
    refusal = ApiError(503, "the replicas that began to answer are gone; try again", code="replicas_lost")
    await send_error(client.send, refusal, path)
    return num_lost


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Answer with an error, in the form of the path's API."""
    response = error.response(path)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body)})


class _Client:
    """The receiver of an answer: messages in order, and in a stream of events a comment after a long silence.

    A context, after which no comment is sent. has_begun: the first message was sent; has_ended: the last one was.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = self.has_ended = False
        self._is_sending = False
        self._last_sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Future[None] | None = None

    def __enter__(self) -> "_Client":
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    async def send(self, message: Message) -> None:
        """Send a message, after a comment that is being sent."""
        if self._pinging is not None:
            await self._pinging
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        if message["type"] == "http.response.start":
            self.has_begun = True
            if _takes_pings(message):
                self._timer = loop.call_later(_PING_SECONDS, self._look)
        else:
            self.has_ended = not message.get("more_body")

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._last_sent + _PING_SECONDS - loop.time()
        if left <= 0 and not self._is_sending and not self.has_ended and self._pinging is None:
            self._pinging = asyncio.ensure_future(self._ping())
        self._timer = loop.call_later(left if left > 0 else _PING_SECONDS, self._look)

    async def _ping(self) -> None:
        # Of a client that is gone its connection tells.
        with suppress(Exception):
            await self._send(_PING)
        self._last_sent = asyncio.get_running_loop().time()
        self._pinging = None


def _takes_pings(start: Message) -> bool:
    """True if comments may stand between two writes of an answer."""
    return any(name.lower() == b"content-type" and b"text/event-stream" in value for name, value in start["headers"])


def _joined(messages: list[Message]) -> list[Message]:
    """The same bytes in fewer messages: neighbours of a body are one."""
    joined: list[MutableMapping[str, Any]] = []
    bodies: list[bytes] = []
    for message in messages:
        if message["type"] == "http.response.body" and bodies:
            bodies.append(message.get("body", b""))
            joined[-1] = {**message, "body": b"".join(bodies)}
            continue
        bodies = [message.get("body", b"")] if message["type"] == "http.response.body" else []
        joined.append(message)
    return joined


SILENT_SECONDS = 3.0
"""After so long without a batch, of which a replica sends an empty one each second, it is taken for lost: what another
one needs to continue is left of the five seconds that no stream is to be silent."""
_LOOK_SECONDS = 0.25
HUNG_SECONDS = 15.0
"""Without an answer since it was first silent: one that is only slow, on a busy machine, is not to be started anew."""
_ASK_PAUSE_SECONDS = 1.0


async def unless_silent(
    batches: AsyncIterator[list[AnswerPart]], may_leave: Callable[[], bool] = lambda: True
) -> AsyncGenerator[list[AnswerPart]]:
    """Batches of a replica as they come.

    may_leave: asked after SILENT_SECONDS without one whether another replica would do better: where all are slow, as on
    a machine that is busy with other things, none would. Raises: ReplicaLostError, if so; what the iterator raises.
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
    """The replicas that are silent, as an ingress sees them.

    ask: asks a replica whether it lives. suspect: called with True to leave a replica out, False to take it back.
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
        """Watch a replica that was silent or is gone, until it answers or has ended."""
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
                await asyncio.sleep(min(_ASK_PAUSE_SECONDS, left))
                continue
            await self._suspect(replica, False)
            return
        logger.warning("replica %s has said nothing for %g s; its process is ended", replica, self._seconds)
        await self._end(replica)

    def _forget(self, replica: str, done: "asyncio.Task[None]") -> None:
        del self._watched[replica]
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.error("replica %s could not be ended: %s", replica, " ".join(str(error).split())[:200])
