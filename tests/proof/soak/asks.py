"""Requests whose replies are determined, in every API of the server, and what of a reply is compared."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from tests.proof.soak.cold_answers import QUESTIONS, SENTENCES

_LONG_SENTENCES = 45
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}}


class Reply(NamedTuple):
    """What came of a request. text: all that its seed determines. id: by which it can be continued, if it can."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    id: str = ""


@dataclass(frozen=True)
class Ask:
    """A request of one API. then: what continues it, given its id. streams: whether it may be asked for as a stream."""

    kind: str
    path: str
    body: dict[str, Any]
    then: "Ask | None" = None
    streams: bool = True
    key: str = field(default="", compare=False)

    def encoded(self, *, streamed: bool, previous: str | None = None) -> bytes:
        """The body as it is sent."""
        body = dict(self.body)
        if self.streams or self.kind.startswith("ollama"):
            body["stream"] = streamed
        if streamed and self.kind in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
        if previous is not None:
            body["previous_response_id"] = previous
        return json.dumps(body).encode()

    def read(self, content: bytes, *, streamed: bool) -> Reply:
        """The reply in the body of an answer. Raises: ValueError, KeyError and the like if it is none."""
        if not streamed:
            return _WHOLE[self.kind](json.loads(content))
        return _STREAMED[self.kind](list(_events(content)))


def draw_asks(random: Random, models: Sequence[str]) -> list[Ask]:
    """Some requests of every kind for each model."""
    return [ask for model in models for ask in _of_model(random, model)]


def _of_model(random: Random, model: str) -> Iterator[Ask]:
    system = {"role": "system", "content": " ".join(random.choices(SENTENCES, k=8))}

    def tokens() -> int:
        return random.randint(3, 48)

    def messages(*, with_system: bool = True) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"{random.choice(SENTENCES)} {random.choice(QUESTIONS)}"}
        return [system, question] if with_system else [question]

    def chat(**options: Any) -> Ask:
        body = {"model": model, "messages": messages(), "max_tokens": tokens(), **options}
        return Ask("chat", "/v1/chat/completions", body)

    def drawn() -> dict[str, Any]:
        return {"temperature": 0.9, "seed": random.randrange(1000)}

    for _ in range(3):
        yield chat(temperature=0)
        yield chat(**drawn())
    long = {"role": "user", "content": " ".join(random.choices(SENTENCES, k=_LONG_SENTENCES))}
    yield chat(temperature=0, messages=[system, long])
    yield chat(**drawn(), response_format={"type": "regex", "pattern": "(red|blue) [a-z]{2,9}"})
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    yield chat(**drawn(), response_format=form, max_tokens=60)
    yield chat(**drawn(), tools=[_TOOL], tool_choice="required", max_tokens=60)
    for options in ({"temperature": 0}, drawn()):
        prompt = " ".join(random.choices(SENTENCES, k=random.randint(1, 9)))
        body = {"model": model, "prompt": prompt, "max_tokens": tokens(), **options}
        yield Ask("completions", "/v1/completions", body)
    body = {"model": model, "messages": messages(with_system=False), "max_tokens": tokens(), "temperature": 0}
    yield Ask("messages", "/v1/messages", body)
    body = {"model": model, "input": random.choice(QUESTIONS), "max_output_tokens": tokens(), "temperature": 0}
    later = Ask("responses", "/v1/responses", {**body, "input": random.choice(QUESTIONS)})
    yield Ask("responses", "/v1/responses", body, then=later)
    for options in ({"temperature": 0}, drawn()):
        body = {"model": model, "options": {"num_predict": tokens(), **options}}
        yield Ask("ollama chat", "/api/chat", {**body, "messages": messages()})
        yield Ask("ollama generate", "/api/generate", {**body, "prompt": random.choice(QUESTIONS)})
    body = {"model": model, "messages": messages(), "options": {"num_predict": 4, "temperature": 0}, "keep_alive": 0}
    yield Ask("ollama chat", "/api/chat", body)
    yield Ask("embeddings", "/v1/embeddings", {"model": model, "input": random.sample(SENTENCES, 2)}, streams=False)


