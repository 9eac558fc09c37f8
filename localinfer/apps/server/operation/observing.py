"""Every request from its first byte to its last, told to those who observe, and written down where that is wanted."""

import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localinfer.apps.server.operation.request_log import RequestLog
from localinfer.apps.server.operation.request_record import Observer, RequestRecord, record_of

logger = logging.getLogger("localinfer.server")


class ObservingMiddleware:
    """ASGI middleware around all others: it sees what they refuse, and streams to their end.

    observers: told of each request at its end. request_log: gets requests and answers with their bodies.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Observer] = (), request_log: RequestLog | None = None) -> None:
        self._app = app
        self._observers = observers
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        record.method = scope["method"]
        record.headers = Headers(scope=scope)
        exchange = None if self._request_log is None else self._request_log.begin(scope)
        began = time.perf_counter()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            if exchange is not None:
                exchange.sent(message)
            await send(message)

        async def receive_noted() -> Message:
            message = await receive()
            if exchange is not None:
                exchange.received(message)
            return message

        try:
            await self._app(scope, receive_noted, send_noted)
        finally:
            record.id = scope["state"].get("request_id", "")
            record.seconds = time.perf_counter() - began
            if exchange is not None:
                exchange.end(record)
            for observer in self._observers:
                observer(record)


def log_request(record: RequestRecord) -> None:
    """Write a line of the log: a text, and for a log in JSON the facts."""
    logger.info(
        "%s %s %s %d %.3f s",
        record.id,
        record.method,
        record.route or "-",
        record.status,
        record.seconds,
        extra={"facts": record.facts()},
    )
