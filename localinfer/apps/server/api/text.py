"""Text and tokens without generation: `/tokenize`, `/detokenize`, `/tokenizer_info`, `/apply-template`, and counting
what a prompt has."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localinfer.apps.server.replies.clients import salt_options
from localinfer.apps.server.replies.fields import (
    AddGenerationPrompt,
    CacheSalt,
    ChatFields,
    ContinueFinalMessage,
    OpenRouterReasoning,
    TokenId,
    continuation,
    given,
    without_missing_thinking,
)
from localinfer.apps.server.replies.message_fields import Messages, template_messages
from localinfer.apps.server.replies.service import on_model, read_body, service_of
from localinfer.apps.server.replies.tool_fields import Tools, checked_choice, function_tools
from localinfer.apps.server.transport.bodies import is_large
from localinfer.apps.server.transport.http import ApiError, json_response, to_api_error
from localinfer.apps.server.transport.known_fields import TEMPLATES, TEXTS

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer


_WRITTEN_AT_ONCE = 1 << 16
"""Tokens."""


class TokenizeRequest(msgspec.Struct):
    """A text to be split into tokens, as llama.cpp asks (`content`) or vLLM (`prompt`).

    add_special, add_special_tokens: with the tokens that begin and end a text; without either, a prompt has them and a
    content not. parse_special: read the names of special tokens as those tokens, as completions do. with_pieces: with
    each token's text, or its bytes where they are no whole text. return_token_strs: with all texts, in a list.
    """

    known_fields: ClassVar = TEXTS

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def id_parts(self, tokenizer: "Tokenizer") -> Iterator[list[int]]:
        """Yield the ids that are asked for, part by part."""
        adds = next((one for one in (self.add_special, self.add_special_tokens) if one is not None), None)
        text = self.prompt if self.content is None else self.content
        adds = self.prompt is not None if adds is None else adds
        return tokenizer.encode_parts([(text or "", self.parse_special)], adds)


class DetokenizeRequest(msgspec.Struct):
    """Tokens to be put together."""

    known_fields: ClassVar = TEXTS

    tokens: list[TokenId]
    model: str | None = None


class TemplateRequest(ChatFields, kw_only=True):
    """A chat to be written as its model's template writes it, with what else the template reads."""

    known_fields: ClassVar = TEMPLATES

    messages: Messages
    model: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    continue_final_message: ContinueFinalMessage | None = None
    add_generation_prompt: AddGenerationPrompt | None = None
    reasoning: OpenRouterReasoning | None = None
    cache_salt: CacheSalt | None = None

    def chat_options(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The engine's options that the prompt of these messages depends on."""
        options = self.reply_options(self.reasoning)
        has_form = options.pop("constraint", None) is not None
        tools = function_tools(self.tools)
        choice = checked_choice(self.tool_choice, self.tools, has_tools=bool(tools))
        options |= continuation(self.continue_final_message, self.add_generation_prompt, messages, has_form=has_form)
        return {**options, **given(tools=tools or None, tool_choice=choice if self.tools else None)}


async def tokenize(request: Request) -> Response:
    """The token ids of a text."""
    body = await read_body(request, TokenizeRequest)
    if body.content is not None and body.prompt is not None:
        raise ApiError(400, "content and prompt are given, two names of one text; give one", param="prompt")
    if not is_large(request):
        return Response(await on_model(request, body.model, _whole, body), media_type="application/json")
    return await _streamed(request, body)


def _whole(llm: "LLM", body: TokenizeRequest) -> bytes:
    return b"".join(_written(llm, body))


def _written(llm: "LLM", body: TokenizeRequest) -> Iterator[bytes]:
    """Yield the answer part by part: what is written of a text may be thirty times as long as the text."""
    tokenizer = llm.tokenizer
    opened, count = b'{"tokens":[', 0
    # Each token is written once, however often it comes: a text may have a million.
    pieces: dict[int, bytes] = {}
    for ids in _slices(body.id_parts(tokenizer)):
        if body.with_pieces:
            for token_id in {*ids} - pieces.keys():
                piece = {"id": token_id, "piece": _piece(tokenizer.token_bytes(token_id))}
                pieces[token_id] = msgspec.json.encode(piece)
            yield opened + b",".join([pieces[token_id] for token_id in ids])
        else:
            yield opened + msgspec.json.encode(ids)[1:-1]
        opened, count = b",", count + len(ids)
    yield b'%b],"count":%d,"max_model_len":%d' % (b"" if count else opened, count, llm.context_length)
    if body.return_token_strs:
        opened = b',"token_strs":['
        for ids in _slices(body.id_parts(tokenizer)):
            texts = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
            yield opened + msgspec.json.encode(texts)[1:-1]
            opened = b","
        yield b"]" if count else opened + b"]"
    yield b"}"


def _slices(parts: Iterable[list[int]]) -> Iterator[list[int]]:
    for ids in parts:
        for start in range(0, len(ids), _WRITTEN_AT_ONCE):
            yield ids[start : start + _WRITTEN_AT_ONCE]


async def _streamed(request: Request, body: TokenizeRequest) -> Response:
    """The answer as it is written, no faster than it is read; what fails later than the first tokens is its `error`."""
    service = service_of(request)
    lease = await service.lease(request, body.model)
    parts = _written(lease.llm, body)
    try:
        first = await service.bodies.run(request, next, parts, b"")
    except BaseException:
        lease.close()
        raise

    async def answer() -> AsyncIterator[bytes]:
        part = first
        try:
            while part:
                yield part
                part = await service.bodies.run(request, next, parts, b"")
        except Exception as error:
            refusal = to_api_error(error, request.state.request_id, prompt_field="content")
            yield b'],"error":%b}' % msgspec.json.encode(refusal.body()["error"])
        finally:
            lease.close()

    return StreamingResponse(answer(), media_type="application/json")


def _piece(spelled: bytes) -> str | list[int]:
    """A token's text; of one that is part of a character its bytes, as llama.cpp gives them."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


async def tokenizer_info(request: Request) -> Response:
    """Special tokens and chat template of the model's tokenizer, by which lm-eval writes prompts."""
    return json_response(await on_model(request, request.query_params.get("model"), _tokenizer_info, None))


def _tokenizer_info(llm: "LLM", _: None) -> dict[str, Any]:
    tokenizer = llm.tokenizer
    names = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    names["unk_token"] = tokenizer.unknown_token_id
    return {
        "tokenizer_class": tokenizer.kind,
        **{name: None if one is None else tokenizer.token_text(one) for name, one in names.items()},
        "pad_token": None,
        "add_bos_token": tokenizer.adds_bos,
        "model_max_length": llm.context_length,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": llm.info.chat_template,
    }


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    text = await on_model(request, body.model, _text, body)
    # The names that llama.cpp and vLLM have for it.
    return json_response({"content": text, "prompt": text})


def _text(llm: "LLM", body: DetokenizeRequest) -> str:
    return llm.tokenizer.decode(body.tokens, skip_special=False)


async def apply_template(request: Request) -> Response:
    """The prompt that a chat becomes, as text."""
    body = await read_body(request, TemplateRequest)
    render = partial(_prompt, salted=salt_options(request))
    return json_response({"prompt": await on_model(request, body.model, render, body)})


def _prompt(llm: "LLM", body: TemplateRequest, *, salted: Mapping[str, Any]) -> str:
    messages = template_messages(body.messages)
    options = without_missing_thinking(llm, body.chat_options(messages))
    begins = body.add_generation_prompt is not False
    return llm.render_chat(messages, add_generation_prompt=begins, **salted, **options)


async def count_chat_tokens(request: Request) -> Response:
    """Count the tokens of a chat's prompt, before it is sent."""
    body = await read_body(request, TemplateRequest)
    count = await on_model(request, body.model, partial(_count, salted=salt_options(request)), body)
    return json_response({"object": "input_tokens", "input_tokens": count})


def _count(llm: "LLM", body: TemplateRequest, *, salted: Mapping[str, Any]) -> int:
    messages = template_messages(body.messages)
    return llm.count_chat_tokens(messages, **salted, **without_missing_thinking(llm, body.chat_options(messages)))