def _events(content: bytes) -> Iterator[dict[str, Any]]:
    """Server-sent events with JSON, or lines of JSON, with white space before those that took long to come."""
    for line in content.decode().split("\n"):
        line = line.strip().removeprefix("data: ")
        if line.startswith("{"):
            yield json.loads(line)


def _openai_usage(usage: dict[str, int]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage.get("completion_tokens", 0)


def _calls(calls: Sequence[dict[str, Any]]) -> str:
    return json.dumps([[call["function"]["name"], call["function"]["arguments"]] for call in calls])


def _chat(answer: dict[str, Any]) -> Reply:
    choice = answer["choices"][0]
    message = choice["message"]
    text = f"{message['content'] or ''}{_calls(message.get('tool_calls') or [])}{choice['finish_reason']}"
    return Reply(text, *_openai_usage(answer["usage"]))


def _chat_stream(events: list[dict[str, Any]]) -> Reply:
    text, reason = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for part in choice["delta"].get("tool_calls") or []:
            call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})["function"]
            for name in call:
                call[name] += part["function"].get(name) or ""
    return Reply(f"{text}{_calls(list(calls.values()))}{reason}", *_openai_usage(events[-1]["usage"]))


def _completions(answer: dict[str, Any]) -> Reply:
    choice = answer["choices"][0]
    return Reply(f"{choice['text']}{choice['finish_reason']}", *_openai_usage(answer["usage"]))


def _completions_stream(events: list[dict[str, Any]]) -> Reply:
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return Reply(f"{text}{choices[-1]['finish_reason']}", *_openai_usage(events[-1]["usage"]))


def _messages_usage(usage: dict[str, int]) -> tuple[int, int]:
    read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    return read, usage["output_tokens"]


def _messages(answer: dict[str, Any]) -> Reply:
    text = "".join(block["text"] for block in answer["content"])
    return Reply(f"{text}{answer['stop_reason']}", *_messages_usage(answer["usage"]))


def _messages_stream(events: list[dict[str, Any]]) -> Reply:
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    last = next(event for event in events if event["type"] == "message_delta")
    return Reply(f"{text}{last['delta']['stop_reason']}", *_messages_usage(last["usage"]))


def _responses(answer: dict[str, Any]) -> Reply:
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    usage = answer["usage"]
    return Reply(f"{text}{answer['status']}", usage["input_tokens"], usage["output_tokens"], answer["id"])


def _responses_stream(events: list[dict[str, Any]]) -> Reply:
    whole = _responses(events[-1]["response"])
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return whole if whole.text.startswith(deltas) else whole._replace(text=f"deltas: {deltas}, whole: {whole.text}")


def _ollama(events: list[dict[str, Any]]) -> Reply:
    text = "".join(event["message"]["content"] if "message" in event else event["response"] for event in events)
    last = events[-1]
    return Reply(f"{text}{last['done_reason']}", last["prompt_eval_count"], last["eval_count"])


def _embeddings(answer: dict[str, Any]) -> Reply:
    return Reply(json.dumps([one["embedding"] for one in answer["data"]]))


_WHOLE: dict[str, Callable[[dict[str, Any]], Reply]] = {
    "chat": _chat,
    "completions": _completions,
    "messages": _messages,
    "responses": _responses,
    "ollama chat": lambda answer: _ollama([answer]),
    "ollama generate": lambda answer: _ollama([answer]),
    "embeddings": _embeddings,
}
_STREAMED: dict[str, Callable[[list[dict[str, Any]]], Reply]] = {
    "chat": _chat_stream,
    "completions": _completions_stream,
    "messages": _messages_stream,
    "responses": _responses_stream,
    "ollama chat": _ollama,
    "ollama generate": _ollama,
}
