"""Measure `localinfer serve` under load, over HTTP, as its clients meet it: a plain record, which
`bench_serve_report.py` prints and `bench_serve_chart.py` draws.

The same texts are asked for once more at the end, one after another of a server that has just started: whatever ran
beside them, was cached or was left, the words have to be the same.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localinfer.bench.decode import ProgressCallback, Record, check_context, model_record
from localinfer.bench.disconnect import LeavingClients
from localinfer.bench.load import Load, Prompts, chat_body, reply_lengths, run_load
from localinfer.bench.load_client import LoadClient, ask
from localinfer.bench.load_figures import (
    Failure,
    Objective,
    Outcome,
    compare_texts,
    knee,
    level_record,
    spread,
)
from localinfer.bench.server import ServerProcess
from localinfer.describe import describe_file
from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.evaluation.texts import read_calibration

MOST_STREAMS = 256
_LONGEST_REPLY = 1.25
"""The longest replies of a load, over the mean."""
_TEMPLATE_TOKENS = 128
"""Left for what a chat template writes around a message."""
_CHECKED_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What load is put on a server. concurrency: numbers of streams at one time. requests: of each stream, in turn.

    prompt, decode: tokens of a message, about, and of a reply, in the mean. objective: what goodput means.
    threads, device: as `localinfer serve` takes them. Raises: RequestError naming the value.
    """

    model: str
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    requests: int = 4
    prompt: int = 512
    decode: int = 128
    objective: Objective
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "decode"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; measure at least 1")
        if not self.concurrency or min(self.concurrency) < 1 or max(self.concurrency) > MOST_STREAMS - 16:
            raise RequestError(
                f"concurrency is {self.concurrency}; give numbers of streams from 1 to {MOST_STREAMS - 16}"
            )


def run_serve_bench(settings: ServeSettings, progress: ProgressCallback) -> Record:
    """Measure a server at each number of streams, then clients that leave; return one record that JSON can hold.

    Keys: model, settings, levels (see `level_record`; with what `/health` took), knee (its number of streams, None for
    none), leaving (seconds until work stops, by phase), same_text (see `compare_texts`) and num_failed.
    Raises: LocalinferError.
    """
    description = describe_file(settings.model)
    longest = round(_LONGEST_REPLY * settings.decode) + 1
    check_context(description, settings.prompt + longest)
    run = _Run(settings, progress)
    with run.serve() as server:
        levels, leaving = asyncio.run(run.measure(server.port))
    with run.serve() as server:
        same_text = asyncio.run(run.compare(server.port))
    measured = [level for level in levels if level["seconds_per_token"] is not None]
    bend = knee([(level["tokens_per_second"], level["seconds_per_token"]["p50"]) for level in measured])
    return {
        "model": model_record(description),
        "settings": {
            "concurrency": [level["concurrency"] for level in levels],
            "requests": settings.requests,
            "prompt": settings.prompt,
            "decode": settings.decode,
            "slo_first_token_seconds": settings.objective.first_token_seconds,
            "slo_itl_seconds": settings.objective.interval_seconds,
            "device": settings.device,
        },
        "levels": levels,
        "knee": None if bend is None else measured[bend]["concurrency"],
        "leaving": leaving,
        "same_text": same_text,
        "num_failed": len(same_text["failures"])
        + sum(len(level["failures"]) + level["health_failures"] for level in levels),
    }


