"""Measure `localinfer serve` under load, over HTTP; `report.py` prints the record, `charts.py` draws it.

Some requests are repeated at the end, one after another, on a fresh server: the texts must be equal, whatever was
batched with them, cached or aborted.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from localinfer.apps.bench.decode import check_context, model_record
from localinfer.apps.bench.figures import (
    Failure,
    Objective,
    Outcome,
    Record,
    compare_texts,
    knee,
    level_record,
    spread,
    summarize,
)
from localinfer.apps.bench.load import CHAT_PATH, LoadClient, Prompts, ask, chat, chat_body, reply_lengths, run_load
from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.evaluate.texts import read_calibration
from localinfer.apps.show.describe import describe_file
from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.types import ProgressCallback

DISCONNECTS = 9
_ATTEMPTS = 4 * DISCONNECTS
_RUNNING = re.compile(rb"^localinfer_running_generations (\S+)$", re.MULTILINE)
_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0
_LONG_PROMPT, _SHORT_REPLY = 1024, 64
_SHORT_PROMPT, _LONG_REPLY = 64, 1024
"""Tokens of an aborted prompt or reply, if the context has room."""
_REPEATED_TOKENS = 16
_CHECKED_SHARE = 3
"""One in so many aborted requests is repeated: whole prompts take long."""


class DisconnectingClients:
    """Clients that disconnect from an otherwise idle server.

    room: tokens of a message and its reply together. bodies: some of the aborted requests, to be repeated.
    """

    def __init__(self, port: int, prompts: Prompts, room: int) -> None:
        self._port = port
        self._prompts = prompts
        self._long_prompt = max(1, min(_LONG_PROMPT, room - _SHORT_REPLY))
        self._short_prompt = max(1, min(_SHORT_PROMPT, room // 2))
        self._long_reply = min(_LONG_REPLY, room - self._short_prompt)
        self.bodies: list[dict[str, Any]] = []

    async def in_prompt(self) -> Record:
        """Disconnect during prefill: seconds until nothing is generated any more.

        Raises: BackendUnavailableError if the server continues, or prompts are too short to disconnect in time.
        """
        with closing(LoadClient(self._port)) as client:
            whole = await chat(client, chat_body(self._prompts.take(self._long_prompt), 1, None))
        if isinstance(whole, Failure):
            raise BackendUnavailableError(f"a prompt of {self._long_prompt} tokens failed: {whole.reason}")
        samples: list[float] = []
        share = 0.5
        for _ in range(_ATTEMPTS):
            body = chat_body(self._prompts.take(self._long_prompt), _SHORT_REPLY, None)
            client = LoadClient(self._port)
            await client.send("POST", CHAT_PATH, body)
            try:
                # The first event holds the role, the second the reply's first token.
                await asyncio.wait_for(client.receive_events(2), share * whole.time_to_first_token_seconds)
            except TimeoutError:
                samples.append(await self._disconnect(client, body, len(samples)))
                # In the middle, at a different time in each repetition.
                share = 0.25 + 0.5 * (len(samples) % DISCONNECTS) / DISCONNECTS
            else:
                # The disconnect was late, or the prompt fast.
                share *= 0.5
                await self._seconds_to_idle(client)
            if len(samples) == DISCONNECTS:
                return _record(samples)
        raise BackendUnavailableError(
            f"prompts of {self._long_prompt} tokens are computed before a client can disconnect; measure a larger model"
        )

    async def in_reply(self) -> Record:
        """Disconnect after some tokens of the reply. Raises: BackendUnavailableError if the server continues."""
        samples = []
        for repetition in range(DISCONNECTS):
            body = chat_body(self._prompts.take(self._short_prompt), self._long_reply, repetition)
            client = LoadClient(self._port)
            await client.send("POST", CHAT_PATH, body)
            await client.receive_events(3 + repetition)
            samples.append(await self._disconnect(client, body, repetition))
        return _record(samples)

    async def _disconnect(self, client: LoadClient, body: dict[str, Any], number: int) -> float:
        if number % _CHECKED_SHARE == 0:
            self.bodies.append({**body, "max_tokens": _REPEATED_TOKENS})
        return await self._seconds_to_idle(client)

    async def _seconds_to_idle(self, client: LoadClient) -> float:
        """Close the connection; return the seconds until the server's gauge of running generations is 0."""
        with closing(LoadClient(self._port)) as watcher:
            await watcher.request("GET", "/health")
            began = time.perf_counter()
            client.close()
            while True:
                answer = await watcher.request("GET", "/metrics")
                found = _RUNNING.search(answer.body)
                if found is not None and float(found[1]) == 0:
                    return answer.ended - began
                if answer.ended - began > _PATIENCE_SECONDS:
                    raise BackendUnavailableError(
                        f"the server still computes {_PATIENCE_SECONDS:.0f} s after a disconnect; please report this"
                    )
                await asyncio.sleep(_POLL_SECONDS)


def _record(samples: list[float]) -> Record:
    return {**summarize(samples), "max": max(samples)}


MAX_STREAMS = 256
_LONGEST_REPLY = 1.25
"""Longest reply of a load, relative to the mean."""
_TEMPLATE_TOKENS = 128
"""Tokens reserved for the chat template around a message."""
_CHECKED_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The server and its load. Raises: RequestError naming the value."""

    model: str
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of concurrent streams."""
    requests: int = 4
    """Per stream, one after another."""
    prompt: int = 512
    """Mean tokens of a message."""
    decode: int = 128
    """Mean tokens of a reply."""
    objective: Objective
    """Limits that goodput counts by."""
    threads: int | None = None
    """Of the server, as `--threads`."""
    device: str = "cpu"
    """Of the server, as `--device`."""

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "decode"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; measure at least 1")
        if not self.concurrency or min(self.concurrency) < 1 or max(self.concurrency) > MAX_STREAMS - 16:
            raise RequestError(
                f"concurrency is {self.concurrency}; give numbers of streams from 1 to {MAX_STREAMS - 16}"
            )


