"""Accounts of requests: an ingress asks a `Dispatcher` in its own process, or in one that several ingresses share.

What is asked is numbers, names and tuples, so that it may be in another process. An ingress reports once a second which
of its requests run; those of one that reports nothing are given up, as their connections are gone with it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from inspect import isawaitable
from itertools import count
from secrets import token_hex
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from localinfer.apps.fleet.dispatch import Asked, Dispatcher, Place
from localinfer.apps.fleet.placement import Placement
from localinfer.apps.server.replies.clients import Reservation
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import ServerSettings

_LOST_SECONDS = 10.0


@dataclass(frozen=True)
class Opened:
    """The answer to a request that was opened: admitted, or refused."""

    replica: str = ""
    """Replica that answers it, "" where Serve chooses."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of its answer."""
    refusal: Mapping[str, Any] | None = None
    """The arguments of an `ApiError`, None for an admitted request: errors of another process come as
    values, since Ray wraps what is raised."""

    @classmethod
    def refused(cls, error: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> "Opened":
        """A request that is refused."""
        named = {name: getattr(error, name) for name in ("status", "message", "code", "param", "headers", "facts")}
        return cls(headers=dict(headers), refusal=named)

    def error(self) -> ApiError:
        """The error for the client."""
        assert self.refusal is not None, "asked for where there is one"
        return ApiError(**self.refusal)


@dataclass
class _Open:
    """An admitted request. given: set when it has a slot, or has ended without one."""

    token: str
    place: Place | None
    began: float
    given: "asyncio.Future[None]" = field(repr=False)
    reservation: Reservation


class Accounts:
    """A dispatcher on an event loop, for any number of ingresses; requests are named by an ingress and a number."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._open: dict[str, dict[int, _Open]] = {}
        self._heard: dict[str, float] = {}
        self._replicas: dict[str, tuple[str, ...]] = {}

    async def open(self, ingress: str, number: int, token: str, asked: Asked | None) -> Opened:
        """Admit a request, and return when it has a slot. asked: None for one that generates no text.

        `close` must follow, however this ends.
        """
        given = asyncio.get_running_loop().create_future()
        headers: Mapping[str, str] = {}
        try:
            headers = self._dispatcher.limiter.admit(token)
            place = None if asked is None else self._dispatcher.ask(asked, lambda _: _set(given))
        except ApiError as error:
            return Opened.refused(error, headers)
        self._heard.setdefault(ingress, self._clock())
        self._open.setdefault(ingress, {})[number] = _Open(
            token, place, self._clock(), given, Reservation(self._dispatcher.limiter, token)
        )
        if place is None:
            return Opened(headers=headers)
        await given
        return Opened(place.replica, headers)

    def reserve(self, ingress: str, number: int, least: int, most: int) -> Opened:
        """Take tokens for a request, see `RateLimiter.reserve`; with the headers of the rest."""
        found = self._open.get(ingress, {}).get(number)
        if found is None:
            return Opened()
        try:
            found.reservation.reserve(least, most)
        except ApiError as error:
            return Opened.refused(error)
        return Opened(headers=self._dispatcher.limiter.headers(found.token))

    def resize(self, ingress: str, number: int, num_texts: int) -> None:
        """Set the number of texts of a request."""
        place = self._place(ingress, number)
        if place is not None:
            self._dispatcher.resize(place, num_texts)

    def move(self, ingress: str, number: int) -> str:
        """The replica that resumes a request whose own is gone or silent."""
        place = self._place(ingress, number)
        if place is None:
            return ""
        self._dispatcher.move(place)
        return place.replica

    def close(self, ingress: str, number: int, used: int) -> None:
        """End a request. used: tokens that it read and generated."""
        found = self._open.get(ingress, {}).pop(number, None)
        if found is not None:
            _set(found.given)
            found.reservation.settle(used)
            if found.place is not None:
                self._dispatcher.leave(found.place)

    def suspect(self, replica: str, is_suspect: bool) -> None:
        """Mark a replica as silent, or as answering again."""
        self._dispatcher.suspect(replica, is_suspect)

    def report(self, ingress: str, replicas: tuple[str, ...], numbers: frozenset[int]) -> None:
        """Note that an ingress is alive, with these replicas and running requests; its others have ended."""
        now = self._heard[ingress] = self._clock()
        for name in [name for name, heard in self._heard.items() if now - heard > _LOST_SECONDS]:
            del self._heard[name]
            self._replicas.pop(name, None)
            for number in list(self._open.get(name, ())):
                self.close(name, number, 0)
            self._open.pop(name, None)
        # What was opened since the report was written is not in it.
        mine = self._open.get(ingress, {})
        for number in [one for one, open in mine.items() if one not in numbers and now - open.began > _LOST_SECONDS]:
            self.close(ingress, number, 0)
        if self._replicas.get(ingress) != replicas:
            # The union over ingresses: a replica that is gone fails its requests, and is left out then.
            self._replicas[ingress] = replicas
            self._dispatcher.set_replicas({name for names in self._replicas.values() for name in names})

    def _place(self, ingress: str, number: int) -> Place | None:
        found = self._open.get(ingress, {}).get(number)
        return None if found is None else found.place


def _set(given: "asyncio.Future[None]") -> None:
    if not given.done():
        given.set_result(None)


logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
_CALL_SECONDS = 5.0
"""Time for shared accounts to answer a call that needs no slot, before a request continues without."""


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
    """A deployment of one replica, by which limits and turns are the same at every ingress: `Accounts`, awaited."""

    def __init__(self, options: IngressOptions) -> None:
        self._accounts = options.accounts()


def _awaited(name: str) -> Callable[..., Any]:
    async def call(self: SharedAccounts, *values: Any) -> Any:
        found = getattr(self._accounts, name)(*values)
        return await found if isawaitable(found) else found

    return call


for _name in ("open", "reserve", "resize", "move", "close", "suspect", "report"):
    # On the event loop: Serve runs plain functions in threads.
    setattr(SharedAccounts, _name, _awaited(_name))


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
        """Call a listener, which must not block, when replicas come or go."""
        with self._lock:
            self._listeners.append(listener)

    def note(self, deployment: str, names: dict[str, str]) -> None:
        """Set the replicas of a deployment."""
        with self._lock:
            self._names[deployment] = names
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


present_replicas = PresentReplicas()
"""As reported by Serve's routers in this process."""


class IngressAccounts:
    """The calls of one ingress to its accounts, from its event loop.

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
        """Report replicas and running requests from now on; may be called again."""
        if self._reporting is None:
            loop, changed = asyncio.get_running_loop(), asyncio.Event()
            self._present.listen(lambda: loop.call_soon_threadsafe(changed.set))
            self._reporting = asyncio.ensure_future(self._report_always(changed))

    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas that Serve knows."""
        return tuple(self._present.of(self._deployment))

    def next_number(self) -> int:
        """A new number for a request."""
        return next(self._numbers)

    async def open(self, number: int, token: str, asked: Asked | None) -> Opened:
        """Return when a request has its slot. `close` must follow."""
        self._texts[number] = 0 if asked is None else asked.num_texts
        return await self._opened("open", number, token, asked)

    async def reserve(self, number: int, least: int, most: int) -> Opened:
        """Take tokens of a request's client, with the headers of the rest."""
        return await self._opened("reserve", number, least, most)

    async def _opened(self, name: str, *values: Any) -> Opened:
        if self._own is not None:
            found = getattr(self._own, name)(self._name, *values)
            return await found if isawaitable(found) else found  # type: ignore[no-any-return]
        try:
            opened: Opened = await call_apart(getattr(self._handle, name).remote, self._name, *values)
        except Exception as error:
            _tell(name, error)
            return Opened.refused(ApiError(503, "the accounts of requests are gone; try again", code="no_accounts"))
        return opened

    async def move(self, number: int) -> str:
        """The replica that resumes a request; "" for one that Serve chooses."""
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
        """Set the number of texts of a request, None where it is not known yet; costs nothing if it is unchanged."""
        if num_texts is not None and self._texts[number] not in (0, num_texts):
            self._texts[number] = num_texts
            self._call("resize", number, num_texts)

    def close(self, number: int, used: int) -> None:
        """End a request. used: tokens that it read and generated."""
        del self._texts[number]
        self._call("close", number, used)

    async def suspect(self, replica: str, is_suspect: bool) -> None:
        """Mark a replica as silent, or as answering again."""
        if self._own is not None:
            self._own.suspect(replica, is_suspect)
        else:
            await call_apart(self._handle.suspect.remote, replica, is_suspect)

    def _call(self, name: str, *values: Any) -> None:
        """Call the accounts without waiting for the answer."""
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


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def call_apart(call: Callable[Arguments, Result], *values: Arguments.args, **options: Arguments.kwargs) -> Result:
    """Call a handle of Serve outside the client's request during which this runs.

    Serve gives each call made during a request its id, and takes two calls of a deployment with one id for the
    same: of two that wait for a replica the first gets the one that was chosen for the second, which is never sent. It
    also cancels them when the client leaves. An ingress asks whether a replica lives while the request that found it
    silent resumes elsewhere, and reports for all requests from a task that the first one started.
    """
    return Context().run(call, *values, **options)
