"""Responses that are made in the background: they go on when their client leaves, and may be looked at meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from localinfer.apps.server.api.responses_writer import ResponseWriter
from localinfer.apps.server.api.serving import reply_frames
from localinfer.apps.server.transport.http import PING, ApiError, EventStream

_FRAME_END = b"\n\n"


class BackgroundResponse:
    """A response that is made by a task of its own. Lives on the event loop.

    frames: its events so far, as they are streamed. keep_frames: is given all of them at the end; None if they may not
    be asked for.
    """

    def __init__(
        self, writer: ResponseWriter, ping_seconds: float, keep_frames: Callable[[bytes], None] | None
    ) -> None:
        self.writer = writer
        self.is_streamed = keep_frames is not None
        self.frames: list[bytes] = []
        self.has_ended = False
        self.ping_seconds = ping_seconds
        self._keep_frames = keep_frames
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Make the response, to its end."""
        try:
            async for frame in reply_frames(self.writer, self.ping_seconds):
                if frame != PING:
                    self.frames.append(frame)
                    self.tell()
        finally:
            self.writer.reply.close()
            if self._keep_frames is not None:
                self._keep_frames(b"".join(self.frames))
            self.has_ended = True
            self.tell()

    async def wait(self) -> None:
        """Return when there is more, or a while later. Raises: TimeoutError."""
        await asyncio.wait_for(self._changed.wait(), self.ping_seconds)

    def tell(self) -> None:
        """Wake those who wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def stream(self, begin: int = 0) -> EventStream:
        """Its frames from one on, as they come; ends with it, or when the client leaves."""
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            self.tell()

        async def frames() -> AsyncIterator[bytes]:
            next_frame = begin
            while not has_left:
                while next_frame < len(self.frames):
                    yield self.frames[next_frame]
                    next_frame += 1
                if self.has_ended:
                    return
                try:
                    await self.wait()
                except TimeoutError:
                    yield PING

        return EventStream(frames(), leave)


class BackgroundResponses:
    """The responses of a server that are made in the background now, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[BackgroundResponse, asyncio.Task[None]]] = {}

    def start(self, response: BackgroundResponse) -> None:
        """Begin to make a response."""
        response_id = response.writer.reply.id
        task = asyncio.create_task(response.run())
        self._running[response_id] = response, task
        task.add_done_callback(lambda _: self._running.pop(response_id, None))

    def get(self, response_id: str) -> BackgroundResponse | None:
        """A response that is being made."""
        found = self._running.get(response_id)
        return None if found is None else found[0]

    async def cancel(self, response_id: str) -> dict[str, Any] | None:
        """Stop a response, and return it as it ended; None if none of this id is being made."""
        found = self._running.get(response_id)
        if found is None:
            return None
        response, task = found
        response.writer.reply.cancel()
        await asyncio.shield(task)
        return response.writer.response()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Wait at the end for what still runs; who ends the server sees to it that it ends."""
        yield
        tasks = [task for _, task in self._running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)


def frames_after(stored: bytes, begin: int) -> list[bytes]:
    """The frames of a stored stream from one on."""
    return [frame + _FRAME_END for frame in stored.split(_FRAME_END)[:-1]][begin:]


def first_frame(starting_after: str | None) -> int:
    """The index of the frame after a sequence number, which are those of the frames. Raises: ApiError."""
    if starting_after is None:
        return 0
    if not (starting_after.isascii() and starting_after.isdecimal()):
        raise ApiError(
            400, f"starting_after is {starting_after!r:.40}; give the number of an event", param="starting_after"
        )
    return int(starting_after[:9]) + 1
