"""Many clients of one server for a long time: every reply right, nobody stuck, nothing left over."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
from prometheus_client.parser import text_string_to_metric_families

from localinfer.apps.server.transport.settings import ServerSettings
from tests.kernels.subprocesses import environment
from tests.models.talking_models import build_talking_model
from tests.proof.soak.asks import draw_asks
from tests.proof.soak.client import Tally, World, ask_whole, run_client
from tests.proof.soak.connection import CutError, StuckError
from tests.proof.soak.process_figures import Figures, Trend, figures, trend
from tests.proof.soak.site import ViolationError, require
from tests.support.limits import seconds

_DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
_TALKING = ("gemma3-gqa", "lfm2-hybrid")
"""A model with sliding windows and one with recurrent states, of random weights."""
_MEMORY_LIMIT = "110MB"
"""Two of the four models."""
_PATIENCE_SECONDS = 60.0
"""On an idle machine: the longest that a client waits without a byte, be it for its turn or for a model."""
_LAST_ASKS = 60
_SAMPLE_SECONDS = 1.0
_SHAKEDOWN_SECONDS = 45.0
_SHAKEDOWN_SHARE, _WARM_UP_SHARE = 0.1, 0.25
_JUDGED = ("anonymous", "pss", "rss")
_SETTLING_SECONDS = 30.0
_MOST_TOLD = 6000
_MOST_TEXTS = ServerSettings().max_generations
_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Threads of asyncio's pool, which are started when all others are busy and then stay."""


