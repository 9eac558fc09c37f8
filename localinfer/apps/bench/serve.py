"""Measure `localinfer serve` under a closed-loop load of streamed chats, over HTTP; `report.py` prints the record.

Some requests are repeated at the end, one after another, on a fresh server: the texts must be equal, whatever was
batched with them, cached or aborted. The client shares the machine with the server, so during a stream it only records
times and bytes, and parses them at the end: HTTP client libraries parse every chunk as it arrives.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import h11

from localinfer.apps.bench.figures import (
    Failure,
    Objective,
    Outcome,
    Record,
    RequestTimes,
    check_context,
    compare_texts,
    knee,
    level_record,
    model_record,
    spread,
    summarize,
)
from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.evaluate.texts import read_calibration
from localinfer.apps.show.describe import describe_file
from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.types import ProgressCallback

_READ_BYTES = 1 << 16
_SILENCE_SECONDS = 120.0
"""The server sends a ping at least every 15 seconds of a stream; after this long without one the reply is lost."""
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_EVENT = b"data: "

CHAT_PATH = "/v1/chat/completions"
NETWORK_ERRORS = (OSError, TimeoutError, h11.ProtocolError)


@dataclass
class HttpAnswer:
    """The response to one request; times in seconds on one clock."""

    sent: float
    status: int = 0
    is_stream: bool = False
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """Parts of the body, each with the time at which it was received."""
    ended: float = 0.0
    """0 until the response is complete."""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(chunk for _, chunk in self.chunks)


class LoadClient:
    """One connection to the server on a loopback port, opened by the first request and kept alive until one fails."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._headers = [("host", f"127.0.0.1:{port}"), ("content-type", "application/json")]
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: Any = None) -> HttpAnswer:
        """Send a request without waiting for its answer. Raises: OSError if there is no connection."""
        content = b"" if body is None else json.dumps(body).encode()
        if self._streams is None:
            self._http = h11.Connection(our_role=h11.CLIENT)
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        elif self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        head = h11.Request(method=method, target=path, headers=[*self._headers, ("content-length", str(len(content)))])
        parts = [self._http.send(event) or b"" for event in (head, h11.Data(data=content), h11.EndOfMessage())]
        self._streams[1].write(b"".join(parts))
        return HttpAnswer(sent=time.perf_counter())

    async def request(self, method: str, path: str, body: Any = None) -> HttpAnswer:
        """Send a request and read its answer. Raises: one of NETWORK_ERRORS, and then the connection is closed."""
        try:
            answer = await self.send(method, path, body)
            await self._receive(answer)
        except NETWORK_ERRORS:
            self.close()
            raise
        return answer

    async def receive_events(self, count: int) -> None:
        """Wait for this many events of a stream. Raises: ConnectionError if it ends before."""
        assert self._streams is not None, "a request was sent"
        received = bytearray()
        while received.count(_EVENT) < count:
            data = await self._streams[0].read(_READ_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            received += data

    def close(self) -> None:
        """Close the connection at once; may be called again."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _receive(self, answer: HttpAnswer) -> None:
        assert self._streams is not None, "a request was sent"
        unread: list[tuple[float, bytes]] = []
        tail = b""
        async with asyncio.timeout(_SILENCE_SECONDS) as silence:
            loop = asyncio.get_running_loop()
            while not answer.ended:
                data = await self._streams[0].read(_READ_BYTES)
                now = time.perf_counter()
                silence.reschedule(loop.time() + _SILENCE_SECONDS)
                unread.append((now, data))
                tail = (tail + data[-len(_END_OF_CHUNKS) :])[-len(_END_OF_CHUNKS) :]
                if not answer.is_stream or not data or tail == _END_OF_CHUNKS:
                    self._parse(answer, unread)
                    unread.clear()

    def _parse(self, answer: HttpAnswer, received: list[tuple[float, bytes]]) -> None:
        """Add received data to an answer; sets `ended` at its end."""
        for moment, data in received:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                match event:
                    case h11.Response():
                        answer.status = event.status_code
                        kind = dict(event.headers).get(b"content-type", b"")
                        answer.is_stream = kind.startswith(b"text/event-stream")
                    case h11.Data():
                        answer.chunks.append((moment, bytes(event.data)))
                    case h11.EndOfMessage():
                        answer.ended = moment
                        return
                    case h11.ConnectionClosed():
                        raise ConnectionError("the server closed the connection")


async def ask(client: LoadClient, method: str, path: str, body: Any = None) -> Any:
    """The JSON response to a request. Raises: one of NETWORK_ERRORS; ConnectionError if the server refuses it."""
    answer = await client.request(method, path, body)
    if answer.status != 200:
        raise ConnectionError(f"{path} answered with status {answer.status}")
    return json.loads(answer.body)


async def chat(client: LoadClient, body: dict[str, Any]) -> Outcome:
    """Send a streaming chat request, and read the reply to its end."""
    try:
        return read_reply(await client.request("POST", CHAT_PATH, body), body["max_tokens"])
    except TimeoutError:
        return Failure(f"nothing was received for {_SILENCE_SECONDS:.0f} s")
    except NETWORK_ERRORS as error:
        return Failure(f"{type(error).__name__}: {error}")
    except ValueError as error:
        return Failure(f"an event cannot be read: {error}")


def read_reply(answer: HttpAnswer, wanted_tokens: int) -> Outcome:
    """The times and text of a chat's stream; it is complete if it has the wanted tokens and the [DONE] event."""
    if answer.status != 200 or not answer.is_stream:
        return Failure(f"status {answer.status}: {answer.body.decode(errors='replace'):.200}")
    texts: list[str] = []
    times: list[float] = []
    usage: dict[str, int] = {}
    last = ""
    for moment, last in _events(answer.chunks):
        event = {} if last == "[DONE]" else json.loads(last)
        if "error" in event:
            return Failure(f"the stream ended with an error: {event['error'].get('message')}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            if text := (delta.get("reasoning_content") or "") + (delta.get("content") or ""):
                texts.append(text)
                times.append(moment)
    num_tokens = usage.get("completion_tokens", 0)
    if last != "[DONE]" or num_tokens != wanted_tokens or not times:
        end = "ended" if last == "[DONE]" else "broke off"
        return Failure(f"the stream {end} after {num_tokens} of {wanted_tokens} tokens, {len(times)} of them with text")
    return RequestTimes(
        sent=answer.sent,
        first_byte=answer.chunks[0][0],
        tokens=tuple(times),
        ended=answer.ended,
        num_tokens=num_tokens,
        prompt_tokens=usage.get("prompt_tokens", 0),
        text="".join(texts),
    )


def _events(chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each event, with the time at which its last byte was received."""
    rest = b""
    for moment, chunk in chunks:
        *frames, rest = (rest + chunk).split(b"\n\n")
        for frame in frames:
            lines = [line for line in frame.split(b"\n") if line.startswith(_EVENT)]
            if lines:
                yield moment, lines[-1][len(_EVENT) :].decode()


_HEALTH_PERIOD_SECONDS = 0.05
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


@dataclass
class Load:
    """The results of a load."""

    outcomes: list[Outcome]
    """In the order of the requests."""
    began: float
    busy_until: float = 0.0
    """End of the period in which every stream had a request."""
    health_seconds: list[float] = field(default_factory=list)
    """Latencies of `/health` meanwhile."""
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
