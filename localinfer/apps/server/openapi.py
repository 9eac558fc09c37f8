"""The server's routes described in OpenAPI 3.1, from the very records that requests are read into."""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.chat import ChatRequest
from localinfer.apps.server.api.completions import CompletionRequest
from localinfer.apps.server.api.embeddings import EmbeddingRequest, LlamaEmbeddingRequest, RerankRequest
from localinfer.apps.server.api.messages import CountRequest, MessagesRequest
from localinfer.apps.server.api.responses import ConversationRequest
from localinfer.apps.server.api.responses_items import ResponsesRequest
from localinfer.apps.server.api.text import DetokenizeRequest, TemplateRequest, TokenizeRequest
from localinfer.apps.server.llama_server.completion import InfillRequest, LlamaCompletionRequest
from localinfer.apps.server.ollama.routes import DELETED, POSTED, READ
from localinfer.apps.server.transport.http import OLLAMA, json_response
from localinfer.kernels.versions import installed_version

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/input_tokens": TemplateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
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
    **POSTED,
}
"""Records that are posted, by route."""

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
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def describe() -> dict[str, Any]:
    """The description, as a JSON object."""
    bodies = tuple(dict.fromkeys((*BODIES.values(), *DELETED.values())))
    described = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    references, schemas = msgspec.json.decode(_OWN_NAMES.sub(rb'\1ToolCall"', msgspec.json.encode(described)))
    reference_of = dict(zip(bodies, references, strict=True))
    paths: dict[str, Any] = {path: {"get": {"responses": _answers(path)}} for path in (*_READ, *READ)}
    sent = [("post", *item) for item in BODIES.items()] + [("delete", *item) for item in DELETED.items()]
    for method, path, body in sent:
        content = {"application/json": {"schema": reference_of[body]}}
        paths[path] = {method: {"requestBody": {"required": True, "content": content}, "responses": _answers(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "localinfer", "version": installed_version("localinfer")},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR, "OllamaError": _OLLAMA_ERROR}},
    }


def _answers(path: str) -> dict[str, Any]:
    name, stream = ("OllamaError", "lines of JSON") if path.startswith(OLLAMA) else ("Error", "server-sent events")
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        "200": {"description": f"The answer, as JSON or as {stream}."},
        "default": {"description": "An error.", "content": {"application/json": {"schema": schema}}},
    }


async def openapi(request: Request) -> Response:
    """Describe every route."""
    return json_response(describe())
