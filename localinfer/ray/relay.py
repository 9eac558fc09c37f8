"""The ingress's side of a relayed request: parts of an answer become messages to the client, whoever makes them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from starlette.types import Message, Send

from localinfer.ray.answer_parts import AnswerPart
from localinfer.server.replies.resumption import ReplyProgress, Resumption
from localinfer.server.transport.http import ApiError

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 8
_PAUSE_SECONDS = 0.25
"""Before a replica that refused a reply is asked again, doubled each time."""
_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}

Open = Callable[[Resumption | None], AsyncGenerator[list[AnswerPart]]]
"""Has a replica answer a request, or go on with the answer."""


class ReplicaLostError(Exception):
    """The replica that answered is gone."""


class BrokenAnswerError(Exception):
    """A part of an answer was sent, and nobody can go on with it; the connection has to end without its end."""


async def relay_answer(open_parts: Open, send: Send, path: str) -> int:
    """Pass an answer on; where its replica goes, another one goes on. Returns how many replicas were lost.

    Raises: BrokenAnswerError; what `open_parts` raises but ReplicaLostError.
    """
    progress = ReplyProgress()
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
                async for notes, message in _each(parts):
                    for note in notes:
                        progress.take(note)
                    if message is None or is_refused:
                        continue
                    if message["type"] == "http.response.start":
                        # Full, ending or failing: what was taken on once is not given up for that.
                        is_refused = resumption is not None and message["status"] >= 400
                        if has_begun or is_refused:
                            continue
                        has_begun = True
                    await send(message)
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


async def _each(batches: AsyncGenerator[list[AnswerPart]]) -> AsyncIterator[AnswerPart]:
    async for batch in batches:
        for part in batch:
            yield part
