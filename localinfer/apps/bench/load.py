"""A closed-loop load of streamed chats, and its client: HTTP over asyncio, with the times of a streamed reply.

The client shares the machine with the server, so during a stream it only records times and bytes, and parses them at
the end: HTTP client libraries parse every chunk as it arrives.
"""

import asyncio
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import h11

from localinfer.apps.bench.figures import Failure, Outcome, RequestTimes
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
