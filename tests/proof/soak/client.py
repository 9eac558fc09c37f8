"""A client that asks at random, stays or leaves, and compares what it gets with what a lone client got."""

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tests.proof.soak.asks import Ask, Reply
from tests.proof.soak.connection import Answer, Connection, CutError, connected, request_bytes
from tests.proof.soak.site import ViolationError, require

_WAYS = {"whole": 62, "leave": 10, "leave at once": 5, "cancel": 6, "half-close": 5, "slow": 5, "rubbish": 4, "half": 3}
"""What a client does with a request, and how often."""
_RUBBISH = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n\r\n\x00\x00\xff\xff",
)
_UNLOADED = b"was unloaded while it was being loaded; ask for it again"
_SLOW_BYTES, _SLOW_SECONDS = 300, 0.01
_LONGEST_THOUGHT_SECONDS = 0.4


@dataclass
class Tally:
    """What all clients did and got. longest: seconds that a request took until its first byte, and to its end."""

    did: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    most_tokens_left: int = 0
    longest_first_byte: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class World:
    """What clients share: the server's port, the requests with their right replies, and what they count.

    patience: seconds without a byte after which a request is stuck.
    """

    port: int
    asks: list[Ask]
    right: dict[str, str]
    tally: Tally
    patience: float


class UnloadedError(Exception):
    """Somebody unloaded the model while it was being loaded for a request."""


async def ask_whole(world: World, ask: Ask, *, streamed: bool = False, previous: str | None = None) -> Reply:
    """The reply to a request, which must be answered. Raises: ViolationError, StuckError, CutError."""
    async with connected(world.port, world.patience) as connection:
        connection.send(request_bytes(ask.path, ask.encoded(streamed=streamed, previous=previous)))
        return _reply(ask, await connection.answer(), streamed=streamed)


async def run_client(world: World, random: Random, until: float) -> None:
    """Ask until a moment of `time.monotonic`. Raises: ViolationError, StuckError, CutError."""
    ways, weights = list(_WAYS), list(_WAYS.values())
    while time.monotonic() < until:
        way = random.choices(ways, weights)[0]
        world.tally.did[way] += 1
        ask = random.choice(world.asks)
        if way == "rubbish":
            await _send_rubbish(world, random)
        else:
            try:
                if way == "whole":
                    await _ask_and_continue(world, ask, random)
                else:
                    async with connected(world.port, world.patience) as connection:
                        await _try(world, connection, ask, way, random)
            except UnloadedError:
                world.tally.did["unloaded meanwhile"] += 1
        await asyncio.sleep(random.uniform(0, _LONGEST_THOUGHT_SECONDS))


async def _ask_and_continue(world: World, ask: Ask, random: Random) -> None:
    previous: str | None = None
    key = ask.key
    wanted: Ask | None = ask
    while wanted is not None:
        streamed = wanted.streams and random.random() < 0.5
        began = time.monotonic()
        async with connected(world.port, world.patience) as connection:
            connection.send(request_bytes(wanted.path, wanted.encoded(streamed=streamed, previous=previous)))
            await connection.read_some()
            first = time.monotonic() - began
            reply = _reply(wanted, await connection.answer(), streamed=streamed)
        _take(world, wanted, key, reply, f"whole, streamed {streamed}: {connection.received!r}")
        world.tally.longest_first_byte = max(world.tally.longest_first_byte, first)
        world.tally.longest = max(world.tally.longest, time.monotonic() - began)
        previous, key, wanted = reply.id, f"{key} then", wanted.then


async def _try(world: World, connection: Connection, ask: Ask, way: str, random: Random) -> None:
    streamed = ask.streams and (way == "cancel" or random.random() < 0.7)
    sent = request_bytes(ask.path, ask.encoded(streamed=streamed))
    if way == "half":
        connection.send(sent[: random.randrange(1, len(sent))])
        await asyncio.sleep(random.uniform(0, 0.2))
        return
    connection.send(sent)
    world.tally.most_tokens_left += 64
    match way:
        case "leave at once":
            await asyncio.sleep(random.choice((0.0, random.uniform(0, 0.05))))
        case "leave":
            most = random.randint(1, 3000)
            while len(connection.received) < most and await connection.read_some(most - len(connection.received)):
                pass
        case "cancel":
            await _cancel(world, connection, random)
        case _:
            if way == "half-close":
                connection.end_sending()
            pause = _SLOW_SECONDS if way == "slow" else 0.0
            answer = await connection.answer(at_once=_SLOW_BYTES if pause else 1 << 16, pause=pause)
            reply = _reply(ask, answer, streamed=streamed)
            _take(world, ask, ask.key, reply, f"{way}, streamed {streamed}: {connection.received!r}")
            world.tally.most_tokens_left -= 64


async def _cancel(world: World, connection: Connection, random: Random) -> None:
    """Cancel the reply by its id over another connection, and read the rest, which must end."""
    await connection.read_some()
    found = re.search(rb'"id":\s*"(\w+-?\w+)"', connection.received)
    if found is not None:
        async with connected(world.port, world.patience) as other:
            other.send(request_bytes(f"/requests/{found[1].decode()}/cancel", b"{}"))
            answer = await other.answer()
        require(answer.status in (200, 404), f"a cancel was answered by {answer}")
    try:
        await connection.answer()
    except CutError as error:
        raise ViolationError(f"a cancelled reply did not end: {error}") from error


async def _send_rubbish(world: World, random: Random) -> None:
    content = random.choice((*_RUBBISH, random.randbytes(random.randint(1, 300))))
    async with connected(world.port, world.patience) as connection:
        connection.send(content)
        if random.random() < 0.5:
            connection.end_sending()
            while await connection.read_some():
                pass


def _take(world: World, ask: Ask, key: str, reply: Reply, how: str) -> None:
    right = world.right.get(key)
    require(reply.text == right, f"{ask.kind} {ask.body} was answered by {reply.text!r}; alone it is {right!r}; {how}")
    world.tally.finished[ask.kind] += 1
    world.tally.prompt_tokens += reply.prompt_tokens
    world.tally.completion_tokens += reply.completion_tokens


def _reply(ask: Ask, answer: Answer, *, streamed: bool) -> Reply:
    if answer.status == 503 and _UNLOADED in answer.body:
        raise UnloadedError
    require(answer.status == 200, f"{ask.kind} {ask.body} was refused: {answer}")
    try:
        return ask.read(answer.body, streamed=streamed)
    except (ValueError, KeyError, IndexError, TypeError, StopIteration) as error:
        raise ViolationError(f"{ask.kind} {json.dumps(ask.body)} was answered by {answer}: {error!r}") from error
