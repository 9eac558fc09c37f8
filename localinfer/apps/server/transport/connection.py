"""Connections and what comes through them: framing, deadlines and priority; hosts, origins and tokens of requests.

The checks of `SecurityMiddleware` come before every route and before any body is read. A page that a browser shows can
send requests to this machine. It cannot choose the `Host` header of a name that it rebinds to a loopback address, nor
leave out `Origin`, nor send JSON without asking first. So a foreign host or origin and every body that is not JSON are
refused, and pages of other origins get no permission. The one page that needs none is the server's own: its origin is
the very host that was asked, after that host has passed.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

import h11
import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localinfer.apps.server.transport.bodies import CONNECTION, FORM, FORM_ROUTES, PARTED_ROUTES
from localinfer.apps.server.transport.codings import coding_of
from localinfer.apps.server.transport.http import OLLAMA, STREAMS_EVENTS, ApiError, identifier
from localinfer.apps.server.transport.settings import LOOPBACK_NAMES, ServerSettings, ip_address, matching_token

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
_STALL_SECONDS = 0.05
"""Delay of a deadline from which on this process, and not the client, was late."""
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
    """A transport that is closed by its protocol's `close_in_order`, and takes nothing for a client that has left."""

    def __init__(self, transport: asyncio.Transport, protocol: "Connection") -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        # asyncio warns of each write behind one that failed, until the protocol is told in its next turn.
        if not self._transport.is_closing():
            self._transport.write(data)

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
            self._wait_for_request(self.settings.body_seconds if is_in_body else self.settings.header_seconds)
        if is_in_body and not self._is_in_body:
            self._since, self._body_bytes = self.loop.time(), 0
        self._is_in_body = is_in_body

    def _wait_for_request(self, seconds: float) -> None:
        self._request_timer = self.loop.call_later(seconds, self._time_out, self.loop.time() + seconds)

    def _time_out(self, deadline: float) -> None:
        self._request_timer = None
        late = self.loop.time() - deadline
        # Where nothing was read meanwhile, what the client sent may still wait for it. Of a body that comes at a fair
        # pace more is waited for, however long it is.
        more = late if late > _STALL_SECONDS else 0.0
        if self._is_in_body:
            more = max(more, self.settings.body_seconds - self.seconds_behind())
        if more > 0 or self.flow.read_paused:
            self._wait_for_request(max(more, _STALL_SECONDS))
        elif self.is_receiving:
            late_body = f"the body did not arrive within {self.settings.body_seconds:g} seconds; send it at once"
            self._refuse(ApiError(408, late_body, code="request_timeout"))
        elif not self.is_idle:
            self.transport.abort()
        else:
            self._refuse(ApiError(408, "the request did not arrive in time; send it at once", code="request_timeout"))

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def _no_place() -> ApiError:
    return ApiError(
        503, "every place is taken by a request that is being answered; try again later", code="too_many_connections"
    )


