"""`/api/chat`: Ollama's chats."""

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.serving import serve_reply
from localinfer.apps.server.api.writer import Event
from localinfer.apps.server.ollama.messages import OllamaMessages, read_ollama_messages
from localinfer.apps.server.ollama.reply_fields import ReplyFields, begin_request, load_or_unload
from localinfer.apps.server.ollama.reply_lines import OllamaLineWriter
from localinfer.apps.server.replies.fields import continuation, given
from localinfer.apps.server.replies.reply import TextPlan
from localinfer.apps.server.replies.service import caller_options, prepared, read_body
from localinfer.apps.server.replies.tool_fields import Tools, function_tools

if TYPE_CHECKING:
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM


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

    def plan(llm: "LLM") -> list[TextPlan]:
        return [TextPlan(partial(_open, llm, body, messages, options))]

    asked = msgspec.structs.replace(body, model=begun.named.id, stream=body.stream is not False)
    return await serve_reply(request, asked, "chat", plan, lambda reply: OllamaLineWriter(reply, begun, body, _message))


def _open(llm: "LLM", body: OllamaChatRequest, messages: list[dict[str, Any]], options: dict[str, Any]) -> "TextStream":
    body.check_thinking(llm)
    return llm.stream_chat(messages, **options)


def _message(text: str, reasoning: str, calls: list[Event]) -> Event:
    message: Event = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}
