"""What Ollama's answers look like: lines of JSON, times and durations."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from localinfer.apps.server.transport.http import EventStream

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
