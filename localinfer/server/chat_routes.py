"""`/v1/chat/completions`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.chat_messages import Messages, template_messages
from localinfer.server.constraint_fields import ConstraintFields
from localinfer.server.event_stream import DONE, PING, EventStream, data_frame
from localinfer.server.json_body import read_json
from localinfer.server.reply import End, Reply, Silence, TextPlan, Token
from localinfer.server.routing import service_of
from localinfer.server.sampling_fields import Count, Prediction, StreamOptions, TextCount, seeded
from localinfer.server.service import unless_gone
from localinfer.server.usage import timings, usage
from localinfer.server.wire_errors import json_response, to_api_error

if TYPE_CHECKING:
    from localinfer.llm import LLM


class ChatRequest(ConstraintFields, kw_only=True):
    """The members of a chat completion request that are read; all others are ignored."""

    messages: Messages
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: TextCount | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    prediction: Prediction | None = None

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request."""
        options = self.options()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is not None:
            options["max_tokens"] = limit
        if self.prediction is not None:
            options["prediction"] = self.prediction.text()
        constraint = self.constraint()
        if constraint is not None:
            options["constraint"] = constraint
        return options


async def chat_completions(request: Request) -> Response:
    """Answer a chat, streamed or whole."""
    service = service_of(request)
    body = await read_json(request, ChatRequest, service.settings)
    messages = template_messages(body.messages)
    reply = await service.begin(request, body.model, "chatcmpl", lambda llm: plan_chat(llm, messages, body))
    if body.stream:
        return EventStream(_frames(reply, body, service.settings.ping_seconds), reply.close)
    try:
        return json_response(await unless_gone(request, _completion(reply)))
    finally:
        reply.close()


def plan_chat(llm: "LLM", messages: Sequence[Mapping[str, Any]], body: ChatRequest) -> list[TextPlan]:
    """One text per choice; the later ones find the prompt in the cache."""
    options = body.generation_options()
    return [
        TextPlan(partial(llm.stream_chat, messages, **seeded(options, index)), 0 if index else None)
        for index in range(body.n or 1)
    ]


async def _completion(reply: Reply) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(reply.num_texts)]
    reasons = ["length"] * reply.num_texts
    async for event in reply.events():
        match event:
            case Token(index, token):
                texts[index].append(token.text)
            case End(index, reason, _):
                reasons[index] = reason
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
            "logprobs": None,
            "finish_reason": reasons[index],
        }
        for index in range(reply.num_texts)
    ]
    first = reply.stats[0]
    costs = {"usage": usage(reply), "timings": None if first is None else timings(first)}
    return {**_envelope(reply, "chat.completion"), "choices": choices, **costs}


async def _frames(reply: Reply, body: ChatRequest, ping_seconds: float) -> AsyncIterator[bytes]:
    """The stream: a role per choice at once, its text as it comes, its end, and at the end of all `[DONE]`."""
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    envelope = _envelope(reply, "chat.completion.chunk")
    nothing = {"usage": None} if has_usage else {}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return data_frame({**envelope, "choices": [choice], **nothing, **more})

    for index in range(reply.num_texts):
        yield chunk(index, {"role": "assistant", "content": ""})
    try:
        async for event in reply.events(ping_seconds):
            match event:
                case Token(index, token):
                    if token.text:
                        yield chunk(index, {"content": token.text})
                case End(index, reason, stats):
                    yield chunk(index, {}, reason, **({} if stats is None else {"timings": timings(stats)}))
                case Silence():
                    yield PING
        if has_usage:
            yield data_frame({**envelope, "choices": [], "usage": usage(reply)})
    except Exception as error:
        yield data_frame(to_api_error(error, reply.id).body())
    yield DONE


def _envelope(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model_id,
        "system_fingerprint": reply.fingerprint,
    }
