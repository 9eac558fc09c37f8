"""`/api/chat`, `/api/generate` and `/api/embed`: Ollama's chats and completions, as lines of JSON, and its vectors."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.completions import CompletionRequest, fill_in_prompt
from localinfer.apps.server.api.embeddings import MOST_TEXTS, in_batches
from localinfer.apps.server.api.serving import (
    Delta,
    Event,
    ReplyWriter,
    chat_logprobs,
    chat_plan,
    deltas_of,
    serve_reply,
    timings,
)
from localinfer.apps.server.ollama.fields import (
    BegunRequest,
    KeepAlive,
    LineStream,
    OllamaMessages,
    Options,
    ReplyFields,
    begin_request,
    image_parts,
    line,
    load_or_unload,
    nanoseconds,
    read_ollama_messages,
    with_images,
    written_call,
)
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.compacted_chats import compacted_heads
from localinfer.apps.server.replies.fields import TokenId, continuation, given
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import caller_options, prepared, read_body, reserve_prompts, service_of
from localinfer.apps.server.replies.tool_fields import Tools, function_tools
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import OLLAMA, ApiError, json_response, unsupported
from localinfer.apps.server.transport.known_fields import KnownFields, Refusal

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent, TextStream
    from localinfer.llm import LLM
    from localinfer.types import TokenIds


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts that vectors of length 1 are wanted for; without any the model is loaded.

    truncate: cut those longer than the context, as Ollama does by default; an answer says so in `warnings`.
    """

    known_fields: ClassVar = KnownFields({}, {"prompt": Refusal("send input, or ask /api/embeddings")})

    model: str | None = None
    input: str | Annotated[list[str], Meta(max_length=MOST_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0)] | None = None
    keep_alive: KeepAlive | None = None
    options: Options | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """One text that a vector is wanted for, as the model gives it; without it the model is loaded."""

    known_fields: ClassVar = KnownFields({}, {"input": Refusal("send prompt, or ask /api/embed")})

    model: str | None = None
    prompt: str | None = None
    keep_alive: KeepAlive | None = None
    options: Options | None = None


async def embed(request: Request) -> Response:
    """The vectors of texts, in order."""
    body = await read_body(request, OllamaEmbedRequest)
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input or ())
    begun = begin_request(request, body.model, body.keep_alive)
    settings = service_of(request).settings
    ids: list[TokenIds] = []
    vectors: list[msgspec.Raw] = []
    num_cut = 0
    with await service_of(request).lease(request, begun.named.id) as lease:
        loaded = time.monotonic()
        async for encoded in in_batches(request, texts, partial(_encode, lease.llm, body)):
            ids += encoded
        count = sum(map(len, ids))
        reserve_prompts(request, count)
        async for found in in_batches(request, ids, partial(_embed, lease.llm, body, settings.pooling)):
            vectors += found.vectors
            num_cut += found.num_cut
        warnings = _warnings(body.options, lease.llm.context_length, num_cut)
    record_of(request.scope).input_tokens = count
    answer = {
        "model": begun.named.shown,
        "embeddings": vectors,
        "total_duration": nanoseconds(time.monotonic() - begun.began),
        "load_duration": nanoseconds(loaded - begun.began),
        "prompt_eval_count": count,
    }
    return json_response({**answer, **warnings})


async def embeddings(request: Request) -> Response:
    """The vector of one text."""
    body = await read_body(request, OllamaEmbeddingsRequest)
    begun = begin_request(request, body.model, body.keep_alive)
    warnings: dict[str, Any] = {}
    vector = msgspec.Raw(b"[]")
    with await service_of(request).lease(request, begun.named.id) as lease:
        if body.prompt:
            pooling, reserve = service_of(request).settings.pooling, partial(reserve_prompts, request)
            found = await unless_gone(request.receive, asyncio.to_thread(_embed_one, lease.llm, body, pooling, reserve))
            record_of(request.scope).input_tokens = found.num_tokens
            vector = found.vectors[0]
        warnings = _warnings(body.options, lease.llm.context_length, 0)
    return json_response({"embedding": vector, **warnings})


class _Found(msgspec.Struct):
    """Vectors as JSON, with how many tokens they were made of, and how many texts were cut."""

    vectors: list[msgspec.Raw]
    num_tokens: int
    num_cut: int


