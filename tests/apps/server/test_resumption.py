"""Replies that one process begins and another goes on with: the client receives every byte of an undisturbed run."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
from local_servers import MODEL, STORY
from scripted_models import loader, scripted_sources
from test_tools_wire import BODY as CALLING

import localinfer
from localinfer.apps.fleet import relay
from localinfer.apps.fleet.relay import BrokenAnswerError, ReplicaLostError, relay_answer
from localinfer.apps.fleet.replica import AnswerPart, RelayedRequest, answer_parts
from localinfer.apps.server.app import make_app
from localinfer.apps.server.operation.observation import Metrics
from localinfer.apps.server.replies.relay import PromptNote, ReplyProgress, Resumption, TokenNote
from localinfer.apps.server.replies.service import Service
from localinfer.apps.server.router.model_folder import ModelSource, measure_need
from localinfer.apps.server.router.models import ModelRegistry
from localinfer.apps.server.transport.http import PING
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM
from tests.support.limits import seconds

COSTS = re.compile(
    rb'"(?:timings|\w+_duration|created_at|completed_at|cache_miss|(?:accepted|rejected)_prediction_tokens)"'
    rb':(?:\{[^{}]*\}|"[^"]*"|[^,}]*),?'
)
"""What it took, which no two runs have alike."""
CACHED = re.compile(
    rb'"(?:cached_tokens|cache_write_tokens|cache_read_input_tokens|input_tokens|prompt_eval_cached_count)":\d+'
)
CHAT, COMPLETIONS, LLAMA = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SAID: dict[str, Any] = {"messages": STORY, "temperature": 1.2, "stream": True}
SHORT: dict[str, Any] = {**SAID, "max_tokens": 14}
PLAIN: dict[str, Any] = {"prompt": "Once upon a", "temperature": 1.0, "stream": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
CITY = CALLING["tools"][0]["function"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**SHORT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "penalties": (CHAT, {**SHORT, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "dry_multiplier": 0.8}),
    "filters": (CHAT, {**SHORT, "xtc_probability": 0.5, "typical_p": 0.9, "dynatemp_range": 0.5}),
    "logprobs": (CHAT, {**SHORT, "logprobs": True, "top_logprobs": 3}),
    "mirostat": (COMPLETIONS, {**PLAIN, "max_tokens": 24, "mirostat": 2}),
    "stop": (CHAT, {**SAID, "max_tokens": 40, "stop": [" the", "."]}),
    "form": (
        CHAT,
        {
            **SAID,
            "max_tokens": 40,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    "tools": (CHAT, {**CALLING, "stream": True}),
    "echo": (COMPLETIONS, {**PLAIN, "max_tokens": 8, "echo": True, "logprobs": 1}),
    "responses": (RESPONSES, {"input": "Tell me a story.", "stream": True, "max_output_tokens": 14, "store": False}),
    "responses with tools": (
        RESPONSES,
        {
            "input": "How?",
            "stream": True,
            "store": False,
            "tool_choice": "required",
            "tools": [{"type": "function", **CITY}],
            "max_output_tokens": 100,
        },
    ),
    "messages": (MESSAGES, {**SHORT}),
    "messages with tools": (
        MESSAGES,
        {
            **SAID,
            "max_tokens": 100,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "weather", "description": "Say it.", "input_schema": CITY["parameters"]}],
        },
    ),
    "ollama": ("/api/chat", {"model": "demo", "messages": STORY, "options": {"num_predict": 12}}),
    "ollama's prompts": ("/api/generate", {"model": "demo", "prompt": "Once", "options": {"num_predict": 12}}),
    "llama-server": (LLAMA, {**PLAIN, "n_predict": 12, "n_probs": 2, "seed": 7}),
}
SCRIPTED = {
    "thinking": b"<think>\nHm, well.\n</think>\n\nYes.",
    "calls": b"<think>\nHm.\n</think>\n\nI look."
    b'\n<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>'
    b'\n<tool_call>\n{"name": "count", "arguments": {"to": 3}}\n</tool_call>',
    "unicode": "Grüße 😀 日本.".encode(),
}
EVERY, *THIRDS = slice(None), *(slice(first, None, 3) for first in range(3))
"""Which of the moments below: each kind of reply loses its replica at some, and each API and script at all."""
LOOK = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "count")
]


def load_demo(source: ModelSource, **options: Any) -> LLM:
    return localinfer.load(source.path, threads=1, kv_memory=32 << 20, **{"context_length": 512, **options})


def load_any(source: ModelSource) -> LLM:
    return load_demo(source) if source.id == "demo" else loader(SCRIPTED)(source)


def replica(load: Callable[[ModelSource], LLM] = load_any) -> Service:
    """A server without sockets."""
    sources = [MODEL, *scripted_sources(*SCRIPTED)]

    def make_registry(metrics: Metrics) -> ModelRegistry:
        return ModelRegistry(sources, load, lambda source: measure_need(source.path, "f16"), metrics)

    return Service(ServerSettings(port=0), make_registry)


Answer = Callable[[RelayedRequest, Resumption | None], AsyncIterator[list[AnswerPart]]]


class Replicas:
    """Two replicas on an event loop of their own, in a thread."""

    def __init__(self, *services: Service) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas")
        self._thread.start()
        self._stack = AsyncExitStack()
        self.services = services
        self.answers = [self.run(self._open(service)) for service in services]

    async def _open(self, service: Service) -> Answer:
        app = make_app(service)
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        return lambda asked, resumption: answer_parts(app, asked, resumption)

    def run(self, work: Awaitable[Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds(60))

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module", autouse=True)
def the_next_replica_is_asked_at_once() -> Iterator[None]:
    """Only the order of attempts matters here, not the pause before each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "_PAUSE_SECONDS", 0.001)
        yield


