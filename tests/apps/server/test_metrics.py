"""`/metrics` and `/health` while texts are generated: every figure agrees with what the replies themselves say."""

import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from local_servers import MODEL, STORY, ServedModel, serving_drafting
from prometheus_client.parser import text_string_to_metric_families

from localinfer.apps.server.operation.observation import LatencyTracker, Metrics, VllmMetrics
from localinfer.apps.server.replies.reply import End, Reply, ReplyEvent
from localinfer.apps.server.replies.service import ReplyTotals
from tests.support.limits import wait_until

PATH = "/v1/chat/completions"
SETTLING_SECONDS = 10.0
ENDLESS = {"messages": STORY, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": True}
Samples = dict[str, float]


@pytest.fixture(scope="module")
def counted() -> Iterator[ServedModel]:
    """A server of its own, that drafts: nothing else changes its meters."""
    with serving_drafting() as running:
        yield running


@pytest.fixture
def client(counted: ServedModel) -> Iterator[httpx.Client]:
    with counted.client() as made:
        yield made


def read_metrics(client: httpx.Client) -> Samples:
    """Every sample, by its name and the values of its labels."""
    response = client.get("/metrics")
    assert response.status_code == 200
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def gains(before: Samples, after: Samples) -> Samples:
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def wait_for(client: httpx.Client, name: str, value: float) -> Samples:
    """The metrics once one of them has a value."""
    assert wait_until(lambda: read_metrics(client).get(name) == value, SETTLING_SECONDS), name
    return read_metrics(client)


def ask(counted: ServedModel, number: int) -> dict[str, Any]:
    """The usage of a reply, every second one streamed."""
    question = [{"role": "user", "content": f"Tell me a story about {number} cats and a dog who lost its ball."}]
    body = {"messages": question, "max_tokens": 10 + number, "ignore_eos": True, "seed": number}
    with counted.client() as client:
        if number % 2:
            return client.post(PATH, json=body).json()["usage"]
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        lines = [line for line in client.post(PATH, json=asked).text.split("\n\n") if line]
        return json.loads(lines[-2].removeprefix("data: "))["usage"]


def test_every_meter_is_there_before_the_first_request(client):
    text = client.get("/metrics").text
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE ")}
    expected = {
        "histogram": ["time_to_first_token_seconds", "inter_token_seconds"],
        "gauge": ["running_generations", "waiting_generations", "loaded_models"],
        "counter": ["requests", "prompt_tokens", "cached_prompt_tokens", "completion_tokens", "replies", "good_replies"]
        + ["drafted_tokens", "accepted_tokens"],
    }
    for kind, names in expected.items():
        for name in names:
            full = f"localinfer_{name}_total" if kind == "counter" else f"localinfer_{name}"
            assert kinds[full] == kind


def test_meters_count_what_replies_say_under_load(counted, client):
    before = read_metrics(client)
    with ThreadPoolExecutor(6) as threads:
        replies = [threads.submit(ask, counted, number) for number in range(6)]
        while not all(reply.done() for reply in replies):
            assert client.get("/health").status_code == 200
            assert 0 <= read_metrics(client)["localinfer_running_generations"] <= 6
    usage = [reply.result() for reply in replies]
    model = MODEL.id
    gained = gains(before, read_metrics(client))
    num_tokens = sum(10 + number for number in range(6))
    assert gained[f"localinfer_completion_tokens_total {model}"] == num_tokens
    assert sum(one["completion_tokens"] for one in usage) == num_tokens
    assert gained[f"localinfer_prompt_tokens_total {model}"] == sum(one["prompt_tokens"] for one in usage)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert gained.get(f"localinfer_cached_prompt_tokens_total {model}", 0) == cached
    details = [one["completion_tokens_details"] for one in usage]
    accepted = sum(one["accepted_prediction_tokens"] for one in details)
    assert sum(gain for name, gain in gained.items() if name.startswith("localinfer_accepted_tokens_total")) == accepted
    assert gained[f"localinfer_time_to_first_token_seconds_count {model}"] == 6
    assert gained[f"localinfer_inter_token_seconds_count {model}"] == num_tokens - 6
    assert gained[f"localinfer_time_to_first_token_seconds_bucket +Inf {model}"] == 6
    assert gained[f"localinfer_inter_token_seconds_sum {model}"] > 0
    assert gained["localinfer_requests_total /chat/completions 200"] == 6
    assert gained["localinfer_replies_total length"] == 6
    assert gained.get("localinfer_good_replies_total", 0) <= 6
    assert "localinfer_running_generations" not in gained
    assert "localinfer_waiting_generations" not in gained


def test_text_waits_until_its_first_token_and_is_good_only_if_it_is_whole():
    metrics = Metrics()

    def read(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"localinfer_{name}")

    clocks = [LatencyTracker(metrics, "model") for _ in range(3)]
    assert (read("running_generations"), read("waiting_generations")) == (3, 3)
    for clock in clocks[:2]:
        clock.tick()
    assert (read("running_generations"), read("waiting_generations")) == (3, 1)
    clocks[0].end(is_whole=True)
    clocks[1].end(is_whole=False)
    clocks[2].end(is_whole=False)
    assert (read("running_generations"), read("waiting_generations")) == (0, 0)
    assert read("good_replies_total") == 1


def test_gauges_follow_texts_that_run_and_a_client_that_leaves_is_not_good(counted, client):
    before = wait_for(client, "localinfer_running_generations", 0)
    with ExitStack() as streams:
        readers = []
        for _ in range(3):
            session = streams.enter_context(counted.client())
            response = streams.enter_context(session.stream("POST", PATH, json=ENDLESS))
            # Kept, because it closes its connection when it is dropped.
            readers.append(response.iter_lines())
            assert "assistant" in next(readers[-1])
        metrics = wait_for(client, "localinfer_waiting_generations", 0)
        assert metrics["localinfer_running_generations"] == 3
        assert metrics["localinfer_loaded_models"] == 1
        assert client.get("/health").json() == {"status": "ok"}
        assert len(client.get("/requests").json()) == 3
    gained = gains(before, wait_for(client, "localinfer_running_generations", 0))
    assert client.get("/requests").json() == []
    assert "localinfer_waiting_generations" not in gained
    assert "localinfer_good_replies_total" not in gained
    assert not any(name.startswith("localinfer_replies_total") and "cancelled" not in name for name in gained)


@pytest.mark.parametrize("leaves", [False, True])
def test_text_is_counted_while_the_gauge_still_has_it(counted, client, monkeypatch, leaves):
    wait_for(client, "localinfer_running_generations", 0)
    seen: list[float | None] = []
    count_reply = Metrics.count_reply

    def watched(metrics: Metrics, *reply: Any) -> None:
        seen.append(metrics.registry.get_sample_value("localinfer_running_generations"))
        count_reply(metrics, *reply)

    monkeypatch.setattr(Metrics, "count_reply", watched)
    before = read_metrics(client)
    if leaves:
        with counted.client() as session, session.stream("POST", PATH, json=ENDLESS) as response:
            assert "assistant" in next(response.iter_lines())
    else:
        client.post(PATH, json={"messages": STORY, "max_tokens": 3, "ignore_eos": True})
    gained = gains(before, wait_for(client, "localinfer_running_generations", 0))
    assert seen == [1]
    assert gained[f"localinfer_replies_total {'cancelled' if leaves else 'length'}"] == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_request_is_counted_before_its_last_text_is_said_to_have_ended(client, monkeypatch, streamed):
    happened: list[str] = []
    count_text, count_request, events = ReplyTotals.count_text, VllmMetrics.count_request, Reply.events

    def count_watched_text(*counted: Any) -> None:
        happened.append("text")
        count_text(*counted)

    def count_watched_request(*counted: Any) -> None:
        happened.append("request")
        count_request(*counted)

    async def watched_events(*reply: Any) -> AsyncIterator[ReplyEvent]:
        async for event in events(*reply):
            if isinstance(event, End):
                happened.append("end")
            yield event

    monkeypatch.setattr(ReplyTotals, "count_text", count_watched_text)
    monkeypatch.setattr(VllmMetrics, "count_request", count_watched_request)
    monkeypatch.setattr(Reply, "events", watched_events)
    body = {"messages": STORY, "max_tokens": 3, "ignore_eos": True, "n": 2, "stream": streamed}
    assert client.post(PATH, json=body).status_code == 200
    assert happened == ["end", "text", "text", "request", "end"]


def test_predicted_text_counts_as_accepted_by_place(client):
    body = {"messages": STORY, "max_tokens": 40, "temperature": 0}
    told = client.post(PATH, json=body).json()["choices"][0]["message"]["content"]
    before = read_metrics(client)
    predicted = {**body, "prediction": {"type": "content", "content": told}}
    details = client.post(PATH, json=predicted).json()["usage"]["completion_tokens_details"]
    gained = gains(before, read_metrics(client))
    accepted = {name: gain for name, gain in gained.items() if name.startswith("localinfer_accepted_tokens_total")}
    drafted = {name: gain for name, gain in gained.items() if name.startswith("localinfer_drafted_tokens_total")}
    assert sum(accepted.values()) == details["accepted_prediction_tokens"] > 0
    assert sum(drafted.values()) - sum(accepted.values()) == details["rejected_prediction_tokens"]
    assert set(accepted) <= {name.replace("drafted", "accepted") for name in drafted}


def test_whole_reply_in_time_is_good(client):
    before = read_metrics(client)
    client.post(PATH, json={"messages": STORY, "max_tokens": 1})
    gained = gains(before, read_metrics(client))
    first = [value for name, value in gained.items() if name.startswith("localinfer_time_to_first_token_seconds_sum")]
    assert gained.get("localinfer_good_replies_total", 0) == (first[0] <= 1.0)


def test_refused_request_is_counted_by_its_status_only(client):
    before = read_metrics(client)
    assert client.post(PATH, json={"messages": []}).status_code == 400
    gained = gains(before, read_metrics(client))
    assert {name: gain for name, gain in gained.items() if "/metrics" not in name} == {
        "localinfer_requests_total /chat/completions 400": 1
    }
