"""Spans of requests, in memory: OpenTelemetry's names for generative AI, and no text."""

import importlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from local_servers import serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.app import LocalServer
from localinfer.apps.server.operation import logs
from localinfer.apps.server.replies.service import Observability
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import MissingPackageError, RequestError
from tests.support.limits import seconds, wait_until

SECRET = "a question about somebody"
SCRIPTS = {"says": b"Nobody else's answer.", "fails": [*b"abc", ValueError("a secret")]}
ASK = {"model": "says", "messages": [{"role": "user", "content": SECRET}], "temperature": 0, "max_tokens": 99}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter() -> Any:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="opentelemetry-sdk is not installed"
    )
    return memory.InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(exporter: Any) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        plain = LocalServer.__init__
        tracer = logs.RequestTracer(exporter=exporter)
        operation = Observability((tracer.observe,))
        patch.setattr(LocalServer, "__init__", lambda self, *a, **k: plain(self, *a, **k, operation=operation))
        settings = ServerSettings(port=0)
        with serving(settings, sources=scripted_sources(*SCRIPTS), load=loader(SCRIPTS)) as run, run.client() as client:
            yield client
        tracer.close()


@pytest.fixture
def spans(exporter: Any):
    """The spans that came, once there are so many."""
    exporter.clear()

    def read(count: int) -> list[Any]:
        assert wait_until(lambda: len(exporter.get_finished_spans()) >= count)
        found = list(exporter.get_finished_spans())
        assert len(found) == count
        assert not any(SECRET in span.to_json() or "Nobody else" in span.to_json() for span in found)
        return found

    return read


def test_a_span_says_what_a_request_was_and_cost(traced, spans):
    asked = {**ASK, "temperature": 0.5, "top_p": 0.9, "seed": 3, "top_k": 1}
    reply = traced.post("/v1/chat/completions", json=asked, headers={"traceparent": PARENT}).json()
    (span,) = spans(1)
    attributes = dict(span.attributes)
    assert span.name == "chat says"
    assert span.kind.name == "SERVER"
    assert span.status.is_unset
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    assert span.resource.attributes["service.name"] == "localinfer"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "localinfer",
        "gen_ai.request.model": "says",
        "gen_ai.request.max_tokens": 99,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 1,
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": "says",
        "gen_ai.response.id": reply["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": reply["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": reply["usage"]["completion_tokens"],
        "http.route": "/chat/completions",
        "http.request.method": "POST",
        "http.response.status_code": 200,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert 0 < attributes["gen_ai.server.time_to_first_token"] < 1e-9 * (span.end_time - span.start_time)


def test_every_kind_of_request_has_its_operation_and_others_have_no_span(traced, spans):
    traced.post("/v1/messages", json=ASK, headers={"anthropic-version": "2023-06-01"})
    traced.post("/v1/responses", json={"model": "says", "input": SECRET})
    traced.post("/v1/completions", json={"model": "says", "prompt": f"{SECRET}|", "stream": True, "n": 2})
    for path in ("/health", "/v1/models", "/metrics"):
        traced.get(path)
    traced.post("/tokenize", json={"model": "says", "content": SECRET})
    found = spans(3)
    assert [span.name for span in found] == ["chat says", "chat says", "text_completion says"]
    assert found[2].attributes["gen_ai.request.choice.count"] == 2
    assert found[2].attributes["gen_ai.response.finish_reasons"] == ("length", "length")


def test_what_fails_has_its_kind_and_is_no_success(traced, spans):
    traced.post("/v1/chat/completions", json={**ASK, "model": "fails", "stream": True})
    traced.post("/v1/chat/completions", json={**ASK, "model": "fails"})
    traced.post("/v1/chat/completions", json={**ASK, "temperature": -1})
    broken, failed, wrong = spans(3)
    assert (broken.attributes["error.type"], broken.status.status_code.name) == ("ValueError", "ERROR")
    assert (failed.attributes["http.response.status_code"], failed.status.status_code.name) == (500, "ERROR")
    # A client's fault is none of the server's.
    assert wrong.attributes["http.response.status_code"] == 400 and wrong.status.is_unset
    assert wrong.attributes["error.type"]


def test_without_its_packages_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setattr("localinfer.system.extras._is_there", lambda name: not name.startswith("opentelemetry"))
    monkeypatch.setattr("localinfer.system.extras._found", set())
    with pytest.raises(MissingPackageError, match=r"localinfer\[otel\]"):
        logs.RequestTracer("http://localhost:4318")


def test_spans_go_where_the_option_or_the_environment_says(monkeypatch):
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    try:
        trace_exporter = importlib.import_module(module)
    except ImportError:
        pytest.skip("opentelemetry-exporter-otlp-proto-http is not installed")
    given = []
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda **options: given.append(options))
    for endpoint in ("http://host:4318", "https://host:4318/v1/traces/", None):
        logs._exporter(endpoint)
    first, second = ({"endpoint": f"{scheme}://host:4318/v1/traces"} for scheme in ("http", "https"))
    assert given == [first, second, {}]
    for wrong in ("localhost:4318", "ftp://host", "http://"):
        with pytest.raises(RequestError, match="--otlp-endpoint"):
            logs._exporter(wrong)
    for name in logs.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not logs.wants_traces(None) and logs.wants_traces("http://host")
    monkeypatch.setenv(logs.ENDPOINT_VARIABLES[0], "http://host")
    assert logs.wants_traces(None)


def test_closing_waits_no_longer_than_told_for_a_collector_that_does_not_answer(exporter, monkeypatch):
    tracer = logs.RequestTracer(exporter=exporter)
    gate = threading.Event()
    monkeypatch.setattr(exporter, "shutdown", lambda: gate.wait(seconds(30)))
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 0.01)
    tracer.close()
    assert any(thread.name == "localinfer-traces" for thread in threading.enumerate()), "it still tries"
    gate.set()
    assert wait_until(lambda: not any(thread.name == "localinfer-traces" for thread in threading.enumerate()))
    tracer.close()
