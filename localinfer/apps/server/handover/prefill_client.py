"""A prefill server that is reached over HTTP, by TCP or a Unix socket.

Whatever it answers, whole or byte by byte, it is waited for until the deadline and no longer, and no longer than
somebody waits for the prompt: both are looked at before every byte that is read or sent.
"""

import http.client
import io
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from localinfer.apps.server.handover.prefill_server import (
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
from localinfer.apps.server.transport.handover_options import HandoverOptions, PrefillAddress

_MOST_LINE_BYTES = 1 << 16
_LOOK_SECONDS = 0.25
"""Between two looks at whether somebody still waits."""


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
        sock: socket.socket | None = None
        try:
            connection.connect()
            sock = connection.sock
            connection.sock = cast(socket.socket, _BoundedSocket(sock, deadline, is_cancelled))
            connection.request("POST", ROUTE, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise refusal(response.status, response.read(_MOST_LINE_BYTES))
            while True:
                if (answer := read_line(_line(response))) is not None:
                    return answer
        except TimeoutError:
            raise silence(deadline, time.monotonic()) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PrefillFailed(f"it cannot be reached, or went away: {error or type(error).__name__}") from None
        finally:
            connection.close()
            if sock is not None:
                sock.close()


def http_servers(options: HandoverOptions) -> tuple[HttpPrefillServer, ...]:
    """Those that a decode server was told of."""
    return tuple(HttpPrefillServer(address, options.token) for address in options.servers)


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


class _BoundedSocket(io.RawIOBase):
    """A connected socket for `http.client`, which gives it up where an answer says `Connection: close`; this one is
    closed by who opened it.

    Raises wherever it reads or sends: TimeoutError after the deadline or a long silence, PrefillCancelled.
    """

    def __init__(self, sock: socket.socket, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        self._socket = sock
        self._deadline = deadline
        self._is_cancelled = is_cancelled

    def makefile(self, *_args: Any, **_options: Any) -> io.BufferedReader:
        """What the answer is read from."""
        return io.BufferedReader(self)

    def close(self) -> None:
        """Nothing: another one reads on."""

    def sendall(self, data: bytes) -> None:
        """Send all of some bytes."""
        left = memoryview(data)
        while left:
            left = left[self._bounded(partial(self._socket.send, left)) :]

    def readable(self) -> bool:
        """It is read only by `readinto`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for some bytes; 0 at their end."""
        return self._bounded(partial(self._socket.recv_into, buffer))

    def _bounded(self, work: Callable[[], int]) -> int:
        latest = min(self._deadline, time.monotonic() + SILENT_SECONDS)
        while True:
            if self._is_cancelled():
                raise PrefillCancelled
            left = latest - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left, _LOOK_SECONDS))
            try:
                return work()
            except TimeoutError:
                continue


def _line(response: http.client.HTTPResponse) -> bytes:
    line = response.readline(_MOST_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise PrefillFailed("it went away before it was done")
    return line
