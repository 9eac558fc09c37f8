"""OpenTelemetry traces: a span for every request that a model worked for, with the names for generative AI and no text.

A span is made when its request has ended, of what was noted meanwhile, so requests pay nothing for it. One that a
client began (`traceparent`) goes on. Names: OpenTelemetry's semantic conventions for generative AI, in development when
this was written, and those of HTTP.
"""

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from localinfer.apps.server.operation.requests import RequestRecord, reply_facts
from localinfer.errors import RequestError
from localinfer.system.extras import require
from localinfer.types import Closing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

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
    exporter: takes the spans at once instead. Closing it sends what is left, for half a second at most.
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
        """Send what is left, and make no more spans; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            # Where nobody takes them, it would try again for longer than it is told.
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
