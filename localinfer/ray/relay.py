"""The ingress's side of a relayed request: parts of an answer become messages to the client, whoever makes them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.types import Message, Send

from localinfer.ray.answer_parts import AnswerPart
from localinfer.server.replies.resumption import ReplyProgress, ReserveNote, Resumption
from localinfer.server.transport.http import ApiError

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 8
_PAUSE_SECONDS = 0.25
"""Before a replica that refused a reply is asked again, doubled each time."""
SILENT_SECONDS = 3.0
"""After so long without a batch, of which a replica sends an empty one each second, it is taken for lost: what another
one needs to go on is left of the five seconds that no stream is to be silent."""
_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}

Open = Callable[[Resumption | None], AsyncGenerator[list[AnswerPart]]]
"""Has a replica answer a request, or go on with the answer."""


class ReplicaLostError(Exception):
    """The replica that answered is gone."""


class BrokenAnswerError(Exception):
    """A part of an answer was sent, and nobody can go on with it; the connection has to end without its end."""


async def unless_silent(batches: AsyncIterator[list[AnswerPart]]) -> AsyncGenerator[list[AnswerPart]]:
    """Batches of a replica as they come.

    Raises: ReplicaLostError after SILENT_SECONDS without one; what the iterator raises.
    """
    loop, seconds = asyncio.get_running_loop(), SILENT_SECONDS
    try:
        async with asyncio.timeout(seconds) as limit:
            async for batch in batches:
                # What the client takes to read is not the replica's.
                limit.reschedule(None)
                yield batch
                limit.reschedule(loop.time() + seconds)
    except TimeoutError:
        if not limit.expired():
            raise
        raise ReplicaLostError(f"it has said nothing for {seconds:g} s") from None


async def relay_answer(
    open_parts: Open,
    send: Send,
    path: str,
    progress: ReplyProgress | None = None,
    reserve: Callable[[int, int], Awaitable[object]] | None = None,
) -> int:
    """Pass an answer on; where its replica goes, another one goes on. Returns how many replicas were lost.

    open_parts: called again for each that is lost. path: of the request, without `/v1`. progress: told how far it came.
    reserve: takes the tokens of a `ReserveNote`, before anything is sent, or raises what the client is told in place
    of an answer. Raises: BrokenAnswerError; what `open_parts` raises but ReplicaLostError; what `reserve` raises.
    """
    progress = ReplyProgress() if progress is None else progress
    has_begun = False
    num_lost = 0
    for attempt in range(_MOST_ATTEMPTS):
        resumption = progress.resumption()
        if has_begun and progress.is_whole:
            await send(_END)
            return num_lost
        if has_begun and resumption is None:
            raise BrokenAnswerError("a replica is gone, and its answer was no reply that another can go on with")
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
                            if has_begun or is_refused:
                                continue
                            has_begun = True
                        messages.append(message)
                    for message in _joined(messages):
                        await send(message)
                    for notes, _ in batch:
                        for note in notes:
                            progress.take(note)
            if not is_refused:
                return num_lost
            await asyncio.sleep(_PAUSE_SECONDS * 2**attempt)
        except ReplicaLostError as error:
            num_lost += 1
            logger.warning(
                "a replica is gone in the middle of an answer (%s); another goes on after %d tokens",
                " ".join(str(error).split())[:200],
                progress.num_tokens,
            )
    if has_begun:
        raise BrokenAnswerError(f"{num_lost} replicas were lost, or refused to go on")
    refusal = ApiError(503, "the replicas that began to answer are gone; try again", code="replicas_lost")
    response = refusal.response(path)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body)})
    return num_lost


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
