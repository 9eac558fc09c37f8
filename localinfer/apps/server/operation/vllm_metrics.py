"""The server's figures under vLLM's names, for dashboards and autoscalers that were made for it.

What the server counts anyway is read from its own meters when somebody asks, and engines are asked what they do; the
rest is counted here. What only vLLM has (adapters, encoders of images, caches of other nodes, sleep, tokens by step) is
left out rather than said to be zero. Source: vLLM's documentation of the metrics of its V1 engine.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from localinfer.apps.server.operation.metrics import LatencyTracker, Metrics
    from localinfer.generation.completion import Stats

_ENGINE = "0"
"""vLLM numbers the engines of a server; here every model has one."""
_LABELS = ["model_name", "engine"]
_FINISHED = {"tool_calls": "stop", "cancelled": "abort", "failed": "error"}
"""How a text ended here -> vLLM's word for it, where that is another."""
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
        """What engines do now, and the server's own meters under vLLM's names."""
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
