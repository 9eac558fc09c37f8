"""`/v1/conversations`: conversations that responses continue and add to, and the items in them."""

import asyncio
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.responses_items import InputItem, Item, item_list, item_messages
from localinfer.apps.server.api.responses_memory import KeptConversation, memory_of
from localinfer.apps.server.replies.service import read_body
from localinfer.apps.server.transport.http import ApiError, json_response
from localinfer.apps.server.transport.known_fields import KnownFields

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
