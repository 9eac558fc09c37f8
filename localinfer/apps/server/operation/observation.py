"""Observation of requests: a record of each, which is given to observers, and counters and times in Prometheus' format.

The record lies in the request's state from its first byte to its last and holds none of its text. Metrics have a
registry of their own, and vLLM's names beside the server's."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localinfer.apps.server.transport.http import ApiError

if TYPE_CHECKING:
    from localinfer.apps.server.operation.logs import RequestLog
    from localinfer.engine.cache.stats import SnapshotStats
    from localinfer.engine.engine import EngineStats
    from localinfer.generation.stream import Stats


_KEY = "record"
_NUMBERS = (
    "max_tokens max_completion_tokens max_output_tokens n temperature top_p top_k seed frequency_penalty"
    " presence_penalty"
).split()
"""Members of requests, of every API, that are no text."""
_MOST_TOKENS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class ReplyFigures(Protocol):
    """Figures of a reply for records and logs.

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
    """The id that its client got."""
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
        """The code or class of the error, also in a stream whose status says that all is well."""
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


logger = logging.getLogger("localinfer.server")


class ObservingMiddleware:
    """ASGI middleware around all others: it sees what they refuse, and streams to their end.

    observers: called with each request at its end. request_log: gets requests and answers with their bodies.
    """

    def __init__(
        self, app: ASGIApp, observers: Sequence[Observer] = (), request_log: "RequestLog | None" = None
    ) -> None:
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


GOOD_FIRST_TOKEN_SECONDS = 1.0
GOOD_INTERVAL_SECONDS = 0.1
"""A reply is good if it came to its own end, its first token within the one time and its later ones, in the mean,
within the other."""

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_INTERVAL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)


