"""One HTTP connection, with deadlines: uvicorn's protocol waits for ever for a request that never ends.

Also here: the one error shape for bytes that are not HTTP, a limit of connections under which the oldest idle one
makes room, an end for clients that do not read their replies, and an answer for those that send no more.
"""

import asyncio
import socket
from typing import Any, ClassVar

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.event_stream import PING, STREAMS_EVENTS
from localinfer.server.transport.http_framing import FramingCheck
from localinfer.server.transport.security import IS_UNIX_SOCKET
from localinfer.server.transport.settings import ServerSettings
from localinfer.server.transport.sockets import has_unix_sockets

_PROBE_SECONDS = (0.01, 0.05, 0.25)
"""After the end of what a client sends: when it is asked again whether it still listens. Its machine answers the first
time that nobody does, and the second time the system says so. Some clients take only five such interim answers."""


class Connection(H11Protocol):
    """uvicorn's protocol for HTTP/1.1 with the limits of `settings`, which a subclass made by `limited` carries."""

    settings: ClassVar[ServerSettings]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._idle_since = self.loop.time()
        self._framing = FramingCheck()
        self._is_half_closed = False
        self._is_dropped = False

    @classmethod
    def limited(cls, settings: ServerSettings) -> type["Connection"]:
        """The class that a server with these settings makes its connections of."""
        return type("LimitedConnection", (cls,), {"settings": settings})

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        listener = transport.get_extra_info("socket")
        if has_unix_sockets() and listener.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, IS_UNIX_SOCKET: True}
        self._make_room()
        if not transport.is_closing():
            self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._reader_timer, self._probe_timer):
            self._stop(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._framing.has_fault:
            return
        num_sound = self._framing.feed(data)
        if num_sound:
            super().data_received(data[:num_sound])
        self._refuse_fault()
        self._watch_request()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may still wait for what it asked, or have left: only writing to it tells."""
        if self.is_idle or self.cycle.more_body:
            return False
        self._is_half_closed = True
        self._probe(0)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since = self.loop.time()
        self._refuse_fault()
        if self._is_half_closed and (self.is_idle or self.cycle.more_body):
            self.transport.close()
        self._bound_lingering()
        self._watch_request()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._bound_lingering()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop(self._reader_timer)
        self._reader_timer = self.loop.call_later(self.settings.slow_reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._reader_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the shape of every other error."""
        self._refuse(
            ApiError(400, "this is not a request of HTTP/1.1; check the client and its address", code="bad_http")
        )

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error.body())
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=error.status, headers=[*headers, *error.headers.items()])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _refuse_fault(self) -> None:
        """Refuse bytes that may be read in two ways, after what was asked before them was answered."""
        if self._framing.has_fault and (self.is_idle or self.cycle.more_body) and not self.transport.is_closing():
            self.send_400_response("bytes with two readings")

    def _probe(self, count: int) -> None:
        """Send what changes nothing to a client that listens, and fails if it left."""
        if self.is_idle or self.transport.is_closing():
            return
        if self.conn.our_state is h11.SEND_BODY and self.scope["state"].get(STREAMS_EVENTS):
            self.transport.write(self.conn.send(h11.Data(data=PING)) or b"")
        elif self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version != b"1.0":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        if count < len(_PROBE_SECONDS):
            self._probe_timer = self.loop.call_later(_PROBE_SECONDS[count], self._probe, count + 1)

    def _bound_lingering(self) -> None:
        """Give a client that does not read the end of its last reply no longer than others."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._stop(self._reader_timer)
            self._reader_timer = self.loop.call_later(self.settings.slow_reader_seconds, self.transport.abort)

    def _make_room(self) -> None:
        """Keep to the limit: close the connection that was idle longest, or if none is, refuse this one."""
        # Those that were closed here leave the server's set only in the next round of the loop.
        kept = [other for other in self.connections if isinstance(other, Connection) and not other._is_dropped]
        if len(kept) <= self.settings.max_connections:
            return
        idle = [other for other in kept if other is not self and other.is_idle]
        if idle:
            min(idle, key=lambda other: other._idle_since).drop()
        else:
            self._is_dropped = True
            self._refuse(ApiError(503, "too many connections are open; close some", code="too_many_connections"))

    def drop(self) -> None:
        """Close the connection at once."""
        self._is_dropped = True
        self.transport.abort()

    def _watch_request(self) -> None:
        """Keep a deadline while a request is on its way: one for its head, another for its body."""
        state = self.conn.their_state
        is_in_body = state is h11.SEND_BODY
        has_begun = is_in_body or (state is h11.IDLE and self.timeout_keep_alive_task is None)
        if not has_begun or self.transport.is_closing():
            self._stop(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None or is_in_body is not self._is_in_body:
            self._stop(self._request_timer)
            seconds = self.settings.body_seconds + 1 if is_in_body else self.settings.header_seconds
            self._request_timer = self.loop.call_later(seconds, self._give_up)
        self._is_in_body = is_in_body

    def _give_up(self) -> None:
        self._request_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        self._refuse(ApiError(408, "the request did not arrive in time; send it at once", code="request_timeout"))

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
