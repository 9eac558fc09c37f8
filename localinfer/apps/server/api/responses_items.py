"""Requests for responses, their items as they are kept and as the messages of a chat, and the events of a stream."""

import asyncio
import base64
import binascii
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.apps.server.api.responses_calls import CALLS, CallItem, call_item, hosted_text, read_call, read_output
from localinfer.apps.server.api.serving import (
    BlockWriter,
    Delta,
    Event,
    PromptProgress,
    timings,
    usage,
    whole_object,
)
from localinfer.apps.server.replies.fields import CacheSalt, ChatFields, Count, ResponseFormat
from localinfer.apps.server.replies.message_fields import (
    ChatMessage,
    MessageToolCall,
    Role,
    joined_text,
    message_content,
)
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.replies.tool_fields import (
    ToolName,
    Tools,
    is_left_out,
    responses_choice,
    responses_tools,
    tool_names,
)
from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.apps.server.transport.known_fields import RESPONSES
from localinfer.generation.chat.messages import SYSTEM_ROLES
from localinfer.generation.compaction import SUMMARY_PREFIX

if TYPE_CHECKING:
    from localinfer.apps.server.api.responses import Turn
    from localinfer.generation.stream import Stats, StreamEvent


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
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "compaction": "cmp",
}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})_i?\d+")

Item = dict[str, Any]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of a request's input; what each kind has beside its type is optional here.

    id: of an item that is referred to. From `action` to `tools`: of calls of tools that are no functions. status,
    phase, summary, caller, created_by, environment, max_output_length: ignored, as items are told apart by their order,
    and a summary of reasoning is not what the model thought.
    """

    type: str | None = None
    role: Role | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | dict[str, Any] | None = None
    namespace: str | None = None
    id: Any = None
    action: Any = None
    actions: Any = None
    operation: Any = None
    queries: Any = None
    results: Any = None
    result: Any = None
    code: Any = None
    outputs: Any = None
    server_label: Any = None
    error: Any = None
    approve: Any = None
    reason: Any = None
    tools: Any = None
    environment: Any = None
    max_output_length: Any = None
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


class CompactedSummary(msgspec.Struct):
    """Content of an item `compaction`."""

    summary: str
    """The model's summary of the conversation."""
    retains: bool = False
    """True if the items before it were chosen to stay beside it; otherwise it stands for them all."""


Unseal = Callable[[object, str], CompactedSummary]
"""Reads the content of an item `compaction`; given its path."""


def _refuse_compaction(content: object, path: str) -> CompactedSummary:
    raise unsupported(f"{path} is a compaction, which only /v1/responses reads; send the conversation itself", path)


