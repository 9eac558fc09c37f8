"""Who gives way when more connections come than a server keeps open.

A connection costs its peer nothing, so its number says nothing of how urgent it is. Those on which nothing is asked end
first, then those whose body is only partly here, the one furthest behind a client that sends at a fair pace before all.
A request that is whole keeps its place. Where all places are taken by such requests a newcomer is a guest: it may ask
how the server is, and learns why it is refused all else. The owner's connections, through the Unix socket, have places
that no program on TCP can take.
"""

from collections.abc import Collection
from typing import Protocol

OWNER_PLACES = 16
"""Connections through the Unix socket that take no place from others."""
_MOST_GUESTS = 8
_MOST_DRAINING = 16
"""Refused connections whose rest is read on, so that their clients read the answer."""
_FAIR_BYTES_PER_SECOND = 1 << 20
_IDLE_SECONDS = 1.0
"""From here on a connection that asks nothing gives way before all that ask something; one that was just made will."""


class Occupant(Protocol):
    """A connection as this module sees it.

    is_dropped: it is being closed and counts no more. is_draining: its answer is out, and what comes is thrown away.
    is_guest: it has no place. is_owners: it came through the Unix socket. is_idle: nothing is being answered.
    is_receiving: a request is being answered whose body is not whole. since: of its state, in seconds of the loop.
    """

    is_dropped: bool
    is_guest: bool

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_owners(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_receiving(self) -> bool: ...

    @property
    def since(self) -> float: ...

    def seconds_behind(self) -> float:
        """How late its request is, or the body of it."""
        ...

    def drop(self) -> None:
        """Close it at once."""
        ...

    def give_way(self) -> None:
        """Say why its request is not answered, and close it."""
        ...


def seconds_behind(waited: float, num_bytes: int) -> float:
    """How much longer than a client of a fair pace one takes that sent so many bytes in so many seconds."""
    return waited - num_bytes / _FAIR_BYTES_PER_SECOND


def make_room(newcomer: Occupant, occupants: Collection[Occupant], limit: int) -> bool:
    """Whether a newcomer, one of the occupants, may stay as more than a guest; closes another one for it if it must.

    limit: places, beside those of the owner. Each call closes one connection at most, of which a newcomer adds one.
    """
    kept = [one for one in occupants if not one.is_dropped]
    draining = [one for one in kept if one.is_draining]
    if len(draining) > _MOST_DRAINING:
        _oldest(draining).drop()
    seated = [one for one in kept if not one.is_draining and (not one.is_guest or one is newcomer)]
    owners = [one for one in seated if one.is_owners]
    others = [one for one in seated if not one.is_owners]
    num_extra = max(0, len(owners) - OWNER_PLACES)
    if len(others) + num_extra <= limit:
        return True
    movable = [one for one in ((*others, *owners) if num_extra else others) if one is not newcomer]
    if idle := [one for one in movable if one.is_idle and one.seconds_behind() > _IDLE_SECONDS]:
        _oldest(idle).drop()
        return True
    if unfinished := [one for one in movable if one.is_idle or one.is_receiving]:
        last = max(unfinished, key=lambda one: one.seconds_behind())
        if last.is_idle:
            last.drop()
        else:
            last.give_way()
        return True
    return False


def bound_guests(occupants: Collection[Occupant]) -> None:
    """Close a guest if there are too many: the oldest that asks nothing, or else the oldest."""
    guests = [one for one in occupants if one.is_guest and not one.is_dropped and not one.is_draining]
    if len(guests) > _MOST_GUESTS:
        _oldest([one for one in guests if one.is_idle] or guests).drop()


def _oldest(occupants: list[Occupant]) -> Occupant:
    return min(occupants, key=lambda one: one.since)
