"""From a request for text to its answer, streamed or whole: the one shape that the handlers of all APIs share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.writer import Event, ReplyWriter
from localinfer.apps.server.replies.fields import seeded, without_missing_thinking
from localinfer.apps.server.replies.reply import End, Reply, Silence, TextPlan, Token
from localinfer.apps.server.replies.resumption import RELAY, ReplyRelay
from localinfer.apps.server.replies.service import Plan, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import json_response, to_api_error

if TYPE_CHECKING:
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM


async def serve_reply(
    request: Request,
    body: Any,
    kind: str,
    plan: Plan,
    make_writer: Callable[[Reply], ReplyWriter],
    *,
    session: str | None = None,
    ping_seconds: float | None = None,
) -> Response:
    """Generate what a request asks for and answer it, streamed or whole.

    body: the request's record, with its members `model` and `stream`. kind, plan, session: of `Service.begin`.
    ping_seconds: between signs of life in a stream, if not the server's.
    """
    service = service_of(request)
    id_slot = getattr(body, "id_slot", None)
    relay: ReplyRelay | None = request.scope.get("state", {}).get(RELAY)
    reply = await service.begin(request, body.model, kind, plan, session=session, id_slot=id_slot, relay=relay)
    try:
        writer = make_writer(reply)
        if writer.prepare is not None:
            await unless_gone(request.receive, asyncio.to_thread(writer.prepare))
        if not body.stream:
            return json_response(await unless_gone(request.receive, _whole(writer)))
    except BaseException:
        reply.close()
        raise
    finally:
        if not body.stream:
            reply.close()
    return writer.stream(reply_frames(writer, ping_seconds or service.settings.ping_seconds), reply.close)


async def _whole(writer: ReplyWriter) -> Any:
    reply = writer.reply
    async for event in reply.events():
        for _ in _written(writer, event):
            pass
        if reply.relay is not None:
            _relayed(reply, reply.relay, event, None)
    whole = writer.whole()
    await writer.settle()
    return whole


async def reply_frames(writer: ReplyWriter, ping_seconds: float) -> AsyncIterator[bytes]:
    """A reply as a stream: frames of events, and pings while nothing comes."""
    reply = writer.reply
    if reply.relay is not None:
        async for relayed in _relayed_frames(writer, reply.relay, ping_seconds):
            yield relayed
        return
    for event in writer.begin():
        yield writer.frame(event)
    try:
        async for item in reply.events(ping_seconds):
            for frame in _frames(writer, item):
                yield frame
        last = list(writer.finish())
        await writer.settle()
        for event in last:
            yield writer.frame(event)
    except Exception as error:
        for event in writer.failures(to_api_error(error, reply.id)):
            yield writer.frame(event)
    if writer.last_frame:
        yield writer.last_frame


async def _relayed_frames(writer: ReplyWriter, relay: ReplyRelay, ping_seconds: float) -> AsyncIterator[bytes]:
    """As `reply_frames`, in pieces of which each is sent whole or not at all, without those that were sent before."""
    reply = writer.reply
    if begun := relay.sent("begin", 0, [writer.frame(event) for event in writer.begin()]):
        yield begun
    try:
        async for item in reply.events(ping_seconds):
            if made := _relayed(reply, relay, item, list(_frames(writer, item))):
                yield made
        last = [writer.frame(event) for event in writer.finish()]
        await writer.settle()
    except Exception as error:
        last = [writer.frame(event) for event in writer.failures(to_api_error(error, reply.id))]
    if tail := relay.sent("tail", 0, [*last, writer.last_frame]):
        yield tail


def _frames(writer: ReplyWriter, item: Token | End | Silence) -> Iterator[bytes]:
    for made in _written(writer, item):
        yield writer.stream.ping if made is None else writer.frame(made)


def _relayed(reply: Reply, relay: ReplyRelay, item: Token | End | Silence, frames: list[bytes] | None) -> bytes:
    """What is to be sent of the frames of an event; frames: None for an answer that is sent as a whole."""
    if isinstance(item, Token) and item.event.token_id >= 0:
        stats = reply.stats_so_far(item.index)
        return relay.token(item.index, item.event.token_id, None if stats is None else stats.cached_tokens, frames)
    if isinstance(item, End) and frames is not None:
        return relay.sent("end", item.index, frames)
    return b"".join(frames or ())


def _written(writer: ReplyWriter, item: Token | End | Silence) -> Iterable[Event | None]:
    if isinstance(item, Token):
        return writer.add(item.index, item.event)
    if isinstance(item, End):
        return writer.end(item.index, item.finish_reason, item.stats)
    return writer.silence()


def chat_plan(messages: Sequence[Mapping[str, Any]], options: dict[str, Any], count: int = 1) -> Plan:
    """One answer to a chat per choice; the later ones find the prompt in the cache."""

    def open_stream(llm: "LLM", index: int) -> "TextStream":
        return llm.stream_chat(messages, **seeded(without_missing_thinking(llm, options), index, llm.defaults))

    def plan(llm: "LLM") -> list[TextPlan]:
        return [TextPlan(partial(open_stream, llm, index), 0 if index else None) for index in range(count)]

    return plan
