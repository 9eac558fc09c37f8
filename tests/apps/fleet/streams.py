"""Streamed replies as a client receives them, and the end of a replica in their midst."""

import json
import re
from typing import Any

from tests.apps.fleet.serve_process import ServeProcess

CHAT = "/v1/chat/completions"
STORY = [{"role": "user", "content": "Tell me a story about a dog."}]
_NAMES = re.compile(rb'"(?:id|created|timings|cached_tokens)":(?:\{[^{}]*\}|"[^"]*"|\d+),?')


def streamed(cluster: ServeProcess, body: dict[str, Any], killed_after: int | None = None) -> bytes:
    """A stream as received, without the parts that differ between two undisturbed runs: names, times, what was cached.

    killed_after: events, after which the replica that makes them is killed; the reply must be longer.
    """
    received = b""
    with cluster.client() as client, client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for piece in response.iter_raw():
            received += piece
            if killed_after is not None and received.count(b"\n\n") >= killed_after:
                reply_id = json.loads(received.split(b"\n\n")[0].removeprefix(b"data: "))["id"]
                cluster.kill(next(one for one, replies in cluster.replicas().items() if reply_id in replies))
                killed_after = None
    assert killed_after is None, "the reply ended before"
    assert b"[DONE]" in received[-20:], received[-300:]
    return _NAMES.sub(b"", received)