def _encode(llm: "LLM", body: OllamaEmbedRequest, texts: Sequence[str]) -> "list[TokenIds]":
    _check(body.options)
    return llm.embedding_ids(texts, truncate=body.truncate is not False)


def _embed(llm: "LLM", body: OllamaEmbedRequest, pooling: str | None, ids: "Sequence[TokenIds]") -> _Found:
    return _found(ids, llm.embed_many(ids, pooling=pooling, dimensions=body.dimensions or None), llm.context_length)


def _embed_one(
    llm: "LLM", body: OllamaEmbeddingsRequest, pooling: str | None, reserve: Callable[[int], None]
) -> _Found:
    _check(body.options)
    ids = llm.embedding_ids([body.prompt or ""])
    reserve(len(ids[0]))
    return _found(ids, llm.embed_many(ids, pooling=pooling, normalize=False), llm.context_length)


def _found(ids: Sequence[NDArray[np.int32]], vectors: Sequence[NDArray[np.float32]], context_length: int) -> _Found:
    """Vectors of texts of these ids. Raises: ApiError for a model with a vector per token."""
    if any(vector.ndim > 1 for vector in vectors):
        raise unsupported("this model gives a vector per token, which has no place in this answer; ask /embedding")
    # A text that fills the context to the last token was cut, or is taken for it.
    num_cut = sum(len(one) >= context_length for one in ids)
    written = [msgspec.Raw(msgspec.json.encode(vector.tolist())) for vector in vectors]
    return _Found(written, sum(map(len, ids)), num_cut)


def _check(options: Options | None) -> None:
    if options is not None:
        options.check()


def _warnings(options: Options | None, context_length: int, num_cut: int) -> dict[str, Any]:
    told = [] if options is None else [options.context_warning(context_length)]
    if num_cut:
        told.append(
            f"{num_cut} texts have more than {context_length} tokens and were cut; send truncate: false instead"
        )
    warnings = [warning for warning in told if warning is not None]
    return {"warnings": warnings} if warnings else {}


