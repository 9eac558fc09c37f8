"""Memory for bodies: a request waits before the budget is passed, small ones pass large ones, and slow ones end."""

import asyncio
import json
import random
import socket
import threading

import msgspec
import pytest
from local_servers import read_all, serving
from scripted_models import loader, scripted_sources

from localinfer.apps.server.api.chat import ChatRequest
from localinfer.apps.server.transport import http as shapes
from localinfer.apps.server.transport.bodies import LARGE_BYTES, SMALL_BYTES, Bodies, ByteBudget, measured
from localinfer.apps.server.transport.http import MAX_CONTAINERS, ApiError, decode_json, json_shape
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import RequestError
from tests.support.limits import wait_until

MEGA = 1 << 20
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_shares_never_pass_the_budget_and_all_come_to_their_turn():
    async def run() -> None:
        budget = ByteBudget(64 * MEGA)
        rng = random.Random(1)
        most = 0
        served: list[int] = []

        async def one(size: int) -> None:
            nonlocal most
            with await budget.take(size, 60):
                most = max(most, budget.num_held)
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
                served.append(size)

        sizes = [rng.choice([0, 100, MEGA // 2, 2 * MEGA, 20 * MEGA, 56 * MEGA, 900 * MEGA]) for _ in range(300)]
        await asyncio.gather(*map(one, sizes))
        assert sorted(served) == sorted(sizes)
        assert 56 * MEGA <= most <= 64 * MEGA
        assert budget.num_held == 0

    asyncio.run(run())


def test_small_request_passes_large_ones_and_a_smaller_one_a_larger_one():
    async def run() -> None:
        budget = ByteBudget(64 * MEGA)
        order: list[str] = []

        async def one(name: str, size: int) -> None:
            with await budget.take(size, 60):
                order.append(name)

        holder = await budget.take(budget.most, 60)
        waiting = [asyncio.create_task(one("large", 50 * MEGA)), asyncio.create_task(one("medium", 9 * MEGA))]
        await asyncio.sleep(0)
        await one("small", SMALL_BYTES)
        assert order == ["small"]
        holder.close()
        await asyncio.gather(*waiting)
        assert order == ["small", "medium", "large"]

    asyncio.run(run())


def test_wait_has_an_end_and_a_waiter_that_leaves_holds_up_nobody():
    async def run() -> None:
        budget = ByteBudget(64 * MEGA)
        hurried: list[int] = []
        holder = await budget.take(10 * MEGA, 60, lambda: hurried.append(1))
        with pytest.raises(TimeoutError):
            await budget.take(budget.most, 0.3)
        assert hurried
        leaving = asyncio.create_task(budget.take(budget.most, 60))
        behind = asyncio.create_task(budget.take(20 * MEGA, 60))
        await asyncio.sleep(0)
        leaving.cancel()
        (await behind).close()
        holder.shrink(MEGA)
        assert budget.num_held == MEGA
        holder.close()
        holder.close()
        (await budget.take(budget.most, 0)).close()
        assert budget.num_held == 0

    asyncio.run(run())


def test_holder_that_is_asked_to_hurry_and_gives_up_makes_room():
    async def run() -> None:
        budget = ByteBudget(64 * MEGA)
        holder = await budget.take(budget.most, 60, lambda: holder.close())
        with await budget.take(budget.most, 60):
            assert budget.num_held == budget.most

    asyncio.run(run())


def test_shape_of_any_json_is_that_of_its_value(monkeypatch):
    rng = random.Random(3)

    def made(depth: int) -> object:
        kind = rng.randrange(5)
        if kind == 0 and depth < 5:
            return [made(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 1 and depth < 5:
            return {"".join(rng.choice('"\\,[{a') for _ in range(3)): made(depth + 1) for _ in range(rng.randrange(4))}
        return "".join(rng.choice('"\\,[]{}aé') for _ in range(rng.randrange(8)))

    def counted(value: object) -> tuple[int, int, int]:
        """Depth, values and containers, of those a container's first value is counted by its bracket."""
        if not isinstance(value, list | dict):
            return 0, 0, 0
        inner = [counted(one) for one in (value if isinstance(value, list) else value.values())]
        commas = max(0, len(inner) - 1)
        return (
            1 + max((depth for depth, _, _ in inner), default=0),
            1 + commas + sum(values for _, values, _ in inner),
            1 + sum(containers for _, _, containers in inner),
        )

    for _ in range(1500):
        monkeypatch.setattr(shapes, "_PIECE_BYTES", rng.choice([1, 2, 3, 7, 1000]))
        value = made(0)
        found = json_shape(json.dumps(value, ensure_ascii=False).encode(), 99, 10**9)
        assert found[:3] == counted(value)
        if isinstance(value, list | dict) and value:
            assert found.entries == len(value)


@pytest.mark.parametrize(
    ("member", "value", "code"),
    [
        ("logit_bias", {str(index): 1 for index in range(60_000)}, None),
        ("messages", [{"role": "user", "content": "x"}] * 20_000, None),
        ("metadata", [[]] * (MAX_CONTAINERS + 1), "body_too_large"),
    ],
    ids=["biases", "messages", "containers"],
)
def test_too_many_entries_are_refused_before_one_is_built(member, value, code, monkeypatch):
    monkeypatch.setattr("localinfer.apps.server.transport.http._decode", lambda *_: pytest.fail("all of it was built"))
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], member: value}).encode()
    with pytest.raises(ApiError) as refused:
        decode_json(body, ChatRequest)
    assert (refused.value.param, refused.value.code) == (None if code else member, code)


@pytest.mark.parametrize("text", ["a" * 1000, "é" * 1000, "日" * 1000, "a" * 1000 + "😀"], ids=["1", "1b", "2", "4"])
@pytest.mark.parametrize("escapes", [True, False])
def test_measure_covers_what_is_built(text, escapes):
    body = bytearray(json.dumps({"content": text, "more": [1.5] * 50}, ensure_ascii=escapes).encode())
    decoded = msgspec.json.decode(body)
    taken = decoded["content"].__sizeof__() + 50 * (1.5).__sizeof__() + decoded["more"].__sizeof__()
    assert measured(body)[1] >= taken - 200


@pytest.fixture(scope="module")
def narrow():
    """A server with memory for one large body at a time."""
    settings = ServerSettings(port=0, body_memory=4 * MEGA, max_body_bytes=MEGA)
    with serving(settings, sources=scripted_sources("a"), load=loader({"a": b"Yes."})) as running:
        yield running


def test_body_that_comes_slowly_ends_when_another_needs_its_memory(narrow, monkeypatch):
    monkeypatch.setattr("localinfer.apps.server.transport.connection._LATE_SECONDS", 0.1)
    text = json.dumps({"content": "x" * (MEGA - 100)}).encode()
    slow: list[socket.socket] = []
    try:
        for _ in range(2):
            slow.append(narrow.connect())
            slow[-1].sendall(HEAD + b"Content-Length: %d\r\n\r\n{" % MEGA)
        bodies = narrow.server.service.bodies
        assert wait_until(lambda: bodies._receiving.num_held >= MEGA // 2)
        with narrow.client() as client:
            small = client.post("/tokenize", json={"content": "x" * LARGE_BYTES})
            assert small.status_code == 200
            large = client.post("/tokenize", content=text, headers={"content-type": "application/json"})
            assert large.status_code == 200, large.text
        # It was told before the large body got its memory.
        told = [read_all(one, 0.1) for one in slow]
        assert any(b" 408 " in one and b"send it again" in one for one in told)
    finally:
        for one in slow:
            one.close()
    assert wait_until(lambda: not bodies._receiving.num_held and not bodies._working.num_held)


def test_large_bodies_at_one_time_are_all_answered_and_nothing_is_held_after(narrow):
    with narrow.client() as first, narrow.client() as second:
        for client in (first, second):
            for _ in range(3):
                answer = client.post("/tokenize", json={"content": "hello " * 100_000})
                assert answer.status_code == 200
    bodies = narrow.server.service.bodies
    assert wait_until(lambda: not bodies._receiving.num_held and not bodies._working.num_held)


@pytest.mark.parametrize("options", [{}, {"with_pieces": True}, {"return_token_strs": True}], ids=str)
def test_tokens_of_a_large_text_come_as_they_are_written_and_are_the_same(served, llm, options, monkeypatch):
    monkeypatch.setattr("localinfer.apps.server.api.text._WRITTEN_AT_ONCE", 1000)
    text = "Once upon a time. " * 100
    with served.client() as client:
        small = client.post("/tokenize", json={"content": text, **options}).json()
        monkeypatch.setattr("localinfer.apps.server.transport.bodies.LARGE_BYTES", 100)
        answer = client.post("/tokenize", json={"content": text, **options})
        empty = client.post("/tokenize", json={"content": "", "stop": "x" * 200, **options})
    assert "content-length" not in answer.headers and answer.json() == small
    assert small["count"] == len(llm.tokenizer.encode(text, False, True)) == len(small["tokens"])
    assert empty.json()["tokens"] == []


def test_failure_behind_the_first_tokens_ends_the_answer_with_an_error(served, monkeypatch):
    def parts(self, tokenizer):
        yield [1, 2]
        raise RequestError("the rest cannot be read; send less")

    monkeypatch.setattr("localinfer.apps.server.transport.bodies.LARGE_BYTES", 10)
    monkeypatch.setattr("localinfer.apps.server.api.text.TokenizeRequest.id_parts", parts)
    with served.client() as client:
        answer = client.post("/tokenize", json={"content": "x" * 100}).json()
    assert answer["tokens"] == [1, 2] and "cannot be read" in answer["error"]["message"]


def test_memory_of_large_bodies_is_returned_to_the_system_once_they_are_done(monkeypatch):
    returned = threading.Event()
    monkeypatch.setattr("localinfer.apps.server.transport.bodies.return_free_memory", returned.set)
    monkeypatch.setattr("localinfer.apps.server.transport.bodies._TRIM_SECONDS", 0.0)

    async def hold(num_bytes: int) -> None:
        bodies = Bodies(ServerSettings(port=0))
        with await bodies._working.take(num_bytes, 0.0):
            pass
        await asyncio.sleep(0.01)
        bodies._workers.shutdown()

    asyncio.run(hold(SMALL_BYTES))
    assert not returned.is_set()
    asyncio.run(hold(20 * MEGA))
    assert returned.is_set()
