"""A server from its first socket to its last reply: binding, serving, and ending in good order."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn

from localinfer.errors import BackendUnavailableError
from localinfer.server.app import make_app
from localinfer.server.connection import Connection
from localinfer.server.gate import MAX_HEADER_BYTES
from localinfer.server.meters import Meters
from localinfer.server.model_registry import ModelRegistry
from localinfer.server.service import Service
from localinfer.server.settings import ServerSettings
from localinfer.server.sockets import UnixListener, bind_tcp

_GRACE_SECONDS = 2
"""What streams get, after their time is over, to send the error that says so."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, so that they close it, and never write to one that we just closed."""


class LocalServer:
    """A server on its sockets, which are bound when it is made; `run` serves until `stop` or a signal.

    preloads: load the default model before the first request is answered.
    addresses: where it listens, as URLs and paths. Leaving the context closes the sockets and removes the socket file.
    Raises: RequestError.
    """

    def __init__(
        self, settings: ServerSettings, make_registry: Callable[[Meters], ModelRegistry], *, preloads: bool = False
    ) -> None:
        self.settings = settings
        self.service = Service(settings, make_registry, preloads=preloads)
        self.port: int | None = None
        self.addresses: list[str] = []
        self._closing = ExitStack()
        self._sockets: list[socket.socket] = []
        try:
            if settings.socket_path is not None:
                listener = self._closing.enter_context(UnixListener(settings.socket_path))
                self._sockets.append(listener.socket)
                self.addresses.append(f"unix:{settings.socket_path}")
            if settings.host is not None:
                bound = self._closing.enter_context(bind_tcp(settings.host, settings.port))
                self._sockets.append(bound)
                self.port = int(bound.getsockname()[1])
                name = f"[{settings.host}]" if ":" in settings.host else settings.host
                self.addresses.append(f"http://{name}:{self.port}")
        except BaseException:
            self._closing.close()
            raise
        config = uvicorn.Config(
            make_app(self.service),
            http=Connection.limited(settings),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(settings.shutdown_seconds) + _GRACE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._server = _Server(config, self.service)

    def run(self) -> None:
        """Serve; return when `stop` was called, or SIGTERM or Ctrl-C came and replies have ended. A second signal
        ends them at once. Raises: LocalinferError if the default model cannot be loaded."""
        try:
            asyncio.run(self._server.serve(self._sockets))
        except SystemExit:
            # uvicorn's way to say that starting failed.
            raise self.service.start_error or BackendUnavailableError("the server could not start") from None

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return bool(self._server.started)

    def stop(self) -> None:
        """Ask `run`, in another thread, to end as after SIGTERM."""
        self._server.should_exit = True

    def close(self) -> None:
        """Close the sockets; may be called again."""
        self._closing.close()

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which ends by itself after a signal instead of raising it again, so that models are closed."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        seconds = self._service.settings.shutdown_seconds
        asyncio.get_running_loop().call_later(0 if self.force_exit else seconds, self._service.fail_replies)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        watched = (signal.SIGINT, signal.SIGTERM)
        former = {number: signal.signal(number, self.handle_exit) for number in watched}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
