"""From a path to a function: endpoints that answer every error in one shape, and paths with and without `/v1`."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from localinfer.server.replies.service import Service
from localinfer.server.transport.http import ApiError, ClientGone, Record, read_json, to_api_error

if TYPE_CHECKING:
    from localinfer.llm import LLM

logger = logging.getLogger(__name__)

Body = TypeVar("Body")
Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
_CLIENT_CLOSED = 499
"""Written to the log only: the client has left."""


def service_of(request: Request) -> Service:
    """The service that a request was sent to."""
    return cast(Service, request.app.state.service)


def owner_of(request: Request) -> str:
    """The owner among whom the scheduler is fair: a connection by TCP; by the Unix socket each request on its own."""
    return str(request.client or request.state.request_id)


async def read_body(request: Request, record: type[Record]) -> Record:
    """The body of a request as a record. Raises: as `http.read_json`."""
    return await read_json(request, record, service_of(request).settings)


async def on_model(request: Request, name: str | None, work: "Callable[[LLM, Body], Result]", body: Body) -> Result:
    """What some work on a model returns, done in a thread. Raises: as `Service.lease`, and what the work raises."""
    with await service_of(request).lease(request, name) as lease:
        return await asyncio.to_thread(work, lease.llm, body)


def route(path: str, endpoint: Endpoint, method: str = "GET", *, prompt_field: str = "messages") -> Route:
    """A route whose errors are answered, counted and logged. prompt_field: the member of its body with the prompt."""

    async def guarded(request: Request) -> Response:
        began = time.perf_counter()
        request_id = request.state.request_id
        try:
            response = await endpoint(request)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=_CLIENT_CLOSED)
        except Exception as error:
            response = to_api_error(error, request_id, prompt_field=prompt_field).response()
        service_of(request).metrics.requests.labels(path, str(response.status_code)).inc()
        seconds = time.perf_counter() - began
        logger.info("%s %s %s %d %.3f s", request_id, method, path, response.status_code, seconds)
        return response

    return Route(path, guarded, methods=[method])


async def unrouted(request: Request, error: Exception) -> Response:
    """Answer a path or a method that does not exist."""
    assert isinstance(error, HTTPException), "registered for it only"
    if error.status_code == 405:
        message = f"{request.method} is not possible here; use {(error.headers or {}).get('Allow', 'another method')}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
    return ApiError(error.status_code, f"there is nothing at {request.url.path!r:.80}", code="not_found").response()


class PlainPaths:
    """ASGI middleware that strips `/v1` from paths, and slashes from their ends: clients disagree on both."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/")
            path = path.removeprefix("/v1") if path == "/v1" or path.startswith("/v1/") else path
            scope = {**scope, "path": path or "/"}
        await self._app(scope, receive, send)
