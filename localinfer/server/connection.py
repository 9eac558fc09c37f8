"""One HTTP connection, with deadlines: uvicorn's protocol waits for ever for a request that never ends.

Also here: the one error shape for bytes that are not HTTP, a limit of connections under which the oldest idle one
makes room, and an end for clients that do not read their replies.
"""

import asyncio
import re
import socket
from typing import Any, ClassVar

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from localinfer.server.gate import IS_UNIX_SOCKET
from localinfer.server.settings import ServerSettings
from localinfer.server.sockets import has_unix_sockets
from localinfer.server.wire_errors import ApiError

_BARE_LINE_END = re.compile(rb"[^\r]\n")


class Connection(H11Protocol):
    """uvicorn's protocol for HTTP/1.1 with the limits of `settings`, which a subclass made by `limited` carries."""

    settings: ClassVar[ServerSettings]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._idle_since = self.loop.time()

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
        if len(self.connections) > self.settings.max_connections:
            self._make_room()
        if not transport.is_closing():
            self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._request_timer)
        self._stop(self._reader_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and _BARE_LINE_END.search(data.partition(b"\r\n\r\n")[0]):
            # h11 would take it for the end of a line, which others on the way may not.
            self.send_400_response("bare line end")
            return
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since = self.loop.time()
        self._watch_request()

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

    def _make_room(self) -> None:
        """Close the connection that was idle longest."""
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        idle = [other for other in others if other.is_idle]
        if idle:
            min(idle, key=lambda other: other._idle_since).transport.abort()
        else:
            self._refuse(ApiError(503, "too many connections are open; close some", code="too_many_connections"))

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
