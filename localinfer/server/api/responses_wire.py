"""OpenAI's responses as records: what a request may hold, and the object that answers it."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from localinfer.server.api.chat_messages import ChatMessage, FunctionCall, Role, ToolCall
from localinfer.server.replies.constraint_fields import ResponseFormat
from localinfer.server.replies.message_parts import joined_text
from localinfer.server.replies.reply import Reply
from localinfer.server.replies.reply_fields import ReplyFields, Tools
from localinfer.server.replies.sampling_fields import Count
from localinfer.server.replies.tool_fields import checked_choice, joined_name, responses_tools
from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.known_fields import RESPONSES, SEARCH_TOOLS

_UNSUPPORTED = "unsupported_parameter"
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
    """The form of the reply. verbosity: ignored, as how wordy a model is, is its own affair."""

    format: ResponseFormat | None = None
    verbosity: Any = None


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model reasons. summary, generate_summary, context: ignored, as reasoning is told whole."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class ResponsesRequest(ReplyFields, kw_only=True):
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
        """Raise ApiError for what would need a server that keeps responses."""
        for name, way_out in (
            ("previous_response_id", "send the whole conversation as input"),
            ("conversation", "send the whole conversation as input"),
            ("prompt", "send its text as instructions"),
            ("background", "ask without it, and stream"),
        ):
            if getattr(self, name):
                raise ApiError(
                    400, f"{name} is given, but responses are not kept here; {way_out}", code=_UNSUPPORTED, param=name
                )
        for wanted in self.include or ():
            if wanted not in _INCLUDED and wanted != _LOGPROBS:
                raise ApiError(
                    400,
                    f"include asks for {wanted!r:.80}, which this server does not have; leave it out",
                    code=_UNSUPPORTED,
                    param="include",
                )
        for name in ("top_logprobs", "include"):
            if (name == "include" and _LOGPROBS in (self.include or ())) or (name != "include" and self.top_logprobs):
                raise ApiError(
                    400,
                    f"{name} asks for log probabilities, which this route does not tell; ask /v1/chat/completions",
                    code=_UNSUPPORTED,
                    param=name,
                )

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request."""
        if self.reasoning is not None and self.reasoning_effort is None:
            self.reasoning_effort = self.reasoning.effort
        options = {**self.options(), **self.reply_options()}
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

    def messages(self) -> list[ChatMessage]:
        """The input as chat messages, instructions first. Raises: ApiError for an item that is none of ours."""
        first = [] if self.instructions is None else [ChatMessage("system", self.instructions)]
        if isinstance(self.input, str):
            return [*first, ChatMessage("user", self.input)]
        return [*first, *_messages(self.input)]


def _messages(items: list[InputItem]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
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
                raise ApiError(
                    400,
                    f"input[{index}] is of type {kind!r:.40} and cannot be read; give messages with a role, function "
                    "calls and their outputs",
                    code=_UNSUPPORTED,
                    param=f"input[{index}]",
                )
    return messages


def response_object(
    reply: Reply, body: ResponsesRequest, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
) -> dict[str, Any]:
    """The response as it is now: in progress, or with all that it will ever hold."""
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
        "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
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


def _format(body: ResponsesRequest) -> dict[str, Any]:
    found = None if body.text is None else body.text.format
    if found is None:
        return {"type": "text"}
    named = {"name": found.name or "reply", "schema": found.schema, "strict": True}
    return {"type": found.type, **(named if found.type == "json_schema" else {})}


def responses_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """A chat completion's usage under the names of this route."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
