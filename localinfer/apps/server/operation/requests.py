"""A record of every request, its observers, and the logs: lines of JSON, and requests written down whole.

The record lies in the request's state from its first byte to its last and holds none of its text."""

import contextlib
import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localinfer.apps.server.transport.http import ApiError
from localinfer.errors import RequestError
from localinfer.types import Closing

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats


_KEY = "record"
_NUMBERS = (
    "max_tokens max_completion_tokens max_output_tokens n temperature top_p top_k seed frequency_penalty"
    " presence_penalty"
).split()
"""Members of requests, of every API, that are no text."""
_MOST_TOKENS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class ReplyFigures(Protocol):
    """What is read of a reply.

    finish_reasons, stats: one per text, None until it has ended. failure: what failed. is_cancelled: nothing runs on.
    """

    id: str
    model_id: str
    finish_reasons: "list[str | None]"
    stats: "list[Stats | None]"
    failure: BaseException | None
    is_cancelled: bool

    def num_used(self) -> tuple[int, int]:
        """Tokens of the prompts, each once, and tokens generated so far."""


@dataclass
class RequestRecord:
    """A request: its route, its end and its cost, and none of its text."""

    id: str = ""
    """The id that its client was told."""
    method: str = ""
    route: str | None = None
    """The route that answered, without `/v1`; None where none did."""
    status: int = 0
    token: str = ""
    """Name of the token that was shown, "" for none."""
    began: float = field(default_factory=time.time)
    """Seconds since 1970."""
    seconds: float = 0.0
    """Time to the last byte."""
    model: str | None = None
    """The model that was asked for."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numeric options that were asked for."""
    reply: ReplyFigures | None = None
    """Figures of the texts that were generated."""
    input_tokens: int = 0
    """Tokens read by a request that generates none."""
    tenant: str = field(default="", repr=False)
    """The owner, where clients are kept apart."""
    cache_salt: str | None = field(default=None, repr=False)
    """The option of that name."""
    priority: int | None = None
    """The priority that was asked for, None for none."""
    error: str | None = None
    """Code or class of the failure."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of the request; only the parent of a trace is read."""
    notices: list[str] = field(default_factory=list, repr=False)
    """Notices of its answer about members that were not read."""

    @property
    def uses_model(self) -> bool:
        """True if a model worked for it."""
        return self.reply is not None or self.input_tokens > 0

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that it allowed, None if it did not say."""
        found = next((self.numbers[name] for name in _MOST_TOKENS if name in self.numbers), None)
        return None if found is None else int(found)

    def num_tokens(self) -> tuple[int, int]:
        """Tokens that were read for it, and tokens that were generated."""
        return (self.input_tokens, 0) if self.reply is None else self.reply.num_used()

    def failure(self) -> str | None:
        """The code or class of what failed, also in a stream whose status says that all is well."""
        if self.error is not None or self.reply is None or self.reply.failure is None:
            return self.error
        return error_name(self.reply.failure)

    def take_body(self, body: object) -> None:
        """Note what a request asks for, of its body's record."""
        found = {name: getattr(body, name, None) for name in _NUMBERS}
        self.numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
        model = getattr(body, "model", None)
        self.model = model if isinstance(model, str) else None

    def facts(self) -> dict[str, Any]:
        """All of it by the names of a log, without what is unknown."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "token_name": self.token or None,
            "error": self.failure(),
        }
        if self.uses_model:
            facts["input_tokens"], facts["output_tokens"] = self.num_tokens()
        if self.reply is not None:
            facts |= {"reply_id": self.reply.id, "model": self.reply.model_id, **reply_facts(self.reply)}
        return {name: value for name, value in facts.items() if value is not None}


def reply_facts(reply: ReplyFigures) -> dict[str, Any]:
    """Endings of the texts of a reply, and times of the first one."""
    without = "abort" if reply.is_cancelled else "running"
    facts: dict[str, Any] = {"finish_reasons": [reason or without for reason in reply.finish_reasons]}
    if (first := reply.stats[0]) is not None:
        facts["cached_tokens"] = sum(one.cached_tokens for one in reply.stats if one is not None)
        facts["time_to_first_token_seconds"] = round(first.time_to_first_token_seconds, 6)
        facts["queue_seconds"] = round(first.waited_seconds, 6)
    return facts


def error_name(error: BaseException) -> str:
    """Kind of an error, without its message: the code that a client reads, or the class."""
    return (error.code if isinstance(error, ApiError) else None) or type(error).__name__


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request that is being answered."""
    state = scope.setdefault("state", {})
    record: RequestRecord = state.setdefault(_KEY, RequestRecord())
    return record


Observer = Callable[[RequestRecord], object]
"""Told of each request at its end, on the event loop; must not wait."""


LOGGER = "localinfer"
"""Above every logger of this program."""