class _Run:
    """One measurement: what is asked of the first server, and asked again of the second."""

    def __init__(self, settings: ServeSettings, progress: ProgressCallback) -> None:
        self._settings = settings
        self._progress = progress
        self._checked: list[tuple[dict[str, Any], Outcome]] = []
        """Requests for texts to be asked for again, with what came."""

    def serve(self) -> ServerProcess:
        """Start a server. Kernels may have to be compiled first."""
        settings = self._settings
        self._progress("starting the server", 0, 0)
        return ServerProcess(
            settings.model, device=settings.device, threads=settings.threads, max_generations=MOST_STREAMS
        )

    async def measure(self, port: int) -> tuple[list[Record], Record]:
        """All levels, and what leaving clients cost."""
        settings = self._settings
        prompts, context_length = await _look_at(port)
        warm = await run_load(port, [chat_body(prompts.take(settings.prompt), settings.decode, 0)], 1, lambda _: None)
        _check_first(warm.outcomes[0])
        levels: list[Record] = []
        for concurrency in sorted(set(settings.concurrency)):
            load = await self._load(port, prompts, concurrency)
            levels.append(_level(concurrency, load, settings.objective))
        first = levels[0]
        for level in levels:
            rate = first["tokens_per_second"] if first["concurrency"] == 1 else 0.0
            level["ratio_to_one"] = level["tokens_per_second"] / rate if rate else None
        await self._check_texts(port, prompts, max(2, *settings.concurrency))
        self._progress("measuring clients that leave", 0, 0)
        clients = LeavingClients(port, prompts, max(2, context_length - _TEMPLATE_TOKENS))
        leaving = {"prompt": await clients.in_prompt(), "reply": await clients.in_reply()}
        again = await run_load(port, clients.bodies, 2, lambda _: None)
        self._remember(clients.bodies, again)
        return levels, leaving

    async def compare(self, port: int) -> Record:
        """Ask for the checked texts again, one after another."""
        bodies = [body for body, _ in self._checked]
        load = await run_load(port, bodies, 1, self._counting("comparing texts", len(bodies)))
        return compare_texts([outcome for _, outcome in self._checked], load.outcomes)

    async def _load(self, port: int, prompts: Prompts, concurrency: int) -> Load:
        settings = self._settings
        lengths = reply_lengths(settings.decode, concurrency * settings.requests)
        bodies = [chat_body(prompts.take(settings.prompt), length, seed) for seed, length in enumerate(lengths)]
        count = self._counting(f"measuring {concurrency} at one time", len(bodies))
        return await run_load(port, bodies, concurrency, count)

    async def _check_texts(self, port: int, prompts: Prompts, concurrency: int) -> None:
        """Half of them drawn, half of them greedy, as many as run at one time and half of that again."""
        settings = self._settings
        lengths = reply_lengths(min(settings.decode, _CHECKED_TOKENS), concurrency + concurrency // 2)
        bodies = [
            chat_body(prompts.take(settings.prompt), length, index if index % 2 else None)
            for index, length in enumerate(lengths)
        ]
        self._remember(bodies, await run_load(port, bodies, concurrency, self._counting("checking texts", len(bodies))))

    def _remember(self, bodies: Sequence[dict[str, Any]], load: Load) -> None:
        self._checked += zip(bodies, load.outcomes, strict=True)

    def _counting(self, stage: str, total: int) -> Any:
        done = 0

        def count(ended: int) -> None:
            nonlocal done
            done += ended
            self._progress(stage, done, total)

        self._progress(stage, 0, total)
        return count


async def _look_at(port: int) -> tuple[Prompts, int]:
    """Messages cut to the model's own tokens, and the length of its context."""
    client = await LoadClient.connect(port)
    try:
        models = await ask(client, "GET", "/v1/models")
        text = await ask(client, "POST", "/tokenize", {"content": read_calibration().text, "with_pieces": True})
    finally:
        client.close()
    # A piece of a character is no text of its own.
    pieces = [token["piece"] for token in text["tokens"] if "\ufffd" not in token["piece"]]
    return Prompts(pieces), int(models["data"][0]["context_length"])


def _check_first(outcome: Outcome) -> None:
    if isinstance(outcome, Failure):
        raise BackendUnavailableError(
            f"the server answers no chat with this model ({outcome.reason}); check it with `localinfer chat -m MODEL`, "
            "or ask for fewer tokens with --prompt and --decode"
        )


def _level(concurrency: int, load: Load, objective: Objective) -> Record:
    record = level_record(concurrency, load.outcomes, objective, began=load.began, busy_until=load.busy_until)
    return {**record, "health_seconds": spread(load.health_seconds), "health_failures": load.health_failures}
