"""The server: every route behind the security checks, from the first socket to the last reply."""

import asyncio
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from localinfer.apps.server.api.responses import BackgroundResponses, ResponseMemory
from localinfer.apps.server.operation.observation import Metrics, ObservingMiddleware, log_request
from localinfer.apps.server.replies.compacted_chats import CompactedHeads
from localinfer.apps.server.replies.service import NO_OBSERVABILITY, Observability, PlainPaths, Service, unrouted
from localinfer.apps.server.router.models import ModelRegistry
from localinfer.apps.server.routes import server_routes
from localinfer.apps.server.transport.bodies import SharesMiddleware
from localinfer.apps.server.transport.connection import MAX_HEADER_BYTES, Connection, SecurityMiddleware
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server.transport.sockets import (
    BACKLOG,
    HangupHandler,
    SocketTakenError,
    UnixListener,
    affordable_connections,
    bind_tcp,
    given_sockets,
    settings_of_sockets,
    tell_manager,
    tell_reloading,
)
from localinfer.errors import BackendUnavailableError, ClosedError
from localinfer.storage.response_store import ResponseStore
from localinfer.storage.sealed_texts import TextSealer
from localinfer.types import Closing

logger = logging.getLogger("localinfer.server")

_GRACE_SECONDS = 2
"""Time of streams, after theirs is over, to send the error that says so."""
_CUT_SECONDS = 0.5
"""The same after a second signal, which asks not to wait."""
_CUT_STEP_SECONDS = 0.02
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, so that they close it, and never write to one that we just closed."""
_ACCEPTED_AT_ONCE = 16
"""Connections of one listener in a round of the event loop: the limit is looked after only between rounds."""
_LOAD_END_SECONDS = 0.8
"""Time of a load that was given up to end in good order."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def make_app(service: Service, operation: Observability = NO_OBSERVABILITY) -> Starlette:
    """The application of a service; paths are written without `/v1`, which may stand before each."""

    memory = ResponseMemory(ResponseStore(service.settings.kept_responses))
    background = BackgroundResponses()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service.open(), background.open():
            yield
        await asyncio.to_thread(memory.store.close)

    app = Starlette(
        routes=server_routes(service.settings),
        middleware=[
            Middleware(
                ObservingMiddleware,
                observers=(log_request, *operation.observers),
                request_log=operation.request_log,
            ),
            Middleware(SecurityMiddleware, settings=service.settings, present=service.present_settings),
            Middleware(PlainPaths),
            Middleware(SharesMiddleware),
        ],
        exception_handlers={HTTPException: unrouted},
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.responses, app.state.background = memory, background
    app.state.compacted = CompactedHeads(memory.store)
    kept = service.settings.kept_responses
    # Its key is made by the first conversation that is compacted.
    app.state.sealer = cache(partial(TextSealer.kept_in, kept.folder if memory.keeps else None))
    app.router.redirect_slashes = False
    return app


class LocalServer(Closing):
    """A server on its sockets, which are bound when it is made; `run` serves until `stop` or a signal.

    preloads: load the default model at once. Meanwhile `/health` says so, and requests for a model wait.
    on_signal: called when a signal asks for the end; in the handler, so it may come in the midst of anything.
    operation: observation of requests, and reloading of the configuration.
    addresses: where it listens, as URLs and paths. Leaving the context closes the sockets and removes the socket file.
    Raises: RequestError.
    """

    def __init__(
        self,
        settings: ServerSettings,
        make_registry: Callable[[Metrics], ModelRegistry],
        *,
        preloads: bool = False,
        on_signal: Callable[[], object] = lambda: None,
        operation: Observability = NO_OBSERVABILITY,
    ) -> None:
        limit = affordable_connections(settings.max_connections)
        given = given_sockets()
        settings = settings_of_sockets(settings, given)
        self.settings = settings = replace(settings, max_connections=limit)
        self.service = Service(settings, make_registry, preloads=preloads)
        self.port: int | None = None
        self.addresses: list[str] = []
        self._closing = ExitStack()
        self._is_closed = False
        self._serving = threading.Lock()
        self._serving_thread: int | None = None
        self._sockets: list[socket.socket] = []
        self._listener: UnixListener | None = None
        try:
            for listener in given:
                self._sockets.append(self._closing.enter_context(listener))
            if given:
                self._describe_given()
            elif settings.socket_path is not None:
                self._listen_on_socket(settings.socket_path)
            if settings.host is not None and not given:
                bound = self._closing.enter_context(bind_tcp(settings.host, settings.port))
                self._sockets.append(bound)
                self.port = int(bound.getsockname()[1])
                name = f"[{settings.host}]" if ":" in settings.host else settings.host
                self.addresses.append(f"http://{name}:{self.port}")
        except BaseException:
            self._closing.close()
            raise
        config = uvicorn.Config(
            make_app(self.service, operation),
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
            backlog=_ACCEPTED_AT_ONCE,
        )
        self._server = _Server(config, self.service, on_signal, operation)
        if operation.read_configuration is not None:
            hangup = HangupHandler(self._server.reload, lambda: self._server.handle_exit(signal.SIGTERM, None))
            self._closing.enter_context(hangup)

    def _listen_on_socket(self, path: Path) -> None:
        try:
            self._listener = self._closing.enter_context(UnixListener(path))
        except SocketTakenError:
            if self.settings.needs_socket or self.settings.host is None:
                raise
            self.settings = replace(self.settings, socket_path=None)
            return
        self._sockets.append(self._listener.socket)
        self.addresses.append(f"unix:{path}")

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Serve; return when `stop` was called, or SIGTERM or Ctrl-C came and replies have ended. A second signal
        ends them at once, with an error that says so; a third without.

        on_ready: called when models answer. Raises: LocalinferError if the default model cannot be loaded, ClosedError
        once it was closed.
        """
        self._server.on_ready = on_ready
        with self._serving:
            if self._is_closed:
                raise ClosedError("the server was closed before it ran; make another")
            self._serving_thread = threading.get_ident()
            try:
                # Before the loop is made: Ctrl-C in the midst of that would raise KeyboardInterrupt, or cancel a task.
                self._server.answer_signals()
                asyncio.run(self._server.serve(self._sockets))
            except SystemExit:
                # uvicorn's sign that starting failed.
                raise BackendUnavailableError("the server could not start") from None
            finally:
                self._server.give_signals_back()
                self._serving_thread = None
                if self._is_closed:
                    self._closing.close()
        if self._server.start_error is not None:
            raise self._server.start_error

    def _describe_given(self) -> None:
        """Note where the sockets of the service manager listen."""
        for listener in self._sockets:
            place = listener.getsockname()
            if isinstance(place, tuple):
                name = f"[{place[0]}]" if ":" in place[0] else place[0]
                self.port = self.port or int(place[1])
                self.addresses.append(f"http://{name}:{place[1]}")
            else:
                self.addresses.append(f"unix:{place}")

    def has_ended(self) -> bool:
        """Return whether no thread is left that still loads a model, which was given up; waits for it a little."""
        return self.service.registry.join_loads(_LOAD_END_SECONDS)

    def stop(self) -> None:
        """Ask `run`, in another thread, to end as after SIGTERM."""
        self._server.should_exit = True

    def leave(self) -> None:
        """Remove the socket file and its lock, before the process is ended while the server runs; any thread."""
        if self._listener is not None:
            self._listener.remove_files()

    def close(self) -> None:
        """End `run`, wait for it where another thread is in it, and close the sockets; may be called again.

        Sockets are never closed while they are served: their numbers would be those of the next files that are opened.
        """
        self._is_closed = True
        self.stop()
        if self._serving_thread != threading.get_ident():
            with self._serving:
                self._closing.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which ends by itself after a signal instead of raising it again, so that models are closed.

    start_error: why the default model could not be loaded, which ends the server.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, on_signal: Callable[[], object], operation: Observability
    ) -> None:
        super().__init__(config)
        self._operation = operation
        self._reloading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reloads_at_start = False
        self._on_signal = on_signal
        self.start_error: Exception | None = None
        self.on_ready: Callable[[], object] = lambda: None
        self._service = service
        self._starting: asyncio.Task[None] | None = None
        self._is_short_of_descriptors = False
        self._num_signals = 0
        self._former_handlers: dict[int, Any] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._note_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            # What waits in the system costs nothing here; only how many are taken at a time was to be small.
            listener.listen(BACKLOG)
        self._starting = asyncio.create_task(self._get_ready())
        if self._reloads_at_start:
            self._begin_reload()

    async def _get_ready(self) -> None:
        try:
            await self._service.get_ready()
        except ApiError:
            # The server was stopped meanwhile.
            return
        except Exception as error:
            self.start_error, self.should_exit = error, True
            return
        self.on_ready()
        tell_manager("READY=1")

    async def _reload(self) -> None:
        """Read the configuration again; one that is wrong is reported, and the former stays."""
        read = self._operation.read_configuration
        if read is None:
            return
        tell_reloading()
        try:
            fresh = await asyncio.to_thread(read, self._service.settings)
            self._service.reload(fresh.settings, fresh.sources)
        except Exception as error:
            reason = " ".join(str(error).split())
            logger.error("the configuration was not read again, and the former one stays: %s", reason)
        else:
            number = len(self._service.registry.models())
            logger.warning("the configuration was read again; models served: %d", number)
        tell_manager("READY=1")

    def _begin_reload(self) -> None:
        former = self._reloading

        async def reload() -> None:
            # One after the other: the last configuration counts.
            if former is not None:
                await asyncio.wait([former])
            await self._reload()

        self._reloading = asyncio.create_task(reload())

    def _note_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Close connections without a whole request where none can be accepted; asyncio tries again a second later."""
        error = context.get("exception")
        if self.should_exit and self._is_short_of_descriptors and isinstance(error, ValueError):
            # The second has passed, and the socket was closed meanwhile.
            return
        if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTORS:
            loop.default_exception_handler(context)
            return
        for connection in self.server_state.connections.copy():
            if isinstance(connection, Connection) and (connection.is_idle or connection.is_receiving):
                connection.drop()
        if not self._is_short_of_descriptors:
            self._is_short_of_descriptors = True
            logger.error(
                "no more connections can be taken now: %s; those without a whole request were closed", error.strerror
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tell_manager("STOPPING=1")
        self._service.stop()
        seconds = self._service.settings.shutdown_seconds
        asyncio.get_running_loop().call_later(0 if self.force_exit else seconds, self._service.fail_replies)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        try:
            yield
        finally:
            # What ends the loop may wait for threads; a signal ends that as it ends anything else.
            self.give_signals_back()

    def answer_signals(self) -> None:
        """Answer signals by ending, if this is the main thread; one that comes before the loop runs counts too."""
        if threading.current_thread() is threading.main_thread():
            # The last is Ctrl-Break of Windows, which one program can send to another's group.
            names = [name for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
            for number in [getattr(signal, name) for name in names]:
                self._former_handlers[number] = signal.signal(number, self.handle_exit)

    def give_signals_back(self) -> None:
        """Restore the former handlers of signals; may be called again."""
        while self._former_handlers:
            signal.signal(*self._former_handlers.popitem())

    def reload(self) -> None:
        """Read the configuration again, at once or as soon as the loop runs. Signal handlers may call it."""
        if self._loop is None:
            self._reloads_at_start = True
        else:
            self._loop.call_soon_threadsafe(self._begin_reload)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self.should_exit = True
        if self._num_signals == 2 and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_replies, time.monotonic() + _CUT_SECONDS)
        elif self._num_signals > 1:
            self.force_exit = True
        self._on_signal()

    def _cut_replies(self, deadline: float) -> None:
        """Let running replies tell their clients why they end, and then end whatever has not."""
        self._service.fail_replies()
        if self._service.replies() and time.monotonic() < deadline:
            asyncio.get_running_loop().call_later(_CUT_STEP_SECONDS, self._cut_replies, deadline)
        else:
            self.force_exit = True
