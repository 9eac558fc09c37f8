"""Items of the API of responses: what a conversation consists of, as it is kept, and as the messages of a chat."""

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from localinfer.apps.server.replies.message_fields import ChatMessage, FunctionCall, Role, ToolCall, joined_text
from localinfer.apps.server.replies.tool_fields import custom_arguments, joined_name
from localinfer.apps.server.transport.http import ApiError, unsupported

MOST_ITEMS = 10_000
_ENCODED = "localinfer-reasoning-1:"
"""Before the base64 of reasoning that clients send back. It hides nothing: its text stands beside it."""
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})_i?\d+")

Item = dict[str, Any]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of a request's input; what each kind has beside its type is optional here.

    id: of an item that is referred to. status, phase, summary, caller, created_by: ignored, as items are told apart by
    their order, and a summary of reasoning is not what the model thought.
    """

    type: str | None = None
    role: Role | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None
    namespace: str | None = None
    id: Any = None
    encrypted_content: Any = None
    status: Any = None
    phase: Any = None
    summary: Any = None
    caller: Any = None
    created_by: Any = None

    @property
    def kind(self) -> str:
        """Its type; one without is a message, or refers to an item by nothing but its id."""
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.content is None and self.id is not None else "message"


def item_messages(items: Iterable[InputItem], place: Callable[[int], str]) -> list[ChatMessage]:
    """Items as chat messages: reasoning, text and calls of one reply are one message again.

    Reasoning that no text or call of the assistant follows is of no message, and is left out. place: names an item in
    errors. Raises: ApiError for an item of an unknown type.
    """
    messages: list[ChatMessage] = []
    reasoning: list[str] = []
    is_open = False

    def begin_reply(text: str | None) -> ChatMessage:
        made = ChatMessage("assistant", text, reasoning_content="".join(reasoning) or None)
        reasoning.clear()
        messages.append(made)
        return made

    for index, item in enumerate(items):
        match item.kind:
            case "reasoning":
                reasoning.append(_reasoning_text(item, place(index)))
                is_open = False
            case "message" if item.role == "assistant":
                begin_reply(joined_text(item.content, f"{place(index)}.content", "assistant"))
                is_open = True
            case "message" if item.role is not None:
                messages.append(ChatMessage(item.role, joined_text(item.content, f"{place(index)}.content")))
                reasoning.clear()
                is_open = False
            case "function_call" | "custom_tool_call" if item.name is not None:
                is_custom = item.kind == "custom_tool_call"
                arguments = custom_arguments(item.input or "") if is_custom else item.arguments
                function = FunctionCall(joined_name(item.namespace, item.name), arguments)
                reply = messages[-1] if is_open else begin_reply(None)
                reply.tool_calls = [*(reply.tool_calls or ()), ToolCall(function, item.call_id, "function")]
                is_open = True
            case "function_call_output" | "custom_tool_call_output":
                text = joined_text(item.output, f"{place(index)}.output")
                messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
                is_open = False
            case kind:
                raise unsupported(
                    f"{place(index)} is of type {kind!r:.40} and cannot be read; give messages with a role, calls of "
                    "functions and of custom tools, and their outputs",
                    place(index),
                )
    return messages


def kept_items(items: str | Sequence[InputItem], token: str) -> list[Item]:
    """Items as they are kept and listed: each with a type and an id, the content of messages in parts.

    token: 24 hexadecimal digits that the ids of items without one are made of.
    """
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    return [_kept(item, f"{token}_i{index}") for index, item in enumerate(items)]


def _kept(item: InputItem, suffix: str) -> Item:
    made = {name: value for name, value in msgspec.structs.asdict(item).items() if value is not None}
    kind = item.kind
    made["type"] = kind
    if not isinstance(item.id, str):
        made["id"] = f"{_ID_PREFIXES.get(kind, 'item')}_{suffix}"
    made.setdefault("status", "completed")
    if kind == "message" and isinstance(item.content, str):
        made["content"] = [_text_part(item.role or "user", item.content)]
    if kind == "reasoning":
        made.setdefault("summary", [])
    return made


def _text_part(role: str, text: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def response_of(item_id: object) -> str | None:
    """The id of the response that an item belongs to, by its own; None for a name that no server of ours gave."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if found is None else f"resp_{found[1]}"


def encrypted_reasoning(text: str) -> str:
    """Reasoning as clients keep it that ask for `reasoning.encrypted_content`."""
    return _ENCODED + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def _reasoning_text(item: InputItem, path: str) -> str:
    """What the model thought; nothing where only another server can read it. Raises: ApiError."""
    if item.content:
        return joined_text(item.content, f"{path}.content", "assistant")
    encoded = item.encrypted_content
    if not isinstance(encoded, str) or not encoded.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(encoded.removeprefix(_ENCODED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        raise ApiError(
            400, f"{path}.encrypted_content was changed; send it as it came, or leave it out", param=path
        ) from None


def item_list(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items. query: order (`desc` unless `asc` is asked for), after (an item's id), limit (20).

    Raises: ApiError for values that mean nothing.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order!r:.40}; give asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:6]) <= 100):
        raise ApiError(400, f"limit is {limit!r:.40}; give a number from 1 to 100", param="limit")
    listed = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        at = next((index for index, item in enumerate(listed) if item["id"] == after), None)
        if at is None:
            raise ApiError(400, f"there is no item {after!r:.80} to list items after", param="after")
        listed = listed[at + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > len(page),
    }
