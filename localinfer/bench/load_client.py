"""A client that measures: one HTTP connection over asyncio, and what a streamed reply on it was like.

It shares the machine with the server it measures, so while a stream comes it only notes times and bytes, and reads
them when the stream has ended.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import h11

from localinfer.bench.load_figures import Failure, Outcome, RequestTimes

_READ_BYTES = 1 << 16
_SILENCE_SECONDS = 120.0
"""The server says at least every 15 seconds that a stream is alive; after so long a silence the reply is lost."""
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_EVENT = b"data: "

CHAT_PATH = "/v1/chat/completions"
NETWORK_ERRORS = (OSError, TimeoutError, h11.ProtocolError)


@dataclass
class Answer:
    """What came for one request. pieces: of the body, each with the time it came at."""

    sent: float
    status: int = 0
    is_stream: bool = False
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)


class LoadClient:
    """One connection to the server on a loopback port, kept alive from request to request."""

    def __init__(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers = [("host", f"127.0.0.1:{port}"), ("content-type", "application/json")]
        self._http = h11.Connection(our_role=h11.CLIENT)

    @classmethod
    async def connect(cls, port: int) -> Self:
        """Open a connection. Raises: OSError."""
        return cls(port, *await asyncio.open_connection("127.0.0.1", port))

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request and read its answer. Raises: one of NETWORK_ERRORS."""
        answer = self.send(method, path, body)
        unread: list[tuple[float, bytes]] = []
        tail = b""
        async with asyncio.timeout(_SILENCE_SECONDS) as silence:
            loop = asyncio.get_running_loop()
            while True:
                data = await self._reader.read(_READ_BYTES)
                now = time.perf_counter()
                silence.reschedule(loop.time() + _SILENCE_SECONDS)
                unread.append((now, data))
                tail = (tail + data[-len(_END_OF_CHUNKS) :])[-len(_END_OF_CHUNKS) :]
                if answer.is_stream and data and tail != _END_OF_CHUNKS:
                    continue
                if self._read_into(answer, unread):
                    answer.ended = now
                    return answer
                unread.clear()

    def send(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request, and wait for nothing."""
        content = b"" if body is None else json.dumps(body).encode()
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        head = h11.Request(method=method, target=path, headers=[*self._headers, ("content-length", str(len(content)))])
        parts = [self._http.send(event) or b"" for event in (head, h11.Data(data=content), h11.EndOfMessage())]
        self._writer.write(b"".join(parts))
        return Answer(sent=time.perf_counter())

    async def receive_events(self, count: int) -> None:
        """Wait until so many events of a stream have come. Raises: ConnectionError if it ends before."""
        received = bytearray()
        while received.count(_EVENT) < count:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            received += data

    def close(self) -> None:
        """Leave, whatever is on its way."""
        self._writer.close()

    def _read_into(self, answer: Answer, received: list[tuple[float, bytes]]) -> bool:
        """Take bytes apart; return whether the answer has ended."""
        for moment, data in received:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                match event:
                    case h11.Response():
                        answer.status = event.status_code
                        kind = dict(event.headers).get(b"content-type", b"")
                        answer.is_stream = kind.startswith(b"text/event-stream")
                    case h11.Data():
                        answer.pieces.append((moment, bytes(event.data)))
                    case h11.EndOfMessage():
                        return True
                    case h11.ConnectionClosed():
                        raise ConnectionError("the server closed the connection")
        return False


async def ask(client: LoadClient, method: str, path: str, body: Any = None) -> Any:
    """The JSON that answers a request. Raises: one of NETWORK_ERRORS, and ConnectionError if the server refuses it."""
    answer = await client.request(method, path, body)
    if answer.status != 200:
        raise ConnectionError(f"{path} answered with status {answer.status}")
    return json.loads(answer.body)


async def chat(client: LoadClient, body: dict[str, Any]) -> Outcome:
    """Send a chat whose reply is to be streamed, and read it to its end."""
    try:
        answer = await client.request("POST", CHAT_PATH, body)
    except TimeoutError:
        return Failure(f"nothing came for {_SILENCE_SECONDS:.0f} s")
    except NETWORK_ERRORS as error:
        return Failure(f"{type(error).__name__}: {error}")
    try:
        return read_reply(answer, body["max_tokens"])
    except ValueError as error:
        return Failure(f"an event cannot be read: {error}")


def read_reply(answer: Answer, wanted_tokens: int) -> Outcome:
    """What the events of a chat's stream say; it is whole if it has as many tokens as wanted, and its end mark."""
    if answer.status != 200 or not answer.is_stream:
        return Failure(f"status {answer.status}: {answer.body.decode(errors='replace'):.200}")
    texts: list[str] = []
    times: list[float] = []
    usage: dict[str, int] = {}
    last = ""
    for moment, last in _events(answer.pieces):
        event = {} if last == "[DONE]" else json.loads(last)
        if "error" in event:
            return Failure(f"the stream ended with an error: {event['error'].get('message')}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if text := _text_of(choice["delta"]):
                texts.append(text)
                times.append(moment)
    num_tokens = usage.get("completion_tokens", 0)
    if last != "[DONE]" or num_tokens != wanted_tokens or not times:
        end = "ended" if last == "[DONE]" else "broke off"
        return Failure(f"the stream {end} after {num_tokens} of {wanted_tokens} tokens, {len(times)} of them with text")
    return RequestTimes(
        sent=answer.sent,
        first_byte=answer.pieces[0][0],
        tokens=tuple(times),
        ended=answer.ended,
        num_tokens=num_tokens,
        prompt_tokens=usage.get("prompt_tokens", 0),
        text="".join(texts),
    )


def _text_of(delta: dict[str, Any]) -> str:
    reasoning = delta.get("reasoning_content") or ""
    return reasoning + (delta.get("content") or "")


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each event, at the time its last byte came."""
    rest = b""
    for moment, piece in pieces:
        *frames, rest = (rest + piece).split(b"\n\n")
        for frame in frames:
            lines = [line for line in frame.split(b"\n") if line.startswith(_EVENT)]
            if lines:
                yield moment, lines[-1][len(_EVENT) :].decode()
