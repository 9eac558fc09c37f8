"""Prompts computed by a deployment of their own, and continued by another: Ray Serve, in processes of their own."""

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import localinfer
from localinfer.llm import LLM
from tests.apps.fleet.serve_process import ServeProcess, has_ray, serving_replicas
from tests.support.limits import seconds, wait_until

pytestmark = pytest.mark.skipif(not has_ray(), reason="needs `pip install 'localinfer[ray]'`")
STORY = "Once upon a time a small dog found a red ball in the garden, and the cat saw it too. "
OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 7}
PREFILL = "prefill"


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """A model that computes all itself."""
    with localinfer.load(threads=1, kv_memory=64 << 20, speculation=None) as llm:
        yield llm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = str(tmp_path_factory.mktemp("shared"))
    load = {"threads": 1, "kv_memory": 64 << 20, "speculation": None, "disk_cache_folder": folder}
    apart = {"prefill_replicas": 1, "prefill_cpus": 0.9, "prefill_threshold": 64}
    with serving_replicas(replicas=1, cpus=0.9, **apart, **load) as running:
        yield running


def completed(cluster: ServeProcess, prompt: str) -> str:
    with cluster.client() as client:
        response = client.post("/v1/completions", json={"prompt": prompt, **OPTIONS})
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])


def figures(cluster: ServeProcess) -> Counter[str]:
    """Handovers by outcome, and under PREFILL the tokens of prompts that were computed there."""
    with cluster.client() as client:
        text = client.get("/metrics").text
    found = re.findall(r'localinfer_handovers_total\{.*outcome="(\w+)"\} (\d+)', text)
    computed = re.findall(r'localinfer_prompt_tokens_total\{replica="(\w+)".*\} (\d+)', text)
    asked = re.findall(r'localinfer_requests_total\{replica="(\w+)",route="/prefill"', text)
    there = sum(int(number) for replica, number in computed if replica in asked)
    return Counter({**{outcome: int(number) for outcome, number in found}, PREFILL: there})


def test_a_prompt_that_the_prefill_deployment_computed_is_continued_with_the_same_bytes(cluster, alone):
    cluster.wait_for_replicas(1, PREFILL)
    for number in range(3):
        prompt = f"{number} {STORY * 8}"
        before = figures(cluster)
        wanted = alone.complete(prompt, **OPTIONS)
        assert completed(cluster, prompt) == wanted.text
        assert figures(cluster) - before == {"handed_over": 1, PREFILL: wanted.stats.prompt_tokens}


def test_a_stream_of_a_prompt_handed_over_has_the_same_text(cluster, alone):
    prompt = f"A {STORY * 8}"
    with cluster.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "stream": True, **OPTIONS}).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == alone.complete(prompt, **OPTIONS).text


def test_a_prefill_replica_that_is_killed_in_the_midst_costs_no_byte(cluster, alone):
    prompt = f"B {STORY * 8}"
    before = figures(cluster)
    (prefill,) = cluster.replicas(PREFILL)
    # It stands still, until somebody waits for the prompt.
    os.kill(prefill, signal.SIGSTOP)
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(completed(cluster, prompt)))
    asking.start()
    cluster.wait_for(lambda now: any(now.values()))
    cluster.kill(prefill)
    asking.join(seconds(60))
    assert found == [alone.complete(prompt, **OPTIONS).text]
    # The metrics of the others are there all the same.
    after = figures(cluster)
    assert (after - before)["failed"] >= 1
    assert (after - before)["computed_here"] == 1
    cluster.wait_for(lambda now: now and prefill not in now, PREFILL)

    # The one in its place is asked again, once the pause after the failure is over.
    def is_handed_over(prompt: str) -> bool:
        assert completed(cluster, prompt) == alone.complete(prompt, **OPTIONS).text
        return figures(cluster)["handed_over"] > after["handed_over"]

    prompts = (f"{number} more. {STORY * 8}" for number in range(1000))
    assert wait_until(lambda: is_handed_over(next(prompts)), 40, every=0.5)
