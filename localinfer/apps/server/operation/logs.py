"""Logs and traces: lines of JSON, requests written down whole, and OpenTelemetry spans.

Every request that a model worked for has a span, with the names for generative AI and no text. It is made when the
request has ended, of what was noted meanwhile, so requests pay nothing for it. It continues a trace of the client
(`traceparent`). Names: OpenTelemetry's semantic conventions for generative AI, in development when this was written,
and those of HTTP."""

import contextlib
import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import Message, Scope

from localinfer.apps.server.operation.observation import RequestRecord, reply_facts
from localinfer.errors import RequestError
from localinfer.system.extras import require
from localinfer.types import Closing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
            flags |= getattr(os, name, 0)
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


ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Of the environment; either switches traces on. The exporter reads both, and the other variables of its standard."""
_SERVICE = "localinfer"
_TRACES_PATH = "/v1/traces"
_FLUSH_SECONDS = 0.5
_NANOSECONDS = 1_000_000_000
_OPERATIONS = (("embed", "embeddings"), ("rerank", "embeddings"), ("chat", "chat"), ("messages", "chat"))
_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}
_CHAT_ROUTES = ("/chat/completions", "/messages", "/responses", "/api/chat")
_TEXT_ROUTES = ("/completions", "/completion", "/infill", "/api/generate")


class RequestTracer(Closing):
    """Makes spans of requests and exports them.

    endpoint: where OTLP over HTTP is taken, with or without its path; None leaves it to the environment.
    exporter: takes the spans at once instead. Closing it sends the rest, for half a second at most.
    Raises: MissingPackageError; RequestError for an endpoint that is no URL.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        exporter: "SpanExporter | None" = None,
        address: str | None = None,
        port: int | None = None,
    ) -> None:
        if exporter is None:
            require("otel", "exporting traces")
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from localinfer.kernels.versions import installed_version

        version = installed_version("localinfer")
        facts = {"service.version": version}
        if "OTEL_SERVICE_NAME" not in os.environ:
            facts["service.name"] = _SERVICE
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        if exporter is None:
            self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        else:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE, version)
        self._propagator = TraceContextTextMapPropagator()
        self._server = {"server.address": address, "server.port": port}
        self._is_closed = False

    def observe(self, record: RequestRecord) -> None:
        """Make a span of a request that has ended, if a model worked for it or was to."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if not record.uses_model and not _is_generation(record.route):
            return
        attributes = {name: value for name, value in (_attributes(record) | self._server).items() if value is not None}
        operation, model = attributes["gen_ai.operation.name"], attributes.get("gen_ai.request.model")
        began = int(record.began * _NANOSECONDS)
        span = self._tracer.start_span(
            f"{operation} {model}" if model else operation,
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=began,
        )
        failure = record.failure()
        if failure is not None or record.status >= 400:
            span.set_attribute("error.type", failure or str(record.status))
            if record.status >= 500 or record.status < 400:
                span.set_status(Status(StatusCode.ERROR))
        span.end(began + int(record.seconds * _NANOSECONDS))

    def close(self) -> None:
        """Send the rest, and make no more spans; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            # Where no collector takes them, it would try again for longer than it is told.
            sending = threading.Thread(target=self._provider.shutdown, name="localinfer-traces", daemon=True)
            sending.start()
            sending.join(_FLUSH_SECONDS)


def wants_traces(endpoint: str | None) -> bool:
    """Return whether traces are to be exported, by an option or the environment."""
    return endpoint is not None or any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def _exporter(endpoint: str | None) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is None:
        return OTLPSpanExporter()
    found = urlsplit(endpoint)
    if found.scheme not in ("http", "https") or not found.hostname:
        raise RequestError(f"{endpoint!r} is no URL; give one such as --otlp-endpoint http://localhost:4318")
    address = endpoint.rstrip("/")
    return OTLPSpanExporter(endpoint=address if address.endswith(_TRACES_PATH) else address + _TRACES_PATH)


def _is_generation(route: str | None) -> bool:
    return route is not None and (route.endswith(_CHAT_ROUTES) or route in _TEXT_ROUTES)


def _operation(route: str) -> str:
    if route in _TEXT_ROUTES:
        return "text_completion"
    return next((name for part, name in _OPERATIONS if part in route), "chat")


def _attributes(record: RequestRecord) -> dict[str, Any]:
    route = record.route or ""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _operation(route),
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "http.request.method": record.method,
        "http.route": route,
        "http.response.status_code": record.status,
        **{name: record.numbers.get(number) for number, name in _PARAMETERS.items()},
    }
    if attributes["gen_ai.request.choice.count"] == 1:
        del attributes["gen_ai.request.choice.count"]
    if record.uses_model:
        attributes["gen_ai.usage.input_tokens"], output = record.num_tokens()
        attributes["gen_ai.usage.output_tokens"] = output or None
    reply = record.reply
    if reply is not None:
        facts = reply_facts(reply)
        reasons: Sequence[str] = facts["finish_reasons"]
        attributes |= {
            "gen_ai.request.model": record.model or reply.model_id,
            "gen_ai.response.model": reply.model_id,
            "gen_ai.response.id": reply.id,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.cache_read.input_tokens": facts.get("cached_tokens"),
            "gen_ai.server.time_to_first_token": facts.get("time_to_first_token_seconds"),
            "gen_ai.server.queue_time": facts.get("queue_seconds"),
        }
    return attributes
