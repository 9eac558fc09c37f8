"""`/v1/responses`: the newer of OpenAI's two ways to ask, in which the server may keep what was said."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api import status
from localinfer.apps.server.api.responses_background import (
    BackgroundResponse,
    BackgroundResponses,
    first_frame,
    frames_after,
)
from localinfer.apps.server.api.responses_items import item_list, item_messages
from localinfer.apps.server.api.responses_memory import ResponseMemory, Turn, memory_of
from localinfer.apps.server.api.responses_request import ResponsesRequest
from localinfer.apps.server.api.responses_writer import ResponseWriter
from localinfer.apps.server.api.serving import chat_plan, serve_reply
from localinfer.apps.server.operation.request_record import record_of
from localinfer.apps.server.replies.fields import without_missing_thinking
from localinfer.apps.server.replies.isolation import may_see_reply, salt_options
from localinfer.apps.server.replies.message_fields import ChatMessage, template_messages
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.replies.service import caller_options, on_model, prepared, read_body, service_of
from localinfer.apps.server.transport.http import ApiError, EventStream, json_response, not_supported, unsupported

if TYPE_CHECKING:
    from localinfer.llm import LLM


async def responses(request: Request) -> Response:
    """Answer a conversation, streamed or whole, or begin to answer it in the background."""
    body = await read_body(request, ResponsesRequest)
    await prepared(request, body.check)
    memory = memory_of(request)
    turn = await _turn(request, memory, body)
    messages = await prepared(request, _messages, body, turn)
    options = {**await prepared(request, body.generation_options), **caller_options(request)}
    if body.background:
        # Nobody waits for its first token.
        options.pop("ttft_objective", None)

    def make_writer(reply: Reply) -> ResponseWriter:
        return ResponseWriter(reply, body, turn, partial(memory.keep, turn), memory.store.flush)

    plan = chat_plan(messages, options)
    if not body.background:
        return await serve_reply(request, body, "resp", plan, make_writer)
    if not turn.is_kept:
        raise unsupported(
            "background is given, but this server keeps no responses (--no-store); stream it",
            "background",
        )
    service = service_of(request)
    reply = await service.begin(request, body.model, "resp", plan)
    keep_frames = partial(memory.keep_events, reply.id) if body.stream else None
    response = BackgroundResponse(make_writer(reply), service.settings.ping_seconds, keep_frames)
    _background(request).start(response)
    return response.stream() if body.stream else json_response(response.writer.response())


async def compact(request: Request) -> Response:
    """Refuse: nothing is shortened here."""
    raise not_supported("conversations are not compacted here; send as input what the model is to read")


async def response(request: Request) -> Response:
    """A response that is kept or is being made, as it is now, or as the stream of its events."""
    response_id, query = request.path_params["response"], request.query_params
    running = _running(request, response_id)
    memory = memory_of(request)
    if query.get("stream", "false").lower() not in ("true", "1"):
        if running is not None:
            return json_response(running.writer.response())
        return json_response((await asyncio.to_thread(memory.response, response_id)).response)
    begin = first_frame(query.get("starting_after"))
    if running is not None and running.is_streamed:
        return running.stream(begin)
    if running is None:
        await asyncio.to_thread(memory.response, response_id)
        stored = await asyncio.to_thread(memory.events, response_id)
        if stored is not None:
            return EventStream(_frames(frames_after(stored, begin)), lambda: None)
    raise unsupported(
        f"the events of {response_id:.80} are not kept, as it was not asked for with background and stream; "
        "ask without stream",
        "stream",
    )


async def delete_response(request: Request) -> Response:
    """Forget a response; one that is being made is stopped first."""
    response_id = request.path_params["response"]
    if _running(request, response_id) is not None:
        await _background(request).cancel(response_id)
    memory = memory_of(request)
    await asyncio.to_thread(memory.lastingly, memory.delete, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Stop a response that is made in the background; one that has ended is returned as it is."""
    response_id = request.path_params["reply"]
    if _running(request, response_id) is not None:
        cancelled = await _background(request).cancel(response_id)
        if cancelled is not None:
            return json_response(cancelled)
    if may_see_reply(record_of(request.scope).tenant, service_of(request).reply(response_id)):
        return await status.cancel(request)
    kept = await asyncio.to_thread(memory_of(request).response, response_id)
    if not kept.response["background"]:
        raise ApiError(
            400, f"{response_id} has ended, and was not made in the background; there is nothing to cancel", param="id"
        )
    return json_response(kept.response)


async def input_items(request: Request) -> Response:
    """What the model was given for a response."""
    response_id = request.path_params["response"]
    running = _running(request, response_id)
    if running is not None:
        return json_response(item_list(running.writer.given_items(), request.query_params))
    items = await asyncio.to_thread(memory_of(request).input_of, response_id)
    return json_response(item_list(items, request.query_params))


async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response has, to be known before it is asked for."""
    body = await read_body(request, ResponsesRequest)
    await prepared(request, body.check)
    turn = await _turn(request, memory_of(request), body)
    messages = await prepared(request, _messages, body, turn)
    count_tokens = partial(_count, salted=salt_options(request))
    count = await on_model(request, body.model, count_tokens, (messages, body.prompt_options()))
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def _count(llm: "LLM", prompt: tuple[list[dict[str, Any]], dict[str, Any]], *, salted: Mapping[str, Any]) -> int:
    messages, options = prompt
    options.pop("constraint", None)
    return llm.count_chat_tokens(messages, **salted, **without_missing_thinking(llm, options))


async def _turn(request: Request, memory: ResponseMemory, body: ResponsesRequest) -> Turn:
    """What a request continues and adds; looked up in a thread where the disk may be needed."""
    if body.previous_response_id or body.conversation_id or any(item.kind == "item_reference" for item in body.items):
        return await asyncio.to_thread(memory.turn, body)
    return await prepared(request, memory.turn, body)


def _messages(body: ResponsesRequest, turn: Turn) -> list[dict[str, Any]]:
    """The messages that the model is given, instructions first. Raises: ApiError."""
    instructions = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    messages = [*instructions, *item_messages(turn.items(), turn.place)]
    if not messages:
        raise ApiError(400, "there is no message to answer; send some input", param="input")
    return template_messages(messages)


def _background(request: Request) -> BackgroundResponses:
    return cast(BackgroundResponses, request.app.state.background)


def _running(request: Request, response_id: str) -> BackgroundResponse | None:
    """A response that is being made in the background, if this client may see it."""
    found = _background(request).get(response_id)
    return None if found is None or not may_see_reply(record_of(request.scope).tenant, found.writer.reply) else found


async def _frames(stored: list[bytes]) -> AsyncIterator[bytes]:
    for frame in stored:
        yield frame
