"""The ingress: takes requests from Serve's proxy, relays them to replicas, and stays when a replica goes."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localinfer.ray.answer_parts import AnswerPart, RelayedRequest
from localinfer.ray.prefill_deployment import HEADERS
from localinfer.ray.prompt_prefix import prompt_prefixes
from localinfer.ray.relay import ReplicaLostError, relay_answer
from localinfer.ray.replica_answers import AnsweredReplicas, Answers, answers_within
from localinfer.ray.replica_metrics import merged_metrics
from localinfer.server.replies.resumption import Resumption
from localinfer.server.transport.http import ApiError

_OF_ONE_REPLICA = re.compile(r"(?:/v1)?/(?:requests|responses|conversations)/[^/]+(?:/.*)?")
"""Paths with the name of something that one replica has."""
_SECONDS = 30.0
_METRICS_SECONDS = 2.0
"""Who reads metrics waits for ten seconds mostly, and a replica that is well answers in some milliseconds."""
_GONE = (RayActorError, WorkerCrashedError)


class Ingress:
    """What Serve calls with each request. engine: a handle of the replicas. max_body_bytes: of a request.

    prefill: a handle of those that compute prompts for them, None for none.
    """

    def __init__(self, engine: DeploymentHandle, max_body_bytes: int, prefill: DeploymentHandle | None = None) -> None:
        self._engine = engine
        self._prefill = prefill
        self._max_body_bytes = max_body_bytes
        self._answered = AnsweredReplicas()

    def __serve_build_asgi_app__(self) -> ASGIApp:  # noqa: PLW3201 - Serve's name
        # A function: uvicorn takes a method for an app of the former interface.
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _live(receive, send)
            elif scope["type"] == "http":
                await self._answer(scope, receive, send)

        return serve

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive, self._max_body_bytes)
        if body is None:
            return
        request = RelayedRequest(
            scope["method"],
            scope["path"],
            scope["query_string"],
            tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body,
            None if scope.get("client") is None else tuple(scope["client"]),
        )
        if len(body) > self._max_body_bytes:
            reason = f"the body is larger than {self._max_body_bytes:,} bytes; send less"
            await _send_error(send, ApiError(413, reason, code="body_too_large"), request.path)
            return
        answering = asyncio.ensure_future(self._answer_request(request, send))
        leaving = asyncio.ensure_future(_departure(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _answer_request(self, request: RelayedRequest, send: Send) -> None:
        path = request.path.rstrip("/")
        if path in ("/metrics", "/v1/metrics"):
            await self._answer_metrics(request, send)
        elif _OF_ONE_REPLICA.fullmatch(path):
            await self._answer_by_any(request, send)
        else:
            prefixes = prompt_prefixes(request.body) if request.method == "POST" else ()

            def open_parts(resumption: Resumption | None) -> AsyncGenerator[list[AnswerPart]]:
                return self._parts(request, resumption, prefixes)

            await relay_answer(open_parts, _without_request_id(send), path)

    async def _parts(
        self, request: RelayedRequest, resumption: Resumption | None, prefixes: tuple[int, ...]
    ) -> AsyncGenerator[list[AnswerPart]]:
        """What a replica answers, until it ends or is gone. Raises: ReplicaLostError."""
        response: Any = self._engine.options(stream=True).answer.remote(request, resumption, prefix=prefixes)
        has_ended = False
        try:
            async for parts in response:
                yield parts
            has_ended = True
        except _GONE as error:
            has_ended = True
            raise ReplicaLostError(str(error)) from error
        finally:
            if not has_ended:
                response.cancel()

    async def _answer_by_any(self, request: RelayedRequest, send: Send) -> None:
        """Ask all replicas, and pass on the answer of the one that has what is asked for."""
        answers = await _of_all(self._engine, "whole_answer", request, _SECONDS, lambda parts: _status(parts) != 404)
        found = next((parts for parts in answers.found if _status(parts) != 404), None)
        if found is None:
            found = answers.found[0] if answers.found else None
        if found is None:
            await _send_error(send, _no_replica(), request.path)
            return
        for part in found:
            if part.message is not None:
                await send(part.message)

    async def _answer_metrics(self, request: RelayedRequest, send: Send) -> None:
        answers = await _of_all(self._engine, "metrics", request, _METRICS_SECONDS)
        found = dict(answers.found)
        texts = {name: _body(parts).decode() for name, parts in sorted(found.items()) if _status(parts) == 200}
        if not texts:
            refused = next(iter(found.values()), None)
            for part in refused or ():
                if part.message is not None:
                    await send(part.message)
            if refused is None:
                await _send_error(send, _no_replica(), request.path)
            return
        num_missing = answers.num_missing
        if self._prefill is not None:
            # Whether the client may see them, the engines have said.
            asked = RelayedRequest("GET", "/metrics", b"", HEADERS, b"")
            more = await _of_all(self._prefill, "metrics", asked, _METRICS_SECONDS)
            texts |= {name: _body(parts).decode() for name, parts in sorted(more.found) if _status(parts) == 200}
            num_missing += more.num_missing
        body = self._answered.exposition(texts, num_missing, _METRICS_SECONDS) + merged_metrics(texts)
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await send({"type": "http.response.body", "body": body.encode()})


async def _of_all(
    replicas: DeploymentHandle,
    method: str,
    request: RelayedRequest,
    seconds: float,
    is_enough: Callable[[Any], bool] = lambda answer: False,
) -> Answers[Any]:
    """What the replicas that are there return in time; see `answers_within`."""
    called = replicas.broadcast(method, request)
    began = time.monotonic()
    try:
        # Serve's own `results_async` returns nothing of the others where one says nothing.
        results = await asyncio.wait_for(called._fetch_replica_results_async(), seconds)
    except (DeploymentUnavailableError, TimeoutError):
        return Answers()
    left = max(0.0, began + seconds - time.monotonic())
    return await answers_within((result.get_async() for result in results), left, is_enough)


def _no_replica() -> ApiError:
    return ApiError(503, "there is no replica now; try again", code="no_replica")


def _without_request_id(send: Send) -> Send:
    """Serve's proxy gives every answer an id of its own."""

    async def passed(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message["headers"] if header[0] != b"x-request-id"]
            message = {**message, "headers": kept}
        await send(message)

    return passed


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return


async def _read(receive: Receive, most: int) -> bytes | None:
    """The body of a request, or a little more than is allowed of it; None if its client has left."""
    body = bytearray()
    while len(body) <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return bytes(body)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(send: Send, error: ApiError, path: str) -> None:
    response = error.response(path)
    start: Message = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": bytes(response.body)})


def _status(parts: list[AnswerPart]) -> int:
    messages = [part.message for part in parts if part.message is not None]
    return int(messages[0]["status"]) if messages else 500


def _body(parts: list[AnswerPart]) -> bytes:
    return b"".join(part.message.get("body", b"") for part in parts if part.message is not None)
