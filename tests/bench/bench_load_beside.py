"""What running streams, first bytes and /health feel of a model that is loaded beside them.

    python -m tests.bench.bench_load_beside MODEL OTHER [--streams 8] [--loads 5] [--threads N]

The streams chat with MODEL, one reply after another. OTHER is loaded again and again, by a request for it, and unloaded
at once. Beside the streams one short chat asks after another, for first bytes, and /health every 20 ms. Each figure is
told for the seconds in which nothing was loaded and for those of the loads; then what a load takes alone and beside the
streams, and how many tokens a second they got. The client shares the machine.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from localinfer.apps.bench.figures import Failure, RequestTimes, percentile
from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.bench.serve import LoadClient, ask, chat, chat_body

STORY = "Tell me a long story about a dog, a cat and the sea, number {}."
_HEALTH_SECONDS = 0.02
_BETWEEN_SECONDS = 3.0

Moments = list[tuple[float, float]]
"""When each thing that was timed began and ended."""


class Measurement:
    """What is timed on one server, on one clock."""

    def __init__(self, port: int, decode: int) -> None:
        self._port = port
        self._decode = decode
        self._is_over = False
        self.loads: Moments = []
        self.loads_alone: Moments = []
        self.gaps: Moments = []
        self.first_bytes: Moments = []
        self.health: Moments = []
        self.failures: list[str] = []

    async def run(self, num_streams: int, num_loads: int) -> None:
        """Load alone, then beside the streams."""
        loader = LoadClient(self._port)
        for _ in range(max(2, num_loads // 2)):
            self.loads_alone.append(await self._load(loader))
        tasks = [asyncio.create_task(self._stream(index)) for index in range(num_streams)]
        tasks += [asyncio.create_task(self._ask_briefly()), asyncio.create_task(self._watch_health())]
        await asyncio.sleep(_BETWEEN_SECONDS)
        self.gaps.clear()
        self.first_bytes.clear()
        self.health.clear()
        began = time.perf_counter()
        for _ in range(num_loads):
            await asyncio.sleep(_BETWEEN_SECONDS)
            self.loads.append(await self._load(loader))
        self._is_over = True
        self.seconds = time.perf_counter() - began
        await asyncio.gather(*tasks)

    async def _load(self, client: LoadClient) -> tuple[float, float]:
        """Ask for something that needs the other model; it is unloaded at once, before this is done again."""
        began = time.perf_counter()
        await ask(client, "POST", "/tokenize", {"model": "other", "content": "a"})
        ended = time.perf_counter()
        while (await ask(client, "GET", "/v1/models/other"))["state"] != "unloaded":
            await asyncio.sleep(_HEALTH_SECONDS)
        return began, ended

    async def _stream(self, index: int) -> None:
        client, number = LoadClient(self._port), 0
        while not self._is_over:
            number += 1
            outcome = await chat(client, chat_body(STORY.format(f"{index}.{number}"), self._decode, number))
            if isinstance(outcome, RequestTimes):
                self.gaps += zip(outcome.tokens, outcome.tokens[1:], strict=False)
            else:
                self.failures.append(outcome.reason)

    async def _ask_briefly(self) -> None:
        client, number = LoadClient(self._port), 0
        while not self._is_over:
            number += 1
            outcome = await chat(client, chat_body(STORY.format(f"brief {number}"), 2, number))
            if isinstance(outcome, Failure):
                self.failures.append(outcome.reason)
            else:
                self.first_bytes.append((outcome.sent, outcome.first_byte))

    async def _watch_health(self) -> None:
        client = LoadClient(self._port)
        while not self._is_over:
            answer = await client.request("GET", "/health")
            self.health.append((answer.sent, answer.ended))
            await asyncio.sleep(_HEALTH_SECONDS)

    def split(self, moments: Moments) -> tuple[list[float], list[float]]:
        """Milliseconds of what was timed while nothing was loaded, and of what overlaps with a load."""
        without: list[float] = []
        beside: list[float] = []
        for began, ended in moments:
            overlaps = any(began < load_ended and ended > load_began for load_began, load_ended in self.loads)
            (beside if overlaps else without).append(1e3 * (ended - began))
        return without, beside

    def tokens_per_second(self) -> tuple[float, float]:
        """Of all streams together, while nothing was loaded and beside loads."""
        without, beside = self.split(self.gaps)
        loading = sum(ended - began for began, ended in self.loads)
        return len(without) / (self.seconds - loading), len(beside) / loading


def line(name: str, values: Sequence[float]) -> str:
    """Percentiles of milliseconds."""
    if not values:
        return f"{name:<34} {'none':>7}"
    figures = "".join(f"{percentile(values, percent):>10.1f}" for percent in (50, 99, 100))
    return f"{name:<34} {len(values):>7}{figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--decode", type=int, default=200)
    parser.add_argument("--threads", type=int)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "models.toml"
        config.write_text(
            f"[models.other]\nmodel = {json.dumps(str(Path(settings.other).absolute()))}\nkeep_alive = 0\n"
        )
        server = ServerProcess(
            settings.model,
            device="cpu",
            threads=settings.threads,
            max_generations=64,
            more=["--models-config", str(config)],
        )
        with server:
            found = Measurement(server.port, settings.decode)
            asyncio.run(found.run(settings.streams, settings.loads))
    print(f"{'milliseconds':<34} {'times':>7}{'p50':>10}{'p99':>10}{'longest':>10}")
    for name, moments in (("between tokens", found.gaps), ("first byte", found.first_bytes), ("health", found.health)):
        for state, values in zip(("nothing is loaded", "beside a load"), found.split(moments), strict=True):
            print(line(f"{name}, {state}", values))
    alone, beside = ([1e3 * (ended - began) for began, ended in one] for one in (found.loads_alone, found.loads))
    # The first reads the file into the system's cache.
    print(line("load alone", alone[1:]))
    print(line("load beside streams", beside))
    without, during = found.tokens_per_second()
    print(f"tokens per second of all streams: {without:.1f} while nothing is loaded, {during:.1f} beside a load")
    for reason in sorted(set(found.failures)):
        print(f"failed: {reason}")


if __name__ == "__main__":
    main()