class Metrics:
    """The server's metrics; threads may share them. No label and no value holds text of a request.

    engines: says what each loaded model's engine does now, by the model's name. vllm: the same under vLLM's names.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, labelnames=["model"], registry=registry)
        self.requests = counter("localinfer_requests", "Requests answered, by route and status", ["route", "status"])
        self.first_token_seconds = histogram(
            "localinfer_time_to_first_token_seconds",
            "From the request's admission to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self.interval_seconds = histogram(
            "localinfer_inter_token_seconds", "Between two tokens of a reply", buckets=_INTERVAL_BUCKETS
        )
        self.queue_seconds = histogram(
            "localinfer_queue_wait_seconds",
            "From the request's admission to a place among those that run",
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self.prompt_tokens = counter("localinfer_prompt_tokens", "Tokens of prompts", ["model"])
        self.cached_tokens = counter("localinfer_cached_prompt_tokens", "Tokens of prompts that were cached", ["model"])
        self.completion_tokens = counter("localinfer_completion_tokens", "Tokens generated", ["model"])
        self.summaries = counter(
            "localinfer_summaries", "Summaries written of chats; their tokens are counted", ["model"]
        )
        self.drafted = counter("localinfer_drafted_tokens", "Tokens drafted, by place in the draft", ["position"])
        self.accepted = counter(
            "localinfer_accepted_tokens", "Drafted tokens that were accepted, by place in the draft", ["position"]
        )
        self.drafters = {
            "drafted": counter("localinfer_drafter_tokens", "Tokens drafted, by the drafter", ["drafter"]),
            "accepted": counter(
                "localinfer_drafter_accepted_tokens", "Drafted tokens that were accepted, by the drafter", ["drafter"]
            ),
        }
        self.good_replies = counter(
            "localinfer_good_replies",
            f"Replies to their own end, with a first token within {GOOD_FIRST_TOKEN_SECONDS:g} s and intervals of at "
            f"most {GOOD_INTERVAL_SECONDS:g} s in the mean",
        )
        self.replies = counter("localinfer_replies", "Texts generated, by how they ended", ["ending"])
        self.handovers = counter(
            "localinfer_handovers",
            "Prompts handed over to prefill servers, by what came of it: failed counts each server that was asked",
            ["outcome"],
        )
        self.running = gauge("localinfer_running_generations", "Texts being generated now")
        self.waiting = gauge("localinfer_waiting_generations", "Texts admitted that have no token yet")
        self.loaded = gauge("localinfer_loaded_models", "Models in memory")
        snapshots = "Snapshots of recurrent states"
        self.engines: Callable[[], Mapping[str, EngineStats]] = dict
        self.vllm = VllmMetrics(self)
        self.ttft = TtftMetrics(registry, lambda: self.engines())
        self._snapshots = {
            "held": gauge("localinfer_state_snapshots", f"{snapshots} in memory", ["model"]),
            "num_bytes": gauge("localinfer_state_snapshot_bytes", "Their bytes", ["model"]),
            "grid": gauge("localinfer_grid_snapshots", f"{snapshots} that are kept for their distance", ["model"]),
            "grid_bytes": gauge("localinfer_grid_snapshot_bytes", "Their bytes", ["model"]),
            "taken": gauge("localinfer_state_snapshots_taken", f"{snapshots} taken since loading", ["model"]),
            "evicted": gauge("localinfer_state_snapshots_evicted", f"{snapshots} evicted since loading", ["model"]),
            "hits": gauge("localinfer_state_snapshot_hits", "Texts that resumed from one since loading", ["model"]),
        }

    def exposition(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def show_snapshots(self, model: str, stats: "SnapshotStats | None") -> None:
        """Show a loaded model's figures; None for one that has none, or is no longer loaded."""
        for name, shown in self._snapshots.items():
            if stats is not None:
                shown.labels(model).set(getattr(stats, name))
            else:
                with suppress(KeyError):
                    shown.remove(model)

    def count_summary(self, model: str, stats: "Stats") -> None:
        """Count what a summary of a chat cost, which is written before a reply and of which the client gets nothing."""
        self.summaries.labels(model).inc()
        self.prompt_tokens.labels(model).inc(stats.prompt_tokens)
        self.cached_tokens.labels(model).inc(stats.cached_tokens)
        self.completion_tokens.labels(model).inc(stats.completion_tokens)

    def count_reply(self, model: str, stats: "Stats", ending: str, latency: "LatencyTracker") -> None:
        """Count what a finished generation cost; its tokens were counted as they came."""
        self.queue_seconds.labels(model).observe(stats.waited_seconds)
        self.prompt_tokens.labels(model).inc(stats.prompt_tokens)
        self.cached_tokens.labels(model).inc(stats.cached_tokens)
        self.completion_tokens.labels(model).inc(max(0, stats.completion_tokens - latency.num_tokens))
        for position, count in enumerate(stats.drafted_by_position):
            self.drafted.labels(str(position)).inc(count)
        for position, count in enumerate(stats.accepted_by_position):
            self.accepted.labels(str(position)).inc(count)
        for name, (drafted, accepted) in stats.drafted_by.items():
            self.drafters["drafted"].labels(name).inc(drafted)
            self.drafters["accepted"].labels(name).inc(accepted)
        self.replies.labels(ending).inc()
        self.vllm.count_text(model, stats, ending, latency)


class LatencyTracker:
    """Times the tokens of one generation, from its admission on, and counts them."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._first = metrics.first_token_seconds.labels(model)
        self._interval = metrics.interval_seconds.labels(model)
        self._count = metrics.completion_tokens.labels(model).inc
        self._admitted = self._last = time.perf_counter()
        self._began: float | None = None
        self.num_tokens = 0
        metrics.running.inc()
        metrics.waiting.inc()

    @property
    def seconds(self) -> float:
        """From the admission to the last token so far."""
        return self._last - self._admitted

    @property
    def seconds_to_first(self) -> float | None:
        """From the admission to the first token, None before it."""
        return None if self._began is None else self._began - self._admitted

    def tick(self) -> None:
        """Count the next token."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            self._first.observe(now - self._admitted)
            self._metrics.waiting.dec()
        else:
            self._interval.observe(now - self._last)
        self._last = now
        self.num_tokens += 1
        self._count()

    def end(self, *, is_whole: bool) -> None:
        """End the generation. is_whole: the text came to its own end, and was neither stopped nor failed."""
        if self._began is None:
            self._metrics.waiting.dec()
        elif is_whole:
            mean_interval = (self._last - self._began) / max(1, self.num_tokens - 1)
            if self._began - self._admitted <= GOOD_FIRST_TOKEN_SECONDS and mean_interval <= GOOD_INTERVAL_SECONDS:
                self._metrics.good_replies.inc()
        # Last: a client that sees no running text can rely on every other figure.
        self._metrics.running.dec()


