"""An ingress's side of the accounts: its own, or those that it shares with others, and what it tells them."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from secrets import token_hex
from typing import Any

from localinfer.apps.fleet.accounts import Accounts, Opened
from localinfer.apps.fleet.dispatch import Asked, Dispatcher
from localinfer.apps.fleet.handle_calls import call_apart
from localinfer.apps.fleet.placement import Placement
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import ServerSettings

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
_CALL_SECONDS = 5.0
"""What shared accounts get to answer what needs no place, before a request goes on without."""


@dataclass(frozen=True)
class IngressOptions:
    """Options of an ingress."""

    settings: ServerSettings
    """Settings of the server."""
    places: int
    """Texts that each replica computes at a time."""
    replicas: int = 1
    """Number of replicas to be."""
    chooses: bool = True
    """True if the ingress chooses replicas, and not Serve."""

    def accounts(self) -> Accounts:
        """Accounts of nothing yet."""
        placement = Placement(self.places, most=self.settings.max_generations)
        return Accounts(Dispatcher(self.settings, placement, expected=self.replicas, chooses=self.chooses))


class SharedAccounts:
    """A deployment of one replica, by which limits and turns are the same at every ingress."""

    def __init__(self, options: IngressOptions) -> None:
        self._accounts = options.accounts()

    async def open(self, ingress: str, number: int, token: str, asked: Asked | None) -> Opened:
        """As of `Accounts`, as all of these; on the event loop."""
        return await self._accounts.open(ingress, number, token, asked)

    async def move(self, ingress: str, number: int) -> str:
        """See `Accounts`."""
        return self._accounts.move(ingress, number)

    async def reserve(self, ingress: str, number: int, least: int, most: int) -> Opened:
        """See `Accounts`."""
        return self._accounts.reserve(ingress, number, least, most)

    async def resize(self, ingress: str, number: int, num_texts: int) -> None:
        """See `Accounts`."""
        self._accounts.resize(ingress, number, num_texts)

    async def close(self, ingress: str, number: int, used: int) -> None:
        """See `Accounts`."""
        self._accounts.close(ingress, number, used)

    async def suspect(self, replica: str, is_suspect: bool) -> None:
        """See `Accounts`."""
        self._accounts.suspect(replica, is_suspect)

    async def report(self, ingress: str, replicas: tuple[str, ...], numbers: frozenset[int]) -> None:
        """See `Accounts`."""
        self._accounts.report(ingress, replicas, numbers)


class PresentReplicas:
    """The replicas that this process knows, by deployment. Any thread may call; listeners are called in Serve's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, dict[str, str]] = {}
        self._listeners: list[Callable[[], object]] = []

    def of(self, deployment: str) -> dict[str, str]:
        """The names of a deployment's replicas, each with that of its actor."""
        with self._lock:
            return self._names.get(deployment, {})

    def listen(self, listener: Callable[[], object]) -> None:
        """Have something called when replicas come or go; must not wait."""
        with self._lock:
            self._listeners.append(listener)

    def note(self, deployment: str, names: dict[str, str]) -> None:
        """These are there now."""
        with self._lock:
            self._names[deployment] = names
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


present_replicas = PresentReplicas()
"""What Serve's routers of this process have told."""


class IngressAccounts:
    """What one ingress asks of its accounts, from its event loop.

    handle: of `SharedAccounts`, None where there is one ingress. present: the replicas that Serve names, of which
    those of a deployment count.
    """

    def __init__(self, options: IngressOptions, handle: Any, present: PresentReplicas, deployment: str) -> None:
        self._own = options.accounts() if handle is None else None
        self._handle = handle
        self._present, self._deployment = present, deployment
        self._name = token_hex(8)
        self._numbers = count()
        self._texts: dict[int, int] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self) -> None:
        """Tell from now on who is there and what runs; may be called again."""
        if self._reporting is None:
            loop, changed = asyncio.get_running_loop(), asyncio.Event()
            self._present.listen(lambda: loop.call_soon_threadsafe(changed.set))
            self._reporting = asyncio.ensure_future(self._report_always(changed))

    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas that Serve knows."""
        return tuple(self._present.of(self._deployment))

    def next_number(self) -> int:
        """Names a request."""
        return next(self._numbers)

    async def open(self, number: int, token: str, asked: Asked | None) -> Opened:
        """Return when a request has its place. `close` must follow."""
        self._texts[number] = 0 if asked is None else asked.num_texts
        if self._own is not None:
            return await self._own.open(self._name, number, token, asked)
        return await self._opened("open", number, token, asked)

    async def reserve(self, number: int, least: int, most: int) -> Opened:
        """Take tokens of a request's client, with the headers that tell what is left."""
        if self._own is not None:
            return self._own.reserve(self._name, number, least, most)
        return await self._opened("reserve", number, least, most)

    async def _opened(self, name: str, *values: Any) -> Opened:
        try:
            opened: Opened = await call_apart(getattr(self._handle, name).remote, self._name, *values)
        except Exception as error:
            _tell(name, error)
            return Opened.refused(ApiError(503, "who counts requests is gone now; try again", code="no_accounts"))
        return opened

    async def move(self, number: int) -> str:
        """The replica with which a request goes on; "" for one that Serve chooses."""
        if self._own is not None:
            return self._own.move(self._name, number)
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                name: str = await call_apart(self._handle.move.remote, self._name, number)
        except Exception as error:
            _tell("move", error)
            return ""
        return name

    def resize(self, number: int, num_texts: int | None) -> None:
        """A request has so many texts; None where that is not known yet. Costs nothing where that was known."""
        if num_texts is not None and self._texts[number] not in (0, num_texts):
            self._texts[number] = num_texts
            self._call("resize", number, num_texts)

    def close(self, number: int, used: int) -> None:
        """A request has ended, of which so many tokens were read and generated."""
        del self._texts[number]
        self._call("close", number, used)

    async def suspect(self, replica: str, is_suspect: bool) -> None:
        """A replica is silent, or has answered again."""
        if self._own is not None:
            self._own.suspect(replica, is_suspect)
        else:
            await call_apart(self._handle.suspect.remote, replica, is_suspect)

    def _call(self, name: str, *values: Any) -> None:
        """Have something done, and do not wait."""
        if self._own is not None:
            getattr(self._own, name)(self._name, *values)
            return

        async def call() -> None:
            try:
                await call_apart(getattr(self._handle, name).remote, self._name, *values)
            except Exception as error:
                _tell(name, error)

        task = asyncio.ensure_future(call())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_always(self, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            self._call("report", self.replicas(), frozenset(self._texts))
            try:
                async with asyncio.timeout(_REPORT_SECONDS):
                    await changed.wait()
            except TimeoutError:
                pass


def _tell(what: str, error: Exception) -> None:
    logger.warning("the accounts could not be told (%s): %s", what, " ".join(str(error).split())[:200])
