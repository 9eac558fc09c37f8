"""`/v1/responses` and `/v1/conversations`: handlers, responses that are made in the background, and memory of both."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeVar, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api import status
from localinfer.apps.server.api.compaction import (
    CompactedWriter,
    CompactionWriter,
    Compactor,
    is_triggered,
    summary_request,
)
from localinfer.apps.server.api.responses_items import (
    MOST_ITEMS,
    CompactedSummary,
    InputItem,
    Item,
    ResponsesRequest,
    ResponseWriter,
    item_list,
    item_messages,
    kept_items,
    response_of,
)
from localinfer.apps.server.api.serving import chat_plan, reply_frames, serve_reply
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.clients import digest_of, may_see_reply, salt_options
from localinfer.apps.server.replies.compacted_chats import compacted_heads
from localinfer.apps.server.replies.fields import without_missing_thinking
from localinfer.apps.server.replies.message_fields import ChatMessage, template_messages
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.replies.service import caller_options, on_model, prepared, read_body, service_of
from localinfer.apps.server.transport.http import (
    PING,
    ApiError,
    EventStream,
    identifier,
    json_response,
    unsupported,
)
from localinfer.apps.server.transport.known_fields import KnownFields
from localinfer.generation.compaction import SUMMARY_REQUEST
from localinfer.storage.response_store import ResponseStore

if TYPE_CHECKING:
    from localinfer.llm import LLM


Kept = TypeVar("Kept", bound=msgspec.Struct)
Made = TypeVar("Made")

_NOT_KEPT = "this server was started to keep no responses (--no-store)"


class KeptResponse(msgspec.Struct):
    """A response as it was answered. input: what was new. parent: the response before it, whose items go before."""

    response: dict[str, Any]
    input: list[Item]
    parent: str | None = None


class KeptConversation(msgspec.Struct):
    """A conversation. items: as JSON each. last: the response whose items are the last here, and those before it the
    others; None where the items were changed since.
    """

    id: str
    created_at: int
    metadata: dict[str, Any]
    items: list[msgspec.Raw]
    last: str | None = None

    def shown(self) -> dict[str, Any]:
        """The conversation as clients see it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }

    def decoded(self) -> list[Item]:
        """The items."""
        return [msgspec.json.decode(item) for item in self.items]


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: the items that it continues, and those that it adds."""

    before: Sequence[Item]
    """Items of former turns, as they are kept."""
    new: Sequence[InputItem]
    """Items of this one."""
    is_kept: bool
    """True if the response will be kept."""
    parent: str | None = None
    """The response that `before` ends with, if one does."""
    conversation: str | None = None
    """The conversation that both belong to, if any."""

    def items(self) -> list[InputItem]:
        """All items, in order."""
        return [*msgspec.convert(list(self.before), list[InputItem]), *self.new]

    def place(self, index: int) -> str:
        """Name of an item of `items` in errors."""
        at = index - len(self.before)
        return f"input[{at}]" if at >= 0 else f"item {index} of what went before"


class ResponseMemory:
    """Responses and conversations in a store. Threads may share it; what reads the store may wait for the disk."""

    def __init__(self, store: ResponseStore, tenant: str = "") -> None:
        self.store = store
        self._tenant = tenant
        self._changing = threading.Lock()

    def of(self, tenant: str) -> "ResponseMemory":
        """Records of one client, where clients are kept apart: no other finds it by its name."""
        if not tenant:
            return self
        memory = ResponseMemory(self.store, tenant)
        memory._changing = self._changing
        return memory

    @property
    def keeps(self) -> bool:
        """True if anything is kept."""
        return self.store.keeps

    def lastingly(self, change: Callable[..., Made], *arguments: Any) -> Made:
        """Make a change, and return once it outlives the process. Waits for the disk."""
        made = change(*arguments)
        self.store.flush()
        return made

    def turn(self, body: ResponsesRequest) -> Turn:
        """The turn that a request continues. Raises: ApiError if it is not kept."""
        before: list[Item] = []
        parent = None
        if body.previous_response_id:
            if not self.keeps:
                raise unsupported(
                    f"previous_response_id is given, but {_NOT_KEPT}; send the whole conversation as input",
                    "previous_response_id",
                )
            parent = body.previous_response_id
            before = self.history(parent, "previous_response_id")
        if conversation_id := body.conversation_id:
            conversation = self.conversation(conversation_id, "conversation")
            before, parent = conversation.decoded(), self._continuable(conversation.last)
        new = [self._referred(item, index, before) for index, item in enumerate(body.items)]
        if len(before) + len(new) > MOST_ITEMS:
            raise ApiError(400, f"the conversation has more than {MOST_ITEMS:,} items; begin another", param="input")
        return Turn(before, new, self.keeps and body.store is not False, parent, conversation_id or None)

    def _continuable(self, response_id: str | None) -> str | None:
        """A response that what is said next may name as the one before it; None if it, or one before, is not kept."""
        with suppress(ApiError):
            if response_id is not None:
                self.history(response_id, "conversation")
                return response_id
        return None

    def _referred(self, item: InputItem, index: int, before: Sequence[Item]) -> InputItem:
        """The item itself, or the one that it names."""
        if item.kind != "item_reference":
            return item
        found = next((one for one in before if one["id"] == item.id), None)
        response_id = response_of(item.id)
        if found is None and response_id is not None and (kept := self._load(response_id, KeptResponse)) is not None:
            listed = [*kept.input, *kept.response["output"]]
            found = next((one for one in listed if one["id"] == item.id), None)
        if found is None:
            raise ApiError(
                404,
                f"input[{index}] refers to the item {item.id!r:.80}, which is not kept; send the item itself",
                code="item_not_found",
                param=f"input[{index}]",
            )
        return msgspec.convert(found, InputItem)

    def history(self, response_id: str, param: str) -> list[Item]:
        """All items up to the end of a response. Raises: ApiError if one of them is not kept any more."""
        turns: list[list[Item]] = []
        next_id: str | None = response_id
        while next_id is not None:
            kept = self._load(next_id, KeptResponse)
            if kept is None:
                later = "" if next_id == response_id else f", which goes before {response_id!r:.80},"
                raise ApiError(
                    400,
                    f"the response {next_id!r:.80}{later} is not kept: there was none, it was deleted, or it has "
                    "expired; send the whole conversation as input",
                    code="previous_response_not_found",
                    param=param,
                )
            turns.append([*kept.input, *kept.response["output"]])
            next_id = kept.parent
        return [item for turn in reversed(turns) for item in turn]

    def input_of(self, response_id: str) -> list[Item]:
        """Input of the model for a response. Raises: ApiError."""
        kept = self.response(response_id)
        return [*([] if kept.parent is None else self.history(kept.parent, "id")), *kept.input]

    def response(self, response_id: str) -> KeptResponse:
        """A response. Raises: ApiError 404."""
        kept = self._load(response_id, KeptResponse)
        return self._missing("response", response_id, "id") if kept is None else kept

    def events(self, response_id: str) -> bytes | None:
        """The frames of a response that may be streamed again."""
        return self.store.get(self._file(response_id, "events"))

    def keep_events(self, response_id: str, frames: bytes) -> None:
        """Keep the frames of a response that may be streamed again."""
        self.store.put(self._file(response_id, "events"), frames)

    def keep(self, turn: Turn, response: dict[str, Any]) -> None:
        """Keep a response that has ended, and add it to its conversation."""
        if not turn.is_kept:
            return
        response_id = response["id"]
        new = kept_items(turn.new, response_id.partition("_")[2])
        is_first = turn.conversation is not None and turn.parent is None
        kept = KeptResponse(response, [*turn.before, *new] if is_first else new, turn.parent)
        # Before its conversation names it: a process may be killed between the two writes.
        self.store.put(self._file(response_id), msgspec.json.encode(kept))
        if turn.conversation is not None and response["status"] in ("completed", "incomplete"):
            # It may have been deleted meanwhile.
            with suppress(ApiError):
                self._extend(turn.conversation, [*new, *response["output"]], turn, response_id)

    def delete(self, response_id: str) -> None:
        """Forget a response. Raises: ApiError 404."""
        self.response(response_id)
        self.store.delete(self._file(response_id))
        self.store.delete(self._file(response_id, "events"))

    def begin_conversation(self, items: Sequence[InputItem], metadata: dict[str, Any] | None) -> KeptConversation:
        """A new conversation. Raises: ApiError if nothing is kept here."""
        if not self.keeps:
            raise unsupported(f"conversations cannot be had: {_NOT_KEPT}; send the whole conversation as input")
        conversation_id = identifier("conv")
        made = [msgspec.Raw(msgspec.json.encode(item)) for item in kept_items(items, _new_token())]
        conversation = KeptConversation(conversation_id, int(time.time()), metadata or {}, made)
        self._save(conversation)
        return conversation

    def conversation(self, conversation_id: str, param: str = "id") -> KeptConversation:
        """A conversation. Raises: ApiError 404."""
        kept = self._load(conversation_id, KeptConversation)
        return self._missing("conversation", conversation_id, param) if kept is None else kept

    def change(self, conversation_id: str, change: Callable[[KeptConversation], None]) -> KeptConversation:
        """A conversation after a change, which is kept. Raises: ApiError 404; what the change raises."""
        with self._changing:
            kept = self.conversation(conversation_id)
            change(kept)
            self._save(kept)
        return kept

    def add_items(self, conversation_id: str, items: Sequence[InputItem]) -> list[Item]:
        """Add items to a conversation; as they are kept. Raises: ApiError 404, and 400 if there are too many."""
        made = kept_items(items, _new_token())
        self._extend(conversation_id, made)
        return made

    def delete_conversation(self, conversation_id: str) -> None:
        """Forget a conversation; responses that were made in it are kept. Raises: ApiError 404."""
        self.conversation(conversation_id)
        self.store.delete(self._file(conversation_id))

    def _extend(
        self, conversation_id: str, items: Sequence[Item], turn: Turn | None = None, response_id: str | None = None
    ) -> None:
        """Append items. turn, response_id: where they are those of a response."""

        def extend(kept: KeptConversation) -> None:
            if len(kept.items) + len(items) > MOST_ITEMS:
                raise ApiError(400, f"a conversation has at most {MOST_ITEMS:,} items; begin another", param="items")
            # Another response of the conversation may have ended since this one began.
            is_next = turn is not None and len(turn.before) == len(kept.items) and turn.parent in (None, kept.last)
            kept.items += [msgspec.Raw(msgspec.json.encode(item)) for item in items]
            kept.last = response_id if is_next else None

        self.change(conversation_id, extend)

    def _file(self, name: str, kind: str = "json") -> str:
        """The file of a name; of a client's own, one that only its name and the client's lead to."""
        if not self._tenant:
            return f"{name}.{kind}"
        prefix, _, _ = name.partition("_")
        return f"{prefix}_{digest_of(self._tenant, name)[:24]}.{kind}"

    def _save(self, conversation: KeptConversation) -> None:
        self.store.put(self._file(conversation.id), msgspec.json.encode(conversation))

    def _load(self, name: str, record: type[Kept]) -> Kept | None:
        content = self.store.get(self._file(name))
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=record)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # A file that was damaged is as good as none.
            self.store.delete(self._file(name))
            return None

    def _missing(self, kind: str, name: str, param: str) -> NoReturn:
        reason = "there was none, it was deleted, or it has expired" if self.keeps else _NOT_KEPT
        raise ApiError(404, f"the {kind} {name!r:.80} is not kept: {reason}", code=f"{kind}_not_found", param=param)


def _new_token() -> str:
    return identifier("item").removeprefix("item-")


def memory_of(request: Request) -> ResponseMemory:
    """Memory of the server, of the request's client if clients are kept apart."""
    memory = cast(ResponseMemory, request.app.state.responses)
    return memory.of(record_of(request.scope).tenant)


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
    item_messages(items, lambda index: f"items[{index}]", lambda content, path: CompactedSummary(""))
    return items


