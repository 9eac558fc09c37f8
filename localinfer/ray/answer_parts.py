"""A replica's side of a relayed request: the app is called in this process, and its answer is given in parts."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

from localinfer.server.replies.resumption import RELAY, Note, ReplyRelay, Resumption

_END_SECONDS = 5.0
"""What an app gets to end when its client has left."""


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
    """Call an app, and yield what there is of its answer as often as there is something.

    Closing the iterator tells the app that the client has left. Raises: what the app raised.
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

    answering = asyncio.ensure_future(app(request.scope({RELAY: ReplyRelay(note, resumption)}), receive, send))
    answering.add_done_callback(lambda _: changed.set())
    try:
        while True:
            await changed.wait()
            changed.clear()
            if parts:
                given, parts[:] = parts[:], ()
                yield given
            elif answering.done():
                answering.result()
                return
            if answering.done():
                changed.set()
    finally:
        has_left.set()
        if not answering.done():
            with suppress(Exception):
                await asyncio.wait_for(answering, _END_SECONDS)
