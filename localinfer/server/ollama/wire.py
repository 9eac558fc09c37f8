"""What Ollama's answers look like: lines of JSON, times and durations, and errors of one text."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localinfer.server.transport.http import EventStream

_PATHS = "/api/"
_STATUSES = {429: 503}
"""Statuses for which Ollama has another one: its clients know a full queue by 503."""
_MOST_ERROR_BYTES = 1 << 20
_NEVER = datetime(2300, 1, 1, tzinfo=UTC)
"""When a model is unloaded that stays for ever."""


class LineStream(EventStream):
    """Lines of JSON as they come; between two of them a space, which begins the next one, says that all is well."""

    media_type = "application/x-ndjson"
    ping = b" "


def line(value: Any) -> bytes:
    """A value as a line of JSON."""
    return msgspec.json.encode(value) + b"\n"


def timestamp(seconds: float | None) -> str:
    """A time in seconds since 1970, None for one that never comes, as RFC 3339 writes it."""
    moment = _NEVER
    if seconds is not None and seconds < _NEVER.timestamp():
        moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as clients read it, who divide by it: at least one."""
    return max(1, round(seconds * 1e9))


class ErrorTexts:
    """ASGI middleware that writes errors under `/api/` as Ollama's clients read them: `{"error": "..."}`.

    It stands before all others, so that what the security checks and the router refuse has this shape too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].removeprefix("/v1").startswith(_PATHS):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def send_rewritten(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
                return
            if start is None:
                await send(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body") and len(body) < _MOST_ERROR_BYTES:
                return
            text = _error_text(bytes(body))
            headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            headers.append((b"content-length", b"%d" % len(text)))
            status = _STATUSES.get(start["status"], start["status"])
            await send({**start, "status": status, "headers": headers})
            await send({**message, "body": text, "more_body": False})

        await self._app(scope, receive, send_rewritten)


def _error_text(body: bytes) -> bytes:
    """An error as one text; what is none stays as it is."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body
    return msgspec.json.encode({"error": message})
