"""Makes an input smaller that shows a finding, for as long as it still shows the same one."""

import time
from collections.abc import Callable, Iterable

SMALLEST_PIECE = 1


def shrink(
    data: bytes,
    shows: Callable[[bytes], bool],
    simplify: Callable[[bytes], Iterable[bytes]] | None,
    seconds: float,
) -> bytes:
    """The smallest input found in time that still shows it.

    simplify: of the target, tried before bytes are taken away blindly. A simpler input need not be shorter.
    """
    deadline = time.monotonic() + seconds
    if simplify is not None:
        data = _by_structure(data, shows, simplify, deadline)
    return _by_bytes(data, shows, deadline)


def _by_structure(
    data: bytes, shows: Callable[[bytes], bool], simplify: Callable[[bytes], Iterable[bytes]], deadline: float
) -> bytes:
    seen = {data}
    has_changed = True
    while has_changed:
        has_changed = False
        for candidate in simplify(data):
            if time.monotonic() > deadline:
                return data
            if candidate in seen:
                continue
            seen.add(candidate)
            if shows(candidate):
                data, has_changed = candidate, True
                break
    return data


def _by_bytes(data: bytes, shows: Callable[[bytes], bool], deadline: float) -> bytes:
    """Leave out pieces, first large ones, then ever smaller ones."""
    piece = len(data) // 2
    while piece >= SMALLEST_PIECE:
        start = 0
        while start < len(data):
            if time.monotonic() > deadline:
                return data
            candidate = data[:start] + data[start + piece :]
            if shows(candidate):
                data = candidate
            else:
                start += piece
        piece //= 2
    return data