def item_messages(
    items: Iterable[InputItem], place: Callable[[int], str], unseal: Unseal = _refuse_compaction
) -> list[ChatMessage]:
    """Items as chat messages: reasoning, text and calls of one reply are one message again.

    Reasoning that no text or call of the assistant follows is of no message, and is left out. A compaction is a message
    of the user, in place of all before it but system messages, unless it retains them. place: path of an item in
    errors. unseal: reads compactions. Raises: ApiError for an item of an unknown type.
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
                content = message_content(item.content, f"{place(index)}.content", item.role)
                messages.append(ChatMessage(item.role, content))
                reasoning.clear()
                is_open = False
            case kind if kind in CALLS:
                function = read_call(kind, msgspec.structs.asdict(item), place(index))
                reply = messages[-1] if is_open else begin_reply(None)
                reply.tool_calls = [*(reply.tool_calls or ()), MessageToolCall(function, _call_id(item), "function")]
                is_open = True
            case kind if kind.removesuffix("_output") in CALLS:
                output = read_output(kind, item.output, item.status)
                content = message_content(output, f"{place(index)}.output", "tool")
                messages.append(ChatMessage("tool", content, tool_call_id=_call_id(item)))
                is_open = False
            case "compaction" | "compaction_summary":
                found = unseal(item.encrypted_content, place(index))
                if not found.retains:
                    messages = [message for message in messages if message.role in SYSTEM_ROLES]
                messages.append(ChatMessage("user", f"{SUMMARY_PREFIX}\n\n{found.summary}"))
                reasoning.clear()
                is_open = False
            case "compaction_trigger":
                # The last one is answered by a compaction; one before it was.
                is_open = False
            case kind if (text := hosted_text(kind, msgspec.structs.asdict(item))) is not None:
                begin_reply(text)
                is_open = False
            case kind:
                raise unsupported(
                    f"{place(index)} is of type {kind!r:.40} and cannot be read; give messages with a role, calls of "
                    "functions and of custom tools, and their outputs",
                    place(index),
                )
    return messages


def _call_id(item: InputItem) -> str | None:
    """The id of a call, which some items have only as their own."""
    return item.call_id or (item.id if isinstance(item.id, str) else None)


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
"""Values of `include`. All but the first are parts of things that this server neither makes nor reads."""
Items = Annotated[list[InputItem], Meta(min_length=1, max_length=MOST_ITEMS)]


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the reply. verbosity: ignored, as how much a model writes is decided by the model."""

    format: ResponseFormat | None = None
    verbosity: Any = None


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Effort of reasoning. The others are ignored: reasoning is given whole, and there is one way to reason."""

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
        """True if reasoning comes in the form that clients send back, for those that do not have it kept here."""
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


class ResponseWriter(BlockWriter):
    """Reasoning, a message, calls of functions and of custom tools, each an item.

    keep: is given the whole response, once, when it has ended. It is called with what failed as well. flush: waits
    until what was kept outlives the process; called in a thread.
    """

    def __init__(
        self,
        reply: Reply,
        body: ResponsesRequest,
        turn: "Turn",
        keep: Callable[[dict[str, Any]], None],
        flush: Callable[[], None],
    ) -> None:
        super().__init__(reply)
        self._flush = flush
        self._body, self._turn, self._keep = body, turn, keep
        self._tools = tool_names(body.tools)
        self._token = reply.id.partition("_")[2]
        self._call: CallItem | None = None
        self._is_told = True
        self._number = 0
        self._status = "in_progress"
        self._error: ApiError | None = None
        self._progress = PromptProgress(reply) if body.return_progress and body.stream else None

    def begin(self) -> Iterator[Event]:
        begun = self.response()
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        yield from self._progress_events(is_read=True)
        yield from super().add(index, token)

    def silence(self) -> "Iterable[Event | None]":
        return list(self._progress_events(is_read=False)) or (None,)

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        is_cancelled = self.reply.is_cancelled and bool(self._body.background)
        self._status = "cancelled" if is_cancelled else "incomplete" if reason == "length" else "completed"
        yield from self.close_block()

    def finish(self) -> Iterator[Event]:
        # There is no event for a response that was cancelled.
        kind = "completed" if self._status == "completed" else "incomplete"
        whole = self.whole()
        more = {"timings": whole["timings"]} if self._body.timings_per_token and "timings" in whole else {}
        yield self._event(f"response.{kind}", response=whole, **more)

    async def settle(self) -> None:
        if self._turn.is_kept:
            await asyncio.to_thread(self._flush)

    def failures(self, error: ApiError) -> Iterator[Event]:
        # Some clients read the one, some the other.
        yield self._event("error", message=error.message, param=error.param, code=error.code, **error.body())
        self._status, self._error = "failed", error
        failed = self.response()
        self._keep(failed)
        yield self._event("response.failed", response=failed)

    def whole(self) -> dict[str, Any]:
        whole = self.response()
        self._keep(whole)
        return whole

    def response(self) -> dict[str, Any]:
        """The response as it is now: its items so far, or all that it will ever hold."""
        reply, body, status = self.reply, self._body, self._status
        has_ended = status != "in_progress"
        stats = reply.stats[0]
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if status == "completed" else None,
            "conversation": None if self._turn.conversation is None else {"id": self._turn.conversation},
            "error": None if self._error is None else _error(self._error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": reply.model_id,
            "output": self.blocks[:-1] if self.is_open else self.blocks[:],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id or None,
            "prompt": None,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": self._turn.is_kept,
            "temperature": body.temperature,
            "text": {"format": _format(body), "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if not is_left_out(tool)],
            "top_logprobs": 0,
            "top_p": body.top_p,
            "truncation": "auto" if body.truncation == "auto" else "disabled",
            "usage": response_usage(reply) if has_ended and stats is not None else None,
            "metadata": body.metadata or {},
            **({} if stats is None else {"timings": timings(stats)}),
        }

    def given_items(self) -> list[Item]:
        """Input of the model."""
        return [*self._turn.before, *kept_items(self._turn.new, self._token)]

    def block_opened(self, delta: Delta) -> Iterator[Event]:
        index = len(self.blocks)
        self._call = call_item(self._tool(delta), delta.call_id) if delta.kind == "call" else None
        name = {"text": "msg", "reasoning": "rs"}[delta.kind] if self._call is None else self._call.prefix
        item: Item = {"id": f"{name}_{self._token}_{index}", "status": "in_progress"}
        match delta.kind:
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": []}
            case "call" if self._call is not None:
                item |= {"type": self._call.kind, **self._call.members()}
        self.blocks.append(item)
        # A patch has its item when it is known what it is a patch of.
        self._is_told = "operation" not in item
        if self._is_told:
            yield self._event("response.output_item.added", output_index=index, item=dict(item))
        if delta.kind == "text":
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=_output_part(""))

    def block_grown(self, delta: Delta) -> Iterator[Event]:
        at = self._place()
        match delta.kind:
            case "text":
                more = self._timings_so_far()
                yield self._event(
                    "response.output_text.delta", **at, content_index=0, delta=delta.text, logprobs=[], **more
                )
            case "reasoning":
                yield self._event("response.reasoning_text.delta", **at, content_index=0, delta=delta.text)
            case _ if self._call is not None:
                item = self.blocks[-1]
                made = list(self._call.push(item, delta.text))
                if not self._is_told and item["operation"] is not None:
                    self._is_told = True
                    begun = {**item, "operation": {**item["operation"], "diff": ""}}
                    if "diff" not in item["operation"]:
                        begun = dict(item)
                    yield self._event("response.output_item.added", output_index=at["output_index"], item=begun)
                for kind, members in made:
                    yield self._event(f"response.{kind}", **at, **members)

    def block_closed(self, kind: str, text: str) -> Iterator[Event]:
        item, at = self.blocks[-1], self._place()
        item["status"] = "completed" if self._status in ("in_progress", "completed") else "incomplete"
        match kind:
            case "text":
                part = _output_part(text)
                item["content"] = [part]
                yield self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=[])
                yield self._event("response.content_part.done", **at, content_index=0, part=part)
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                if self._body.wants_encrypted_reasoning:
                    item["encrypted_content"] = encrypted_reasoning(text)
                yield self._event("response.reasoning_text.done", **at, content_index=0, text=text)
            case _ if self._call is not None:
                is_whole = whole_object(text) is not None
                item["status"] = "completed" if is_whole else "incomplete"
                for name, members in self._call.close(item, text, is_whole=is_whole):
                    yield self._event(f"response.{name}", **at, **members)
                if not self._is_told:
                    # Cut off before it was known what to do.
                    self.blocks.pop()
                    return
        yield self._event("response.output_item.done", output_index=at["output_index"], item=dict(item))

    def _progress_events(self, *, is_read: bool) -> Iterator[Event]:
        """Progress in reading the prompt, as llama-server tells it. is_read: the first token is there."""
        if self._progress is not None:
            for report in self._progress.reports(is_read=is_read):
                yield self._event("response.in_progress", response=self.response(), prompt_progress=report)

    def _timings_so_far(self) -> dict[str, Any]:
        stats = self.reply.stats_so_far(0) if self._body.timings_per_token else None
        return {} if stats is None else {"timings": timings(stats)}

    def _tool(self, delta: Delta) -> ToolName:
        """Names, to the client, of the tool that a delta calls; nothing for text."""
        name = delta.name or ""
        return self._tools.get(name) or ToolName(name)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}

    def _event(self, kind: str, **members: Any) -> Event:
        """An event with the next number."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}


def response_usage(reply: Reply) -> dict[str, Any]:
    costs = usage(reply)
    cached = costs["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": costs["prompt_tokens"],
        # What was computed is in the prefix cache from then on.
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": costs["prompt_tokens"] - cached},
        "output_tokens": costs["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": costs["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": costs["total_tokens"],
        **{name: costs[name] for name in ("compaction",) if name in costs},
    }


def _error(error: ApiError) -> dict[str, Any]:
    """An error as a response holds it, by the few codes that clients of OpenAI know, or ours."""
    return {"code": error.code or "server_error", "message": error.message}


def _output_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    found = None if body.text is None else body.text.format
    if found is None:
        return {"type": "text"}
    named = {"name": found.name or "reply", "schema": found.schema, "strict": True}
    return {"type": found.type, **(named if found.type == "json_schema" else {})}
