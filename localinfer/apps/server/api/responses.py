"""`/v1/responses` and `/v1/conversations`: handlers, and responses that are made in the background."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api import status
from localinfer.apps.server.api.responses_items import (
    InputItem,
    Item,
    ResponsesRequest,
    ResponseWriter,
    item_list,
    item_messages,
)
from localinfer.apps.server.api.responses_memory import KeptConversation, ResponseMemory, Turn, memory_of
from localinfer.apps.server.api.serving import chat_plan, reply_frames, serve_reply
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.clients import may_see_reply, salt_options
from localinfer.apps.server.replies.fields import without_missing_thinking
from localinfer.apps.server.replies.message_fields import ChatMessage, template_messages
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.replies.service import caller_options, on_model, prepared, read_body, service_of
from localinfer.apps.server.transport.http import PING, ApiError, EventStream, json_response, not_supported, unsupported
from localinfer.apps.server.transport.known_fields import KnownFields

if TYPE_CHECKING:
    from localinfer.llm import LLM


_FRAME_END = b"\n\n"


class BackgroundResponse:
    """A response that is made by a task of its own. Lives on the event loop.

    frames: its events so far, as they are streamed. keep_frames: is given all of them at the end; None if they may not
    be asked for.
    """

    def __init__(
        self, writer: ResponseWriter, ping_seconds: float, keep_frames: Callable[[bytes], None] | None
    ) -> None:
        self.writer = writer
        self.is_streamed = keep_frames is not None
        self.frames: list[bytes] = []
        self.has_ended = False
        self.ping_seconds = ping_seconds
        self._keep_frames = keep_frames
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Make the response, to its end."""
        try:
            async for frame in reply_frames(self.writer, self.ping_seconds):
                if frame != PING:
                    self.frames.append(frame)
                    self.tell()
        finally:
            self.writer.reply.close()
            if self._keep_frames is not None:
                self._keep_frames(b"".join(self.frames))
            self.has_ended = True
            self.tell()

    async def wait(self) -> None:
        """Return when there is more, or a while later. Raises: TimeoutError."""
        await asyncio.wait_for(self._changed.wait(), self.ping_seconds)

    def tell(self) -> None:
        """Wake all waiting tasks."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def stream(self, begin: int = 0) -> EventStream:
        """Its frames from one on, as they come; ends with it, or when the client leaves."""
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            self.tell()

        async def frames() -> AsyncIterator[bytes]:
            next_frame = begin
            while not has_left:
                while next_frame < len(self.frames):
                    yield self.frames[next_frame]
                    next_frame += 1
                if self.has_ended:
                    return
                try:
                    await self.wait()
                except TimeoutError:
                    yield PING

        return EventStream(frames(), leave)


class BackgroundResponses:
    """The responses of a server that are made in the background now, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[BackgroundResponse, asyncio.Task[None]]] = {}

    def start(self, response: BackgroundResponse) -> None:
        """Begin to make a response."""
        response_id = response.writer.reply.id
        task = asyncio.create_task(response.run())
        self._running[response_id] = response, task
        task.add_done_callback(lambda _: self._running.pop(response_id, None))

    def get(self, response_id: str) -> BackgroundResponse | None:
        """A response that is being made."""
        found = self._running.get(response_id)
        return None if found is None else found[0]

    async def cancel(self, response_id: str) -> dict[str, Any] | None:
        """Stop a response, and return it as it ended; None if none of this id is being made."""
        found = self._running.get(response_id)
        if found is None:
            return None
        response, task = found
        response.writer.reply.cancel()
        await asyncio.shield(task)
        return response.writer.response()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Wait at the end for what still runs; the end of the server stops it."""
        yield
        tasks = [task for _, task in self._running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)


def frames_after(stored: bytes, begin: int) -> list[bytes]:
    """The frames of a stored stream from one on."""
    return [frame + _FRAME_END for frame in stored.split(_FRAME_END)[:-1]][begin:]


def first_frame(starting_after: str | None) -> int:
    """The index of the frame after a sequence number, which are those of the frames. Raises: ApiError."""
    if starting_after is None:
        return 0
    if not (starting_after.isascii() and starting_after.isdecimal()):
        raise ApiError(
            400, f"starting_after is {starting_after!r:.40}; give the number of an event", param="starting_after"
        )
    return int(starting_after[:9]) + 1


_MOST_ADDED = 20
_NO_OTHERS = KnownFields({"include": "items are always given whole"}, {})

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
AddedItems = Annotated[list[InputItem], Meta(max_length=_MOST_ADDED)]


class ConversationRequest(msgspec.Struct):
    """A new conversation, or what is changed of one."""

    known_fields: ClassVar = _NO_OTHERS

    items: AddedItems | None = None
    metadata: Metadata | None = None


class ItemsRequest(msgspec.Struct):
    """Items for a conversation."""

    known_fields: ClassVar = _NO_OTHERS

    items: Annotated[AddedItems, Meta(min_length=1)]


async def create_conversation(request: Request) -> Response:
    """Begin a conversation."""
    body = await read_body(request, ConversationRequest)
    memory, items = memory_of(request), _checked(body.items or [])
    made = await asyncio.to_thread(memory.lastingly, memory.begin_conversation, items, body.metadata)
    return json_response(made.shown())


async def conversation(request: Request) -> Response:
    """A conversation, without its items."""
    found = await asyncio.to_thread(memory_of(request).conversation, request.path_params["conversation"])
    return json_response(found.shown())


async def update_conversation(request: Request) -> Response:
    """Replace what a client has noted of a conversation."""
    body = await read_body(request, ConversationRequest)
    if body.items is not None:
        raise ApiError(400, "items are given; add them at the conversation's path with /items", param="items")

    def change(kept: KeptConversation) -> None:
        kept.metadata = dict(body.metadata or {})

    memory = memory_of(request)
    changed = await asyncio.to_thread(memory.lastingly, memory.change, request.path_params["conversation"], change)
    return json_response(changed.shown())


async def delete_conversation(request: Request) -> Response:
    """Forget a conversation; responses that were made in it are kept."""
    conversation_id = request.path_params["conversation"]
    memory = memory_of(request)
    await asyncio.to_thread(memory.lastingly, memory.delete_conversation, conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def conversation_items(request: Request) -> Response:
    """A page of the items of a conversation."""
    found = await asyncio.to_thread(memory_of(request).conversation, request.path_params["conversation"])
    return json_response(item_list(found.decoded(), request.query_params))


async def add_items(request: Request) -> Response:
    """Add items to the end of a conversation."""
    body = await read_body(request, ItemsRequest)
    memory, items = memory_of(request), _checked(body.items)
    added = await asyncio.to_thread(memory.lastingly, memory.add_items, request.path_params["conversation"], items)
    return json_response(item_list(added, {"order": "asc", "limit": str(_MOST_ADDED)}))


async def conversation_item(request: Request) -> Response:
    """One item of a conversation."""
    found = await asyncio.to_thread(memory_of(request).conversation, request.path_params["conversation"])
    items = found.decoded()
    return json_response(items[_index_of(items, request.path_params["item"])])


async def delete_item(request: Request) -> Response:
    """Take one item out of a conversation."""

    def change(kept: KeptConversation) -> None:
        del kept.items[_index_of(kept.decoded(), request.path_params["item"])]
        # What was computed of the last response is of a longer conversation.
        kept.last = None

    memory = memory_of(request)
    changed = await asyncio.to_thread(memory.lastingly, memory.change, request.path_params["conversation"], change)
    return json_response(changed.shown())


def _index_of(items: list[Item], item_id: str) -> int:
    index = next((index for index, item in enumerate(items) if item["id"] == item_id), None)
    if index is None:
        raise ApiError(404, f"the conversation has no item {item_id!r:.80}", code="item_not_found", param="item_id")
    return index


def _checked(items: list[InputItem]) -> list[InputItem]:
    """The items, if a response could continue them. Raises: ApiError."""
    item_messages(items, lambda index: f"items[{index}]")
    return items


async def responses(request: Request) -> Response:
    """Answer a conversation, streamed or whole, or begin to answer it in the background."""
    body = await read_body(request, ResponsesRequest)
    await prepared(request, body.check)
    memory = memory_of(request)
    turn = await _turn(request, memory, body)
    messages = await prepared(request, _messages, body, turn)
    options = {**await prepared(request, body.generation_options), **caller_options(request)}
    if body.background:
        # No client waits for its first token.
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
    """Input of the model for a response."""
    response_id = request.path_params["response"]
    running = _running(request, response_id)
    if running is not None:
        return json_response(item_list(running.writer.given_items(), request.query_params))
    items = await asyncio.to_thread(memory_of(request).input_of, response_id)
    return json_response(item_list(items, request.query_params))


async def input_tokens(request: Request) -> Response:
    """Count the tokens of a response's prompt, before it is asked for."""
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
    """Find the turn that a request continues and adds to; looked up in a thread where the disk may be needed."""
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