class Clients:
    """A run of so many clients; what they do is chosen by the seed. say: is given lines of progress."""

    def __init__(self, seed: int, num_clients: int, say: Callable[[str], None] = print) -> None:
        self._seed, self._num_clients, self._say = seed, num_clients, say
        self._random = Random(seed)
        self._samples: list[Figures] = []
        self.tally = Tally()

    def run(self, length: float) -> bool:
        """Run for so many seconds; return whether nothing was found. The folder of a failure is kept."""
        folder = Path(tempfile.mkdtemp(prefix="soak-clients-"))
        problems: list[str] = []
        try:
            _write_models(folder / "models")
            with (folder / "errors.log").open("w") as errors, _started(folder, errors) as process:
                try:
                    asyncio.run(self._run(process, length))
                    process.terminate()
                    code = process.wait(seconds(_SETTLING_SECONDS))
                    require(code == 0, f"the server ended with {code}")
                finally:
                    process.kill()
            told = (folder / "errors.log").read_text()
            require("Traceback" not in told, f"the server told of a fault: {told[-3000:]}")
        except* (ViolationError, StuckError, CutError, OSError) as group:
            problems = [f"{type(one).__name__}: {one}" for one in _flat(group)]
        if problems:
            text = "\n".join(problems)
            self._say(f"FOUND with --seed {self._seed}: {text[:_MOST_TOLD]}\nits files: {folder}")
            return False
        shutil.rmtree(folder)
        return True

    async def _run(self, process: subprocess.Popen[str], length: float) -> None:
        assert process.stdout is not None, "a pipe"
        line = await asyncio.to_thread(process.stdout.readline)
        require("http://127.0.0.1:" in line, f"the server did not start: {line}")
        address = line.rpartition("http://")[2].strip()
        port = int(address.rpartition(":")[2])
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=seconds(_PATIENCE_SECONDS)) as control:
            models = [card["id"] for card in (await control.get("/v1/models")).json()["data"]]
            asks = [replace(ask, key=str(index)) for index, ask in enumerate(draw_asks(self._random, models))]
            world = World(port, asks, {}, self.tally, seconds(_PATIENCE_SECONDS))
            await _answer_alone(world)
            self._say(f"{len(asks)} requests of {len(models)} models answered alone")
            shakedown = min(_SHAKEDOWN_SECONDS, _SHAKEDOWN_SHARE * length)
            await self._clients(world, process, control, shakedown)
            await _crowd(world)
            await _settle(control, models)
            before = figures(process.pid)
            self._samples.clear()
            await self._clients(world, process, control, length)
            await _settle(control, models)
            await self._check_end(world, process, control, before, models)

    async def _clients(
        self, world: World, process: subprocess.Popen[str], control: httpx.AsyncClient, length: float
    ) -> None:
        until = time.monotonic() + length
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._num_clients):
                tasks.create_task(run_client(world, Random(self._random.randrange(1 << 30)), until))
            tasks.create_task(self._watch(process, control, until))
            tasks.create_task(self._disturb(process, control, until))

    async def _watch(self, process: subprocess.Popen[str], control: httpx.AsyncClient, until: float) -> None:
        told = time.monotonic()
        while (now := time.monotonic()) < until:
            cards = (await control.get("/v1/models")).json()["data"]
            tracked = sum((card.get("memory") or {}).get("held_bytes") or 0 for card in cards)
            self._samples.append(figures(process.pid, tracked))
            if now - told > 60:
                told = now
                held = self._samples[-1]
                finished = sum(self.tally.finished.values())
                self._say(
                    f"{until - now:.0f} s left: {finished} replies, {held.pss >> 20} MiB, {held.files} files, "
                    f"{held.threads} threads, slowest {self.tally.longest:.1f} s"
                )
            await asyncio.sleep(min(_SAMPLE_SECONDS, until - now))

    async def _disturb(self, process: subprocess.Popen[str], control: httpx.AsyncClient, until: float) -> None:
        """Load and unload models, and have everything read again, now and then."""
        random = Random(self._random.randrange(1 << 30))
        models = [card["id"] for card in (await control.get("/v1/models")).json()["data"]]
        while time.monotonic() < until:
            await asyncio.sleep(min(random.uniform(0.2, 4.0), max(0.0, until - time.monotonic())))
            match random.choice(("load", "unload", "unload", "reload", "metrics")):
                case "reload":
                    process.send_signal(signal.SIGHUP)
                case "metrics":
                    require((await control.get("/metrics")).status_code == 200, "/metrics is refused")
                case what:
                    answer = await control.post(f"/models/{what}", json={"model": random.choice(models)})
                    require(answer.status_code == 200, f"{what} is refused: {answer.text}")
            self.tally.did["disturbed"] += 1

    async def _check_end(
        self,
        world: World,
        process: subprocess.Popen[str],
        control: httpx.AsyncClient,
        before: Figures,
        models: list[str],
    ) -> None:
        deadline = time.monotonic() + seconds(_SETTLING_SECONDS)
        while (after := figures(process.pid)).files > before.files and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        self._say(
            f"at rest: {before.pss >> 20} MiB -> {after.pss >> 20} MiB, of no file "
            f"{before.anonymous >> 20} -> {after.anonymous >> 20}, "
            f"files {before.files} -> {after.files}, threads {before.threads} -> {after.threads}"
        )
        require(after.files <= before.files, f"{after.files - before.files} files are left open")
        left = after.threads - before.threads
        require(left <= _POOL_THREADS, f"{left} threads are left")
        await self._check_counts(world, control)
        await _settle(control, models)
        self._report(self._trends())

    async def _check_counts(self, world: World, control: httpx.AsyncClient) -> None:
        """Compare the meters with the clients' counts: of all, within what clients that left may have had; of the last
        requests, which nobody leaves, exactly."""
        metrics, tally = await _metrics(control), self.tally
        for name, least in (("completion", tally.completion_tokens), ("prompt", tally.prompt_tokens)):
            counted = _sum(metrics, f"localinfer_{name}_tokens_total")
            require(counted >= least, f"/metrics has {counted} {name} tokens, the clients had {least}")
        most = tally.completion_tokens + tally.most_tokens_left
        counted = _sum(metrics, "localinfer_completion_tokens_total")
        require(counted <= most, f"/metrics has {counted} completion tokens, the clients at most {most}")
        prompt = completion = 0
        wanted = [ask for ask in world.asks if ask.kind != "embeddings"]
        chosen = [self._random.choice(wanted) for _ in range(_LAST_ASKS)]
        replies = await asyncio.gather(
            *(ask_whole(world, ask, streamed=index % 2 == 0) for index, ask in enumerate(chosen))
        )
        for ask, reply in zip(chosen, replies, strict=True):
            require(reply.text == world.right[ask.key], f"{ask.body} was answered by {reply.text!r} at the end")
            prompt, completion = prompt + reply.prompt_tokens, completion + reply.completion_tokens
        gained = {name: value - metrics.get(name, 0.0) for name, value in (await _metrics(control)).items()}
        found = tuple(_sum(gained, f"localinfer_{name}_total") for name in ("prompt_tokens", "completion_tokens"))
        require(found == (prompt, completion), f"/metrics gained {found} tokens; the replies say {prompt, completion}")
        routes = Counter(ask.path.removeprefix("/v1") for ask in chosen)
        for route, number in routes.items():
            gain = _sum(gained, "localinfer_requests_total", f" {route} 200")
            require(gain == number, f"/metrics gained {gain} requests of {route}; there were {number}")

    def _trends(self) -> dict[str, Trend]:
        began, ended = self._samples[0].seconds, self._samples[-1].seconds
        warm = [one for one in self._samples if one.seconds >= began + _WARM_UP_SHARE * (ended - began)]
        times = [one.seconds for one in warm]
        if len(warm) < 10:
            return {}
        names = (*_JUDGED, "tracked")
        return {name: trend(times, [float(getattr(one, name)) for one in warm]) for name in names}

    def _report(self, trends: dict[str, Trend]) -> None:
        tally = self.tally
        total = sum(tally.finished.values())
        self._say(f"{total} replies compared: {dict(tally.finished)}")
        self._say(f"clients did: {dict(tally.did)}")
        self._say(f"{tally.prompt_tokens} prompt tokens, {tally.completion_tokens} completion tokens")
        self._say(f"longest: {tally.longest_first_byte:.1f} s to the first byte, {tally.longest:.1f} s to the end")
        for name, one in trends.items():
            self._say(f"{name}: {one}")
        for name in _JUDGED:
            if name in trends:
                require(trends[name].is_noise, f"{name} grows: {trends[name]}")


