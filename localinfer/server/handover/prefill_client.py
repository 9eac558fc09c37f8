"""One question to a prefill server, over HTTP: compute this prompt, and write its pages where both find them."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localinfer.server.transport.handover_options import PrefillAddress

ROUTE = "/prefill"
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 5.0
"""A server that says nothing for so long has gone: it tells how far it is four times a second."""
_MOST_LINE_BYTES = 1 << 16


class PrefillFailed(Exception):
    """A prefill server did not do what it was asked; the text says why, and names no part of the prompt."""


class PrefillCancelled(Exception):
    """Nobody waits for the prompt any more."""


@dataclass(frozen=True)
class PrefillAnswer:
    """What a prefill server has done. stored_tokens: leading ids that it wrote; cached_tokens: that it knew before;
    problem: why not all are written."""

    stored_tokens: int
    cached_tokens: int
    problem: str | None = None


def ask_prefill(
    address: PrefillAddress,
    body: bytes,
    token: str | None,
    *,
    deadline: float,
    is_cancelled: Callable[[], bool],
) -> PrefillAnswer:
    """Send a request and wait for its end; blocks the thread. Leaving early makes the server stop.

    deadline: on the monotonic clock. is_cancelled: asked four times a second. Raises: PrefillFailed, PrefillCancelled.
    """
    connection = _UnixConnection(address) if address.path is not None else _connection(address)
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.connect()
        connection.sock.settimeout(_seconds(deadline))
        connection.request("POST", ROUTE, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise PrefillFailed(_refusal(response))
        while True:
            if is_cancelled():
                raise PrefillCancelled
            connection.sock.settimeout(_seconds(deadline))
            line = _line(response)
            if "stored_tokens" in line:
                return PrefillAnswer(int(line["stored_tokens"]), int(line["cached_tokens"]), line.get("problem"))
            if "error" in line:
                raise PrefillFailed(_message(line))
    except TimeoutError:
        late = time.monotonic() >= deadline
        raise PrefillFailed("it is slower than the deadline" if late else "it does not answer") from None
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as error:
        raise PrefillFailed(f"it cannot be reached, or went away: {error or type(error).__name__}") from None
    finally:
        connection.close()


def _seconds(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(SILENT_SECONDS, left)


def _connection(address: PrefillAddress) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address.host, address.port, timeout=CONNECT_SECONDS)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, address: PrefillAddress) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = str(address.path)

    def connect(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no Unix sockets")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_SECONDS)
        self.sock.connect(self._path)


def _line(response: http.client.HTTPResponse) -> dict[str, Any]:
    line = response.readline(_MOST_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise PrefillFailed("it went away before it was done")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise PrefillFailed("its answer is none of a prefill server")
    return found


def _refusal(response: http.client.HTTPResponse) -> str:
    """Why a server refused, in its own words."""
    try:
        return _message(json.loads(response.read(_MOST_LINE_BYTES)))
    except (ValueError, TypeError, KeyError):
        return f"it answers with status {response.status}; is it a server of --role prefill?"


def _message(value: dict[str, Any]) -> str:
    return " ".join(str(value["error"]["message"]).split())[:500]
