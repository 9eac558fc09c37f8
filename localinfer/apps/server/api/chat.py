"""`/v1/chat/completions`: OpenAI's chats."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.serving import (
    ChoicesWriter,
    Delta,
    Event,
    PromptProgress,
    chat_logprobs,
    chat_plan,
    deltas_of,
    serve_reply,
)
from localinfer.apps.server.replies.compacted_chats import compacted_heads
from localinfer.apps.server.replies.fields import (
    AddGenerationPrompt,
    CacheSalt,
    ChatFields,
    ContinueFinalMessage,
    Count,
    OpenRouterReasoning,
    OpenRouterUsage,
    Prediction,
    ProbabilityCount,
    SlotNumber,
    StreamOptions,
    TextCount,
    TokenLimit,
    check_text_count,
    continuation,
    first_limit,
    given,
)
from localinfer.apps.server.replies.message_fields import Messages, template_messages
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.replies.service import Service, caller_options, prepared, read_body, service_of
from localinfer.apps.server.replies.tool_fields import CustomInput, Tools, checked_choice, function_tools, tool_names
from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.apps.server.transport.known_fields import CHAT

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent
    from localinfer.models.text.tokenizer import Tokenizer


ReasoningFormat = Literal["both", "reasoning_content", "reasoning", "none", "auto", "deepseek"]
"""Under which names reasoning is given; those from `auto` on are llama-server's."""
_REASONING_NAMES = {
    **dict.fromkeys(("both", "auto"), ("reasoning_content", "reasoning")),
    "none": (),
    "deepseek": ("reasoning_content",),
}