def run_serve_bench(settings: ServeSettings, progress: ProgressCallback) -> Record:
    """Measure a server at each concurrency, then clients that disconnect; return one JSON-serializable record.

    Keys: model, settings, levels (see `level_record`; with what `/health` took), knee (its number of streams, None for
    none), leaving (seconds until work stops, by phase), same_text (see `compare_texts`) and num_failed.
    Raises: LocalinferError.
    """
    description = describe_file(settings.model)
    check_context(description, settings.prompt + round(_LONGEST_REPLY * settings.decode) + 1)
    run = _Run(settings, progress)
    with run.start() as server:
        levels, leaving = asyncio.run(run.measure(server.port))
    with run.start() as server:
        same_text = asyncio.run(run.compare(server.port))
    measured = [level for level in levels if level["seconds_per_token"] is not None]
    bend = knee([(level["tokens_per_second"], level["seconds_per_token"]["p50"]) for level in measured])
    failed_levels = sum(len(level["failures"]) + level["health_failures"] for level in levels)
    return {
        "model": model_record(description),
        "settings": {
            "concurrency": [level["concurrency"] for level in levels],
            **{name: getattr(settings, name) for name in ("requests", "prompt", "decode", "device")},
            "slo_first_token_seconds": settings.objective.first_token_seconds,
            "slo_itl_seconds": settings.objective.interval_seconds,
        },
        "levels": levels,
        "knee": None if bend is None else measured[bend]["concurrency"],
        "leaving": leaving,
        "same_text": same_text,
        "num_failed": len(same_text["failures"]) + failed_levels,
    }


class _Run:
    """One measurement: the requests to the first server, some of which are repeated on the second."""

    def __init__(self, settings: ServeSettings, progress: ProgressCallback) -> None:
        self._settings = settings
        self._progress = progress
        self._checked: list[tuple[dict[str, Any], Outcome]] = []
        """Requests to be repeated, with their first outcomes."""

    def start(self) -> ServerProcess:
        """Start a server."""
        settings = self._settings
        self._progress("starting the server", 0, 0)
        return ServerProcess(
            settings.model, device=settings.device, threads=settings.threads, max_generations=MAX_STREAMS
        )

    async def measure(self, port: int) -> tuple[list[Record], Record]:
        """The levels, and the seconds until work stops after a disconnect."""
        settings = self._settings
        prompts, context_length = await _prepare(port)
        warm = [chat_body(prompts.take(settings.prompt), settings.decode, 0)]
        outcome = (await run_load(port, warm, 1, "warming up", self._progress)).outcomes[0]
        if isinstance(outcome, Failure):
            raise BackendUnavailableError(
                f"the server cannot chat with this model ({outcome.reason}); check it with `localinfer chat -m MODEL`, "
                "or reduce --prompt and --decode"
            )
        levels: list[Record] = []
        for concurrency in sorted(set(settings.concurrency)):
            lengths = reply_lengths(settings.decode, concurrency * settings.requests)
            bodies = [chat_body(prompts.take(settings.prompt), length, seed) for seed, length in enumerate(lengths)]
            load = await run_load(
                port, bodies, concurrency, f"measuring {concurrency} concurrent streams", self._progress
            )
            level = level_record(
                concurrency, load.outcomes, settings.objective, began=load.began, busy_until=load.busy_until
            )
            level |= {"health_seconds": spread(load.health_seconds), "health_failures": load.health_failures}
            levels.append(level)
            first = levels[0]
            rate = first["tokens_per_second"] if first["concurrency"] == 1 else 0.0
            level["ratio_to_one"] = level["tokens_per_second"] / rate if rate else None
        # Half sampled, half greedy; 1.5 times as many as run concurrently.
        concurrency = max(2, *settings.concurrency)
        lengths = reply_lengths(min(settings.decode, _CHECKED_TOKENS), concurrency + concurrency // 2)
        bodies = [
            chat_body(prompts.take(settings.prompt), length, index if index % 2 else None)
            for index, length in enumerate(lengths)
        ]
        await self._check(port, bodies, concurrency)
        self._progress("measuring clients that disconnect", 0, 0)
        clients = DisconnectingClients(port, prompts, max(2, context_length - _TEMPLATE_TOKENS))
        leaving = {"prompt": await clients.in_prompt(), "reply": await clients.in_reply()}
        await self._check(port, clients.bodies, 2)
        return levels, leaving

    async def compare(self, port: int) -> Record:
        """Repeat the checked requests, one after another."""
        bodies = [body for body, _ in self._checked]
        load = await run_load(port, bodies, 1, "comparing texts", self._progress)
        return compare_texts([outcome for _, outcome in self._checked], load.outcomes)

    async def _check(self, port: int, bodies: Sequence[dict[str, Any]], concurrency: int) -> None:
        load = await run_load(port, bodies, concurrency, "checking texts", self._progress)
        self._checked += zip(bodies, load.outcomes, strict=True)


async def _prepare(port: int) -> tuple[Prompts, int]:
    """Messages cut at the model's token boundaries, and its context length."""
    with closing(LoadClient(port)) as client:
        models = await ask(client, "GET", "/v1/models")
        text = await ask(client, "POST", "/tokenize", {"content": read_calibration().text, "with_pieces": True})
    # A part of a character is not text.
    tokens = [token["piece"] for token in text["tokens"] if "\ufffd" not in token["piece"]]
    return Prompts(tokens), int(models["data"][0]["context_length"])
