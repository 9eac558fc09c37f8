"""Memory of the API of responses: responses by their ids, with former turns, and conversations."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import msgspec
from starlette.requests import Request

from localinfer.apps.server.api.responses_items import (
    MOST_ITEMS,
    InputItem,
    Item,
    ResponsesRequest,
    kept_items,
    response_of,
)
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.clients import digest_of
from localinfer.apps.server.transport.http import ApiError, identifier, unsupported
from localinfer.storage.response_store import ResponseStore

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
