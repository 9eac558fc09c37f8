"""Requests and answers written down whole, for finding out what a client sends: lines of JSON in a private file.

What shows who somebody is (tokens, cookies) is left out of the headers; the texts are in it, so the file is its owner's
alone, and it is only written where somebody asked for it by name.
"""

import contextlib
import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from starlette.types import Message, Scope

from localinfer.apps.server.operation.request_record import RequestRecord
from localinfer.errors import RequestError
from localinfer.types import Closing

logger = logging.getLogger("localinfer.server")

DEFAULT_BYTES = 64 << 20
_BODY_BYTES = 4 << 20
"""Of each body; what is more is counted."""
_SECRET = ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key")
_REDACTED = "redacted"


class RequestLog(Closing):
    """The file. When it would grow over half of `max_bytes` it is renamed, with `.1` at its end, and begun anew.

    Raises: RequestError if the file cannot be written, or is no regular file.
    """

    def __init__(self, path: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        self._path = path
        self._most = max_bytes // 2
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        try:
            self._descriptor, self._size = self._open()
        except OSError as error:
            raise RequestError(
                f"requests cannot be written to {path}: {error.strerror or error}; give --log-requests another"
            ) from None

    def begin(self, scope: Scope) -> "LoggedExchange":
        """Write down a request, and what is answered."""
        return LoggedExchange(self, scope)

    def write(self, facts: dict[str, Any]) -> None:
        """Append a line; a disk that is full or gone ends the log, not the server."""
        line = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._descriptor is None:
                return
            try:
                if self._size and self._size + len(line) > self._most:
                    self._begin_anew()
                view = memoryview(line)
                while view:
                    view = view[os.write(self._descriptor, view) :]
                self._size += len(line)
            except OSError as error:
                self._shut()
                logger.error("requests are no longer written to %s: %s", self._path.name, error.strerror)

    def close(self) -> None:
        """Write no more; may be called again."""
        with self._lock:
            self._shut()

    def _shut(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin_anew(self) -> None:
        self._shut()
        os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        self._descriptor, self._size = self._open()

    def _open(self) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it is not a regular file")
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status.st_size


class LoggedExchange:
    """One request and its answer, gathered while they pass."""

    def __init__(self, log: RequestLog, scope: Scope) -> None:
        self._log = log
        self._path = scope["path"]
        self._headers = _shown(scope["headers"])
        self._answer_headers: dict[str, str] = {}
        self._asked, self._answered = _Body(), _Body()
        self._began = time.time()

    def received(self, message: Message) -> None:
        """Take what came from the client."""
        if message["type"] == "http.request":
            self._asked.add(message.get("body", b""))

    def sent(self, message: Message) -> None:
        """Take what goes to the client."""
        if message["type"] == "http.response.start":
            self._answer_headers = _shown(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._answered.add(message.get("body", b""))

    def end(self, record: RequestRecord) -> None:
        """Write it down."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._began))
        request = {"method": record.method, "path": self._path, "headers": self._headers, **self._asked.facts()}
        answer = {"status": record.status, "headers": self._answer_headers, **self._answered.facts()}
        facts = {"time": f"{moment}Z", "id": record.id, "seconds": round(record.seconds, 6)}
        self._log.write({**facts, "request": request, "response": answer})


class _Body:
    """The bytes of a body, as many as are written down."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._num_bytes = 0

    def add(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        self._kept += piece[: _BODY_BYTES - len(self._kept)]

    def facts(self) -> dict[str, Any]:
        """The body as JSON if it is that, else as text, and how many bytes of it are missing."""
        missing = self._num_bytes - len(self._kept)
        body: Any = self._kept.decode("utf-8", "replace")
        if not missing and body[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                body = json.loads(body)
        return {"body": body, **({"body_bytes_left_out": missing} if missing else {})}


def _shown(headers: Any) -> dict[str, str]:
    """Headers by name; of those that are secret only that they were there."""
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return {name: _REDACTED if name in _SECRET else value for name, value in found.items()}