_ENGINE = "0"
"""vLLM numbers the engines of a server; here every model has one."""
_LABELS = ["model_name", "engine"]
_FINISHED = {"tool_calls": "stop", "cancelled": "abort", "failed": "error"}
"""Finish reasons -> vLLM's words for them, where those are others."""
_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_INTERVALS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_TEXTS = (1, 2, 5, 10, 20)


class VllmMetrics(Collector):
    """vLLM's names for what `metrics` counts, in the same registry, and meters for what has no other name."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics
        registry = metrics.registry
        histogram = partial(Histogram, labelnames=_LABELS, registry=registry)
        counter = partial(Counter, registry=registry)
        self._request_seconds = histogram(
            "vllm:e2e_request_latency_seconds", "From a request's admission to its last token", buckets=_SECONDS
        )
        self._inference_seconds = histogram(
            "vllm:request_inference_time_seconds",
            "From its admission by the engine to the last token",
            buckets=_SECONDS,
        )
        self._prefill_seconds = histogram(
            "vllm:request_prefill_time_seconds",
            "From its admission by the engine to the first token",
            buckets=_SECONDS,
        )
        self._decode_seconds = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last", buckets=_SECONDS
        )
        self._mean_interval = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between two tokens of a text", buckets=_INTERVALS
        )
        self._prompt_tokens = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", buckets=_COUNTS)
        self._computed_tokens = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached", buckets=_COUNTS
        )
        self._generated_tokens = histogram("vllm:request_generation_tokens", "Tokens of a text", buckets=_COUNTS)
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest text of a request", buckets=_COUNTS
        )
        self._asked_texts = histogram("vllm:request_params_n", "Texts that a request asks for", buckets=_TEXTS)
        self._asked_tokens = histogram(
            "vllm:request_params_max_tokens", "Most tokens that a request allows, where it says", buckets=_COUNTS
        )
        self._finished = counter("vllm:request_success", "Texts that have ended, by how", [*_LABELS, "finished_reason"])
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts made by speculation", _LABELS)
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted", _LABELS)
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted", _LABELS)
        self._accepted_by_place = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by place in the draft",
            [*_LABELS, "position"],
        )
        registry.register(self)

    def count_text(self, model: str, stats: "Stats", ending: str, latency: "LatencyTracker") -> None:
        """Count what a finished text cost."""
        self._finished.labels(model, _ENGINE, _FINISHED.get(ending, ending)).inc()
        drafts = stats.drafted_by_position
        self._drafts.labels(model, _ENGINE).inc(drafts[0] if drafts else 0)
        self._drafted.labels(model, _ENGINE).inc(stats.drafted_tokens)
        self._accepted.labels(model, _ENGINE).inc(stats.accepted_tokens)
        for position, count in enumerate(stats.accepted_by_position):
            self._accepted_by_place.labels(model, _ENGINE, str(position)).inc(count)
        self._prompt_tokens.labels(model, _ENGINE).observe(stats.prompt_tokens)
        self._computed_tokens.labels(model, _ENGINE).observe(stats.prompt_tokens - stats.cached_tokens)
        self._generated_tokens.labels(model, _ENGINE).observe(stats.completion_tokens)
        self._request_seconds.labels(model, _ENGINE).observe(latency.seconds)
        if latency.seconds_to_first is None:
            return
        waited, decoded = stats.waited_seconds, latency.seconds - latency.seconds_to_first
        self._inference_seconds.labels(model, _ENGINE).observe(max(0.0, latency.seconds - waited))
        self._prefill_seconds.labels(model, _ENGINE).observe(max(0.0, latency.seconds_to_first - waited))
        self._decode_seconds.labels(model, _ENGINE).observe(decoded)
        if latency.num_tokens > 1:
            self._mean_interval.labels(model, _ENGINE).observe(decoded / (latency.num_tokens - 1))

    def count_request(self, model: str, lengths: Sequence[int], max_tokens: int | None) -> None:
        """Count a request that has ended. lengths: tokens of each of its texts. max_tokens: what it asked for."""
        self._asked_texts.labels(model, _ENGINE).observe(len(lengths))
        self._longest.labels(model, _ENGINE).observe(max(lengths))
        if max_tokens is not None:
            self._asked_tokens.labels(model, _ENGINE).observe(max_tokens)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask engines, and no other collector has these names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Activity of engines, and the server's own meters under vLLM's names."""
        yield from self._engine_figures()
        metrics = self._metrics
        prompt, cached = _by_model(metrics.prompt_tokens), _by_model(metrics.cached_tokens)
        for name, help, values in (
            ("prompt_tokens", "Tokens of prompts", prompt),
            ("prompt_tokens_cached", "Tokens of prompts that were cached", cached),
            ("generation_tokens", "Tokens generated", _by_model(metrics.completion_tokens)),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", prompt),
            ("prefix_cache_hits", "Tokens found in the prefix cache", cached),
        ):
            family = CounterMetricFamily(f"vllm:{name}", help, labels=_LABELS)
            for model, value in values.items():
                family.add_metric([model, _ENGINE], value)
            yield family
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Tokens of prompts, by where they came from", labels=[*_LABELS, "source"]
        )
        for model, value in prompt.items():
            hits = cached.get(model, 0.0)
            sources.add_metric([model, _ENGINE, "local_compute"], value - hits)
            sources.add_metric([model, _ENGINE, "local_cache_hit"], hits)
        yield sources
        for name, help, histogram in (
            (
                "time_to_first_token_seconds",
                "From a request's admission to its first token",
                metrics.first_token_seconds,
            ),
            ("inter_token_latency_seconds", "Between two tokens of a text", metrics.interval_seconds),
            ("request_queue_time_seconds", "Before the engine admitted it", metrics.queue_seconds),
        ):
            yield _renamed(histogram, f"vllm:{name}", help)

    def _engine_figures(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Texts that take part in steps", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Texts waiting for a place or memory", labels=_LABELS)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Texts waiting for a place or memory", labels=[*_LABELS, "reason"]
        )
        used = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Part of the key-value memory that running texts hold, 0 to 1", labels=_LABELS
        )
        preempted = CounterMetricFamily("vllm:num_preemptions", "Texts whose memory others took", labels=_LABELS)
        for model, stats in self._metrics.engines().items():
            labels = [model, _ENGINE]
            running.add_metric(labels, stats.running)
            waiting.add_metric(labels, stats.waiting)
            reasons.add_metric([*labels, "capacity"], stats.waiting)
            used.add_metric(labels, stats.cache_fraction)
            preempted.add_metric(labels, stats.preemptions)
        yield from (running, waiting, reasons, used, preempted)


