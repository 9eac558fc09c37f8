"""A replica's side of a relayed request: the app is called in this process, and its answer is given in parts."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

from localinfer.apps.server.operation.requests import record_of
from localinfer.apps.server.replies.reply import RELAY, Note, ReplyRelay, Resumption, UsedNote

_END_SECONDS = 5.0
"""What an app gets to end when its client has left."""
BATCH_SECONDS = 0.08
"""Between two batches of one answer: what comes meanwhile goes together, as each costs whoever relays it the same."""
HEARTBEAT_SECONDS = 1.0
"""After so long without anything an empty batch says that the process lives."""


@dataclass(frozen=True)
class RelayedRequest:
    """A request as it came, with its whole body; client: address and port of who asks."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    http_version: str = "1.1"

    def scope(self, state: dict[str, Any]) -> Scope:
        """The request as an app is called with it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": state,
        }


class AnswerPart(NamedTuple):
    """A message of the answer, None for none, and what is true as soon as it was sent."""

    notes: tuple[Note, ...]
    message: MutableMapping[str, Any] | None


async def answer_parts(
    app: ASGIApp, request: RelayedRequest, resumption: Resumption | None
) -> AsyncGenerator[list[AnswerPart]]:
    """Call an app, and yield what there is of its answer: at once, then in batches, and [] where there is nothing.

    The last batch has a `UsedNote`. Closing the iterator tells the app that the client has left.
    Raises: what the app raised.
    """
    parts: list[AnswerPart] = []
    pending: list[Note] = []
    changed, has_left = asyncio.Event(), asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    def note(one: Note, has_bytes: bool) -> None:
        if has_bytes:
            pending.append(one)
        else:
            parts.append(AnswerPart((one,), None))
            changed.set()

    async def receive() -> Message:
        if body:
            return body.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        parts.append(AnswerPart(tuple(pending), message))
        pending.clear()
        changed.set()

    scope = request.scope({RELAY: ReplyRelay(note, resumption)})
    answering = asyncio.ensure_future(app(scope, receive, send))
    answering.add_done_callback(lambda _: changed.set())
    loop = asyncio.get_running_loop()
    next_batch = 0.0
    try:
        while True:
            if not await _is_set_within(changed, HEARTBEAT_SECONDS):
                yield []
                continue
            if (seconds := next_batch - loop.time()) > 0 and not answering.done():
                await asyncio.wait({answering}, timeout=seconds)
            changed.clear()
            has_ended = answering.done()
            if has_ended and answering.exception() is None:
                parts.append(AnswerPart((UsedNote(sum(record_of(scope).num_tokens())),), None))
            given, parts[:] = parts[:], ()
            if any(part.message is not None and part.message.get("body") for part in given):
                next_batch = loop.time() + BATCH_SECONDS
            yield given
            if has_ended:
                answering.result()
                return
    finally:
        has_left.set()
        if not answering.done():
            with suppress(Exception):
                await asyncio.wait_for(answering, _END_SECONDS)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
