"""Server-sent events: how frames look on the wire, and a response that stops its work when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n"
"""A comment line, without the blank one that would make several clients see an event."""

STREAMS_EVENTS = "streams_events"
"""Set in the state of a request whose answer is a stream of events: a ping may stand between any two of its writes."""
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def data_frame(value: Any) -> bytes:
    """One event that is only data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Frames as they come. When the client leaves, `on_end` is called, which must bring the frames to an end.

    It is called again when they have ended or failed.
    """

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], object]) -> None:
        super().__init__(frames, headers=_HEADERS, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[STREAMS_EVENTS] = True
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self.stream_response(send)
        finally:
            watching.cancel()
            self._on_end()

    async def _watch(self, receive: Receive) -> None:
        await self.listen_for_disconnect(receive)
        self._on_end()