def _flat(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _flat(one)
        else:
            yield one


def _write_models(folder: Path) -> None:
    folder.mkdir()
    for name in ("demo-f16.gguf", "demo-q4_k_m.gguf"):
        shutil.copy(_DEMO / name, folder)
    for name in _TALKING:
        build_talking_model(folder, name)


def _started(folder: Path, errors: object) -> subprocess.Popen[str]:
    words = ["--models", str(folder / "models"), "--port", "0", "--no-socket", "--no-config", "--threads", "1"]
    words += ["--memory-limit", _MEMORY_LIMIT, "--disk-cache-folder", str(folder), "--disk-cache-size", "20MB"]
    command = [sys.executable, "-m", "localinfer", "serve", *words, "--store-size", "4MB"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(), start_new_session=True
    )


async def _answer_alone(world: World) -> None:
    for ask in world.asks:
        key, wanted, previous = ask.key, ask, None
        while True:
            reply = await ask_whole(world, wanted, previous=previous)
            world.right[key] = reply.text
            world.tally.prompt_tokens += reply.prompt_tokens
            world.tally.completion_tokens += reply.completion_tokens
            if wanted.then is None:
                break
            key, wanted, previous = f"{key} then", wanted.then, reply.id


async def _crowd(world: World) -> None:
    """Have as many texts made at one time as may be: the threads that they take are kept for the next."""
    ask = max((ask for ask in world.asks if ask.kind == "chat"), key=lambda ask: len(ask.encoded(streamed=False)))
    for reply in await asyncio.gather(*(ask_whole(world, ask) for _ in range(_MOST_TEXTS))):
        require(reply.text == world.right[ask.key], f"{ask.body} was answered by {reply.text!r} in a crowd")
        world.tally.prompt_tokens += reply.prompt_tokens
        world.tally.completion_tokens += reply.completion_tokens


async def _settle(control: httpx.AsyncClient, models: list[str]) -> None:
    """Unload all models and wait until nothing runs. Raises: ViolationError."""
    deadline = time.monotonic() + seconds(_SETTLING_SECONDS)
    left: object = None
    while time.monotonic() < deadline:
        running = (await control.get("/requests")).json()
        metrics = await _metrics(control)
        texts = [metrics[f"localinfer_{name}_generations"] for name in ("running", "waiting")]
        if not running and not any(texts):
            for model in models:
                await control.post("/models/unload", json={"model": model})
            cards = (await control.get("/v1/models")).json()["data"]
            states = {card["id"]: card["state"] for card in cards}
            if set(states.values()) == {"unloaded"}:
                # What was answered last is closed in the background.
                await asyncio.sleep(1.0)
                return
            left = states
        else:
            left = running, texts
        await asyncio.sleep(0.1)
    raise ViolationError(f"it never came to rest: {left}")


async def _metrics(control: httpx.AsyncClient) -> dict[str, float]:
    """Samples by name and labels: "name label label"."""
    families = text_string_to_metric_families((await control.get("/metrics")).text)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def _sum(metrics: dict[str, float], name: str, ending: str = "") -> float:
    return sum(value for key, value in metrics.items() if key.partition(" ")[0] == name and key.endswith(ending))