class OllamaLineWriter(ReplyWriter):
    """Lines: text and reasoning as they come, each tool call when it is whole, and the figures at the end.

    content: puts text, reasoning and calls under a route's names. context: gives what the last line has of the
    conversation.
    """

    stream = LineStream
    frame = staticmethod(line)

    def __init__(
        self,
        reply: Reply,
        begun: BegunRequest,
        body: ReplyFields,
        content: Callable[[str, str, list[Event]], Event],
        context: Callable[[], list[int]] | None = None,
    ) -> None:
        super().__init__(reply)
        self._begun = begun
        self._content = content
        self._context = context
        self._shows_logprobs = bool(body.logprobs)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Event] = []
        self._logprobs: list[Event] = []
        self._open: Delta | None = None
        self._arguments: list[str] = []
        self._last: Event = {}
        self._warnings: list[str] = []
        warning = None if body.options is None else body.options.context_warning(reply.llm.context_length)
        if warning is not None:
            self._warnings.append(warning)

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        text, reasoning = "", ""
        calls: list[Event] = []
        for delta in deltas_of(token):
            if delta.kind == "call":
                if delta.call_id is not None:
                    text += self._close_call(calls)
                    self._open = delta
                self._arguments.append(delta.text)
            elif delta.kind == "text":
                text += delta.text
            else:
                reasoning += delta.text
        logprobs = self._logprobs_of(token)
        if text or reasoning or calls or logprobs:
            yield self._line(text, reasoning, calls, logprobs)

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        calls: list[Event] = []
        text = self._close_call(calls)
        if text or calls:
            yield self._line(text, "", calls, [])
        self._last = {"done": True, "done_reason": "length" if reason == "length" else "stop", **self._figures(stats)}

    def finish(self) -> Iterator[Event]:
        yield {**self._begun.head, **self._content("", "", []), **self._last}

    def failure(self, error: ApiError) -> Event:
        return error.body(OLLAMA)

    def whole(self) -> Event:
        content = self._content("".join(self._texts), "".join(self._reasoning), self._calls)
        logprobs = {"logprobs": self._logprobs} if self._shows_logprobs else {}
        return {**self._begun.head, **content, **self._last, **logprobs}

    def _line(self, text: str, reasoning: str, calls: list[Event], logprobs: list[Event]) -> Event:
        self._texts.append(text)
        self._reasoning.append(reasoning)
        self._calls += calls
        self._logprobs += logprobs
        told = {"logprobs": logprobs} if logprobs else {}
        return {**self._begun.head, **self._content(text, reasoning, calls), "done": False, **told}

    def _logprobs_of(self, token: "StreamEvent") -> list[Event]:
        if not self._shows_logprobs or token.logprobs is None:
            return []
        return [chat_logprobs(self.reply.llm.tokenizer, token.token_id, token.logprobs)]

    def _close_call(self, calls: list[Event]) -> str:
        """Append the call that is open to others; one that was cut short is returned as text."""
        delta, written = self._open, "".join(self._arguments)
        self._open, self._arguments = None, []
        if delta is None:
            return ""
        try:
            arguments = msgspec.json.decode(written or "{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return f'{{"name": "{delta.name}", "arguments": {written}'
        calls.append(written_call(delta.call, str(delta.call_id), str(delta.name), arguments))
        return ""

    def _figures(self, stats: "Stats | None") -> Event:
        now = time.monotonic()
        figures: Event = {
            "total_duration": nanoseconds(now - self._begun.began),
            "load_duration": nanoseconds(self.reply.opened_seconds - self._begun.began),
        }
        if stats is not None:
            times = timings(stats)
            figures |= {
                "prompt_eval_count": stats.prompt_tokens,
                "prompt_eval_cached_count": stats.cached_tokens,
                "prompt_eval_duration": nanoseconds(times["prompt_ms"] / 1e3),
                "eval_count": stats.completion_tokens,
                "eval_duration": nanoseconds(times["predicted_ms"] / 1e3),
            }
            self._warnings += stats.notices
        if self._context is not None:
            figures["context"] = self._context()
        if self._warnings:
            figures["warnings"] = self._warnings
        return figures


class OllamaChatRequest(ReplyFields, kw_only=True):
    """A chat; without messages its model is loaded, or unloaded by a `keep_alive` of 0."""

    messages: OllamaMessages | None = None
    tools: Tools | None = None

    def chat_options(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The engine's options. messages: as templates read them. Raises: ApiError."""
        constraint = self.constraint()
        return {
            **self.generation_options(),
            **self.thinking_options(),
            **continuation(None, None, messages, has_form=constraint is not None),
            **given(constraint=constraint, tools=function_tools(self.tools) or None),
        }


async def ollama_chat(request: Request) -> Response:
    """Answer a chat, as lines or whole."""
    body = await read_body(request, OllamaChatRequest)
    begun = begin_request(request, body.model, body.keep_alive)
    if not body.messages:
        return await load_or_unload(request, begun, body.keep_alive, _message("", "", []))
    messages = await prepared(request, read_ollama_messages, body.messages)
    options = {**await prepared(request, body.chat_options, messages), **caller_options(request)}

    def plan(llm: "LLM") -> Sequence[TextPlan]:
        body.check_thinking(llm)
        return chat_plan(messages, options, heads=compacted_heads(request))(llm)

    asked = msgspec.structs.replace(body, model=begun.named.id, stream=body.stream is not False)
    return await serve_reply(request, asked, "chat", plan, lambda reply: OllamaLineWriter(reply, begun, body, _message))


def _message(text: str, reasoning: str, calls: list[Event]) -> Event:
    message: Event = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


_PLAIN_TEMPLATES = ("{{.Prompt}}", "{{.prompt}}")
"""Templates that are nothing but the prompt, without spaces."""


class OllamaGenerateRequest(ReplyFields, kw_only=True):
    """A prompt; without one its model is loaded, or unloaded by a `keep_alive` of 0.

    suffix: what follows the text that is to be filled in, for models with tokens for that. system: a system message.
    raw: take the prompt as it is, with the names of special tokens in it. context: the ids that a former answer had, of
    a conversation that is continued. template: refused unless it is the prompt alone, which is as `raw`. images: files
    as base64, which stand before the prompt.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: Annotated[list[TokenId], Meta(max_length=1 << 24)] | None = None
    images: list[Any] | None = None

    @property
    def is_raw(self) -> bool:
        """True if the prompt is taken as it is."""
        return bool(self.raw) or "".join((self.template or "").split()) in _PLAIN_TEMPLATES

    def check(self) -> None:
        """Raise ApiError for members that do not go together, or cannot be had."""
        if self.images and (self.is_raw or self.context or self.suffix):
            raise unsupported(
                "images are given with raw, context or suffix; send them to /api/chat, in messages", "images"
            )
        if self.template and not self.is_raw:
            raise unsupported(
                "template is given, and the model's own template is used here; send raw: true with a prompt that you "
                "made, or /api/chat with messages",
                "template",
            )
        if self.is_raw and (self.system or self.context):
            raise ApiError(
                400, "raw prompts have no system message and no context; write them into prompt", param="raw"
            )
        if self.suffix and (self.system or self.context or self.is_raw):
            raise ApiError(
                400,
                "suffix is given with system, context or raw; fill in text between prompt and suffix alone",
                param="suffix",
            )
        if self.context and self.think:
            raise ApiError(
                400, "context continues plain text, without reasoning; send messages to /api/chat", param="think"
            )


async def generate(request: Request) -> Response:
    """Continue or answer a prompt, as lines or whole."""
    body = await read_body(request, OllamaGenerateRequest)
    body.check()
    begun = begin_request(request, body.model, body.keep_alive)
    if not body.prompt and not body.suffix:
        return await load_or_unload(request, begun, body.keep_alive, _response("", "", []))
    options = {**body.generation_options(), **given(constraint=body.constraint()), **caller_options(request)}
    prompts = _Prompts(body, options, body.thinking_options())

    def make_writer(reply: Reply) -> OllamaLineWriter:
        return OllamaLineWriter(reply, begun, body, _response, None if body.is_raw else prompts.context)

    asked = msgspec.structs.replace(body, model=begun.named.id, stream=body.stream is not False)
    return await serve_reply(request, asked, "gen", prompts.plan, make_writer)


class _Prompts:
    """The prompt of one request, and the ids of the conversation, which are known once it was opened."""

    def __init__(self, body: OllamaGenerateRequest, options: dict[str, Any], thinking: dict[str, Any]) -> None:
        self._body = body
        self._options = options
        self._thinking = thinking
        self._stream: TextStream | None = None

    def plan(self, llm: "LLM") -> list[TextPlan]:
        """The text that is wanted."""
        return [TextPlan(partial(self._open, llm))]

    def context(self) -> list[int]:
        """The ids of the whole conversation, with those of the reply."""
        return [] if self._stream is None else list(self._stream.token_ids.tolist())

    def _open(self, llm: "LLM") -> "TextStream":
        self._body.check_thinking(llm)
        stream = self._stream = self._opened(llm)
        return stream

    def _opened(self, llm: "LLM") -> "TextStream":
        body, prompt, options = self._body, self._body.prompt or "", self._options
        most = None if options.get("context_shift") else llm.context_length
        if body.suffix:
            asked = CompletionRequest(prompt=prompt, suffix=body.suffix)
            return llm.stream(fill_in_prompt(llm.tokenizer, prompt, asked, most), **options)
        if body.is_raw:
            return llm.stream(_raw_ids(llm, prompt, most), **options)
        messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": with_images(image_parts(body.images, "images"), prompt)})
        if body.context:
            return llm.stream(_continued(llm, body.context, messages, options.get("cache_salt")), **options)
        return llm.stream_chat(messages, **options, **self._thinking)


def _raw_ids(llm: "LLM", prompt: str, max_tokens: int | None) -> list[int]:
    """The ids of a prompt that a client has made, which may have written the token that begins a text itself."""
    ids = llm.tokenizer.encode(prompt, parse_special=True, max_tokens=max_tokens)
    begin = llm.tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def _continued(llm: "LLM", context: Sequence[int], messages: list[dict[str, Any]], cache_salt: str | None) -> list[int]:
    """The ids of a conversation and the next message, without reasoning, which would look like text."""
    thinking = False if llm.info.supports_thinking else None
    with llm.stream_chat(messages, thinking=thinking, max_tokens=0, cache_salt=cache_salt) as stream:
        ids = stream.token_ids.tolist()
    begin = llm.tokenizer.bos_token_id
    return [*context, *(ids[1:] if begin is not None and ids[:1] == [begin] else ids)]


def _response(text: str, reasoning: str, calls: list[Event]) -> Event:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}
