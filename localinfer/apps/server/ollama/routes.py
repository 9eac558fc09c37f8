"""Routes of Ollama's API, and the records that are posted there."""

import msgspec
from starlette.routing import Route

from localinfer.apps.server.ollama.models import (
    DeleteRequest,
    PullRequest,
    RefusedRequest,
    ShowRequest,
    copy,
    create,
    delete,
    pull,
    push,
    root,
    running,
    show,
    studio_model,
    studio_models,
    tags,
    version,
)
from localinfer.apps.server.ollama.replies import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    embed,
    embeddings,
    generate,
    ollama_chat,
)
from localinfer.apps.server.replies.service import route

READ = ("/api/tags", "/api/ps", "/api/version")
POSTED: dict[str, type[msgspec.Struct]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": ShowRequest,
    "/api/pull": PullRequest,
    "/api/copy": RefusedRequest,
    "/api/create": RefusedRequest,
    "/api/push": RefusedRequest,
}
"""Records that are posted, by route."""
DELETED: dict[str, type[msgspec.Struct]] = {"/api/delete": DeleteRequest}


def ollama_routes() -> list[Route]:
    """The routes of Ollama's API, and the root, which browsers and its clients share."""
    return [
        route("/", root),
        route("/api/chat", ollama_chat, "POST"),
        route("/api/generate", generate, "POST", prompt_field="prompt"),
        route("/api/embed", embed, "POST", prompt_field="input"),
        route("/api/embeddings", embeddings, "POST", prompt_field="prompt"),
        route("/api/tags", tags),
        route("/api/ps", running),
        route("/api/version", version),
        # LM Studio's.
        route("/api/v0/models", studio_models),
        route("/api/v0/models/{model:path}", studio_model),
        route("/api/show", show, "POST"),
        route("/api/pull", pull, "POST"),
        route("/api/delete", delete, "DELETE"),
        route("/api/copy", copy, "POST"),
        route("/api/create", create, "POST"),
        route("/api/push", push, "POST"),
    ]
