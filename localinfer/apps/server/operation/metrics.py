"""What the server counts and times, in Prometheus' text format, in a registry of its own."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from localinfer.apps.server.operation.ttft_metrics import TtftMetrics
from localinfer.apps.server.operation.vllm_metrics import VllmMetrics

if TYPE_CHECKING:
    from localinfer.engine.cache.stats import SnapshotStats
    from localinfer.engine.engine import EngineStats
    from localinfer.generation.completion import Stats

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
            "hits": gauge("localinfer_state_snapshot_hits", "Texts that went on from one since loading", ["model"]),
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
        # Last: whoever sees that no text runs can rely on every other figure.
        self._metrics.running.dec()