_HOST = re.compile(r"(?:\[(?P<bracketed>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{1,5})?")
MAX_HEADER_BYTES = 32 << 10
_METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = "x-request-id, retry-after, " + ", ".join(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""Headers that a page of an allowed origin may read."""
IS_UNIX_SOCKET = "is_unix_socket"
"""Set in the state of a request that came through the Unix socket, whose folder guards it."""
TOKEN_IDENTITY = "token_identity"
"""Set in the state of a request that has shown a token: `AccessToken.identity`."""
_OPEN_PATHS = ("", "/health", "/v1/health")
"""Without their last slash; the first is the chat page, the same for everybody, which asks for the token itself."""


_UNSTATED_KINDS = ("", "application/x-www-form-urlencoded")


class SecurityMiddleware:
    """ASGI middleware that checks hosts, origins and tokens, gives every request an id, and answers preflights.

    present: the settings now, where they may change while the server runs.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, present: Callable[[], ServerSettings] | None = None
    ) -> None:
        self._app = app
        self._present = present or (lambda: settings)
        self._use(settings)

    def _use(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._tokens = settings.access_tokens
        self._hosts = {*LOOPBACK_NAMES, *(name.lower() for name in settings.allowed_hosts)}
        if settings.host is not None and not settings.listens_everywhere:
            self._hosts.add(settings.host.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (settings := self._present()) is not self._settings:
            self._use(settings)
        headers = Headers(scope=scope)
        request_id = identifier("req")
        scope.setdefault("state", {})["request_id"] = request_id
        granted = self._granted_headers(headers)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                marked = MutableHeaders(scope=message)
                marked["x-request-id"] = request_id
                marked["x-content-type-options"] = "nosniff"
                for name, value in granted.items():
                    marked[name] = value
            await send(message)

        app = self._app
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS":
                app = Response(status_code=204, headers={"allow": _METHODS})
        except ApiError as error:
            app = error.response(scope["path"].removeprefix("/v1"))
        await app(scope, receive, send_marked)

    def _check(self, scope: Scope, headers: Headers) -> None:
        _check_message(scope, headers)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_allowed_host(hosts[0]):
            raise ApiError(
                403,
                f"the Host header is {', '.join(hosts)!r:.80}; use localhost or 127.0.0.1, or start the server "
                "with --allow-host NAME",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, scope, headers) and origin not in self._settings.allowed_origins:
            raise ApiError(
                403,
                f"pages of {origin!r:.80} may not use this server; start it with --allow-origin ORIGIN to let them",
                code="origin_not_allowed",
            )
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if origin is None and is_foreign and not _opens_the_page(scope, headers):
            raise ApiError(403, "a page of another site may not use this server", code="origin_not_allowed")
        if scope["method"] == "OPTIONS":
            return
        self._check_token(scope, headers)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            coding_of(headers)
            if kind == FORM and scope["path"].removeprefix("/v1") in (*FORM_ROUTES, *PARTED_ROUTES):
                return
            if kind != "application/json" and not _is_json_all_the_same(kind, scope, headers):
                raise ApiError(
                    415, f"the body is {kind or 'of no type'!r:.80}; send JSON, as application/json", code="not_json"
                )

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        if not self._tokens or scope["state"].get(IS_UNIX_SOCKET) or self._is_open(scope["path"].rstrip("/")):
            return
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            shown = headers.get("x-api-key", "")
        token = matching_token(shown.strip(), self._tokens)
        if token is None:
            raise ApiError(
                401,
                "the token is missing or wrong; send it as 'Authorization: Bearer TOKEN'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        scope["state"]["token_name"], scope["state"][TOKEN_IDENTITY] = token.name, token.identity

    def _is_open(self, path: str) -> bool:
        return path in _OPEN_PATHS and (path != "" or self._settings.serves_page)

    def _is_allowed_host(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found["bracketed"] or found["name"]).lower()
        if name in self._hosts:
            return True
        # A name can be made to point anywhere; an address cannot, and here the token guards it.
        return self._settings.listens_everywhere and ip_address(name) is not None

    def _granted_headers(self, headers: Headers) -> Mapping[str, str]:
        """Headers by which a browser lets an allowed page send its request and read the reply."""
        origin = headers.get("origin")
        if origin is None or origin not in self._settings.allowed_origins:
            return {"vary": "Origin"} if self._settings.allowed_origins else {}
        granted = {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED_HEADERS,
            "vary": "Origin",
        }
        wanted = headers.get("access-control-request-headers")
        if headers.get("access-control-request-method") is not None:
            granted |= {"access-control-allow-methods": _METHODS, "access-control-max-age": "600"}
            if wanted is not None:
                granted["access-control-allow-headers"] = wanted
            if self._settings.allows_private_network and headers.get("access-control-request-private-network"):
                granted["access-control-allow-private-network"] = "true"
        return granted


def _has_body(headers: Headers) -> bool:
    """Return whether bytes follow a head, as it says itself."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_own(origin: str, scope: Scope, headers: Headers) -> bool:
    """Return whether the server's own page asks. No browser reaches a Unix socket: only a proxy could say so there."""
    is_from_elsewhere = headers.get("sec-fetch-site", "same-origin") != "same-origin"
    if is_from_elsewhere or scope["state"].get(IS_UNIX_SOCKET):
        return False
    return origin.lower() == f"http://{headers['host']}".lower()


def _opens_the_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a link of another page is followed to the chat page, in a window that this page cannot read."""
    is_visit = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_visit and scope["method"] == "GET" and scope["path"] == "/"


def _is_json_all_the_same(kind: str, scope: Scope, headers: Headers) -> bool:
    """Return whether a body counts as JSON without that type: LiteLLM asks Ollama's API without a type, and curl with
    that of forms. Browsers say from where they send a body, and write no JSON into such a form. Without a body
    no type is needed.
    """
    if not kind and not _has_body(headers):
        return True
    is_from_a_program = "origin" not in headers and "sec-fetch-site" not in headers
    return kind in _UNSTATED_KINDS and is_from_a_program and scope["path"].removeprefix("/v1").startswith(OLLAMA)


def _check_message(scope: Scope, headers: Headers) -> None:
    """Refuse what two programs on the way might understand differently, and heads that are too long."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if scope["http_version"] not in ("1.0", "1.1"):
        found = f"the version of HTTP is {scope['http_version']}; use 1.1"
    elif num_bytes > MAX_HEADER_BYTES:
        found = f"the headers have {num_bytes:,} bytes; send at most {MAX_HEADER_BYTES:,}"
    elif "content-length" in headers and "transfer-encoding" in headers:
        found = "the body has a length and comes in chunks; give one of Content-Length and Transfer-Encoding"
    else:
        return
    raise ApiError(400, found, code="bad_http", headers={"connection": "close"})
