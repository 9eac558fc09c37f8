"""`/v1/responses`: the newer of OpenAI's two ways to ask; nothing is kept between requests."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.api.chat_messages import template_messages
from localinfer.server.api.responses_events import Event, ResponseWriter
from localinfer.server.api.responses_wire import ResponsesRequest, response_object, responses_usage
from localinfer.server.api.routing import owner_of, service_of
from localinfer.server.replies.deltas import pieces_of
from localinfer.server.replies.reply import End, Reply, Silence, TextPlan, Token
from localinfer.server.replies.service import unless_gone
from localinfer.server.replies.tool_fields import namespaced_names
from localinfer.server.replies.usage import timings, usage
from localinfer.server.transport.errors import json_response, to_api_error
from localinfer.server.transport.event_stream import PING, EventStream, named_frame
from localinfer.server.transport.json_body import read_json


async def responses(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    service = service_of(request)
    body = await read_json(request, ResponsesRequest, service.settings)
    body.check()
    messages = template_messages(body.messages())
    options = {**body.generation_options(), "owner": owner_of(request)}
    reply = await service.begin(
        request, body.model, "resp", lambda llm: [TextPlan(partial(llm.stream_chat, messages, **options))]
    )
    if body.stream:
        return EventStream(_frames(reply, body, service.settings.ping_seconds), reply.close)
    try:
        return json_response(await unless_gone(request, _response(reply, body)))
    finally:
        reply.close()


async def _response(reply: Reply, body: ResponsesRequest) -> dict[str, Any]:
    last: Event = {}
    async for event in _events(reply, body, None):
        last = event or last
    found: dict[str, Any] = last["response"]
    return found


async def _events(reply: Reply, body: ResponsesRequest, ping_seconds: float | None) -> AsyncIterator[Event | None]:
    """Every event in order, the whole response in the last one; None where the stream was silent."""
    writer = ResponseWriter(reply.id, namespaced_names(body.tools))
    begun = response_object(reply, body, "in_progress", [], None)
    yield writer.event("response.created", response=begun)
    yield writer.event("response.in_progress", response=begun)
    status = "completed"
    async for event in reply.events(ping_seconds):
        match event:
            case Token(_, token):
                for piece in pieces_of(token):
                    for made in writer.add(piece):
                        yield made
            case End(_, reason, _):
                status = "incomplete" if reason == "length" else "completed"
                for made in writer.finish(status):
                    yield made
            case Silence():
                yield None
    done = response_object(reply, body, status, writer.output, responses_usage(usage(reply)))
    if (stats := reply.stats[0]) is not None:
        done["timings"] = timings(stats)
    yield writer.event(f"response.{status}", response=done)


async def _frames(reply: Reply, body: ResponsesRequest, ping_seconds: float) -> AsyncIterator[bytes]:
    number = 0
    try:
        async for event in _events(reply, body, ping_seconds):
            if event is None:
                yield PING
                continue
            number = event["sequence_number"] + 1
            yield named_frame(event["type"], event)
    except Exception as error:
        told = to_api_error(error, reply.id)
        failed = {"type": "error", "sequence_number": number, "message": told.message, "param": told.param}
        yield named_frame("error", {**failed, "code": told.code, **told.body()})
