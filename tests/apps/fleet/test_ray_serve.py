"""Two replicas of the demo model behind Ray Serve, in processes of their own."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.apps.fleet.serve_process import ServeProcess, has_ray, serving_replicas
from tests.apps.fleet.streams import CHAT, STORY, streamed
from tests.support.limits import seconds

pytestmark = pytest.mark.skipif(not has_ray(), reason="needs `pip install 'localinfer[ray]'`")
BODY: dict[str, Any] = {"messages": STORY, "seed": 3, "temperature": 1.1, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeProcess]:
    with serving_replicas(replicas=2, cpus=0.9, threads=1, kv_memory=32 << 20, speculation=None) as running:
        yield running


@pytest.mark.parametrize("events", [2, 40])
def test_reply_whose_replica_is_killed_has_the_bytes_of_an_undisturbed_one(cluster, events):
    body = {**BODY, "max_tokens": 900, "stream_options": {"include_usage": True}}
    cluster.wait_for_replicas(2)
    undisturbed = streamed(cluster, body)
    assert undisturbed.endswith(b"data: [DONE]\n\n")
    assert streamed(cluster, body, killed_after=events) == undisturbed


def test_routes_answer_as_those_of_the_server(cluster):
    cluster.wait_for_replicas(2)
    with cluster.client() as client:
        assert client.get("/v1/models").json()["data"][0]["state"] == "loaded"
        refused = client.post(CHAT, json={"messages": STORY, "temperatur": 1})
        assert refused.status_code == 400
        assert "temperatur is no member of this route" in refused.json()["error"]["message"]
        client.post(CHAT, json={"messages": STORY, "max_tokens": 2})
        metrics = client.get("/metrics").text
    assert len(set(re.findall(r'replica="(\w+)"', metrics))) == 2
    assert metrics.count("# TYPE localinfer_requests_total counter") == 1


def test_silent_replica_does_not_keep_the_metrics_of_the_other(cluster):
    cluster.wait_for_replicas(2)
    with cluster.client() as client:
        assert "\nlocalinfer_missing_replicas 0\n" in client.get("/metrics").text
        silent = next(iter(cluster.replicas()))
        os.kill(silent, signal.SIGSTOP)
        try:
            metrics = client.get("/metrics").text
        finally:
            os.kill(silent, signal.SIGCONT)
    assert "\nlocalinfer_missing_replicas 1\n" in metrics
    assert sorted(re.findall(r'localinfer_replica_answered{replica="\w+"} (\d)', metrics)) == ["0", "1"]
    assert len(set(re.findall(r'localinfer_requests_total{replica="(\w+)"', metrics))) == 1


def test_client_that_leaves_ends_its_text_in_the_replica(cluster):
    cluster.wait_for_replicas(2)
    with cluster.client() as client, client.stream("POST", CHAT, json={**BODY, "max_tokens": 900}) as response:
        # Without its iterator the client would leave at once.
        pieces = response.iter_raw()
        next(pieces)
        assert any(cluster.replicas().values())
    cluster.wait_for(lambda now: not any(now.values()))


def test_no_reply_is_lost_where_a_replica_is_removed(cluster):
    cluster.wait_for_replicas(2)
    body = {**BODY, "max_tokens": 900}
    found: dict[int, bytes] = {}

    def ask(number: int) -> None:
        found[number] = streamed(cluster, {**body, "seed": number})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    cluster.wait_for(lambda now: all(now.values()))
    cluster.deploy(replicas=1)
    for thread in threads:
        thread.join(seconds(120))
    assert sorted(found) == list(range(6))
    assert all(body.count(b'"content"') > 100 and body.endswith(b"data: [DONE]\n\n") for body in found.values())
    cluster.wait_for_replicas(1)
