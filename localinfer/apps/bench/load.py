"""A closed-loop load of streamed chats: each concurrent stream sends its next request after its reply has ended."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from localinfer.apps.bench.figures import Failure, Outcome
from localinfer.apps.bench.load_client import NETWORK_ERRORS, LoadClient, chat
from localinfer.types import ProgressCallback

_HEALTH_PERIOD_SECONDS = 0.05
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@dataclass
class Load:
    """The results of a load: outcomes in the order of the requests, the period in which every stream was busy, and
    latencies of `/health` meanwhile, in seconds."""

    outcomes: list[Outcome]
    began: float
    busy_until: float = 0.0
    health_seconds: list[float] = field(default_factory=list)
    health_failures: int = 0


class Prompts:
    """Messages of a given number of tokens, about, cut from one text so that no two have a common prefix.

    tokens: the text of each token.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._stride = round(len(tokens) / _GOLDEN_RATIO)
        while math.gcd(self._stride, len(tokens)) > 1:
            self._stride += 1
        self._start = 0

    def take(self, num_tokens: int) -> str:
        """The next message."""
        start = self._start
        self._start = (start + self._stride) % len(self._tokens)
        return "".join(self._tokens[(start + index) % len(self._tokens)] for index in range(num_tokens))


def chat_body(message: str, max_tokens: int, seed: int | None) -> dict[str, Any]:
    """A request for exactly `max_tokens` streamed tokens, sampled with a seed, or greedy without one."""
    choice = {"temperature": 0} if seed is None else {"seed": seed}
    return {
        "messages": [{"role": "user", "content": message}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **choice,
    }


def reply_lengths(mean: int, count: int) -> list[int]:
    """Lengths from 3/4 to 5/4 of a mean: with equal ones all streams would run in lockstep."""
    return [max(1, round(mean * (0.75 + 0.5 * (index * _GOLDEN_RATIO % 1)))) for index in range(count)]


async def run_load(
    port: int, bodies: Sequence[dict[str, Any]], concurrency: int, stage: str, progress: ProgressCallback
) -> Load:
    """Send all requests, `concurrency` at a time, each stream on its own connection; poll `/health` meanwhile.

    progress: called with the stage, the number of requests that have ended, and of all of them.
    """
    load = Load([Failure("it was never sent")] * len(bodies), time.perf_counter())
    waiting = iter(range(len(bodies)))
    num_ended = 0

    async def stream() -> None:
        nonlocal num_ended
        with closing(LoadClient(port)) as client:
            for index in waiting:
                load.outcomes[index] = outcome = await chat(client, bodies[index])
                if isinstance(outcome, Failure):
                    client.close()
                num_ended += 1
                progress(stage, num_ended, len(bodies))
        load.busy_until = load.busy_until or time.perf_counter()

    progress(stage, 0, len(bodies))
    polling = asyncio.create_task(_poll_health(port, load))
    try:
        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(bodies))):
                streams.create_task(stream())
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    return load


async def _poll_health(port: int, load: Load) -> None:
    with closing(LoadClient(port)) as client:
        while True:
            began = time.perf_counter()
            try:
                answer = await client.request("GET", "/health")
                load.health_failures += answer.status != 200
                load.health_seconds.append(answer.ended - began)
            except NETWORK_ERRORS:
                load.health_failures += 1
            await asyncio.sleep(_HEALTH_PERIOD_SECONDS)
