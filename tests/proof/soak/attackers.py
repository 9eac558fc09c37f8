"""Connections of a program that means harm, in a process of its own: `python -m tests.proof.soak.attackers PORT ...`.

Each does one thing after the other: half of a head or a body, bodies that are large, slow, or huge once decoded, texts
that are costly to read, constraints that are costly to compile, answers that nobody reads. It reports counts as JSON.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

_MEGA = 1 << 20
_SHORT_SECONDS, _LONG_SECONDS = 1.0, 8.0
_CHAT = "/v1/chat/completions"
_READ_SECONDS = 90.0
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def _chat(**members: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8, **members}).encode()


def _filled(before: bytes, unit: bytes, size: int, after: bytes) -> bytes:
    return before + unit * (size // len(unit)) + after


class Attackers:
    """What a number of connections share: bodies, made once, and counts. most_bytes: of a body."""

    def __init__(self, port: int, seed: int, most_bytes: int) -> None:
        self._port, self._random = port, Random(seed)
        self.counts: Counter[str] = Counter()
        text = (b'{"content":"', b'"}')
        self._texts = [
            _filled(text[0], unit, most_bytes, text[1])
            for unit in (
                b"a",
                b"abcdefghij",
                b"Once upon a time. ",
                b"12 ",
                b"\\n",
                b"\\u00e9",
                "\U0001f600".encode(),
                b"<|",
            )
        ]
        self._texts.append(_filled(b'{"with_pieces":true,"content":"', b"0 ", most_bytes, text[1]))
        self._texts.append(_filled(text[0], b"a b ", most_bytes, "\U0001f600".encode() + text[1]))
        many = most_bytes // 32
        self._bombs = [
            _chat(logit_bias={str(index): 1 for index in range(many)}),
            _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * (many // 4)}]),
            _chat(messages=[{"role": "user", "content": "x"}] * (many // 2)),
            _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}] * 8),
            _chat(metadata={str(index): "x" for index in range(many)}),
            _chat(stop=["x"] * many),
            _chat(tools=[{"type": "function", "function": {"name": f"f{index}"}} for index in range(many // 8)]),
            _filled(b'{"messages":', b"[", most_bytes, b"}"),
            _filled(b'{"messages":[', b"[],", many, b"[]]}"),
            _filled(b'{"content":"x","unknown":[', b"1.5,", most_bytes // 16, b"1]}"),
            _chat(messages=[{"role": "user", "content": "x" * (most_bytes - 200)}]),
        ]

    async def run(self, num_connections: int, length: float) -> None:
        """Attack for so many seconds."""
        until = time.monotonic() + length
        await asyncio.gather(*(self._one(until) for _ in range(num_connections)))

    async def _one(self, until: float) -> None:
        kinds: tuple[Callable[[Ends], Awaitable[None]], ...] = (
            self._idle,
            self._half_head,
            self._half_body,
            self._half_large,
            self._drip,
            self._cut,
            self._text,
            self._text_unread,
            self._bomb,
            self._form,
            self._stream_unread,
        )
        while time.monotonic() < until:
            kind = self._random.choice(kinds)
            name = kind.__name__.strip("_").replace("_", " ")
            try:
                async with asyncio.timeout(max(0.1, min(_READ_SECONDS, until + 1 - time.monotonic()))):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_MEGA)
                    try:
                        await kind((reader, writer))
                    finally:
                        writer.transport.abort()
                self.counts[name] += 1
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                self.counts[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.05)

    async def _send(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        for start in range(0, len(content), _MEGA):
            writer.write(content[start : start + _MEGA])
            await writer.drain()

    async def _ask(self, ends: Ends, path: str, body: bytes) -> None:
        reader, writer = ends
        await self._send(writer, _head(path, len(body)) + body)
        status = (await reader.readline()).split()
        self.counts[f"status {status[1].decode() if len(status) > 1 else 'none'}"] += 1
        while await reader.read(_MEGA):
            pass

    async def _hold(self) -> None:
        await asyncio.sleep(self._random.uniform(_SHORT_SECONDS, _LONG_SECONDS))

    async def _idle(self, ends: Ends) -> None:
        await self._hold()

    async def _half_head(self, ends: Ends) -> None:
        ends[1].write(_head(_CHAT, 100)[:60])
        await self._hold()

    async def _half_body(self, ends: Ends) -> None:
        ends[1].write(_head(_CHAT, 100) + b"{")
        await self._hold()

    async def _half_large(self, ends: Ends) -> None:
        body = self._random.choice(self._texts)
        await self._send(ends[1], _head("/tokenize", len(body)) + body[: len(body) // 2])
        await self._hold()

    async def _drip(self, ends: Ends) -> None:
        ends[1].write(_head(_CHAT, _MEGA) + b"{")
        for _ in range(80):
            ends[1].write(b" " * 100)
            await ends[1].drain()
            await asyncio.sleep(0.1)

    async def _cut(self, ends: Ends) -> None:
        body = self._random.choice(self._texts)
        await self._send(ends[1], _head("/tokenize", len(body)) + body[: self._random.randrange(len(body))])

    async def _text(self, ends: Ends) -> None:
        body = self._random.choice(self._texts)
        size = len(body) if self._random.random() < 0.3 else len(body) // self._random.choice((4, 20, 100))
        await self._ask(
            ends, "/tokenize", body if size == len(body) else body[:size].rstrip(b"\\u0e9\xf0\x9f\x98\x80") + b'"}'
        )

    async def _text_unread(self, ends: Ends) -> None:
        body = self._random.choice(self._texts)
        await self._send(ends[1], _head("/tokenize", len(body)) + body)
        ends[0]._transport.pause_reading()  # type: ignore[attr-defined]
        await self._hold()

    async def _bomb(self, ends: Ends) -> None:
        await self._ask(ends, _CHAT, self._random.choice(self._bombs))

    async def _form(self, ends: Ends) -> None:
        number = self._random.randrange(1 << 30)
        form: dict[str, object] = self._random.choice(
            (
                {"regex": f"(a{{1000}}){{1000}}x{number}"},
                {"regex": f"(a{{1000}}){{100}}x{number}"},
                {"regex": "|".join(f"word{number + index}" for index in range(5000))},
                {"grammar": "root ::= " + " | ".join(f'"w{number + index}" root' for index in range(1000)) + ' | "x"'},
                {
                    "json_schema": {
                        "type": "object",
                        "properties": {f"p{number + i}": {"type": "string"} for i in range(500)},
                    }
                },
            )
        )
        await self._ask(ends, _CHAT, _chat(**form))

    async def _stream_unread(self, ends: Ends) -> None:
        body = _chat(stream=True, max_tokens=200)
        ends[1].write(_head(_CHAT, len(body)) + body)
        ends[0]._transport.pause_reading()  # type: ignore[attr-defined]
        await self._hold()


def main() -> None:
    """Attack as the arguments say: port, seed, number of connections, seconds, bytes of the largest bodies."""
    port, seed, num_connections, length, most_bytes = sys.argv[1:]
    attackers = Attackers(int(port), int(seed), int(most_bytes))
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(attackers.run(int(num_connections), float(length)))
    print(json.dumps(attackers.counts), flush=True)


if __name__ == "__main__":
    main()