def _by_model(counter: Counter) -> dict[str, float]:
    """The values of a counter whose one label is the model."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return {sample.labels["model"]: sample.value for sample in samples if sample.name.endswith("_total")}


def _renamed(histogram: Histogram, name: str, help: str) -> Metric:
    """A histogram whose one label is the model, under another name and with vLLM's labels."""
    made = Metric(name, help, "histogram")
    for family in histogram.collect():
        for sample in family.samples:
            bounds = {label: value for label, value in sample.labels.items() if label != "model"}
            labels = {"model_name": sample.labels["model"], "engine": _ENGINE, **bounds}
            made.samples.append(Sample(f"{name}{sample.name.removeprefix(family.name)}", labels, sample.value))
    return made


class TtftMetrics(Collector):
    """Counts, and quantiles of the latest 512 predictions whose first token came. engines: by the model's name."""

    def __init__(self, registry: CollectorRegistry, engines: "Callable[[], Mapping[str, EngineStats]]") -> None:
        self._engines = engines
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask engines."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Figures of the engines' predictions."""
        predicted = CounterMetricFamily(
            "localinfer_ttft_predictions", "First tokens that were predicted, for an objective", labels=["model"]
        )
        refused = CounterMetricFamily(
            "localinfer_ttft_refusals", "Requests refused for what was predicted", labels=["model"]
        )
        ratio = Metric("localinfer_ttft_prediction_ratio", "Time to first token over the predicted one", "summary")
        error = Metric("localinfer_ttft_prediction_error_seconds", "How far the two are apart", "summary")
        for model, stats in self._engines().items():
            predicted.add_metric([model], stats.ttft.num_predicted)
            refused.add_metric([model], stats.ttft.num_refused)
            for metric, quantiles in ((ratio, stats.ttft.ratio_quantiles), (error, stats.ttft.error_quantiles)):
                for quantile, value in quantiles.items():
                    metric.add_sample(metric.name, {"model": model, "quantile": f"{quantile:g}"}, value)
        yield from (predicted, refused, ratio, error)
