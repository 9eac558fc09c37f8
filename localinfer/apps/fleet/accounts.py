"""What ingresses ask of a `Dispatcher`: in the process of the only one, or in one that several share.

Everything here is numbers, names and tuples, so that it may be in another process. An ingress says once a second which
of its requests run; those of one that says nothing are given up, as their connections are gone with it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from localinfer.apps.fleet.dispatch import Asked, Dispatcher, Place
from localinfer.apps.server.operation.rate_limits import Reservation
from localinfer.apps.server.transport.http import ApiError

_LOST_SECONDS = 10.0


@dataclass(frozen=True)
class Opened:
    """A request that may go on."""

    replica: str = ""
    """Replica that answers it, "" where Serve chooses."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of its answer."""
    refusal: Mapping[str, Any] | None = None
    """The arguments of an `ApiError`, None for a request that was taken on: errors of another process come as
    values, since Ray wraps what is raised."""

    @classmethod
    def refused(cls, error: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> "Opened":
        """A request that may not."""
        named = {name: getattr(error, name) for name in ("status", "message", "code", "param", "headers", "facts")}
        return cls(headers=dict(headers), refusal=named)

    def error(self) -> ApiError:
        """What the client is to be told."""
        assert self.refusal is not None, "asked for where there is one"
        return ApiError(**self.refusal)


@dataclass
class _Open:
    """A request that was taken on. given: is set when it has a place, or has ended without one."""

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
        """Take a request on, and return when it has a place. asked: None for one that generates no text.

        `close` must follow, whatever comes of this.
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
        """Take tokens for a request, see `RateLimiter.reserve`; with the headers that tell what is left."""
        found = self._open.get(ingress, {}).get(number)
        if found is None:
            return Opened()
        try:
            found.reservation.reserve(least, most)
        except ApiError as error:
            return Opened.refused(error)
        return Opened(headers=self._dispatcher.limiter.headers(found.token))

    def resize(self, ingress: str, number: int, num_texts: int) -> None:
        """A request has so many texts."""
        place = self._place(ingress, number)
        if place is not None:
            self._dispatcher.resize(place, num_texts)

    def move(self, ingress: str, number: int) -> str:
        """The replica with which a request goes on, as the one that it had is gone or silent."""
        place = self._place(ingress, number)
        if place is None:
            return ""
        self._dispatcher.move(place)
        return place.replica

    def close(self, ingress: str, number: int, used: int) -> None:
        """A request has ended, of which so many tokens were read and generated."""
        found = self._open.get(ingress, {}).pop(number, None)
        if found is not None:
            _set(found.given)
            found.reservation.settle(used)
            if found.place is not None:
                self._dispatcher.leave(found.place)

    def suspect(self, replica: str, is_suspect: bool) -> None:
        """A replica is silent, or has answered again."""
        self._dispatcher.suspect(replica, is_suspect)

    def report(self, ingress: str, replicas: tuple[str, ...], numbers: frozenset[int]) -> None:
        """An ingress lives, knows these replicas, and has these requests; others of it have ended."""
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
            # All that any of them knows: one that is gone fails its requests, and is left out then.
            self._replicas[ingress] = replicas
            self._dispatcher.set_replicas({name for names in self._replicas.values() for name in names})

    def _place(self, ingress: str, number: int) -> Place | None:
        found = self._open.get(ingress, {}).get(number)
        return None if found is None else found.place


def _set(given: "asyncio.Future[None]") -> None:
    if not given.done():
        given.set_result(None)
