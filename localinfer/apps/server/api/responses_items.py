"""The body of a request for a response and its items, as they are kept and as the messages of a chat."""

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.replies.fields import CacheSalt, ChatFields, Count, ResponseFormat
from localinfer.apps.server.replies.message_fields import ChatMessage, FunctionCall, Role, ToolCall, joined_text
from localinfer.apps.server.replies.tool_fields import (
    Tools,
    custom_arguments,
    joined_name,
    responses_choice,
    responses_tools,
)
from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.apps.server.transport.known_fields import RESPONSES

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
    """Reasoning of the model; nothing where only another server can read it. Raises: ApiError."""
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


_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDED = (
    _ENCRYPTED,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may ask for. All but the first are parts of things that this server neither makes nor reads."""
Items = Annotated[list[InputItem], Meta(min_length=1, max_length=MOST_ITEMS)]


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the reply. verbosity: ignored, as how much a model writes is decided by the model."""

    format: ResponseFormat | None = None
    verbosity: Any = None


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model reasons. The others are ignored: reasoning is given whole, and there is one way to reason."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ConversationName(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation, named in an object."""

    id: str


class ResponsesRequest(ChatFields, kw_only=True):
    """The members of a responses request that are read.

    timings_per_token, return_progress: llama-server's, as on chats, for streams.
    """

    known_fields: ClassVar = RESPONSES

    input: str | Items | None = None
    model: str | None = None
    instructions: str | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Any], Meta(max_length=256)] | None = None
    reasoning: ReasoningSettings | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    timings_per_token: bool | None = None
    cache_salt: CacheSalt | None = None
    return_progress: bool | None = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation that is continued, if one is."""
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def items(self) -> list[InputItem]:
        """Items of this turn."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input or []

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """True if reasoning comes in the form that clients send back who do not have it kept here."""
        return _ENCRYPTED in (self.include or ())

    def check(self) -> None:
        """Raise ApiError for what this route does not have, and for members that contradict each other."""
        if self.prompt:
            raise unsupported("prompt is given, but no prompts are kept here; send its text as instructions", "prompt")
        if self.previous_response_id and self.conversation_id:
            raise ApiError(
                400,
                "previous_response_id and conversation are both given, and each says what goes before; give one",
                param="conversation",
            )
        if self.store is False:
            for name, is_given in (("background", self.background), ("conversation", self.conversation_id)):
                if is_given:
                    raise ApiError(
                        400, f"{name} is given, which keeps the response, and store is false; leave one out", param=name
                    )
        if self.input is None and not (self.previous_response_id or self.conversation_id):
            raise ApiError(400, "input is missing, and nothing goes before; send some", param="input")
        included = self.include or ()
        for wanted in included:
            if wanted not in _INCLUDED and wanted != _LOGPROBS:
                raise unsupported(
                    f"include lists {wanted!r:.80}, which this server does not have; leave it out", "include"
                )
        for name, is_wanted in (("top_logprobs", self.top_logprobs), ("include", _LOGPROBS in included)):
            if is_wanted:
                raise unsupported(
                    f"{name} wants log probabilities, which this route does not return; use /v1/chat/completions", name
                )

    def prompt_options(self) -> dict[str, Any]:
        """The engine's options that the prompt depends on. Raises: ApiError."""
        if self.reasoning is not None and self.reasoning_effort is None:
            self.reasoning_effort = self.reasoning.effort
        options = self.reply_options()
        tools = responses_tools(self.tools)
        choice = responses_choice(self.tool_choice, self.tools)
        if tools:
            options["tools"] = tools
            options["tool_choice"] = choice or "auto"
        return options

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        options = {**self.sampling_options(), **self.prompt_options()}
        if "tools" in options:
            options["parallel_tool_calls"] = self.parallel_tool_calls is not False
        if self.max_output_tokens is not None:
            options["max_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            form = self.text.format.constraint("text.format")
            if form is not None and options.setdefault("constraint", form) is not form:
                raise ApiError(400, "text.format is given, and another form too; choose one", param="text.format")
        if self.truncation == "auto":
            options["context_shift"] = True
        return options