class ChatRequest(ChatFields, kw_only=True):
    """The members of a chat completion request that are read.

    reasoning_format: under which names reasoning is given; clients prefer one of two. return_progress: say in a stream
    how far the prompt was read, and how many replies are ahead. timings_per_token: with the timings so far in each
    chunk. n_probs, n_predict: other names of top_logprobs, with logprobs, and of max_tokens. id_slot: where it shows.
    verbose: show the prompt in a whole reply, as the member `__verbose`. reasoning, usage: OpenRouter's.
    return_token_ids: with the ids of the prompt and of each choice.
    """

    known_fields: ClassVar = CHAT

    messages: Messages
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: TextCount | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    continue_final_message: ContinueFinalMessage | None = None
    add_generation_prompt: AddGenerationPrompt | None = None
    reasoning_format: ReasoningFormat | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    n_probs: ProbabilityCount | None = None
    n_predict: TokenLimit | None = None
    id_slot: SlotNumber | None = None
    verbose: bool | None = None
    reasoning: OpenRouterReasoning | None = None
    usage: OpenRouterUsage | None = None
    return_token_ids: bool | None = None
    cache_salt: CacheSalt | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens returned beside each, None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else self.n_probs or None

    def generation_options(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The engine's options for this request, whose messages are as templates read them. Raises: ApiError."""
        if self.modalities and self.modalities != ["text"]:
            raise unsupported("modalities has more than text, which is all that is generated here", "modalities")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is given without logprobs; send logprobs: true", param="top_logprobs")
        replying = self.reply_options(self.reasoning)
        continuing = continuation(
            self.continue_final_message, self.add_generation_prompt, messages, has_form="constraint" in replying
        )
        if self.add_generation_prompt is False and not continuing:
            raise unsupported(
                "add_generation_prompt is false, and nothing would be answered; leave it out, or send "
                "continue_final_message: true",
                "add_generation_prompt",
            )
        tools = function_tools(self.tools)
        return {
            **self.sampling_options(),
            **replying,
            **continuing,
            **given(
                max_tokens=first_limit(self.max_completion_tokens, self.max_tokens, self.n_predict),
                prediction=None if self.prediction is None else self.prediction.text(),
                logprobs=self.num_logprobs,
                tools=tools or None,
                tool_choice=checked_choice(self.tool_choice, self.tools, has_tools=bool(tools))
                if self.tool_choice
                else None,
                parallel_tool_calls=self.parallel_tool_calls if tools else None,
            ),
        }

    @property
    def streamed_usage(self) -> StreamOptions | None:
        """Parts of a stream beside text."""
        if self.usage is None or not self.usage.include:
            return self.stream_options
        return msgspec.structs.replace(self.stream_options or StreamOptions(), include_usage=True)

    def reasoning_names(self) -> tuple[str, ...]:
        """The members that hold reasoning."""
        chosen = "none" if self.reasoning is not None and self.reasoning.exclude else self.reasoning_format or "both"
        return _REASONING_NAMES.get(chosen, (chosen,))


async def chat_completions(request: Request) -> Response:
    """Answer a chat, streamed or whole."""
    service = service_of(request)
    body = await read_body(request, ChatRequest)
    check_text_count(body.n or 1, service.settings)
    messages = await prepared(request, template_messages, body.messages)
    options = {**await prepared(request, body.generation_options, messages), **caller_options(request)}
    silence = service.settings.ping_seconds
    if body.return_progress:
        silence = min(silence, service.settings.progress_seconds)
    return await serve_reply(
        request,
        body,
        "chatcmpl",
        chat_plan(messages, options, body.n or 1, heads=compacted_heads(request)),
        lambda reply: _ChatWriter(reply, body, service),
        ping_seconds=silence,
    )


class _ChatWriter(ChoicesWriter):
    """Chunks: a role per choice at once, its text as it comes, its end."""

    def __init__(self, reply: Reply, body: ChatRequest, service: Service) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(reply, kind, body.streamed_usage, tells_timings=bool(body.timings_per_token))
        if body.return_progress and body.stream:
            self.progress = PromptProgress(reply, service.num_ahead)
        self._tells_ids = bool(body.return_token_ids)
        self._is_verbose = body.verbose and not body.stream
        self._choices = [_Choice(body, reply.llm.tokenizer) for _ in range(reply.num_texts)]

    def begin(self) -> Iterator[Event]:
        told = self._prompt_ids()
        for index in range(self.reply.num_texts):
            yield self.chunk(_delta_choice(index, {"role": "assistant", "content": ""}), **(told if index == 0 else {}))

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        if index == 0:
            yield from self.progress_chunks(is_read=True)
        choice = self._choices[index]
        if self._tells_ids and token.token_id >= 0:
            choice.token_ids.append(token.token_id)
        for delta, logprobs in choice.deltas(token):
            yield self.token_chunk({**_delta_choice(index, delta, logprobs=logprobs), **self._new_ids(choice)})

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        choice = self._choices[index]
        choice.finish_reason = reason
        yield self.last_chunk({**_delta_choice(index, {}, reason), **self._new_ids(choice)}, stats)

    def _new_ids(self, choice: "_Choice") -> dict[str, Any]:
        """The ids that no event has held yet."""
        if not self._tells_ids:
            return {}
        told, choice.num_told = choice.num_told, len(choice.token_ids)
        return {"token_ids": choice.token_ids[told:]}

    def _prompt_ids(self) -> dict[str, Any]:
        found = self.reply.prompt_ids(0) if self._tells_ids else None
        return {} if found is None else {"prompt_token_ids": found.tolist()}

    def empty_choice(self) -> dict[str, Any]:
        return _delta_choice(0, {})

    def whole(self) -> dict[str, Any]:
        choices = [choice.whole(index) for index, choice in enumerate(self._choices)]
        if self._tells_ids:
            for told, choice in zip(choices, self._choices, strict=True):
                told["token_ids"] = choice.token_ids
        made = {**self.completion(choices), **self._prompt_ids()}
        return {**made, "__verbose": {"prompt": self.reply.prompt_text(0)}} if self._is_verbose else made


def _delta_choice(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class _Choice:
    """Turns the tokens of one choice into deltas, and gathers them into a message."""

    def __init__(self, body: ChatRequest, tokenizer: "Tokenizer") -> None:
        self.finish_reason = "length"
        self.token_ids: list[int] = []
        self.num_told = 0
        self._names = body.reasoning_names()
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._custom_names = {name for name, tool in tool_names(body.tools).items() if tool.kind == "custom"}
        self._inputs: dict[int, CustomInput] = {}
        self._logprobs: list[dict[str, Any]] | None = None if body.num_logprobs is None else []

    def deltas(self, token: "StreamEvent") -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """The deltas of a token, and the `logprobs` that go with each; both are gathered."""
        logprobs = None
        if token.logprobs is not None and self._logprobs is not None:
            entry = chat_logprobs(self._tokenizer, token.token_id, token.logprobs)
            self._logprobs.append(entry)
            logprobs = {"content": [entry], "refusal": None}
        made = [written for delta in deltas_of(token) if (written := self._written(delta))]
        if logprobs is not None and not made:
            made = [{"content": ""}]
        for written in made:
            yield written, logprobs
            logprobs = None

    def whole(self, index: int) -> dict[str, Any]:
        """The choice of a whole reply."""
        text = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._reasoning:
            message |= dict.fromkeys(self._names, "".join(self._reasoning))
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def _written(self, delta: Delta) -> dict[str, Any]:
        match delta.kind:
            case "text":
                self._texts.append(delta.text)
                return {"content": delta.text}
            case "reasoning":
                self._reasoning.append(delta.text)
                return dict.fromkeys(self._names, delta.text)
            case "call" if delta.call_id is not None:
                kind, member = ("custom", "input") if delta.name in self._custom_names else ("function", "arguments")
                if kind == "custom":
                    self._inputs[delta.call] = CustomInput()
                head = {"id": delta.call_id, "type": kind}
                self._calls.append({**head, kind: {"name": delta.name, member: ""}})
                return {"tool_calls": [{"index": delta.call, **head, kind: {"name": delta.name, member: ""}}]}
            case _ if (read := self._inputs.get(delta.call)) is not None:
                text = read.push(delta.text)
                self._calls[delta.call]["custom"]["input"] += text
                return {"tool_calls": [{"index": delta.call, "custom": {"input": text}}]} if text else {}
            case _:
                self._calls[delta.call]["function"]["arguments"] += delta.text
                return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}
