"""The ASGI application: every route, behind the gate."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from localinfer.server import openapi
from localinfer.server.api import (
    chat_routes,
    completion_routes,
    embedding_routes,
    messages_routes,
    responses_routes,
    status_routes,
    text_routes,
)
from localinfer.server.api.routing import PlainPaths, route, unrouted
from localinfer.server.replies.service import Service
from localinfer.server.transport.security import SecurityMiddleware


def make_app(service: Service) -> Starlette:
    """The application of a service; paths are written without `/v1`, which may stand before each."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.open():
            yield

    routes = [
        route("/chat/completions", chat_routes.chat_completions, "POST"),
        route("/chat/completions/input_tokens", text_routes.count_chat_tokens, "POST"),
        route("/completions", completion_routes.completions, "POST", prompt_field="prompt"),
        route("/embeddings", embedding_routes.embeddings, "POST", prompt_field="input"),
        route("/responses", responses_routes.responses, "POST", prompt_field="input"),
        route("/messages", messages_routes.messages, "POST"),
        route("/messages/count_tokens", messages_routes.count_tokens, "POST"),
        route("/tokenize", text_routes.tokenize, "POST"),
        route("/detokenize", text_routes.detokenize, "POST"),
        route("/apply-template", text_routes.apply_template, "POST"),
        route("/openapi.json", openapi.openapi),
        route("/health", status_routes.health),
        route("/version", status_routes.show_version),
        route("/models", status_routes.models),
        route("/models/{model:path}", status_routes.model),
        route("/metrics", status_routes.metrics),
        route("/slots", status_routes.slots),
        route("/requests/{reply}/cancel", status_routes.cancel, "POST"),
        route("/requests/{reply}", status_routes.cancel, "DELETE"),
        route("/responses/{reply}/cancel", status_routes.cancel, "POST"),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(SecurityMiddleware, settings=service.settings), Middleware(PlainPaths)],
        exception_handlers={HTTPException: unrouted},
        lifespan=lifespan,
    )
    app.state.service = service
    app.router.redirect_slashes = False
    return app
