"""`/v1/chat/completions`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.api.chat_messages import template_messages
from localinfer.server.api.chat_wire import ChatRequest, MessageWriter, choice
from localinfer.server.api.routing import owner_of, service_of
from localinfer.server.replies.reply import End, Reply, Silence, TextPlan, Token
from localinfer.server.replies.sampling_fields import seeded
from localinfer.server.replies.service import Service, unless_gone
from localinfer.server.replies.usage import stream_usage, timings, usage
from localinfer.server.transport.errors import json_response, to_api_error
from localinfer.server.transport.event_stream import DONE, PING, EventStream, data_frame
from localinfer.server.transport.json_body import read_json

if TYPE_CHECKING:
    from localinfer.llm import LLM


async def chat_completions(request: Request) -> Response:
    """Answer a chat, streamed or whole."""
    service = service_of(request)
    body = await read_json(request, ChatRequest, service.settings)
    messages = template_messages(body.messages)
    options = {**body.generation_options(), "owner": owner_of(request)}
    plan = partial(_plan, messages=messages, options=options, count=body.n or 1)
    reply = await service.begin(request, body.model, "chatcmpl", plan)
    if body.stream:
        return EventStream(_frames(reply, body, service), reply.close)
    try:
        return json_response(await unless_gone(request, _completion(reply, body)))
    finally:
        reply.close()


def _plan(llm: "LLM", *, messages: Sequence[Mapping[str, Any]], options: dict[str, Any], count: int) -> list[TextPlan]:
    """One text per choice; the later ones find the prompt in the cache."""
    return [
        TextPlan(partial(llm.stream_chat, messages, **seeded(options, index)), 0 if index else None)
        for index in range(count)
    ]


async def _completion(reply: Reply, body: ChatRequest) -> dict[str, Any]:
    writers = [MessageWriter(body, reply.llm.tokenizer) for _ in range(reply.num_texts)]
    reasons = ["length"] * reply.num_texts
    async for event in reply.events():
        match event:
            case Token(index, token):
                for _ in writers[index].deltas(token):
                    pass
            case End(index, reason, _):
                reasons[index] = reason
    choices = [choice(index, writer, reasons[index]) for index, writer in enumerate(writers)]
    first = reply.stats[0]
    costs = {"usage": usage(reply), "timings": None if first is None else timings(first)}
    return {**_envelope(reply, "chat.completion"), "choices": choices, **costs}


async def _frames(reply: Reply, body: ChatRequest, service: Service) -> AsyncIterator[bytes]:
    """The stream: a role per choice at once, its text as it comes, its end, and at the end of all `[DONE]`."""
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    envelope = _envelope(reply, "chat.completion.chunk")
    silence = service.settings.ping_seconds
    if body.return_progress:
        silence = min(silence, service.settings.progress_seconds)
    used = stream_usage(reply, body.stream_options)
    writers = [MessageWriter(body, reply.llm.tokenizer) for _ in range(reply.num_texts)]

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return data_frame({**envelope, "choices": [choice], **used(), **more})

    for index in range(reply.num_texts):
        yield chunk(index, {"role": "assistant", "content": ""})
    try:
        async for event in reply.events(silence):
            match event:
                case Token(index, token):
                    for delta, logprobs in writers[index].deltas(token):
                        yield chunk(index, delta, logprobs=logprobs)
                case End(index, reason, stats):
                    yield chunk(index, {}, reason, **({} if stats is None else {"timings": timings(stats)}))
                case Silence() if body.return_progress and not reply.num_tokens:
                    progress = {**reply.progress(), "position": service.num_ahead(reply)}
                    yield chunk(0, {}, prompt_progress=progress)
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