class JsonFormatter(logging.Formatter):
    """One object per record: `time`, `level`, `logger`, `message`, and what the record has as `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(*, as_json: bool, verbose: bool) -> None:
    """Write this program's log to standard error, as text or as JSON. verbose: requests too, which JSON always has.

    Text without `verbose` is what Python does anyway.
    """
    if not as_json and not verbose:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger(LOGGER if as_json else f"{LOGGER}.server")
    logger.addHandler(handler)
    logger.propagate = False
    logging.getLogger(f"{LOGGER}.server").setLevel(logging.INFO)


logger = logging.getLogger("localinfer.server")

DEFAULT_BYTES = 64 << 20
_BODY_BYTES = 4 << 20
"""Of each body; what is more is counted."""
_SECRET = ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key")
_REDACTED = "redacted"


class RequestLog(Closing):
    """The file. When it would grow over half of `max_bytes` it is renamed, with `.1` at its end, and begun anew.

    Raises: RequestError if the file cannot be written, or is no regular file.
    """

    def __init__(self, path: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        self._path = path
        self._most = max_bytes // 2
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        try:
            self._descriptor, self._size = self._open()
        except OSError as error:
            raise RequestError(
                f"requests cannot be written to {path}: {error.strerror or error}; give --log-requests another"
            ) from None

    def begin(self, scope: Scope) -> "LoggedExchange":
        """Write down a request, and what is answered."""
        return LoggedExchange(self, scope)

    def write(self, facts: dict[str, Any]) -> None:
        """Append a line; a disk that is full or gone ends the log, not the server."""
        line = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._descriptor is None:
                return
            try:
                if self._size and self._size + len(line) > self._most:
                    self._begin_anew()
                view = memoryview(line)
                while view:
                    view = view[os.write(self._descriptor, view) :]
                self._size += len(line)
            except OSError as error:
                self._shut()
                logger.error("requests are no longer written to %s: %s", self._path.name, error.strerror)

    def close(self) -> None:
        """Write no more; may be called again."""
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin_anew(self) -> None:
        self._shut()
        os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        self._descriptor, self._size = self._open()

    def _open(self) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it is not a regular file")
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status.st_size


class LoggedExchange:
    """One request and its answer, gathered while they pass."""

    def __init__(self, log: RequestLog, scope: Scope) -> None:
        self._log = log
        self._path = scope["path"]
        self._headers = _shown(scope["headers"])
        self._answer_headers: dict[str, str] = {}
        self._asked, self._answered = _Body(), _Body()
        self._began = time.time()

    def received(self, message: Message) -> None:
        """Take what came from the client."""
        if message["type"] == "http.request":
            self._asked.add(message.get("body", b""))

    def sent(self, message: Message) -> None:
        """Take what goes to the client."""
        if message["type"] == "http.response.start":
            self._answer_headers = _shown(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._answered.add(message.get("body", b""))

    def end(self, record: RequestRecord) -> None:
        """Write it down."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._began))
        request = {"method": record.method, "path": self._path, "headers": self._headers, **self._asked.facts()}
        answer = {"status": record.status, "headers": self._answer_headers, **self._answered.facts()}
        facts = {"time": f"{moment}Z", "id": record.id, "seconds": round(record.seconds, 6)}
        self._log.write({**facts, "request": request, "response": answer})


class _Body:
    """The bytes of a body, as many as are written down."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._num_bytes = 0

    def add(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        self._kept += piece[: _BODY_BYTES - len(self._kept)]

    def facts(self) -> dict[str, Any]:
        """The body as JSON if it is that, else as text, and how many bytes of it are missing."""
        missing = self._num_bytes - len(self._kept)
        body: Any = self._kept.decode("utf-8", "replace")
        if not missing and body[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                body = json.loads(body)
        return {"body": body, **({"body_bytes_left_out": missing} if missing else {})}


def _shown(headers: Any) -> dict[str, str]:
    """Headers by name; of those that are secret only that they were there."""
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return {name: _REDACTED if name in _SECRET else value for name, value in found.items()}


class ObservingMiddleware:
    """ASGI middleware around all others: it sees what they refuse, and streams to their end.

    observers: told of each request at its end. request_log: gets requests and answers with their bodies.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Observer] = (), request_log: RequestLog | None = None) -> None:
        self._app = app
        self._observers = observers
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        record.method = scope["method"]
        record.headers = Headers(scope=scope)
        exchange = None if self._request_log is None else self._request_log.begin(scope)
        began = time.perf_counter()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            if exchange is not None:
                exchange.sent(message)
            await send(message)

        async def receive_noted() -> Message:
            message = await receive()
            if exchange is not None:
                exchange.received(message)
            return message

        try:
            await self._app(scope, receive_noted, send_noted)
        finally:
            record.id = scope["state"].get("request_id", "")
            record.seconds = time.perf_counter() - began
            if exchange is not None:
                exchange.end(record)
            for observer in self._observers:
                observer(record)


def log_request(record: RequestRecord) -> None:
    """Write a line of the log: a text, and for a log in JSON the facts."""
    logger.info(
        "%s %s %s %d %.3f s",
        record.id,
        record.method,
        record.route or "-",
        record.status,
        record.seconds,
        extra={"facts": record.facts()},
    )
