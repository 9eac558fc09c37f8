"""Server-sent events: how frames look on the wire, and a response that stops its work when the client leaves."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n"
"""A comment line, without the blank one that would make several clients see an event."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def data_frame(value: Any) -> bytes:
    """One event that is only data."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Frames as they come. `on_end` is called once, whether they ended, failed, or the client left."""

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], object]) -> None:
        super().__init__(frames, headers=_HEADERS, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
