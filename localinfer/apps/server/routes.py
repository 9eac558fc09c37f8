"""Every route of the server, and their description in OpenAPI 3.1, made of the records that requests are read into."""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from localinfer.apps.server.api import (
    audio,
    chat,
    completions,
    decisions,
    embeddings,
    messages,
    prefill,
    responses,
    status,
    text,
)
from localinfer.apps.server.api.audio import SpeechRequest
from localinfer.apps.server.api.chat import ChatRequest
from localinfer.apps.server.api.completions import CompletionRequest
from localinfer.apps.server.api.decisions import DecisionRequest, SystemOneRequest
from localinfer.apps.server.api.embeddings import EmbeddingRequest, LlamaEmbeddingRequest, RerankRequest
from localinfer.apps.server.api.messages import CountRequest, MessagesRequest
from localinfer.apps.server.api.responses import ConversationRequest
from localinfer.apps.server.api.responses_items import ResponsesRequest
from localinfer.apps.server.api.text import DetokenizeRequest, TemplateRequest, TokenizeRequest
from localinfer.apps.server.kv_transfer import ROUTE
from localinfer.apps.server.llama_server import completion, properties
from localinfer.apps.server.llama_server.completion import InfillRequest, LlamaCompletionRequest
from localinfer.apps.server.ollama import models as ollama_models, replies as ollama_replies
from localinfer.apps.server.replies.service import route
from localinfer.apps.server.transport.bodies import FORM, FORM_ROUTES
from localinfer.apps.server.transport.http import OLLAMA, SYSTEM_ONE, json_response
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.kernels.versions import installed_version

_OLLAMA_READ = ("/api/tags", "/api/ps", "/api/version")
_OLLAMA_POSTED: dict[str, type[msgspec.Struct]] = {
    "/api/chat": ollama_replies.OllamaChatRequest,
    "/api/generate": ollama_replies.OllamaGenerateRequest,
    "/api/embed": ollama_replies.OllamaEmbedRequest,
    "/api/embeddings": ollama_replies.OllamaEmbeddingsRequest,
    "/api/show": ollama_models.ShowRequest,
    "/api/pull": ollama_models.PullRequest,
    "/api/copy": ollama_models.RefusedRequest,
    "/api/create": ollama_models.RefusedRequest,
    "/api/push": ollama_models.RefusedRequest,
}
"""Records that are posted, by route."""
_OLLAMA_DELETED: dict[str, type[msgspec.Struct]] = {"/api/delete": ollama_models.DeleteRequest}


def ollama_routes() -> list[Route]:
    """The routes of Ollama's API, and the root, which browsers and its clients share."""
    return [
        route("/", ollama_models.root),
        route("/api/chat", ollama_replies.ollama_chat, "POST"),
        route("/api/generate", ollama_replies.generate, "POST", prompt_field="prompt"),
        route("/api/embed", ollama_replies.embed, "POST", prompt_field="input"),
        route("/api/embeddings", ollama_replies.embeddings, "POST", prompt_field="prompt"),
        route("/api/tags", ollama_models.tags),
        route("/api/ps", ollama_models.running),
        route("/api/version", ollama_models.version),
        # LM Studio's.
        route("/api/v0/models", ollama_models.studio_models),
        route("/api/v0/models/{model:path}", ollama_models.studio_model),
        route("/api/show", ollama_models.show, "POST"),
        route("/api/pull", ollama_models.pull, "POST"),
        route("/api/delete", ollama_models.delete, "DELETE"),
        route("/api/copy", ollama_models.copy, "POST"),
        route("/api/create", ollama_models.create, "POST"),
        route("/api/push", ollama_models.push, "POST"),
    ]


BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/input_tokens": TemplateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/systemone": SystemOneRequest,
    "/v1/decisions": DecisionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/conversations": ConversationRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": TemplateRequest,
    "/completion": LlamaCompletionRequest,
    "/infill": InfillRequest,
    "/embedding": LlamaEmbeddingRequest,
    **_OLLAMA_POSTED,
}
"""Records that are posted, by route."""
FORM_BODIES: dict[str, type[msgspec.Struct]] = {f"/v1{path}": SpeechRequest for path in FORM_ROUTES}
"""The same that are posted as forms."""

_OWN_NAMES = re.compile(rb'("|#/components/schemas/)MessageToolCall"')
"""The record whose name in the document is `ToolCall`, which is another class in Python."""
_READ = ("/health", "/version", "/v1/models", "/tokenizer_info", "/metrics", "/slots", "/props", "/openapi.json")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_DETAIL = {
    "type": "object",
    "required": ["loc", "msg", "type"],
    "properties": {"loc": {"type": "array"}, "msg": {"type": "string"}, "type": {"type": "string"}},
}
_SYSTEM_ONE_ERROR = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "detail": {
            "anyOf": [
                {"type": "array", "items": _DETAIL},
                {
                    "type": "object",
                    "required": ["error_type", "message"],
                    "properties": {"error_type": {"type": "string"}, "message": {"type": "string"}},
                },
            ]
        }
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_ERRORS = {"Error": _ERROR, "OllamaError": _OLLAMA_ERROR, "SystemOneError": _SYSTEM_ONE_ERROR}


