"""Text and tokens without generation: `/tokenize`, `/detokenize`, `/apply-template`, and counting what a prompt has."""

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.api.chat_messages import Messages, template_messages
from localinfer.server.api.routing import service_of
from localinfer.server.replies.prompts import TokenId
from localinfer.server.replies.reply_fields import ReplyFields, Tools
from localinfer.server.replies.tool_fields import checked_choice, function_tools
from localinfer.server.transport.errors import ApiError, json_response
from localinfer.server.transport.json_body import read_json
from localinfer.server.transport.known_fields import TEMPLATES, TEXTS

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct):
    """A text to be split into tokens.

    content, prompt: the text, under either name. add_special: with the tokens that begin and end a text. parse_special:
    read the names of special tokens as those tokens. with_pieces: with each token's text.
    """

    known_fields: ClassVar = TEXTS

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct):
    """Tokens to be put together."""

    known_fields: ClassVar = TEXTS

    tokens: list[TokenId]
    model: str | None = None


class TemplateRequest(ReplyFields, kw_only=True):
    """A chat to be written as its model's template writes it, with what else the template is told."""

    known_fields: ClassVar = TEMPLATES

    messages: Messages
    model: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True

    def chat_options(self) -> dict[str, Any]:
        """The engine's options that the prompt depends on."""
        options = self.reply_options()
        options.pop("constraint", None)
        choice = checked_choice(self.tool_choice, has_tools=bool(self.tools))
        chosen = {"tools": function_tools(self.tools) or None, "tool_choice": choice if self.tools else None}
        return options | {name: value for name, value in chosen.items() if value is not None}


async def tokenize(request: Request) -> Response:
    """The token ids of a text."""
    service = service_of(request)
    body = await read_json(request, TokenizeRequest, service.settings)
    if body.content is not None and body.prompt is not None:
        raise ApiError(400, "content and prompt are given, two names of one text; give one", param="prompt")
    lease = await service.lease(request, body.model)
    try:
        return json_response(await asyncio.to_thread(_tokens, lease.llm.tokenizer, body))
    finally:
        lease.release()


def _tokens(tokenizer: "Tokenizer", body: TokenizeRequest) -> dict[str, Any]:
    ids = tokenizer.encode(body.content or body.prompt or "", body.add_special, body.parse_special)
    if not body.with_pieces:
        return {"tokens": msgspec.Raw(msgspec.json.encode(ids)), "count": len(ids)}
    # Each token is decoded and written once, however often it comes: a text may have a million.
    written = {
        token_id: msgspec.json.encode({"id": token_id, "piece": tokenizer.decode([token_id], skip_special=False)})
        for token_id in dict.fromkeys(ids)
    }
    return {"tokens": msgspec.Raw(b"[%b]" % b",".join([written[token_id] for token_id in ids])), "count": len(ids)}


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service = service_of(request)
    body = await read_json(request, DetokenizeRequest, service.settings)
    lease = await service.lease(request, body.model)
    try:
        text = await asyncio.to_thread(lease.llm.tokenizer.decode, body.tokens, skip_special=False)
        return json_response({"content": text})
    finally:
        lease.release()


async def apply_template(request: Request) -> Response:
    """The prompt that a chat becomes, as text."""
    service = service_of(request)
    body = await read_json(request, TemplateRequest, service.settings)
    lease = await service.lease(request, body.model)
    try:
        options = body.chat_options()
        text = await asyncio.to_thread(
            lambda: lease.llm.render_chat(
                template_messages(body.messages), add_generation_prompt=body.add_generation_prompt, **options
            )
        )
        return json_response({"prompt": text})
    finally:
        lease.release()


async def count_chat_tokens(request: Request) -> Response:
    """How many tokens the prompt of a chat has, for those who want to know before they ask."""
    service = service_of(request)
    body = await read_json(request, TemplateRequest, service.settings)
    lease = await service.lease(request, body.model)
    try:
        options = body.chat_options()
        count = await asyncio.to_thread(
            lambda: lease.llm.count_chat_tokens(template_messages(body.messages), **options)
        )
        return json_response({"object": "input_tokens", "input_tokens": count})
    finally:
        lease.release()
