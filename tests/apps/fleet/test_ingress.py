"""The ingress before replicas that answer, fall silent or go as a test says; no Ray, and no model but in one test."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from localinfer.apps.fleet import relay
from localinfer.apps.fleet.accounts import IngressAccounts, IngressOptions, PresentReplicas
from localinfer.apps.fleet.ingress import Ingress
from localinfer.apps.fleet.options import ReplicaOptions, without_limits
from localinfer.apps.fleet.placement import prompt_facts
from localinfer.apps.fleet.relay import ReplicaLostError, ReplicaWatch
from localinfer.apps.fleet.replica import AnswerPart, RelayedRequest
from localinfer.apps.fleet.replica_answers import Answers
from localinfer.apps.server.replies.relay import (
    PromptNote,
    ReplyNote,
    ReserveNote,
    Resumption,
    SentNote,
    TokenNote,
    UsedNote,
)
from localinfer.apps.server.transport.http import PING
from localinfer.apps.server.transport.settings import AccessToken, Quota, ServerSettings
from tests.apps.fleet.test_prefill_apart import replica

METRICS = b"# TYPE localinfer_requests_total counter\nlocalinfer_requests_total 2.0\n"
WORDS = [b"Once ", b"upon ", b"a ", b"time."]
BODY = {"prompt": "Once upon a time a small dog found a red ball in the garden, and the cat saw it too. " * 4}
Answer = AsyncGenerator[list[AnswerPart]]


def head(status: int = 200) -> AnswerPart:
    return AnswerPart((), {"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"req-1")]})


def body_part(body: bytes, *notes: Any, more: bool = True) -> AnswerPart:
    return AnswerPart(notes, {"type": "http.response.body", "body": body, "more_body": more})


async def words(resumption: Resumption | None, most: int = len(WORDS)) -> Answer:
    """A reply of one text, from where another replica left it. most: words after which it stops without an end."""
    had = 0
    if resumption is None:
        yield [AnswerPart((ReplyNote("cmpl-1", 7, "fp", (0,)),), None)]
        yield [AnswerPart((PromptNote(0, b"\1\0\0\0\2\0\0\0", 3),), None)]
    else:
        assert resumption.texts[0] is not None
        had = len(resumption.texts[0].token_ids)
    yield [head()]
    for number in range(had, min(most, len(WORDS))):
        yield [body_part(WORDS[number], TokenNote(0, number, 0))]
    if most >= len(WORDS):
        yield [body_part(b"", SentNote("tail"), more=False), AnswerPart((UsedNote(6),), None)]


class FakeReplicas:
    """Replicas by name, each a way of answering; asked: who was asked, in order."""

    def __init__(self, **answers: Callable[[RelayedRequest, Resumption | None], Answer]) -> None:
        self.answers = answers
        self.present = PresentReplicas()
        self.present.note("engine", dict.fromkeys(answers, "actor"))
        self.asked: list[str] = []
        self.running = 0
        self.most_running = 0
        self.ended: list[str] = []
        self.alive: set[str] = set()

    async def answer(self, request: RelayedRequest, resumption: Resumption | None, replica: str) -> Answer:
        self.asked.append(replica)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for batch in self.answers[replica or "a"](request, resumption):
                yield batch
        finally:
            self.running -= 1

    async def of_all(self, method: str, request: RelayedRequest, seconds: float, is_enough: Any) -> Answers[Any]:
        parts = [head(), body_part(METRICS, more=False)]
        return Answers([(name, parts) for name in self.answers])

    async def prefill_metrics(self, request: RelayedRequest, seconds: float) -> Answers[Any]:
        return Answers()

    async def ask(self, replica: str) -> None:
        if replica not in self.alive:
            await asyncio.Future()

    async def end(self, replica: str) -> None:
        self.ended.append(replica)


def made_ingress(replicas: FakeReplicas, places: int = 4, **settings: Any) -> Ingress:
    made = ServerSettings(serves_page=False, allowed_hosts=("test",), **settings)
    told = IngressAccounts(IngressOptions(made, places, len(replicas.answers)), None, replicas.present, "engine")
    return Ingress(replicas, made, told)


def tokens(*names: str, **limits: int) -> dict[str, Any]:
    return {"tokens": tuple(AccessToken(name, f"sk-{name}", quota=Quota(**limits)) for name in names)}


async def post(ingress: Ingress, token: str = "", path: str = "/v1/completions", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer sk-{token}"} if token else {}
    transport = httpx.ASGITransport(ingress)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        return await client.post(
            path, json={name: value for name, value in {**BODY, **more}.items() if value is not None}
        )


async def get(ingress: Ingress, path: str, key: str, root_path: str = "") -> httpx.Response:
    transport = httpx.ASGITransport(ingress, root_path=root_path)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        return await client.get(root_path + path)


async def well(request: RelayedRequest, resumption: Resumption | None) -> Answer:
    async for batch in words(resumption):
        yield batch


async def is_silent(request: RelayedRequest, resumption: Resumption | None) -> Answer:
    async for batch in words(resumption, most=2):
        yield batch
    await asyncio.Future()


async def dies(request: RelayedRequest, resumption: Resumption | None) -> Answer:
    async for batch in words(resumption, most=3):
        yield batch
    raise ReplicaLostError("the actor died")


async def says_nothing(request: RelayedRequest, resumption: Resumption | None) -> Answer:
    await asyncio.Future()
    yield []


@pytest.mark.parametrize("lost", [is_silent, dies, says_nothing])
def test_a_stream_whose_replica_is_silent_or_gone_goes_on_elsewhere_with_the_same_bytes(lost, monkeypatch):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.02)

    async def run() -> None:
        replicas = FakeReplicas(a=lost, b=well)
        replicas.alive.add("a")
        response = await post(made_ingress(replicas), seed=3)
        assert (response.status_code, response.content) == (200, b"".join(WORDS))
        assert replicas.asked[:2] == ["a", "b"] and replicas.running == 0

    asyncio.run(run())


def test_what_any_replica_may_answer_is_not_asked_of_a_silent_one(monkeypatch):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.02)

    async def run() -> None:
        replicas = FakeReplicas(a=says_nothing, b=well)
        ingress = made_ingress(replicas)
        await post(ingress)
        assert replicas.asked == ["a", "b"]
        assert (await get(ingress, "/v1/models", "")).status_code == 200
        assert replicas.asked[2:] == ["b"]

    asyncio.run(run())


def test_where_all_replicas_are_slow_none_is_left_for_another(monkeypatch):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(relay, "_LOOK_SECONDS", 0.01)

    async def slow(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        async for batch in words(resumption):
            await asyncio.sleep(0.06)
            yield batch

    async def run() -> None:
        replicas = FakeReplicas(a=slow, b=slow)
        replies = await asyncio.gather(*(post(made_ingress(replicas), seed=number) for number in range(3)))
        assert {reply.content for reply in replies} == {b"".join(WORDS)}
        # Each was left at most once, and then there was nobody better.
        assert len(replicas.asked) <= 6

    asyncio.run(run())


def test_replicas_that_are_gone_are_waited_for(monkeypatch):
    monkeypatch.setattr(relay, "_MOST_PAUSE_SECONDS", 0.001)

    async def run() -> None:
        lives = iter([False] * 12)

        async def comes(request: RelayedRequest, resumption: Resumption | None) -> Answer:
            if not next(lives, True):
                raise ReplicaLostError("the actor died")
            async for batch in words(resumption):
                yield batch

        replicas = FakeReplicas(a=dies, b=comes)
        assert (await post(made_ingress(replicas))).content == b"".join(WORDS)

    asyncio.run(run())


@pytest.mark.parametrize("has_other", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_stream_of_events_is_told_that_it_goes_on_whatever_is_waited_for(has_other, is_stream, monkeypatch):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(relay, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(relay, "_PING_SECONDS", 0.01)

    def made(resumption: Resumption | None, most: int = len(WORDS)) -> Answer:
        return events(words(resumption, most)) if is_stream else words(resumption, most)

    async def slow(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        await asyncio.sleep(0.04)
        async for batch in made(resumption):
            yield batch

    async def stops(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        """Says nothing for long, and goes on if nobody else did meanwhile."""
        async for batch in made(resumption, most=2):
            yield batch
        await asyncio.sleep(10.0 if has_other else 0.1)
        yield [body_part(word) for word in WORDS[2:]] + [body_part(b"", more=False)]

    async def run() -> None:
        replicas = FakeReplicas(a=stops, b=slow) if has_other else FakeReplicas(a=stops)
        response = await post(made_ingress(replicas))
        assert replicas.asked == ["a", "b"][: 1 + has_other]
        said = response.content
        assert said.replace(PING, b"") == b"".join(WORDS)
        assert said.startswith(b"Once upon " + PING if is_stream else b"Once upon a")

    asyncio.run(run())


def test_a_comment_stands_between_what_is_sent_and_never_after_the_end(monkeypatch):
    monkeypatch.setattr(relay, "_PING_SECONDS", 0.005)
    sent: list[tuple[bytes, bool]] = []
    sending = 0

    async def send(message: Any) -> None:
        nonlocal sending
        sending += 1
        assert sending == 1
        await asyncio.sleep(0.007)
        sending -= 1
        sent.append((message.get("body", b""), message.get("more_body", True)))

    async def slow(resumption: Resumption | None) -> Answer:
        async for batch in events(words(resumption)):
            await asyncio.sleep(0.008)
            yield batch
        await asyncio.sleep(0.02)

    async def run() -> None:
        await relay.relay_answer(slow, send, "/completions")
        await asyncio.sleep(0.02)

    asyncio.run(run())
    assert [has_more for _, has_more in sent] == [True] * (len(sent) - 1) + [False]
    assert PING in [body for body, _ in sent]
    assert b"".join(body for body, _ in sent).replace(PING, b"") == b"".join(WORDS)


async def events(batches: Answer) -> Answer:
    """The same as a stream of events."""
    async for batch in batches:
        for part in batch:
            if part.message is not None and "headers" in part.message:
                part.message["headers"].append((b"content-type", b"text/event-stream; charset=utf-8"))
        yield batch


def test_a_replica_that_says_nothing_while_it_computes_sends_signs_of_life(monkeypatch):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.2)

    async def slow(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        assert resumption is None
        for _ in range(4):
            await asyncio.sleep(0.08)
            yield []
        async for batch in words(resumption):
            yield batch

    async def run() -> None:
        replicas = FakeReplicas(a=slow)
        assert (await post(made_ingress(replicas))).content == b"".join(WORDS)
        assert replicas.asked == ["a"]

    asyncio.run(run())


def test_what_comes_together_is_sent_together_and_the_bytes_are_the_same():
    sent: list[Any] = []

    async def at_once(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        parts = [part async for batch in words(resumption) for part in batch]
        yield parts[:4]
        yield parts[4:]

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        request = RelayedRequest("POST", "/v1/completions", b"", (), b"{}")
        lost = await relay.relay_answer(lambda resumption: at_once(request, resumption), send, "/completions")
        assert lost == 0

    asyncio.run(run())
    assert [message.get("body") for message in sent] == [None, b"Once ", b"upon a time."]
    assert [message.get("more_body") for message in sent] == [None, True, False]


def test_a_silent_replica_is_given_nothing_until_it_answers_and_is_ended_if_it_does_not(monkeypatch):
    monkeypatch.setattr(relay, "_ASK_PAUSE_SECONDS", 0.01)
    said: list[tuple[str, bool]] = []

    async def suspect(name: str, is_suspect: bool) -> None:
        said.append((name, is_suspect))

    async def run() -> None:
        replicas = FakeReplicas()
        watch = ReplicaWatch(replicas.ask, suspect, replicas.end, seconds=0.05)
        for _ in range(3):
            watch.notice("hung")
        watch.notice("")
        assert watch.watched == {"hung"}
        await asyncio.sleep(0.02)
        assert (said, replicas.ended) == ([("hung", True)], [])
        while watch.watched:
            await asyncio.sleep(0.01)
        assert (said, replicas.ended) == ([("hung", True)], ["hung"])
        replicas.alive.add("busy")
        watch.notice("busy")
        while watch.watched:
            await asyncio.sleep(0.01)
        assert said[1:] == [("busy", True), ("busy", False)]
        assert replicas.ended == ["hung"]

    asyncio.run(run())


def test_limits_of_a_token_are_those_of_one_server_however_many_replicas_there_are():
    async def run() -> None:
        replicas = FakeReplicas(a=well, b=well, c=well, d=well)
        ingress = made_ingress(replicas, **tokens("carl", "dora", requests_per_minute=10))
        found = [await post(ingress, "carl", seed=number) for number in range(40)]
        statuses = [response.status_code for response in found]
        assert statuses == [200] * 10 + [429] * 30
        assert found[0].headers["x-ratelimit-limit-requests"] == "10"
        assert found[0].headers["x-ratelimit-remaining-requests"] == "9"
        assert int(found[-1].headers["retry-after"]) >= 1
        assert (await post(ingress, "dora")).status_code == 200
        assert (await post(ingress, "nobody")).status_code == 401
        assert len(replicas.asked) == 11

    asyncio.run(run())


def test_tokens_that_a_replica_reserves_are_those_of_all_replicas():
    async def reserves(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        yield [AnswerPart((ReserveNote(40, 40),), None)]
        async for batch in words(resumption):
            yield batch

    async def run() -> None:
        replicas = FakeReplicas(a=reserves, b=reserves, c=reserves)
        ingress = made_ingress(replicas, **tokens("carl", tokens_per_minute=100))
        # Six of forty are used by each; the last ones find less than forty.
        found = [await post(ingress, "carl", seed=number) for number in range(12)]
        assert [response.status_code for response in found] == [200] * 11 + [429]
        assert [found[0].headers[f"x-ratelimit-{what}-tokens"] for what in ("limit", "remaining")] == ["100", "60"]
        assert replicas.running == 0
        together = await asyncio.gather(*(post(ingress, "carl", seed=number) for number in range(5)))
        assert {response.status_code for response in together} == {429}

    asyncio.run(run())


def test_what_a_replica_says_it_used_counts_though_the_client_has_all_of_its_answer():
    async def ends_late(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        yield [AnswerPart((ReserveNote(40, 40),), None)]
        async for batch in words(resumption):
            yield [part for part in batch if part.message is not None]
        # As it goes where a replica is another process.
        await asyncio.sleep(0.01)
        yield [AnswerPart((UsedNote(33),), None)]

    async def run() -> None:
        ingress = made_ingress(FakeReplicas(a=ends_late), **tokens("carl", tokens_per_minute=100))
        limiter = ingress._accounts._own._dispatcher.limiter  # type: ignore[union-attr]
        limiter._clock = lambda: 0.0
        assert (await post(ingress, "carl")).content == b"".join(WORDS)
        assert limiter.headers("carl")["x-ratelimit-remaining-tokens"] == "67"

    asyncio.run(run())


def test_a_flood_of_one_token_is_bounded_and_refused_and_another_has_the_next_place():
    async def run() -> None:
        gate = asyncio.Event()
        order: list[bytes] = []

        async def waits(request: RelayedRequest, resumption: Resumption | None) -> Answer:
            order.append(dict(request.headers)[b"authorization"])
            await gate.wait()
            async for batch in words(resumption):
                yield batch

        replicas = FakeReplicas(a=waits, b=waits)
        ingress = made_ingress(replicas, places=2, max_generations=3, **tokens("a", "b"))
        flood = [asyncio.ensure_future(post(ingress, "a", seed=number)) for number in range(5)]
        while len(order) < 4:
            await asyncio.sleep(0.001)
        other = asyncio.ensure_future(post(ingress, "b"))
        while len(order) < 5:
            await asyncio.sleep(0.001)
        assert order[-1] == b"Bearer sk-b"
        refused = await post(ingress, "b")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        gate.set()
        assert {response.status_code for response in await asyncio.gather(other, *flood)} == {200}
        assert replicas.most_running == 5

    asyncio.run(run())


def test_a_guess_of_another_tokens_text_does_not_go_where_that_text_went():
    async def run() -> None:
        replicas = FakeReplicas(**dict.fromkeys("abcdefgh", well))
        ingress = made_ingress(replicas, isolates_cache=True, **tokens("alice", "bob"))
        for number in range(12):
            text = f"{number} My secret is long enough to be found by who has read it before. " * 20
            await post(ingress, "alice", prompt=text)
            mine = replicas.asked[-1]
            await post(ingress, "alice", prompt=text)
            assert replicas.asked[-1] == mine, "her own text goes back to its cache"
            before = len(replicas.asked)
            fresh = "x" + text[1:]
            # Bob's guess goes where a text that nobody has sent would go.
            placed = ingress._accounts._own._dispatcher.placement  # type: ignore[union-attr]
            guess = prompt_facts(json.dumps({**BODY, "prompt": text}).encode(), "name bob").prefixes
            unknown = prompt_facts(json.dumps({**BODY, "prompt": fresh}).encode(), "name bob").prefixes
            assert placed.table.matches(guess) == placed.table.matches(unknown) == {}
            assert placed.choose(guess) == placed.choose(unknown)
            assert len(replicas.asked) == before

    asyncio.run(run())


def test_labels_of_replicas_are_for_who_runs_the_application():
    async def run() -> None:
        replicas = FakeReplicas(a=well, b=well)
        ingress = made_ingress(replicas, token="sk-own", isolates_cache=True, **tokens("alice"))
        text = (await get(ingress, "/metrics", "sk-alice")).text
        assert "replica" not in text and "localinfer_requests_total 4.0\n" in text
        text = (await get(ingress, "/v1/metrics", "sk-own")).text
        assert 'localinfer_requests_total{replica="a"} 2.0' in text
        assert 'localinfer_replica_answered{replica="b"} 1' in text
        assert (await get(ingress, "/metrics", "sk-wrong")).status_code == 401

    asyncio.run(run())


def test_an_application_under_a_prefix_answers_by_the_paths_of_the_server():
    paths: list[str] = []

    async def noted(request: RelayedRequest, resumption: Resumption | None) -> Answer:
        paths.append(request.path)
        async for batch in words(resumption):
            yield batch

    async def run() -> None:
        ingress = made_ingress(FakeReplicas(a=noted))
        assert (await get(ingress, "/v1/models", "", root_path="/two")).status_code == 200
        assert (await get(ingress, "", "", root_path="/two")).status_code == 200
        assert (await get(ingress, "/v1/models", "")).status_code == 200

    asyncio.run(run())
    assert paths == ["/v1/models", "/", "/v1/models"]


def test_a_client_that_leaves_ends_its_answer_and_gives_its_place_back():
    async def run() -> None:
        replicas = FakeReplicas(a=is_silent)
        ingress = made_ingress(replicas, places=1)
        asking = asyncio.ensure_future(post(ingress))
        waiting = asyncio.ensure_future(post(ingress))
        while not replicas.running:
            await asyncio.sleep(0.001)
        waiting.cancel()
        asking.cancel()
        await asyncio.gather(asking, waiting, return_exceptions=True)
        while replicas.running:
            await asyncio.sleep(0.001)
        replicas.answers["a"] = well
        assert (await post(ingress)).content == b"".join(WORDS)

    asyncio.run(run())


def test_an_engine_behind_the_ingress_answers_and_counts_as_one_server(tmp_path):
    limits = tokens("carl", tokens_per_minute=5_000, requests_per_minute=50)

    async def run() -> None:
        served = ServerSettings(serves_page=False, allowed_hosts=("test",), **limits)
        load = {"kv_memory": 64 << 20, "speculation": None, "threads": 1}
        lone = await replica(ReplicaOptions(None, None, served, load))
        behind = await replica(ReplicaOptions(None, None, without_limits(served), load))

        async def answers(request: RelayedRequest, resumption: Resumption | None) -> Answer:
            async for batch in behind.answer(request, resumption):
                yield batch

        ingress = made_ingress(FakeReplicas(a=answers), **limits)
        accounts = ingress._accounts._own._dispatcher.limiter  # type: ignore[union-attr]
        # Nothing comes back by the time that an answer takes.
        accounts._clock = lone._service.limiter._clock = lambda: 0.0
        try:
            for more in (
                {"max_tokens": 9, "seed": 4, "logprobs": 2},
                {"max_tokens": 7, "n": 2, "seed": 4, "temperature": 1.1},
                {"max_tokens": 7, "stream": True, "seed": 4, "temperature": 1.1},
                {"max_tokens": 9_000, "seed": 4},
                {"path": "/v1/embeddings", "input": "A dog.", "prompt": None},
                {"path": "/tokenize", "content": "A dog.", "prompt": None},
            ):
                found, wanted = [await post(app, "carl", **more) for app in (ingress, lone._app)]
                assert found.status_code == wanted.status_code
                assert steady(found) == steady(wanted)
                assert accounts.headers("carl") == lone._service.limiter.headers("carl"), more
        finally:
            await lone.close()
            await behind.close()

    asyncio.run(run())


def steady(response: httpx.Response) -> tuple[str, ...]:
    """The part of an answer that is equal on two servers."""
    body = re.sub(r'"(?:id|created|timings)":(?:\{[^{}]*\}|"[^"]*"|\d+),?', "", response.text)
    return body, *(response.headers[f"x-ratelimit-limit-{kind}"] for kind in ("requests", "tokens"))
