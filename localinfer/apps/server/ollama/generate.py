"""`/api/generate`: Ollama's completions: a prompt in the model's template, as it is, or with what follows it."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.completions import CompletionRequest, fill_in_prompt
from localinfer.apps.server.api.serving import serve_reply
from localinfer.apps.server.api.writer import Event
from localinfer.apps.server.ollama.messages import check_no_images
from localinfer.apps.server.ollama.reply_fields import ReplyFields, begin_request, load_or_unload
from localinfer.apps.server.ollama.reply_lines import OllamaLineWriter
from localinfer.apps.server.replies.fields import TokenId, given
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import caller_options, read_body
from localinfer.apps.server.transport.http import ApiError, unsupported

if TYPE_CHECKING:
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM

_PLAIN_TEMPLATES = ("{{.Prompt}}", "{{.prompt}}")
"""Templates that are nothing but the prompt, without spaces."""


class OllamaGenerateRequest(ReplyFields, kw_only=True):
    """A prompt; without one its model is loaded, or unloaded by a `keep_alive` of 0.

    suffix: what follows the text that is to be filled in, for models with tokens for that. system: a system message.
    raw: take the prompt as it is, with the names of special tokens in it. context: the ids that a former answer had, of
    a conversation that is continued. template: refused unless it is the prompt alone, which is as `raw`. images:
    refused, as models read text only here.
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
        """Whether the prompt is taken as it is."""
        return bool(self.raw) or "".join((self.template or "").split()) in _PLAIN_TEMPLATES

    def check(self) -> None:
        """Raise ApiError for members that do not go together, or cannot be had."""
        check_no_images(self.images, "images")
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
                400, "context goes on with plain text, without reasoning; send messages to /api/chat", param="think"
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
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": prompt})
        if body.context:
            return llm.stream(_continued(llm, body.context, messages, options.get("cache_salt")), **options)
        return llm.stream_chat(messages, **options, **self._thinking)


def _raw_ids(llm: "LLM", prompt: str, max_tokens: int | None) -> list[int]:
    """The ids of a prompt that a client has made, which may have written the token that begins a text itself."""
    ids = llm.tokenizer.encode(prompt, parse_special=True, max_tokens=max_tokens)
    begin = llm.tokenizer.bos_token_id
    return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids


def _continued(llm: "LLM", context: Sequence[int], messages: list[dict[str, Any]], cache_salt: str | None) -> list[int]:
    """The ids of a conversation and the next message, without reasoning, which could not be told from the text."""
    thinking = False if llm.info.supports_thinking else None
    with llm.stream_chat(messages, thinking=thinking, max_tokens=0, cache_salt=cache_salt) as stream:
        ids = stream.token_ids.tolist()
    begin = llm.tokenizer.bos_token_id
    return [*context, *(ids[1:] if begin is not None and ids[:1] == [begin] else ids)]


def _response(text: str, reasoning: str, calls: list[Event]) -> Event:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}
