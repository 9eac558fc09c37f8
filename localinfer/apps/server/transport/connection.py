"""One HTTP connection: strict framing, deadlines, and its priority among the connections of a server."""

import asyncio
import re
import socket
from collections.abc import Collection
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localinfer.apps.server.transport.bodies import CONNECTION
from localinfer.apps.server.transport.http import STREAMS_EVENTS, ApiError
from localinfer.apps.server.transport.security import IS_UNIX_SOCKET
from localinfer.apps.server.transport.settings import ServerSettings

OWNER_PLACES = 16
"""Connections through the Unix socket, counted apart from others."""
_MOST_GUESTS = 8
_MOST_DRAINING = 16
"""Refused connections whose rest is read on, so that their clients read the answer."""
_FAIR_BYTES_PER_SECOND = 1 << 20
_IDLE_SECONDS = 1.0
"""From here on a connection that asks nothing gives way before all that ask something; one that was just made will."""


class Occupant(Protocol):
    """A connection as this module sees it.

    is_dropped: it is being closed and counts no more. is_draining: its answer is out, and what comes is thrown away.
    is_guest: it is above the limit. is_owners: it came through the Unix socket. is_idle: nothing is being answered.
    is_receiving: a request is being answered whose body is not whole. since: of its state, in seconds of the loop.
    """

    is_dropped: bool
    is_guest: bool

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_owners(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_receiving(self) -> bool: ...

    @property
    def since(self) -> float: ...

    def seconds_behind(self) -> float:
        """Delay of its request, or of the body of it."""
        ...

    def drop(self) -> None:
        """Close it at once."""
        ...

    def give_way(self) -> None:
        """Say why its request is not answered, and close it."""
        ...


def seconds_behind(waited: float, num_bytes: int) -> float:
    """Delay, against a fair pace, of a client that sent so many bytes in so many seconds."""
    return waited - num_bytes / _FAIR_BYTES_PER_SECOND


def make_room(newcomer: Occupant, occupants: Collection[Occupant], limit: int) -> bool:
    """Return whether a newcomer, one of the occupants, may stay as more than a guest; closes another one if it must.

    limit: connections beside the owner's. Each call closes one connection at most, of which a newcomer adds one.
    """
    kept = [one for one in occupants if not one.is_dropped]
    draining = [one for one in kept if one.is_draining]
    if len(draining) > _MOST_DRAINING:
        _oldest(draining).drop()
    seated = [one for one in kept if not one.is_draining and (not one.is_guest or one is newcomer)]
    owners = [one for one in seated if one.is_owners]
    others = [one for one in seated if not one.is_owners]
    num_extra = max(0, len(owners) - OWNER_PLACES)
    if len(others) + num_extra <= limit:
        return True
    movable = [one for one in ((*others, *owners) if num_extra else others) if one is not newcomer]
    if idle := [one for one in movable if one.is_idle and one.seconds_behind() > _IDLE_SECONDS]:
        _oldest(idle).drop()
        return True
    if unfinished := [one for one in movable if one.is_idle or one.is_receiving]:
        last = max(unfinished, key=lambda one: one.seconds_behind())
        if last.is_idle:
            last.drop()
        else:
            last.give_way()
        return True
    return False


def bound_guests(occupants: Collection[Occupant]) -> None:
    """Close a guest if there are too many: the oldest that asks nothing, or else the oldest."""
    guests = [one for one in occupants if one.is_guest and not one.is_dropped and not one.is_draining]
    if len(guests) > _MOST_GUESTS:
        _oldest([one for one in guests if one.is_idle] or guests).drop()


def _oldest(occupants: list[Occupant]) -> Occupant:
    return min(occupants, key=lambda one: one.since)


_PROBE_SECONDS = (0.01, 0.05, 0.25)
"""After the end of what a client sends: when to probe whether it still listens. Its machine answers the first probe
that reaches no program, and the second one fails. Some clients take only five such interim answers."""
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?")


_READ_BYTES = 1 << 16
_LATE_SECONDS, _UNREAD_SECONDS = 1.0, 5.0
"""Behind a fair pace with a body, and not reading an answer: from when on a client must not hold what others need."""
_DRAIN_SECONDS = 5.0
_DRAIN_BYTES = 1 << 30
"""Time and bytes in which a body that was refused is still read."""


class _Part(Enum):
    """Part of a request that the next byte belongs to."""

    HEAD = auto()
    CONTENT = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILER = auto()


class FramingCheck:
    """Follows the bytes of one connection, however packets split them; finds nothing else that may be wrong with them.

    has_fault: whether a byte was found that may be read in two ways; nothing after it counts.
    """

    def __init__(self) -> None:
        self.has_fault = False
        self._part = _Part.HEAD
        self._line = bytearray()
        self._left = 0
        self._start_head()

    def feed(self, data: bytes) -> int:
        """Take the next bytes and return how many of them are in order: all, or those before the first at fault."""
        position = 0
        while position < len(data) and not self.has_fault:
            if self._part in (_Part.CONTENT, _Part.CHUNK_DATA):
                taken = min(self._left, len(data) - position)
                self._left -= taken
                position += taken
                if not self._left:
                    self._end_data()
                continue
            end = data.find(b"\n", position) + 1
            part = data[position : end or len(data)]
            if self._is_faulty(part):
                self.has_fault = True
                break
            position += len(part)
            self._line += part
            if end:
                line = bytes(self._line[:-2])
                self._line.clear()
                self._end_line(line)
        return position

    def _is_faulty(self, part: bytes) -> bool:
        """Return whether a line is already invalid."""
        if self._line[-1:] == b"\r":
            return part != b"\n"
        if not self._line and part[:1] in (b" ", b"\t") and self._part in (_Part.HEAD, _Part.TRAILER):
            return True
        if part.endswith(b"\n"):
            return not part.endswith(b"\r\n") or part.count(b"\r") > 1
        return b"\r" in part[:-1]

    def _start_head(self) -> None:
        self._part = _Part.HEAD
        self._has_chunks = False
        self._length = 0

    def _end_data(self) -> None:
        if self._part is _Part.CHUNK_DATA:
            self._part = _Part.CHUNK_END
        else:
            self._start_head()

    def _end_line(self, line: bytes) -> None:
        match self._part:
            case _Part.HEAD if line:
                self._read_header(line)
            case _Part.HEAD:
                if self._has_chunks:
                    self._part = _Part.CHUNK_SIZE
                elif self._length:
                    self._part, self._left = _Part.CONTENT, self._length
                else:
                    self._start_head()
            case _Part.CHUNK_SIZE:
                # A size that is none is left to the parser, which ends the connection.
                found = _CHUNK_SIZE.fullmatch(line)
                self._left = 0 if found is None else int(found[1], 16)
                if found is not None:
                    self._part = _Part.CHUNK_DATA if self._left else _Part.TRAILER
            case _Part.CHUNK_END:
                self._part = _Part.CHUNK_SIZE
            case _Part.TRAILER if not line:
                self._start_head()

    def _read_header(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        match name.lower():
            case b"content-length":
                self._length = int(value) if value.strip().isdigit() and len(value) < 24 else 0
            case b"transfer-encoding":
                self._has_chunks = True


class _DrainingTransport:
    """A transport that is closed by its protocol's `close_in_order`, and in all else as it is."""

    def __init__(self, transport: asyncio.Transport, protocol: "Connection") -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._protocol.close_in_order(self._transport)

    def is_closing(self) -> bool:
        return self._protocol.is_draining or self._transport.is_closing()


class Connection(H11Protocol):
    """uvicorn's protocol for HTTP/1.1 with the limits of `settings`, which a subclass made by `limited` carries."""

    settings: ClassVar[ServerSettings]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._body_bytes = 0
        self._is_held = False
        self._unread_since: float | None = None
        self._since = self.loop.time()
        self._framing = FramingCheck()
        self._is_half_closed = False
        self.is_owners = False
        self.is_dropped = False
        self.is_guest = False
        self._num_drained: int | None = None
        self._drain_timer: asyncio.TimerHandle | None = None

    @classmethod
    def limited(cls, settings: ServerSettings) -> type["Connection"]:
        """The class that a server with these settings makes its connections of."""
        return type("LimitedConnection", (cls,), {"settings": settings})

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_draining(self) -> bool:
        """True if all was said, and the rest of a request is read only to be thrown away."""
        return self._num_drained is not None

    @property
    def is_receiving(self) -> bool:
        """True if a request is being answered whose body is not whole."""
        return not self.is_idle and self.cycle.more_body

    @property
    def since(self) -> float:
        """Time at which it was made, its last answer was out, or the present body began; seconds of the loop."""
        return self._since

    def seconds_behind(self) -> float:
        """Delay of the body that is being read, or time without a request."""
        waited = 0.0 if self._is_held else self.loop.time() - self._since
        return seconds_behind(waited, 0 if self.is_idle else self._body_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: self}
        if hasattr(transport, "max_size"):
            # Of asyncio's transports: by itself one reads four times as much before the next one's turn.
            transport.max_size = _READ_BYTES
        self.transport = _DrainingTransport(transport, self)  # type: ignore[assignment]
        if transport.get_extra_info("socket").family == getattr(socket, "AF_UNIX", None):
            self.is_owners = True
            self.app_state = {**self.app_state, IS_UNIX_SOCKET: True}
        if not self._has_place():
            self.is_guest = True
            self.app = self._for_guests(self.app)
            bound_guests(self._all())
        if not transport.is_closing():
            self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._reader_timer, self._probe_timer, self._drain_timer):
            self._stop(timer)
        super().connection_lost(exc)

    def close_in_order(self, transport: asyncio.Transport) -> None:
        """Close the connection; where a body is still being sent, only after its end, or after a while.

        Closed at once, the system would answer what comes next with a reset, and many clients read no reply then.
        """
        if self.is_draining:
            return
        if self.conn.their_state is not h11.SEND_BODY or self._is_half_closed or transport.is_closing():
            transport.close()
            return
        self._num_drained = 0
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        self._drain_timer = self.loop.call_later(_DRAIN_SECONDS, transport.abort)

    def shutdown(self) -> None:
        if self.is_draining:
            self.transport.abort()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._num_drained is not None:
            self._num_drained += len(data)
            if self._num_drained > _DRAIN_BYTES:
                self.transport.abort()
            return
        # Behind a request that is the last one nothing is asked (RFC 9112, section 9.6).
        if self._framing.has_fault or self.conn.their_state is h11.MUST_CLOSE:
            return
        num_sound = self._framing.feed(data)
        if num_sound:
            self._body_bytes += num_sound
            super().data_received(data[:num_sound])
        self._refuse_fault()
        self._watch_request()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It may still wait for its answer, or have left: only writing to it shows which."""
        if self.is_idle or self.cycle.more_body or self.is_draining:
            return False
        self._is_half_closed = True
        self._probe(0)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
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
        self._unread_since = self.loop.time()
        self._stop(self._reader_timer)
        self._reader_timer = self.loop.call_later(self.settings.slow_reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None
        self._stop(self._reader_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the shape of every other error."""
        self._refuse(
            ApiError(400, "this is not a request of HTTP/1.1; check the client and its address", code="bad_http")
        )

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error.body())
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            response = h11.Response(status_code=error.status, headers=list((headers | error.headers).items()))
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if not self.is_idle:
            # What is being answered had a body that is not in order: its own answer would come second.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _refuse_fault(self) -> None:
        """Refuse bytes that may be read in two ways, after what was asked before them was answered."""
        if self._framing.has_fault and (self.is_idle or self.cycle.more_body) and not self.transport.is_closing():
            self.send_400_response("bytes with two readings")

    def _probe(self, count: int) -> None:
        """Write what a client ignores if it listens, and what fails if it left."""
        if self.is_idle or self.transport.is_closing():
            return
        ping = self.scope["state"].get(STREAMS_EVENTS)
        if self.conn.our_state is h11.SEND_BODY and ping is not None:
            self.transport.write(self.conn.send(h11.Data(data=ping)) or b"")
        elif self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version != b"1.0":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        if count < len(_PROBE_SECONDS):
            self._probe_timer = self.loop.call_later(_PROBE_SECONDS[count], self._probe, count + 1)

    def _bound_lingering(self) -> None:
        """Give a client that does not read the end of its last reply no longer than others."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._stop(self._reader_timer)
            self._reader_timer = self.loop.call_later(self.settings.slow_reader_seconds, self.transport.abort)

    def _all(self) -> list["Connection"]:
        return [one for one in self.connections if isinstance(one, Connection)]

    def _has_place(self) -> bool:
        return make_room(self, self._all(), self.settings.max_connections)

    def _for_guests(self, app: ASGIApp) -> ASGIApp:
        """The application of a connection above the limit: it tells the server's health, or that there is no room."""

        async def guests_app(scope: Scope, receive: Receive, send: Send) -> None:
            if self._has_place():
                self.is_guest, self.app = False, app
                await app(scope, receive, send)
                return

            async def send_last(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
                await send(message)

            path = scope["path"].rstrip("/").removeprefix("/v1")
            await (app if path == "/health" else _no_place().response(path))(scope, receive, send_last)

        return guests_app

    def give_way(self) -> None:
        """Refuse a request whose body is not whole, to make room for another."""
        self._refuse(
            ApiError(
                503,
                "the body had not arrived when its place was needed for another request; send it again, at once",
                code="too_many_connections",
            )
        )

    def drop(self) -> None:
        """Close the connection at once."""
        self.is_dropped = True
        self.transport.abort()

    def hold_body(self) -> None:
        """Nothing is read now: no deadline runs, and the client is not late."""
        self._is_held = True
        self._watch_request()

    def resume_body(self) -> None:
        """The body is wanted from now on."""
        self._is_held = False
        self._since, self._body_bytes = self.loop.time(), 0
        self._watch_request()

    def end_if_late(self) -> None:
        """Refuse a request whose body comes slowly, for those that wait for the memory that it holds."""
        if self.is_receiving and self.seconds_behind() > _LATE_SECONDS:
            self._refuse(
                ApiError(
                    408,
                    "the body came slowly while others waited for the memory that it takes; send it again, at once",
                    code="request_timeout",
                )
            )

    def end_if_unread(self) -> None:
        """Close a connection whose answer is not read, for those that wait for the memory that it holds."""
        if self._unread_since is not None and self.loop.time() - self._unread_since > _UNREAD_SECONDS:
            self.transport.abort()

    def _watch_request(self) -> None:
        """Keep a deadline while a request is on its way: one for its head, another for its body."""
        state = self.conn.their_state
        is_in_body = state is h11.SEND_BODY
        has_begun = is_in_body or (state is h11.IDLE and self.timeout_keep_alive_task is None)
        if not has_begun or self._is_held or self.transport.is_closing():
            self._stop(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None or is_in_body is not self._is_in_body:
            self._stop(self._request_timer)
            seconds = self.settings.body_seconds + 1 if is_in_body else self.settings.header_seconds
            self._request_timer = self.loop.call_later(seconds, self._time_out)
        if is_in_body and not self._is_in_body:
            self._since, self._body_bytes = self.loop.time(), 0
        self._is_in_body = is_in_body

    def _time_out(self) -> None:
        self._request_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        self._refuse(ApiError(408, "the request did not arrive in time; send it at once", code="request_timeout"))

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def _no_place() -> ApiError:
    return ApiError(
        503, "every place is taken by a request that is being answered; try again later", code="too_many_connections"
    )
