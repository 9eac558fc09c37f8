"""Text and tokens without generation: `/tokenize`, `/detokenize`, `/tokenizer_info`, `/apply-template`, and counting
what a prompt has."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.replies.fields import (
    AddGenerationPrompt,
    CacheSalt,
    ChatFields,
    ContinueFinalMessage,
    TokenId,
    continuation,
    given,
    without_missing_thinking,
)
from localinfer.server.replies.isolation import salt_options
from localinfer.server.replies.message_fields import Messages, template_messages
from localinfer.server.replies.service import on_model, read_body
from localinfer.server.replies.tool_fields import Tools, checked_choice, function_tools
from localinfer.server.transport.http import ApiError, json_response
from localinfer.server.transport.known_fields import TEMPLATES, TEXTS

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer


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

    def token_ids(self, tokenizer: "Tokenizer") -> list[int]:
        """The ids that are asked for."""
        adds = next((one for one in (self.add_special, self.add_special_tokens) if one is not None), None)
        text = self.prompt if self.content is None else self.content
        return tokenizer.encode(text or "", self.prompt is not None if adds is None else adds, self.parse_special)


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
    cache_salt: CacheSalt | None = None

    def chat_options(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The engine's options that the prompt of these messages depends on."""
        options = self.reply_options()
        has_form = options.pop("constraint", None) is not None
        choice = checked_choice(self.tool_choice, has_tools=bool(self.tools))
        tools = function_tools(self.tools)
        options |= continuation(self.continue_final_message, self.add_generation_prompt, messages, has_form=has_form)
        return {**options, **given(tools=tools or None, tool_choice=choice if self.tools else None)}


async def tokenize(request: Request) -> Response:
    """The token ids of a text."""
    body = await read_body(request, TokenizeRequest)
    if body.content is not None and body.prompt is not None:
        raise ApiError(400, "content and prompt are given, two names of one text; give one", param="prompt")
    return json_response(await on_model(request, body.model, _tokens, body))


def _tokens(llm: "LLM", body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = llm.tokenizer
    ids = body.token_ids(tokenizer)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": llm.context_length}
    # Each token is written once, however often it comes: a text may have a million.
    spelled = {token_id: tokenizer.token_bytes(token_id) for token_id in dict.fromkeys(ids)}
    if body.return_token_strs:
        answer["token_strs"] = [spelled[token_id].decode("utf-8", "replace") for token_id in ids]
    if body.with_pieces:
        written = {
            token_id: msgspec.json.encode({"id": token_id, "piece": _piece(text)}) for token_id, text in spelled.items()
        }
        answer["tokens"] = msgspec.Raw(b"[%b]" % b",".join([written[token_id] for token_id in ids]))
    return {**answer, "tokens": msgspec.Raw(msgspec.json.encode(answer["tokens"]))}


def _piece(spelled: bytes) -> str | list[int]:
    """A token's text; of one that is part of a character its bytes, as llama.cpp gives them."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


async def tokenizer_info(request: Request) -> Response:
    """How the model's tokenizer begins and ends texts, and its chat template: lm-eval writes prompts by it."""
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
    """How many tokens the prompt of a chat has, to be known before it is sent."""
    body = await read_body(request, TemplateRequest)
    count = await on_model(request, body.model, partial(_count, salted=salt_options(request)), body)
    return json_response({"object": "input_tokens", "input_tokens": count})


def _count(llm: "LLM", body: TemplateRequest, *, salted: Mapping[str, Any]) -> int:
    messages = template_messages(body.messages)
    return llm.count_chat_tokens(messages, **salted, **without_missing_thinking(llm, body.chat_options(messages)))