def describe() -> dict[str, Any]:
    """The description, as a JSON object."""
    bodies = tuple(dict.fromkeys((*BODIES.values(), *FORM_BODIES.values(), *_OLLAMA_DELETED.values())))
    described = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    references, schemas = msgspec.json.decode(_OWN_NAMES.sub(rb'\1ToolCall"', msgspec.json.encode(described)))
    reference_of = dict(zip(bodies, references, strict=True))
    paths: dict[str, Any] = {path: {"get": {"responses": _answers(path)}} for path in (*_READ, *_OLLAMA_READ)}
    sent = [("post", *item) for item in (*BODIES.items(), *FORM_BODIES.items())]
    for method, path, body in sent + [("delete", *item) for item in _OLLAMA_DELETED.items()]:
        content = {FORM if path in FORM_BODIES else "application/json": {"schema": reference_of[body]}}
        paths[path] = {method: {"requestBody": {"required": True, "content": content}, "responses": _answers(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "localinfer", "version": installed_version("localinfer")},
        "paths": paths,
        "components": {"schemas": {**schemas, **_ERRORS}},
    }


def _answers(path: str) -> dict[str, Any]:
    name, stream = ("OllamaError", "lines of JSON") if path.startswith(OLLAMA) else ("Error", "server-sent events")
    name = "SystemOneError" if path == f"/v1{SYSTEM_ONE}" else name
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        "200": {"description": f"The answer, as JSON or as {stream}."},
        "default": {"description": "An error.", "content": {"application/json": {"schema": schema}}},
    }


async def openapi(request: Request) -> Response:
    """Describe every route."""
    return json_response(describe())


def server_routes(settings: ServerSettings) -> list[Route]:
    """Every route of a server; paths are written without `/v1`."""
    routes = [
        *ollama_routes(),
        route("/chat/completions", chat.chat_completions, "POST"),
        route("/chat/completions/input_tokens", text.count_chat_tokens, "POST"),
        route("/completions", completions.completions, "POST", prompt_field="prompt"),
        route("/embeddings", embeddings.embeddings, "POST", prompt_field="input"),
        route("/rerank", embeddings.rerank, "POST", prompt_field="documents"),
        route("/systemone", decisions.system_one, "POST", prompt_field="state"),
        route("/decisions", decisions.decisions, "POST", prompt_field="input"),
        # Where Cohere's clients ask.
        route("/v2/rerank", embeddings.rerank, "POST", prompt_field="documents"),
        route("/responses", responses.responses, "POST", prompt_field="input"),
        route("/responses/input_tokens", responses.input_tokens, "POST", prompt_field="input"),
        route("/responses/compact", responses.compact, "POST"),
        route("/responses/{response}", responses.response),
        route("/responses/{response}", responses.delete_response, "DELETE"),
        route("/responses/{response}/input_items", responses.input_items),
        route("/responses/{reply}/cancel", responses.cancel_response, "POST"),
        route("/conversations", responses.create_conversation, "POST"),
        route("/conversations/{conversation}", responses.conversation),
        route("/conversations/{conversation}", responses.update_conversation, "POST"),
        route("/conversations/{conversation}", responses.delete_conversation, "DELETE"),
        route("/conversations/{conversation}/items", responses.conversation_items),
        route("/conversations/{conversation}/items", responses.add_items, "POST"),
        route("/conversations/{conversation}/items/{item}", responses.conversation_item),
        route("/conversations/{conversation}/items/{item}", responses.delete_item, "DELETE"),
        route("/audio/transcriptions", audio.transcriptions, "POST", prompt_field="file"),
        route("/audio/translations", audio.translations, "POST", prompt_field="file"),
        route("/messages", messages.messages, "POST"),
        route("/messages/count_tokens", messages.count_tokens, "POST"),
        route("/tokenize", text.tokenize, "POST"),
        route("/detokenize", text.detokenize, "POST", prompt_field="tokens"),
        route("/tokenizer_info", text.tokenizer_info),
        route("/apply-template", text.apply_template, "POST"),
        route("/openapi.json", openapi),
        route("/health", status.health),
        # vLLM's.
        route("/ping", status.ping),
        route("/ping", status.ping, "POST"),
        route("/score", embeddings.score, "POST", prompt_field="text_2"),
        route("/version", status.show_version),
        route("/models", status.models),
        route("/models/{model:path}", status.model),
        route("/metrics", properties.metrics),
        route("/requests", status.requests),
        # llama-server's own shapes.
        route("/completion", completion.completion, "POST", prompt_field="prompt"),
        route("/infill", completion.infill, "POST", prompt_field="input_prefix"),
        route("/embedding", embeddings.embedding, "POST", prompt_field="input"),
        route("/reranking", embeddings.rerank, "POST", prompt_field="documents"),
        route("/props", properties.show_properties),
        route("/props", properties.change_properties, "POST"),
        route("/models/load", properties.load, "POST"),
        route("/models/unload", properties.unload, "POST"),
        route("/lora-adapters", properties.lora_adapters),
        route("/lora-adapters", properties.change_lora_adapters, "POST"),
        route("/slots", properties.slots),
        route("/slots/{slot}", properties.act, "POST"),
        route("/requests/{reply}/cancel", status.cancel, "POST"),
        route("/requests/{reply}", status.cancel, "DELETE"),
    ]
    if settings.handover.role == "prefill":
        routes.insert(0, route(ROUTE, prefill.prefill, "POST", prompt_field="token_ids"))
    return routes
