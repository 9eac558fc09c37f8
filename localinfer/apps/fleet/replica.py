"""A replica: the server's app over one loaded model, without sockets, whose answers are given in parts."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

from localinfer.apps.fleet.accounts import call_apart
from localinfer.apps.fleet.options import ReplicaOptions, model_registry
from localinfer.apps.server.kv_transfer import (
    CONNECT_SECONDS,
    ROUTE,
    SILENT_SECONDS,
    PrefillAnswer,
    PrefillCancelled,
    PrefillFailed,
    read_line,
    refusal,
    silence,
)
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.relay import RELAY, Note, ReplyRelay, Resumption, UsedNote

_END_SECONDS = 5.0
"""Time for the app to end when its client has left."""
BATCH_SECONDS = 0.08
"""Between two batches of one answer: parts are sent together, as each batch costs the ingress the same."""
HEARTBEAT_SECONDS = 1.0
"""After this long without parts an empty batch shows that the process is alive."""


@dataclass(frozen=True)
class RelayedRequest:
    """A request with its whole body. client: address and port."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    http_version: str = "1.1"

    def scope(self, state: dict[str, Any]) -> Scope:
        """The request as an app is called with it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": state,
        }


class AnswerPart(NamedTuple):
    """A message of the answer, None for none, and what is true as soon as it was sent."""

    notes: tuple[Note, ...]
    message: MutableMapping[str, Any] | None


async def answer_parts(
    app: ASGIApp, request: RelayedRequest, resumption: Resumption | None
) -> AsyncGenerator[list[AnswerPart]]:
    """Call an app, and yield what there is of its answer: at once, then in batches, and [] where there is nothing.

    The last batch has a `UsedNote`. Closing the iterator tells the app that the client has left.
    Raises: what the app raised.
    """
    parts: list[AnswerPart] = []
    pending: list[Note] = []
    changed, has_left = asyncio.Event(), asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    def note(one: Note, has_bytes: bool) -> None:
        if has_bytes:
            pending.append(one)
        else:
            parts.append(AnswerPart((one,), None))
            changed.set()

    async def receive() -> Message:
        if body:
            return body.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        parts.append(AnswerPart(tuple(pending), message))
        pending.clear()
        changed.set()

    scope = request.scope({RELAY: ReplyRelay(note, resumption)})
    answering = asyncio.ensure_future(app(scope, receive, send))
    answering.add_done_callback(lambda _: changed.set())
    loop = asyncio.get_running_loop()
    next_batch = 0.0
    try:
        while True:
            if not await _is_set_within(changed, HEARTBEAT_SECONDS):
                yield []
                continue
            if (seconds := next_batch - loop.time()) > 0 and not answering.done():
                await asyncio.wait({answering}, timeout=seconds)
            changed.clear()
            has_ended = answering.done()
            if has_ended and answering.exception() is None:
                parts.append(AnswerPart((UsedNote(sum(record_of(scope).num_tokens())),), None))
            given, parts[:] = parts[:], ()
            if any(part.message is not None and part.message.get("body") for part in given):
                next_batch = loop.time() + BATCH_SECONDS
            yield given
            if has_ended:
                answering.result()
                return
    finally:
        has_left.set()
        if not answering.done():
            with suppress(Exception):
                await asyncio.wait_for(answering, _END_SECONDS)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


PREFILL = "prefill"
"""The name of the deployment."""
HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))
"""Of requests that the application makes itself, which takes a handle."""


class PrefillDeployment:
    """A prefill server for `KVTransferClient`: the replica that Serve chooses, asked over its handle instead of HTTP.

    handle: of the deployment, a `DeploymentHandle`. loop: on which its answers are waited for; it runs in another
    thread than the one that asks.
    """

    name = f"of Serve's deployment {PREFILL!r}"

    def __init__(self, handle: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = handle
        self._loop = loop

    def ask(self, body: bytes, *, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        """See `PrefillServer`."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(body, deadline, is_cancelled), self._loop)
        try:
            # The loop may have ended without a notice.
            return asking.result(max(0.0, deadline - time.monotonic()) + SILENT_SECONDS)
        except TimeoutError:
            asking.cancel()
            raise silence(deadline, time.monotonic()) from None

    async def _ask(self, body: bytes, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        request = RelayedRequest("POST", ROUTE, b"", HEADERS, body)
        try:
            response = call_apart(self._handle.options(stream=True).prefill.remote, request)
            try:
                return await _answer(response, deadline, is_cancelled)
            except BaseException:
                response.cancel()
                raise
        except TimeoutError:
            raise silence(deadline, time.monotonic()) from None
        except (PrefillFailed, PrefillCancelled):
            raise
        except Exception as error:
            # Of Ray's own there are many: a replica that died, a node that is gone, a deployment that is deleted.
            raise PrefillFailed(f"it cannot be reached, or went away: {type(error).__name__}") from None


async def _answer(
    response: AsyncIterator[list[AnswerPart]], deadline: float, is_cancelled: Callable[[], bool]
) -> PrefillAnswer:
    """Read an answer to its end. Raises: PrefillFailed, PrefillCancelled, TimeoutError; what the iterator raises."""
    answer, seconds = _Answer(), CONNECT_SECONDS
    while True:
        if is_cancelled():
            raise PrefillCancelled
        try:
            async with asyncio.timeout(min(seconds, deadline - time.monotonic())):
                parts = await anext(response)
        except StopAsyncIteration:
            if answer.found is None:
                raise PrefillFailed("it went away before it was done") from None
            return answer.found
        seconds = SILENT_SECONDS
        answer.take(parts)


class _Answer:
    """The lines of an answer, from its parts. found: the result, None until it is reported."""

    def __init__(self) -> None:
        self.found: PrefillAnswer | None = None
        self._status = 0
        self._content = b""

    def take(self, parts: Sequence[AnswerPart]) -> None:
        """Read further parts. Raises: PrefillFailed."""
        for message in (part.message for part in parts if part.message is not None):
            if message["type"] == "http.response.start":
                self._status = int(message["status"])
                continue
            self._content += message.get("body", b"")
            if self._status == 200:
                *lines, self._content = self._content.split(b"\n")
                for line in lines:
                    self.found = read_line(line) or self.found
            elif not message.get("more_body"):
                raise refusal(self._status, self._content)


class EngineReplica:
    """Loads a model when it is made, and answers requests as `localinfer serve` does. Lives on one event loop.

    prefill: a handle of the deployment that computes long prompts, None where this replica does. num_prefill: of its
    replicas; so many may fail before a prompt is computed here.
    Raises: LocalinferError for a model that cannot be loaded, which ends the deployment.
    """

    # Serve awaits it: a model is loaded on the loop that answers.
    async def __init__(  # type: ignore[misc]
        self, options: ReplicaOptions, prefill: Any = None, num_prefill: int = 0
    ) -> None:
        from localinfer.apps.server.app import make_app
        from localinfer.apps.server.replies.service import Service

        loop = asyncio.get_running_loop()
        self._service = Service(
            options.settings,
            lambda metrics: model_registry(options, metrics),
            preloads=True,
            prefill_servers=[PrefillDeployment(prefill, loop) for _ in range(num_prefill)],
        )
        self._app = make_app(self._service)
        self._closing = AsyncExitStack()
        await self._closing.enter_async_context(self._app.router.lifespan_context(self._app))
        await self._service.get_ready()

    async def __del__(self) -> None:
        # Serve awaits it when the replica's last request has ended.
        await self._closing.aclose()

    async def answer(
        self, request: RelayedRequest, resumption: Resumption | None = None, replica: str = ""
    ) -> AsyncGenerator[list[AnswerPart]]:
        """Answer a request, or resume a reply to it. replica: the name of this one, for the router."""
        async with aclosing(answer_parts(self._app, request, resumption)) as answering:
            async for parts in answering:
                yield parts

    async def prefill(self, request: RelayedRequest) -> AsyncGenerator[list[AnswerPart]]:
        """Compute a prompt for another replica; yields an empty batch at once."""
        yield []
        async with aclosing(answer_parts(self._app, request, None)) as answering:
            async for parts in answering:
                yield parts

    async def whole_answer(self, request: RelayedRequest) -> list[AnswerPart]:
        """The answer as one list, for requests to all replicas."""
        return [part async for parts in answer_parts(self._app, request, None) for part in parts]

    async def metrics(self, request: RelayedRequest) -> tuple[str, list[AnswerPart]]:
        """The name of this replica, and its answer to a request for its metrics."""
        from ray import serve

        return serve.get_replica_context().replica_tag, await self.whole_answer(request)

    async def check_health(self) -> None:
        """Answer Serve's health check."""

    async def is_alive(self, replica: str = "") -> bool:
        """Answer the ingress's health check. replica: see `answer`."""
        return True

    async def running(self) -> tuple[int, list[str]]:
        """The number of this process, and the ids of the replies that it generates now."""
        return os.getpid(), [reply.id for reply in self._service.replies()]
