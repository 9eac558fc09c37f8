"""A prefill server that is reached over HTTP, by TCP or a Unix socket."""

import http.client
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localinfer.server.handover.prefill_server import (
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
from localinfer.server.transport.handover_options import HandoverOptions, PrefillAddress

_MOST_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class HttpPrefillServer:
    """A server of `--role prefill`. token: shown to it."""

    address: PrefillAddress
    token: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Its address."""
        return self.address.name

    def ask(self, body: bytes, *, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        """As of `PrefillServer`."""
        address = self.address
        connection = _UnixConnection(address) if address.path is not None else _connection(address)
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        try:
            connection.connect()
            connection.sock.settimeout(_seconds(deadline))
            connection.request("POST", ROUTE, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise refusal(response.status, response.read(_MOST_LINE_BYTES))
            while True:
                if is_cancelled():
                    raise PrefillCancelled
                connection.sock.settimeout(_seconds(deadline))
                if (answer := read_line(_line(response))) is not None:
                    return answer
        except TimeoutError:
            raise silence(deadline, time.monotonic()) from None
        except (OSError, http.client.HTTPException) as error:
            raise PrefillFailed(f"it cannot be reached, or went away: {error or type(error).__name__}") from None
        finally:
            connection.close()


def http_servers(options: HandoverOptions) -> tuple[HttpPrefillServer, ...]:
    """Those that a decode server was told of."""
    return tuple(HttpPrefillServer(address, options.token) for address in options.servers)


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


def _line(response: http.client.HTTPResponse) -> bytes:
    line = response.readline(_MOST_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise PrefillFailed("it went away before it was done")
    return line
