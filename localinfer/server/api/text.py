"""Text and tokens without generation: `/tokenize`, `/detokenize`, `/apply-template`, and counting what a prompt has."""

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.replies.fields import (
    AddGenerationPrompt,
    ChatFields,
    ContinueFinalMessage,
    TokenId,
    continuation,
    given,
)
from localinfer.server.replies.message_fields import Messages, template_messages
from localinfer.server.replies.service import on_model, read_body
from localinfer.server.replies.tool_fields import Tools, checked_choice, function_tools
from localinfer.server.transport.http import ApiError, json_response
from localinfer.server.transport.known_fields import TEMPLATES, TEXTS

if TYPE_CHECKING:
    from localinfer.llm import LLM


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


class TemplateRequest(ChatFields, kw_only=True):
    """A chat to be written as its model's template writes it, with what else the template reads."""

    known_fields: ClassVar = TEMPLATES

    messages: Messages
    model: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    continue_final_message: ContinueFinalMessage | None = None
    add_generation_prompt: AddGenerationPrompt | None = None

    def chat_options(self) -> dict[str, Any]:
        """The engine's options that the prompt depends on."""
        options = self.reply_options()
        options.pop("constraint", None)
        choice = checked_choice(self.tool_choice, has_tools=bool(self.tools))
        tools = function_tools(self.tools)
        options |= continuation(self.continue_final_message, self.add_generation_prompt)
        return {**options, **given(tools=tools or None, tool_choice=choice if self.tools else None)}


async def tokenize(request: Request) -> Response:
    """The token ids of a text."""
    body = await read_body(request, TokenizeRequest)
    if body.content is not None and body.prompt is not None:
        raise ApiError(400, "content and prompt are given, two names of one text; give one", param="prompt")
    return json_response(await on_model(request, body.model, _tokens, body))


def _tokens(llm: "LLM", body: TokenizeRequest) -> dict[str, Any]:
    ids = llm.tokenizer.encode(body.content or body.prompt or "", body.add_special, body.parse_special)
    if not body.with_pieces:
        return {"tokens": msgspec.Raw(msgspec.json.encode(ids)), "count": len(ids)}
    # Each token is decoded and written once, however often it comes: a text may have a million.
    written = {
        token_id: msgspec.json.encode({"id": token_id, "piece": llm.tokenizer.decode([token_id], skip_special=False)})
        for token_id in dict.fromkeys(ids)
    }
    return {"tokens": msgspec.Raw(b"[%b]" % b",".join([written[token_id] for token_id in ids])), "count": len(ids)}


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    return json_response({"content": await on_model(request, body.model, _text, body)})


def _text(llm: "LLM", body: DetokenizeRequest) -> str:
    return llm.tokenizer.decode(body.tokens, skip_special=False)


async def apply_template(request: Request) -> Response:
    """The prompt that a chat becomes, as text."""
    body = await read_body(request, TemplateRequest)
    return json_response({"prompt": await on_model(request, body.model, _prompt, body)})


def _prompt(llm: "LLM", body: TemplateRequest) -> str:
    messages, options = template_messages(body.messages), body.chat_options()
    return llm.render_chat(messages, add_generation_prompt=body.add_generation_prompt is not False, **options)


async def count_chat_tokens(request: Request) -> Response:
    """How many tokens the prompt of a chat has, to be known before it is sent."""
    body = await read_body(request, TemplateRequest)
    count = await on_model(request, body.model, _count, body)
    return json_response({"object": "input_tokens", "input_tokens": count})


def _count(llm: "LLM", body: TemplateRequest) -> int:
    return llm.count_chat_tokens(template_messages(body.messages), **body.chat_options())
