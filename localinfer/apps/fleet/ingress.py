"""The ingress: authenticates clients, queues requests for their turn, relays them to replicas, and survives their loss.

Nothing here knows Ray; `serve_ingress` has the replicas that Serve runs.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Protocol

from starlette.types import Message, Receive, Scope, Send

from localinfer.apps.fleet.accounts import IngressAccounts
from localinfer.apps.fleet.dispatch import Asked, owner_of
from localinfer.apps.fleet.placement import PromptFacts, prompt_facts
from localinfer.apps.fleet.relay import ReplicaLostError, ReplicaWatch, relay_answer, send_error, unless_silent
from localinfer.apps.fleet.replica import HEADERS, AnswerPart, RelayedRequest
from localinfer.apps.fleet.replica_answers import AnsweredReplicas, Answers, merged_metrics, summed_metrics
from localinfer.apps.server.replies.clients import tenant_of
from localinfer.apps.server.replies.relay import ReplyProgress, Resumption
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.connection import TOKEN_IDENTITY, SecurityMiddleware
from localinfer.apps.server.transport.http import ApiError, ClientGone
from localinfer.apps.server.transport.settings import AccessToken, ServerSettings

_OF_ONE_REPLICA = re.compile(r"/(?:requests|responses|conversations)/[^/]+(?:/.*)?")
"""Paths of records that one replica holds."""
_GENERATING = frozenset(
    ("/chat/completions", "/completions", "/responses", "/messages", "/completion", "/infill")
    + ("/api/chat", "/api/generate")
)
"""Paths, without `/v1`, of requests for texts, which wait for their turn."""
_SECONDS = 30.0
_METRICS_SECONDS = 2.0
"""Scrapers of metrics mostly wait for ten seconds, and a healthy replica answers in some milliseconds."""
_BIG_BODY_BYTES = 1 << 16
"""Larger bodies are parsed in a thread."""


class _Asking(NamedTuple):
    """A request and its client."""

    request: RelayedRequest
    path: str
    token: str
    identity: str | None
    tenant: str


class Replicas(Protocol):
    """The replicas of an application, as an ingress asks them."""

    def answer(
        self, request: RelayedRequest, resumption: Resumption | None, replica: str
    ) -> AsyncGenerator[list[AnswerPart]]:
        """The answer of a replica, "" for any. Closing the iterator ends it there. Raises: ReplicaLostError."""
        ...

    async def of_all(
        self, method: str, request: RelayedRequest, seconds: float, is_enough: Callable[[Any], bool]
    ) -> Answers[Any]:
        """The results of a method of `EngineReplica` that all replicas return in time; see `answers_within`."""
        ...

    async def prefill_metrics(self, request: RelayedRequest, seconds: float) -> Answers[Any]:
        """The metrics of replicas that compute prompts, if there are any."""
        ...

    async def ask(self, replica: str) -> None:
        """Return when a replica has answered that it is alive."""
        ...

    async def end(self, replica: str) -> None:
        """Kill the process of a replica, which need not answer."""
        ...


class Ingress:
    """An ASGI app in front of replicas. accounts: limits and turns of clients. Lives on one event loop."""

    def __init__(self, replicas: Replicas, settings: ServerSettings, accounts: IngressAccounts) -> None:
        self._replicas = replicas
        self._settings = settings
        self._accounts = accounts
        self._answered = AnsweredReplicas()
        self._watch = ReplicaWatch(replicas.ask, accounts.suspect, replicas.end)
        self._secured = SecurityMiddleware(self._answer, settings)
        owners = [] if settings.token is None else [AccessToken("token", settings.token, False)]
        self._operators = frozenset(one.identity for one in owners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            # Serve's proxy has the application's own prefix there.
            path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
            await self._secured(scope, receive, _without_request_id(send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._accounts.start()
        limit = self._settings.max_body_bytes
        body = await _read(receive, limit)
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
        path = request.path.rstrip("/").removeprefix("/v1")
        if len(body) > limit:
            reason = f"the body is larger than {limit:,} bytes; send less"
            await send_error(send, ApiError(413, reason, code="body_too_large"), path)
            return
        state = scope["state"]
        tenant = tenant_of(scope, self._settings)
        asking = _Asking(request, path, state.get("token_name", ""), state.get(TOKEN_IDENTITY), tenant)
        caller = _Caller(receive, send)
        with suppress(ClientGone):
            await unless_gone(caller.receive, self._answer_request(asking, caller.send))

    async def _answer_request(self, asking: _Asking, send: Send) -> None:
        if asking.path == "/metrics":
            await self._answer_metrics(asking, send)
        elif _OF_ONE_REPLICA.fullmatch(asking.path):
            await self._answer_by_any(asking.request, send)
        elif asking.request.method == "POST" and not asking.path.endswith("/cancel"):
            await self._answer_in_turn(asking, send)
        else:
            await relay_answer(lambda resumption: self._parts(asking.request, resumption, ""), send, asking.path)

    async def _answer_in_turn(self, asking: _Asking, send: Send) -> None:
        """Answer when it is the client's turn, within its limits."""
        asked = await self._asked(asking) if asking.path in _GENERATING else None
        progress = ReplyProgress()
        number = self._accounts.next_number()
        try:
            opened = await self._accounts.open(number, asking.token, asked)
            headers = dict(opened.headers)
            send = _with_headers(send, headers)
            if opened.refusal is not None:
                raise opened.error()
            replicas = [opened.replica]

            async def open_parts(resumption: Resumption | None) -> AsyncGenerator[list[AnswerPart]]:
                replica = replicas.pop() if replicas else await self._accounts.move(number)
                async with aclosing(self._parts(asking.request, resumption, replica)) as parts:
                    async for batch in parts:
                        yield batch
                        # `progress` knows their number from the first batch on.
                        self._accounts.resize(number, progress.num_texts)

            async def reserve(least: int, most: int) -> None:
                taken = await self._accounts.reserve(number, least, most)
                if taken.refusal is not None:
                    raise taken.error()
                headers.update(taken.headers)

            is_limited = self._settings.quotas[asking.token].tokens_per_minute is not None
            await relay_answer(open_parts, send, asking.path, progress, reserve if is_limited else None)
        except ApiError as error:
            await send_error(send, error, asking.path)
        finally:
            self._accounts.close(number, progress.num_used)

    async def _asked(self, asking: _Asking) -> Asked:
        """The facts of a request for texts that decide its turn."""
        body, tenant = asking.request.body, asking.tenant
        if len(body) > _BIG_BODY_BYTES:
            facts: PromptFacts = await asyncio.to_thread(prompt_facts, body, tenant)
        else:
            facts = prompt_facts(body, tenant)
        quota = self._settings.quotas[asking.token]
        least = quota.min_priority
        priority = max(0, least or 0) if facts.priority is None else facts.priority
        # The replica refuses one that is not allowed.
        priority = priority if least is None else max(priority, least)
        owner = owner_of(asking.identity, quota.max_running, str(asking.request.client))
        return Asked(asking.token, owner, facts.num_texts, priority, facts.prefixes)

    async def _parts(
        self, request: RelayedRequest, resumption: Resumption | None, replica: str
    ) -> AsyncGenerator[list[AnswerPart]]:
        """The answer of a replica, up to its end. Raises: ReplicaLostError for one that is silent or gone."""
        if not replica and self._watch.watched:
            # Serve would choose a silent one, which has the shortest queue.
            replica = next(iter(sorted(set(self._accounts.replicas()) - self._watch.watched)), "")
        try:
            async with (
                aclosing(self._replicas.answer(request, resumption, replica)) as batches,
                aclosing(unless_silent(batches, lambda: self._has_other(replica))) as heard,
            ):
                async for batch in heard:
                    yield batch
        except ReplicaLostError:
            self._watch.notice(replica)
            raise

    def _has_other(self, replica: str) -> bool:
        """True if a replica that is not silent exists beside this one."""
        return not replica or bool(set(self._accounts.replicas()) - self._watch.watched - {replica})

    async def _answer_by_any(self, request: RelayedRequest, send: Send) -> None:
        """Ask all replicas, and pass on the answer of the one that has the item."""
        answers = await self._replicas.of_all("whole_answer", request, _SECONDS, lambda parts: _status(parts) != 404)
        found = next((parts for parts in answers.found if _status(parts) != 404), None)
        if found is None:
            found = answers.found[0] if answers.found else None
        if found is None:
            await send_error(send, _no_replica(), request.path)
            return
        for part in found:
            if part.message is not None:
                await send(part.message)

    async def _answer_metrics(self, asking: _Asking, send: Send) -> None:
        answers = await self._replicas.of_all("metrics", asking.request, _METRICS_SECONDS, lambda answer: False)
        found = dict(answers.found)
        texts = {name: _body(parts).decode() for name, parts in sorted(found.items()) if _status(parts) == 200}
        if not texts:
            refused = next(iter(found.values()), None)
            for part in refused or ():
                if part.message is not None:
                    await send(part.message)
            if refused is None:
                await send_error(send, _no_replica(), asking.path)
            return
        # The engines have checked the client's permission.
        asked = RelayedRequest("GET", "/metrics", b"", HEADERS, b"")
        more = await self._replicas.prefill_metrics(asked, _METRICS_SECONDS)
        texts |= {name: _body(parts).decode() for name, parts in sorted(more.found) if _status(parts) == 200}
        num_missing = answers.num_missing + more.num_missing
        if asking.identity is None or asking.identity in self._operators:
            body = self._answered.exposition(texts, num_missing, _METRICS_SECONDS) + merged_metrics(texts)
        else:
            # The replica of a text reveals what is cached there: only operators may see it.
            body = summed_metrics(texts.values())
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await send({"type": "http.response.body", "body": body.encode()})


class _Caller:
    """A client, which can leave only while it is answered: Serve reports each as gone whose answer has ended."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._has_answer = False

    async def receive(self) -> Message:
        """ASGI's receive, which never returns once the answer is whole: its replica still reports the tokens used."""
        message = await self._receive()
        if self._has_answer:
            await asyncio.Future()
        return message

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        self._has_answer = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)


def _no_replica() -> ApiError:
    return ApiError(503, "there is no replica now; try again", code="no_replica")


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Adds headers to an answer, as they are when it begins."""

    async def passed(message: Message) -> None:
        if message["type"] == "http.response.start" and headers:
            more = [(name.encode(), value.encode()) for name, value in headers.items()]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return passed


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


def _status(parts: list[AnswerPart]) -> int:
    messages = [part.message for part in parts if part.message is not None]
    return int(messages[0]["status"]) if messages else 500


def _body(parts: list[AnswerPart]) -> bytes:
    return b"".join(part.message.get("body", b"") for part in parts if part.message is not None)