@pytest.fixture(scope="module")
def pair() -> Iterator[Replicas]:
    with closing(Replicas(replica(), replica())) as both:
        yield both


def request(path: str, body: dict[str, Any]) -> RelayedRequest:
    encoded = json.dumps(body).encode()
    headers = (
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(encoded)),
    )
    return RelayedRequest("POST", path, b"", headers, encoded)


async def recorded(answer: Answer, asked: RelayedRequest) -> list[AnswerPart]:
    return [part async for batch in answer(asked, None) for part in batch]


async def relayed(open_parts: Callable[[Resumption | None], AsyncIterator[list[AnswerPart]]]) -> tuple[int, bytes]:
    """The status and body that a client receives."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await relay_answer(open_parts, send, CHAT)
    assert [one["type"] for one in messages].count("http.response.start") == 1
    assert not messages[-1].get("more_body")
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)


async def cut_after(parts: list[AnswerPart], count: int, goes_on: Callable[[Resumption | None], Any]) -> bytes:
    """What a client receives of a replica that is gone after so many parts, and of the one that goes on."""
    is_first = True

    async def open_parts(resumption: Resumption | None) -> AsyncIterator[list[AnswerPart]]:
        nonlocal is_first
        if is_first:
            is_first = False
            yield parts[:count]
            raise ReplicaLostError("it was killed")
        async for batch in goes_on(resumption):
            yield batch

    status, body = await relayed(open_parts)
    assert status == 200
    return body


def bytes_of(parts: list[AnswerPart]) -> bytes:
    return b"".join(part.message.get("body", b"") for part in parts if part.message is not None)


def prompt_of(parts: list[AnswerPart]) -> bytes:
    return next(note.prompt_ids for part in parts for note in part.notes if isinstance(note, PromptNote))


def timeless(body: bytes) -> bytes:
    """Without what a reply took, and without comments, which say that another replica goes on."""
    return COSTS.sub(b"", body.replace(PING, b""))


def cuts(parts: list[AnswerPart]) -> list[int]:
    """After how many parts a replica goes: around its head and its first token, in the middle, before its end."""
    tokens = [i for i, part in enumerate(parts, 1) if any(isinstance(note, TokenNote) for note in part.notes)]
    first = next(i for i, part in enumerate(parts, 1) if any(isinstance(note, PromptNote) for note in part.notes))
    return sorted({first, tokens[0] - 1, tokens[0], tokens[len(tokens) // 3], tokens[-2], tokens[-1], len(parts) - 1})


def check_same_bytes(
    path: str,
    body: dict[str, Any],
    replicas: Replicas,
    compared: Callable[[bytes], Any] = lambda found: found,
    taken: slice = EVERY,
) -> None:
    """Let a replica go at several moments, and compare what its client receives with an undisturbed run."""
    asked = request(path, body)
    first, second = replicas.answers

    async def check() -> None:
        parts = await recorded(first, asked)
        whole = timeless(bytes_of(parts))
        for count in cuts(parts)[taken]:
            found = timeless(await cut_after(parts, count, lambda resumption: second(asked, resumption)))
            # What of the prompt was cached is told with its first token.
            is_told = any(isinstance(note, TokenNote) for part in parts[:count] for note in part.notes)
            masked = (lambda text: text) if is_told else (lambda text: CACHED.sub(b"", text))
            assert compared(masked(found)) == compared(masked(whole)), f"after {count} of {len(parts)} parts"

    replicas.run(check())


@pytest.mark.parametrize(
    ("case", "taken"), [(case, EVERY if case == "chat" else THIRDS[i % 3]) for i, case in enumerate(CASES)]
)
def test_reply_that_another_replica_goes_on_with_has_the_same_bytes(case, taken, pair):
    check_same_bytes(*CASES[case], pair, taken=taken)


@pytest.mark.parametrize(
    ("script", "path", "taken"),
    [
        (script, path, THIRDS[(i + j) % 3])
        for i, script in enumerate(SCRIPTED)
        for j, path in enumerate((CHAT, RESPONSES, MESSAGES))
    ],
)
def test_reasoning_calls_and_characters_of_several_tokens_are_gone_on_with(script, path, taken, pair):
    body = {"model": script, "stream": True, "max_tokens": 400, "messages": STORY, "tools": LOOK}
    if path == RESPONSES:
        tools = [{"type": "function", **tool["function"]} for tool in LOOK]
        body = {"model": script, "stream": True, "input": "Look.", "tools": tools, "store": False}
    elif path == MESSAGES:
        body["tools"] = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in LOOK]
    check_same_bytes(path, body, pair, taken=taken)


def test_texts_of_one_request_are_gone_on_with_in_any_order(pair):
    body = {**SHORT, "n": 2, "seed": 5, "logprobs": True}
    check_same_bytes(CHAT, body, pair, lambda found: sorted(found.split(b"\n\n")))
    prompts = {**PLAIN, "prompt": ["Once", "The dog"], "n": 2, "max_tokens": 6, "seed": 5}
    check_same_bytes(COMPLETIONS, prompts, pair, lambda found: sorted(found.split(b"\n\n")))


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2, "seed": 3}], ids=["text", "logprobs", "several"])
def test_whole_answer_is_that_of_an_undisturbed_run(more, pair):
    check_same_bytes(CHAT, {**SHORT, "stream": False, **more}, pair)


def test_prompt_that_is_cut_otherwise_elsewhere_is_taken_as_it_was(pair):
    """A replica that made the former reply remembers its ids, which are not those of its text."""
    first, second = pair.answers
    odd = {"messages": STORY, "temperature": 10, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 30, "seed": 11}

    async def check() -> None:
        said = json.loads(bytes_of(await recorded(first, request(CHAT, odd))))["choices"][0]["message"]["content"]
        messages = [*STORY, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        asked = request(CHAT, {**SHORT, "messages": messages, "stream_options": {"include_usage": True}})
        parts = await recorded(first, asked)
        count = cuts(parts)[-2]
        found = await cut_after(parts, count, lambda resumption: second(asked, resumption))
        assert timeless(found) == timeless(bytes_of(parts))
        assert prompt_of(parts) != prompt_of(await recorded(second, asked)), "else it tests nothing"

    pair.run(check())


def test_drafts_change_no_byte_of_what_is_gone_on_with():
    def load(source: ModelSource) -> LLM:
        return load_demo(source, speculation="ngram")

    body = {**SHORT, "max_tokens": 30, "temperature": 0, "repetition_penalty": 1.0}
    with closing(Replicas(replica(load), replica())) as both:
        check_same_bytes(CHAT, body, both)


def test_text_whose_context_was_shifted_is_gone_on_with():
    def load(source: ModelSource) -> LLM:
        return load_demo(source, context_length=64)

    body = {**PLAIN, "max_tokens": 150, "context_shift": True, "ignore_eos": True}
    with closing(Replicas(replica(load), replica(load))) as both:
        check_same_bytes(COMPLETIONS, body, both)


def test_other_tokens_than_this_model_chooses_are_an_error_where_they_are_chosen_again(pair, caplog):
    asked = request(CHAT, {**SHORT, "logprobs": True})

    async def check() -> None:
        parts = await recorded(pair.answers[0], asked)
        progress = ReplyProgress()
        for part in parts:
            for note in part.notes:
                progress.take(note._replace(token_id=1) if isinstance(note, TokenNote) else note)
        wrong = replace(progress.resumption(), sent=frozenset())
        found = [part async for batch in pair.answers[1](asked, wrong) for part in batch]
        assert b'"error":' in bytes_of(found)

    pair.run(check())
    assert "continues differently here" in caplog.text


def test_answer_that_is_no_reply_is_given_again_or_breaks():
    start = {"type": "http.response.start", "status": 200, "headers": []}
    body = {"type": "http.response.body", "body": b"all"}
    num_calls = 0

    async def open_parts(parts: list[AnswerPart]) -> AsyncIterator[list[AnswerPart]]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            yield parts
            raise ReplicaLostError("it was killed")
        yield [AnswerPart((), start), AnswerPart((), body)]

    assert asyncio.run(relayed(lambda _: open_parts([]))) == (200, b"all")
    num_calls = 0
    with pytest.raises(BrokenAnswerError, match="no reply that another can resume"):
        asyncio.run(relayed(lambda _: open_parts([AnswerPart((), start)])))


def test_replicas_that_are_all_gone_are_an_error_in_words(monkeypatch):
    monkeypatch.setattr(relay, "_MOST_PAUSE_SECONDS", 0.001)

    async def open_parts() -> AsyncIterator[list[AnswerPart]]:
        raise ReplicaLostError("it was killed")
        yield []

    status, body = asyncio.run(relayed(lambda _: open_parts()))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "replicas_lost"


def test_client_that_leaves_ends_its_text(pair):
    """The iterator of an answer is closed when nobody wants it any more."""
    service = pair.services[0]
    asked = request(CHAT, {**SAID, "max_tokens": 400, "ignore_eos": True})

    async def leave() -> None:
        parts = pair.answers[0](asked, None)
        await anext(parts)
        assert service.replies()
        await parts.aclose()
        assert not service.replies()

    pair.run(leave())
