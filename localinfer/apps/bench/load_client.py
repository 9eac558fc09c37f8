"""A measuring client: one HTTP connection over asyncio, and the times of a streamed reply on it.

It shares the machine with the server, so during a stream it only records times and bytes, and parses them at the end:
HTTP client libraries parse every chunk as it arrives.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11

from localinfer.apps.bench.figures import Failure, Outcome, RequestTimes

_READ_BYTES = 1 << 16
_SILENCE_SECONDS = 120.0
"""The server sends a ping at least every 15 seconds of a stream; after this long without one the reply is lost."""
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_EVENT = b"data: "

CHAT_PATH = "/v1/chat/completions"
NETWORK_ERRORS = (OSError, TimeoutError, h11.ProtocolError)


@dataclass
class Answer:
    """The response to one request. chunks: of the body, each with the time at which it was received."""

    sent: float
    status: int = 0
    is_stream: bool = False
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0

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

    async def send(self, method: str, path: str, body: Any = None) -> Answer:
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
        return Answer(sent=time.perf_counter())

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
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

    async def _receive(self, answer: Answer) -> None:
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

    def _parse(self, answer: Answer, received: list[tuple[float, bytes]]) -> None:
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


def read_reply(answer: Answer, wanted_tokens: int) -> Outcome:
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
