"""A load of streamed chats: so many at one time, each stream with its next request as soon as it has its reply."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localinfer.bench.load_client import NETWORK_ERRORS, LoadClient, chat
from localinfer.bench.load_figures import Failure, Outcome

_HEALTH_PERIOD_SECONDS = 0.05
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@dataclass
class Load:
    """What came of a load: outcomes in the order of the requests, the time in which every stream was busy, and how
    long `/health` took meanwhile, in seconds."""

    outcomes: list[Outcome]
    began: float
    busy_until: float = 0.0
    health_seconds: list[float] = field(default_factory=list)
    health_failures: int = 0


class Prompts:
    """Messages of about so many tokens, cut from one text so that no two begin alike.

    pieces: the text, a piece per token.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._stride = round(len(pieces) / _GOLDEN_RATIO)
        while math.gcd(self._stride, len(pieces)) > 1:
            self._stride += 1
        self._start = 0

    def take(self, num_tokens: int) -> str:
        """The next message."""
        start = self._start
        self._start = (start + self._stride) % len(self._pieces)
        return "".join(self._pieces[(start + index) % len(self._pieces)] for index in range(num_tokens))


def chat_body(message: str, max_tokens: int, seed: int | None) -> dict[str, Any]:
    """A request for exactly `max_tokens` streamed tokens, drawn with a seed, or greedy without one."""
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
    """Lengths between three and five quarters of a mean: with equal ones all streams would go in step."""
    return [max(1, round(mean * (0.75 + 0.5 * (index * _GOLDEN_RATIO % 1)))) for index in range(count)]


async def run_load(
    port: int, bodies: Sequence[dict[str, Any]], concurrency: int, progress: Callable[[int], None]
) -> Load:
    """Send all requests, `concurrency` at one time, each stream on a connection of its own; poll `/health` meanwhile.

    progress: called with the number of requests that have ended.
    """
    load = Load([Failure("it was never sent")] * len(bodies), time.perf_counter())
    waiting = iter(range(len(bodies)))
    polling = asyncio.create_task(_poll_health(port, load))
    try:
        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(bodies))):
                streams.create_task(_stream(port, bodies, waiting, load, progress))
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    return load


async def _stream(
    port: int,
    bodies: Sequence[dict[str, Any]],
    waiting: Iterator[int],
    load: Load,
    progress: Callable[[int], None],
) -> None:
    client: LoadClient | None = None
    try:
        for index in waiting:
            try:
                client = client or await LoadClient.connect(port)
            except OSError as error:
                load.outcomes[index] = Failure(f"no connection: {error}")
                continue
            load.outcomes[index] = outcome = await chat(client, bodies[index])
            if isinstance(outcome, Failure):
                client.close()
                client = None
            progress(1)
    finally:
        load.busy_until = load.busy_until or time.perf_counter()
        if client is not None:
            client.close()


async def _poll_health(port: int, load: Load) -> None:
    client: LoadClient | None = None
    try:
        while True:
            began = time.perf_counter()
            try:
                client = client or await LoadClient.connect(port)
                answer = await client.request("GET", "/health")
                load.health_failures += answer.status != 200
                load.health_seconds.append(answer.ended - began)
            except NETWORK_ERRORS:
                load.health_failures += 1
                if client is not None:
                    client.close()
                    client = None
            await asyncio.sleep(_HEALTH_PERIOD_SECONDS)
    finally:
        if client is not None:
            client.close()
