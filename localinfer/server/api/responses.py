"""`/v1/responses`: the newer of OpenAI's two ways to ask; nothing is kept between requests."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.api.writer import BlockWriter, Delta, Event, chat_plan, serve_reply, timings, usage
from localinfer.server.replies.fields import ChatFields, Count
from localinfer.server.replies.form_fields import ResponseFormat
from localinfer.server.replies.message_fields import (
    ChatMessage,
    FunctionCall,
    Role,
    ToolCall,
    joined_text,
    template_messages,
)
from localinfer.server.replies.reply import Reply
from localinfer.server.replies.service import owner_of, read_body
from localinfer.server.replies.tool_fields import Tools, checked_choice, joined_name, namespaced_names, responses_tools
from localinfer.server.transport.http import ApiError, unsupported
from localinfer.server.transport.known_fields import RESPONSES, SEARCH_TOOLS

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may ask for to no effect: parts of things that this server does not make, or refuses to read."""
_NEEDS_STORAGE = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "prompt": "send its text as instructions",
    "background": "ask without it, and stream",
}
"""Member that would need a server that keeps responses -> the way out."""


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of a request's input; what each kind has beside its type is optional here.

    id, status, phase, summary, encrypted_content, caller: ignored, as items are told apart by their order and former
    reasoning is left to what the model's template makes of the conversation.
    """

    type: str | None = None
    role: Role | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None
    namespace: str | None = None
    id: Any = None
    status: Any = None
    phase: Any = None
    summary: Any = None
    encrypted_content: Any = None
    caller: Any = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the reply. verbosity: ignored, as how much a model writes is decided by the model."""

    format: ResponseFormat | None = None
    verbosity: Any = None


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model reasons. summary, generate_summary, context: ignored, as reasoning is given whole."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class ResponsesRequest(ChatFields, kw_only=True):
    """The members of a responses request that are read."""

    known_fields: ClassVar = RESPONSES

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=10_000)]
    model: str | None = None
    instructions: str | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: ReasoningSettings | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raise ApiError for what would need a server that keeps responses, or that this route does not have."""
        for name, way_out in _NEEDS_STORAGE.items():
            if getattr(self, name):
                raise unsupported(f"{name} is given, but responses are not kept here; {way_out}", name)
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

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        if self.reasoning is not None and self.reasoning_effort is None:
            self.reasoning_effort = self.reasoning.effort
        options = {**self.sampling_options(), **self.reply_options()}
        tools = responses_tools(self.tools)
        choice = checked_choice(self.tool_choice, has_tools=bool(tools))
        if tools:
            options["tools"] = tools
            options["tool_choice"] = choice or "auto"
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

    def chat_messages(self) -> list[ChatMessage]:
        """The input as chat messages, instructions first. Raises: ApiError for an item of an unknown type."""
        messages = [] if self.instructions is None else [ChatMessage("system", self.instructions)]
        if isinstance(self.input, str):
            return [*messages, ChatMessage("user", self.input)]
        for index, item in enumerate(self.input):
            match item.type or "message":
                case "message" if item.role is not None:
                    messages.append(ChatMessage(item.role, joined_text(item.content, f"input[{index}].content")))
                case "function_call" if item.name is not None:
                    name = joined_name(item.namespace, item.name)
                    call = ToolCall(FunctionCall(name, item.arguments), item.call_id, "function")
                    if messages and messages[-1].role == "assistant" and messages[-1].tool_calls:
                        messages[-1].tool_calls.append(call)
                    else:
                        messages.append(ChatMessage("assistant", None, tool_calls=[call]))
                case "function_call_output":
                    text = joined_text(item.output, f"input[{index}].output")
                    messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
                case "reasoning":
                    # Models read their former reasoning from the conversation's text, if their template wants it.
                    continue
                case kind:
                    raise unsupported(
                        f"input[{index}] is of type {kind!r:.40} and cannot be read; give messages with a role, "
                        "function calls and their outputs",
                        f"input[{index}]",
                    )
        return messages


async def responses(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    body = await read_body(request, ResponsesRequest)
    body.check()
    messages = template_messages(body.chat_messages())
    options = {**body.generation_options(), "owner": owner_of(request)}
    return await serve_reply(
        request, body, "resp", chat_plan(messages, options), lambda reply: _ResponseWriter(reply, body)
    )


class _ResponseWriter(BlockWriter):
    """Items and parts that open, grow and close, as events numbered from 0: reasoning, a message, function calls."""

    def __init__(self, reply: Reply, body: ResponsesRequest) -> None:
        super().__init__(reply)
        self._body = body
        self._namespaces = namespaced_names(body.tools)
        self._token = reply.id.partition("-")[2] or reply.id
        self._number = 0
        self._status = "completed"

    def begin(self) -> Iterator[Event]:
        begun = self._response("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        self._status = "incomplete" if reason == "length" else "completed"
        yield from self.close_block()

    def finish(self) -> Iterator[Event]:
        yield self._event(f"response.{self._status}", response=self.whole())

    def failure(self, error: ApiError) -> Event:
        return self._event("error", message=error.message, param=error.param, code=error.code, **error.body())

    def whole(self) -> dict[str, Any]:
        costs = usage(self.reply)
        done = self._response(
            self._status,
            self.blocks,
            {
                "input_tokens": costs["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": costs["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": costs["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": costs["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": costs["total_tokens"],
            },
        )
        stats = self.reply.stats[0]
        return done if stats is None else {**done, "timings": timings(stats)}

    def block_opened(self, delta: Delta) -> Iterator[Event]:
        index = len(self.blocks)
        name = {"text": "msg", "reasoning": "rs", "call": "fc"}[delta.kind]
        item: dict[str, Any] = {"id": f"{name}_{self._token}_{index}", "status": "in_progress"}
        match delta.kind:
            case "text":
                item |= {"type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"type": "reasoning", "summary": [], "content": []}
            case "call":
                item |= {"type": "function_call", "call_id": delta.call_id, "name": delta.name, "arguments": ""}
                if (place := self._namespaces.get(delta.name or "")) is not None:
                    item["namespace"], item["name"] = place
        self.blocks.append(item)
        yield self._event("response.output_item.added", output_index=index, item=dict(item))
        if delta.kind == "text":
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=_text_part(""))

    def block_grown(self, delta: Delta) -> Event:
        at = {**self._place(), "delta": delta.text}
        match delta.kind:
            case "text":
                return self._event("response.output_text.delta", **at, content_index=0, logprobs=[])
            case "reasoning":
                return self._event("response.reasoning_text.delta", **at, content_index=0)
            case "call":
                return self._event("response.function_call_arguments.delta", **at)

    def block_closed(self, kind: str, text: str) -> Iterator[Event]:
        item, at = self.blocks[-1], self._place()
        item["status"] = self._status
        match kind:
            case "text":
                part = _text_part(text)
                item["content"] = [part]
                yield self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=[])
                yield self._event("response.content_part.done", **at, content_index=0, part=part)
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                yield self._event("response.reasoning_text.done", **at, content_index=0, text=text)
            case _:
                item["arguments"] = text
                yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=text)
        yield self._event("response.output_item.done", output_index=at["output_index"], item=dict(item))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}

    def _event(self, kind: str, **members: Any) -> Event:
        """An event with the next number."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """The response as it is now: in progress, or with all that it will ever hold."""
        reply, body = self.reply, self._body
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": reply.model_id,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.get("type") not in SEARCH_TOOLS],
            "top_p": body.top_p,
            "truncation": "auto" if body.truncation == "auto" else "disabled",
            "usage": usage,
            "metadata": body.metadata or {},
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(body: ResponsesRequest) -> dict[str, Any]:
    found = None if body.text is None else body.text.format
    if found is None:
        return {"type": "text"}
    named = {"name": found.name or "reply", "schema": found.schema, "strict": True}
    return {"type": found.type, **(named if found.type == "json_schema" else {})}
