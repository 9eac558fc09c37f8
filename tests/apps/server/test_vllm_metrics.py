"""`/metrics` under vLLM's names: every one a dashboard asks for, and figures that agree with what replies say."""

import threading
from collections.abc import Iterator

import httpx
import pytest
from local_servers import MODEL, STORY, ServedModel, serving, serving_drafting
from prometheus_client.parser import text_string_to_metric_families
from scripted_models import loader, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings
from tests.support.limits import seconds, wait_until

PATH = "/v1/chat/completions"
GAUGES = "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc"
COUNTERS = (
    "prompt_tokens prompt_tokens_cached prompt_tokens_by_source generation_tokens prefix_cache_queries"
    " prefix_cache_hits request_success num_preemptions spec_decode_num_drafts spec_decode_num_draft_tokens"
    " spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"
)
HISTOGRAMS = (
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds"
    " e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds"
    " request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens"
    " request_prefill_kv_computed_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens"
)
Samples = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def counted() -> Iterator[ServedModel]:
    with serving_drafting() as running:
        yield running


def read(client: httpx.Client) -> Samples:
    """Samples by name and further labels; every one is labelled with the model and its engine."""
    samples: Samples = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and not sample.name.endswith("_created"):
                labels = dict(sample.labels)
                assert labels.pop("engine") == "0"
                assert labels.pop("model_name") in (MODEL.id, "waiting", "other"), sample
                name = sample.name.removeprefix("vllm:")
                assert (name, *labels.values()) not in samples
                samples[name, *labels.values()] = sample.value
    return samples


def test_every_name_has_its_kind(counted):
    with counted.client() as client:
        client.post(PATH, json={"messages": STORY, "max_tokens": 2})
        families = {family.name: family.type for family in text_string_to_metric_families(client.get("/metrics").text)}
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names.split():
            assert families.get(f"vllm:{name}") == kind, name


def test_figures_agree_with_replies(counted):
    with counted.client() as client:
        before = read(client)
        asked = {"messages": STORY, "temperature": 0, "max_tokens": 30}
        replies = [client.post(PATH, json=asked).json() for _ in range(2)]
        told = replies[0]["choices"][0]["message"]["content"]
        replies.append(client.post(PATH, json={**asked, "prediction": {"type": "content", "content": told}}).json())
        several = {"messages": STORY, "max_tokens": 4, "n": 2, "ignore_eos": True}
        replies.append(client.post(PATH, json=several).json())
        after = read(client)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    usage = [reply["usage"] for reply in replies]
    # The second of two texts reads its prompt from the cache, which usage counts once.
    prompt = sum(one["prompt_tokens"] for one in usage) + usage[-1]["prompt_tokens"]
    cached = gained["prefix_cache_hits_total",]
    completion = sum(one["completion_tokens"] for one in usage)
    assert gained["prompt_tokens_total",] == gained["prefix_cache_queries_total",] == prompt
    assert cached == gained["prompt_tokens_cached_total",] > 0
    assert gained["prompt_tokens_by_source_total", "local_cache_hit"] == cached
    assert gained["prompt_tokens_by_source_total", "local_compute"] == prompt - cached
    assert gained["request_prefill_kv_computed_tokens_sum",] == prompt - cached
    assert gained["generation_tokens_total",] == gained["request_generation_tokens_sum",] == completion
    assert gained["request_prompt_tokens_sum",] == prompt
    ends = [choice["finish_reason"] for reply in replies for choice in reply["choices"]]
    for reason in ("stop", "length"):
        assert gained.get(("request_success_total", reason), 0.0) == ends.count(reason)
    assert gained["time_to_first_token_seconds_count",] == gained["e2e_request_latency_seconds_count",] == 5
    assert gained["inter_token_latency_seconds_count",] == completion - 5
    total = gained["e2e_request_latency_seconds_sum",]
    parts = [gained[f"request_{part}_time_seconds_sum",] for part in ("prefill", "decode")]
    assert gained["request_inference_time_seconds_sum",] == pytest.approx(sum(parts), abs=1e-3)
    assert sum(parts) <= total + 1e-6
    assert gained["request_params_n_sum",] == 5 and gained["request_params_n_count",] == 4
    assert gained["request_params_max_tokens_sum",] == 94
    details = [one["completion_tokens_details"] for one in usage]
    accepted = sum(one["accepted_prediction_tokens"] for one in details)
    assert gained["spec_decode_num_accepted_tokens_total",] == accepted > 0
    rejected = sum(one["rejected_prediction_tokens"] for one in details)
    assert gained["spec_decode_num_draft_tokens_total",] == accepted + rejected
    assert 0 < gained["spec_decode_num_drafts_total",] <= accepted + rejected
    places = [value for name, value in gained.items() if name[0] == "spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(places) == accepted


def test_what_runs_and_what_waits_is_told_at_once():
    """The model says one token and waits; the engine takes one text at a time, and its memory is held by that one."""
    gate = threading.Event()
    scripts = {"waiting": [ord("a"), gate, ord("b")], "other": [ord("c")]}
    one_at_a_time = loader(scripts, max_running=1)
    with serving(ServerSettings(port=0), sources=scripted_sources(*scripts), load=one_at_a_time) as served:
        ask = {"model": "waiting", "messages": STORY, "temperature": 0}
        with served.client() as client:
            assert not any(name[0] == "num_requests_running" for name in read(client)), "no model is loaded"
            threads = [threading.Thread(target=lambda: client.post(PATH, json=ask)) for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                # Each waits for a moment before one of them runs.
                assert wait_until(
                    lambda: [read(client).get((f"num_requests_{state}",)) for state in ("running", "waiting")] == [1, 1]
                )
                assert wait_until(lambda: read(client)["generation_tokens_total",] == 1)
                now = read(client)
                assert now["num_requests_running",] == now["num_requests_waiting_by_reason", "capacity"] == 1
                assert 0 < now["kv_cache_usage_perc",] <= 1
            finally:
                gate.set()
                for thread in threads:
                    thread.join(seconds(15))
            assert wait_until(lambda: read(client)["num_requests_running",] == 0)
            assert read(client)["num_requests_waiting",] == read(client)["kv_cache_usage_perc",] == 0
