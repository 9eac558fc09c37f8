"""`/v1/messages`: Anthropic's messages."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.serving import (
    BlockWriter,
    Delta,
    Event,
    chat_plan,
    compaction,
    serve_reply,
    timings,
    whole_object,
)
from localinfer.apps.server.replies.clients import salt_options
from localinfer.apps.server.replies.compacted_chats import compacted_heads
from localinfer.apps.server.replies.fields import (
    Count,
    Priority,
    ResponseFormat,
    StopsLoops,
    StopText,
    Thinking,
    continuation,
    given,
    without_missing_thinking,
)
from localinfer.apps.server.replies.message_fields import (
    ChatMessage,
    InputMessage,
    chat_messages,
    template_messages,
    text_of,
)
from localinfer.apps.server.replies.service import caller_options, on_model, prepared, read_body
from localinfer.apps.server.replies.tool_fields import Tools, anthropic_choice, anthropic_tools
from localinfer.apps.server.transport.http import ANTHROPIC, ApiError, json_response
from localinfer.apps.server.transport.known_fields import COUNTS, MESSAGES

if TYPE_CHECKING:
    from localinfer.apps.server.replies.reply import Reply
    from localinfer.generation.stream import Stats
    from localinfer.llm import LLM

_DELTAS = {"text": ("text", "text"), "reasoning": ("thinking", "thinking"), "call": ("input_json", "partial_json")}
"""Kind of delta -> its name here, and the member that holds the text."""


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The choice of tools: whether the model has to call one, and which."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def as_openai(self) -> str | dict[str, Any]:
        """The choice as chat completions have it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the reply, and how hard the model should think, for templates that know such a word."""

    format: ResponseFormat | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """A conversation, and what else its prompt depends on."""

    known_fields: ClassVar = COUNTS

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=10_000)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    loop_stop: StopsLoops | None = None

    def chat_options(self) -> dict[str, Any]:
        """The engine's options about tools and reasoning. Raises: ApiError for what is no tool."""
        choice = self.tool_choice or ToolChoice()
        tools = anthropic_tools(self.tools or ())
        tool_choice = anthropic_choice(choice.as_openai(), self.tools or ())
        effort = None if self.output_config is None else self.output_config.effort
        return given(
            tools=tools or None,
            tool_choice=tool_choice if tools else None,
            parallel_tool_calls=not choice.disable_parallel_tool_use if tools else None,
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
            thinking_budget=None if self.thinking is None else self.thinking.budget_tokens,
            template_variables=None if effort is None else {"reasoning_effort": effort},
            loop_stop=self.loop_stop,
        )

    def continuation(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The engine's option for a last message that is continued, where they end with a reply."""
        has_form = self.output_config is not None and self.output_config.format is not None
        return continuation(None, None, messages, has_form=has_form)

    def chat_messages(self) -> list[ChatMessage]:
        """The conversation as chat messages, the system's first. Raises: ApiError for what is not text."""
        found = [] if self.system is None else [ChatMessage("system", text_of(self.system, "system"))]
        for index, message in enumerate(self.messages):
            found += chat_messages(message, f"messages[{index}].content")
        return found


class MessagesRequest(CountRequest, kw_only=True):
    """The members of a messages request that are read."""

    known_fields: ClassVar = MESSAGES

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    priority: Priority | None = None

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        form = None if self.output_config is None else self.output_config.format
        return {
            **self.chat_options(),
            **given(
                max_tokens=self.max_tokens,
                constraint=None if form is None else form.constraint("output_config.format"),
                stop=self.stop_sequences or None,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                priority=self.priority,
            ),
        }


async def messages(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    body = await read_body(request, MessagesRequest)
    asked = await prepared(request, lambda: template_messages(body.chat_messages()))
    replying = await prepared(request, body.generation_options)
    options = {**replying, **body.continuation(asked), **caller_options(request)}
    omits = body.thinking is not None and body.thinking.display == "omitted"
    plan = chat_plan(asked, options, heads=compacted_heads(request))
    return await serve_reply(request, body, "msg", plan, lambda reply: _MessageWriter(reply, omits_reasoning=omits))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    body = await read_body(request, CountRequest)
    count = partial(_count, salted=salt_options(request))
    return json_response({"input_tokens": await on_model(request, body.model, count, body)})


def _count(llm: "LLM", body: CountRequest, *, salted: Mapping[str, Any]) -> int:
    asked = template_messages(body.chat_messages())
    options = {**body.chat_options(), **body.continuation(asked)}
    return llm.count_chat_tokens(asked, **salted, **without_missing_thinking(llm, options))


class _MessageWriter(BlockWriter):
    """Blocks of content that open, grow and close. omits_reasoning: its block is there, and has no text."""

    def __init__(self, reply: "Reply", *, omits_reasoning: bool) -> None:
        super().__init__(reply)
        self._omits_reasoning = omits_reasoning
        self._envelope = {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model_id}
        self._ending = _ending("length", None)
        self._stats: Stats | None = None

    def begin(self) -> Iterator[Event]:
        usage = {"input_tokens": self.reply.prompt_tokens[0], "output_tokens": 0}
        begun: Event = {**self._envelope, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": begun}

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        yield from self.close_block()
        self._stats = stats
        self._ending = _ending(reason, stats)
        yield {"type": "message_delta", **self._ending, **({} if stats is None else {"timings": timings(stats)})}

    def finish(self) -> Iterator[Event]:
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Event:
        return error.body(ANTHROPIC)

    def whole(self) -> dict[str, Any]:
        delta, usage, stats = self._ending["delta"], self._ending["usage"], self._stats
        made = {**self._envelope, "content": self.blocks, **delta, "usage": usage}
        return made if stats is None else {**made, "timings": timings(stats)}

    def block_opened(self, delta: Delta) -> Iterator[Event]:
        match delta.kind:
            case "text":
                block: dict[str, Any] = {"type": "text", "text": ""}
            case "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                block = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
        self.blocks.append(block)
        yield {**self._at("content_block_start"), "content_block": dict(block)}

    def block_grown(self, delta: Delta) -> Iterator[Event]:
        name, member = _DELTAS[delta.kind]
        text = "" if delta.kind == "reasoning" and self._omits_reasoning else delta.text
        yield {**self._at("content_block_delta"), "delta": {"type": f"{name}_delta", member: text}}

    def block_closed(self, kind: str, text: str) -> Iterator[Event]:
        block = self.blocks[-1]
        if kind == "call":
            whole = whole_object(text)
            block["input"] = {} if whole is None else whole
            if whole is None:
                # What came of the arguments, which are no object: a tool without required ones would run with none.
                block["incomplete"], block["partial_json"] = True, text
        else:
            block[block["type"]] = "" if kind == "reasoning" and self._omits_reasoning else text
        yield self._at("content_block_stop")

    def _at(self, kind: str) -> Event:
        return {"type": kind, "index": len(self.blocks) - 1}


def _ending(reason: str, stats: "Stats | None") -> dict[str, Any]:
    stop_sequence = None if stats is None else stats.stop_text
    stop = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
    stop = "stop_sequence" if stop_sequence is not None else stop
    usage: dict[str, Any] = {"input_tokens": 0, "output_tokens": 0}
    if stats is not None:
        usage = {
            # What came from the cache is counted apart from the rest on this route.
            "input_tokens": stats.prompt_tokens - stats.cached_tokens,
            "cache_read_input_tokens": stats.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.completion_tokens,
            **compaction([stats]),
        }
    return {"delta": {"stop_reason": stop, "stop_sequence": stop_sequence}, "usage": usage}
