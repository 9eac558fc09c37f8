"""`/v1/messages`: Anthropic's way to ask."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.api.chat_messages import template_messages
from localinfer.server.api.messages_wire import CountRequest, MessagesRequest
from localinfer.server.api.routing import owner_of, service_of
from localinfer.server.replies.deltas import Delta, pieces_of
from localinfer.server.replies.reply import End, Reply, Silence, TextPlan, Token
from localinfer.server.replies.service import unless_gone
from localinfer.server.replies.usage import timings
from localinfer.server.transport.errors import json_response, to_api_error
from localinfer.server.transport.event_stream import PING, EventStream, named_frame
from localinfer.server.transport.json_body import read_json

if TYPE_CHECKING:
    from localinfer.stream import Stats

Event = dict[str, Any]
_BLOCKS = {"text": ("text", "text"), "reasoning": ("thinking", "thinking"), "call": ("input_json", "partial_json")}
"""Kind of piece -> what its delta is called, and the member of the delta that holds it."""


async def messages(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    service = service_of(request)
    body = await read_json(request, MessagesRequest, service.settings)
    asked = template_messages(body.chat_messages())
    options = {**body.generation_options(), "owner": owner_of(request)}
    reply = await service.begin(
        request, body.model, "msg", lambda llm: [TextPlan(partial(llm.stream_chat, asked, **options))]
    )
    if body.stream:
        return EventStream(_frames(reply, service.settings.ping_seconds), reply.close)
    try:
        return json_response(await unless_gone(request, _message(reply)))
    finally:
        reply.close()


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    service = service_of(request)
    body = await read_json(request, CountRequest, service.settings)
    lease = await service.lease(request, body.model)
    try:
        count = partial(lease.llm.count_chat_tokens, template_messages(body.chat_messages()), **body.chat_options())
        return json_response({"input_tokens": await asyncio.to_thread(count)})
    finally:
        lease.release()


class _Blocks:
    """The blocks of a message, one open at a time."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._kind: tuple[str, int] | None = None
        self._texts: list[str] = []

    def add(self, piece: Delta) -> list[Event]:
        """The events that a piece makes."""
        events: list[Event] = []
        kind = (piece.kind, piece.call)
        if kind != self._kind:
            events += self.finish()
            self._kind = kind
            self.content.append(_empty_block(piece))
            events.append({**self._at("content_block_start"), "content_block": dict(self.content[-1])})
        if piece.text:
            self._texts.append(piece.text)
            name, member = _BLOCKS[piece.kind]
            delta = {"type": f"{name}_delta", member: piece.text}
            events.append({**self._at("content_block_delta"), "delta": delta})
        return events

    def finish(self) -> list[Event]:
        """Close the block that is open, if one is."""
        if self._kind is None:
            return []
        block, text = self.content[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _whole_object(text)
        else:
            block[block["type"]] = text
        self._kind, self._texts = None, []
        return [self._at("content_block_stop")]

    def _at(self, kind: str) -> Event:
        return {"type": kind, "index": len(self.content) - 1}


def _whole_object(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut short, none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _empty_block(piece: Delta) -> dict[str, Any]:
    match piece.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}


async def _message(reply: Reply) -> dict[str, Any]:
    blocks, ending = _Blocks(), _ending("length", None)
    async for event in reply.events():
        match event:
            case Token(_, token):
                for piece in pieces_of(token):
                    blocks.add(piece)
            case End(_, reason, stats):
                blocks.finish()
                ending = _ending(reason, stats)
    made = {**_envelope(reply), "content": blocks.content, **ending["delta"], "usage": ending["usage"]}
    return made if reply.stats[0] is None else {**made, "timings": timings(reply.stats[0])}


async def _frames(reply: Reply, ping_seconds: float) -> AsyncIterator[bytes]:
    blocks = _Blocks()
    usage = {"input_tokens": reply.prompt_tokens[0], "output_tokens": 0}
    begun = {**_envelope(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _frame({"type": "message_start", "message": begun})
    try:
        async for event in reply.events(ping_seconds):
            match event:
                case Token(_, token):
                    for piece in pieces_of(token):
                        for made in blocks.add(piece):
                            yield _frame(made)
                case End(_, reason, stats):
                    for made in blocks.finish():
                        yield _frame(made)
                    ending = _ending(reason, stats)
                    told = {} if stats is None else {"timings": timings(stats)}
                    yield _frame({"type": "message_delta", **ending, **told})
                case Silence():
                    yield PING
        yield _frame({"type": "message_stop"})
    except Exception as error:
        yield _frame({"type": "error", **to_api_error(error, reply.id).body()})


def _frame(event: Event) -> bytes:
    return named_frame(event["type"], event)


def _envelope(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model_id}


def _ending(reason: str, stats: "Stats | None") -> dict[str, Any]:
    stop_sequence = None if stats is None else stats.stop_text
    stop = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
    stop = "stop_sequence" if stop_sequence is not None else stop
    usage = {"input_tokens": 0, "output_tokens": 0}
    if stats is not None:
        usage = {
            # What came from the cache is told apart from the rest on this route.
            "input_tokens": stats.prompt_tokens - stats.cached_tokens,
            "cache_read_input_tokens": stats.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.completion_tokens,
        }
    return {"delta": {"stop_reason": stop, "stop_sequence": stop_sequence}, "usage": usage}