async def responses(request: Request) -> Response:
    """Answer a conversation, streamed or whole, or begin to answer it in the background."""
    body = await read_body(request, ResponsesRequest)
    await prepared(request, body.check)
    memory, compactor = memory_of(request), _compactor(request)
    turn = await _turn(request, memory, body)
    messages = await prepared(request, _messages, body, turn, compactor)
    is_compaction = is_triggered(turn)
    if is_compaction:
        body = summary_request(body)
    options = {**await prepared(request, body.generation_options), **caller_options(request)}
    if body.background:
        # No client waits for its first token.
        options.pop("ttft_objective", None)

    def make_writer(reply: Reply) -> ResponseWriter:
        kept = (reply, body, turn, partial(memory.keep, turn), memory.store.flush)
        return CompactionWriter(*kept, seal=compactor.seal) if is_compaction else ResponseWriter(*kept)

    plan = chat_plan(messages, options, heads=None if is_compaction else compacted_heads(request))
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
    """Answer a conversation's compaction, whole; nothing of it is kept."""
    body = summary_request(await read_body(request, ResponsesRequest))
    body = msgspec.structs.replace(body, stream=False, background=False, store=False)
    await prepared(request, body.check)
    memory, compactor = memory_of(request), _compactor(request)
    turn = await _turn(request, memory, body)
    asked = replace(turn, new=[*turn.new, InputItem(type="compaction_trigger")], is_kept=False)
    messages = await prepared(request, _messages, body, asked, compactor)
    options = {**await prepared(request, body.generation_options), **caller_options(request)}

    def make_writer(reply: Reply) -> CompactedWriter:
        return CompactedWriter(reply, body, turn, lambda _: None, lambda: None, seal=compactor.seal, retains=True)

    return await serve_reply(request, body, "resp", chat_plan(messages, options), make_writer)


def _compactor(request: Request) -> Compactor:
    """The sealer of summaries for the client of a request."""
    return Compactor(request.app.state.sealer, record_of(request.scope).tenant)


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
    messages = await prepared(request, _messages, body, turn, _compactor(request))
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


def _messages(body: ResponsesRequest, turn: Turn, compactor: Compactor) -> list[dict[str, Any]]:
    """The messages that the model is given, instructions first. Raises: ApiError."""
    instructions = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    said = item_messages(turn.items(), turn.place, compactor.unseal)
    if not said and not instructions:
        raise ApiError(400, "there is no message to answer; send some input", param="input")
    messages = [*instructions, *said]
    if is_triggered(turn):
        messages.append(ChatMessage("user", SUMMARY_REQUEST))
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
