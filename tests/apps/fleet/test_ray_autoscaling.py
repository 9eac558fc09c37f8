"""Replicas that Serve adds under load and removes after it."""

import threading
from typing import Any

import pytest

from tests.apps.fleet.serve_process import has_ray, serving_replicas
from tests.apps.fleet.streams import STORY, streamed
from tests.support.limits import seconds

pytestmark = pytest.mark.skipif(not has_ray(), reason="needs `pip install 'localinfer[ray]'`")
# What the test asks of replicas counts as requests, too: one client and these are fewer than two.
QUICK: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 1.0,
}


def test_replicas_come_with_load_and_go_after_it_and_no_reply_is_lost():
    with serving_replicas(autoscaling=QUICK, cpus=0.9, threads=1, kv_memory=32 << 20, speculation=None) as cluster:
        cluster.wait_for_replicas(1)
        found: list[list[bytes]] = [[] for _ in range(4)]
        is_over = [threading.Event() for _ in found]

        def ask(number: int) -> None:
            body = {"messages": STORY, "seed": number, "ignore_eos": True, "max_tokens": 300}
            while not is_over[number].is_set():
                found[number].append(streamed(cluster, body))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(found))]
        for thread in threads:
            thread.start()
        cluster.wait_for(lambda now: len(now) == 2 and all(now.values()))
        # One client goes on, and one replica is enough for it.
        for event in is_over[1:]:
            event.set()
        cluster.wait_for_replicas(1)
        is_over[0].set()
        for thread in threads:
            thread.join(seconds(60))
        assert not any(thread.is_alive() for thread in threads)
        # Whichever replica made them.
        assert [len(set(replies)) for replies in found] == [1] * len(found)
        assert all(replies[0].count(b'"content"') > 100 and b'"error"' not in replies[0] for replies in found)
