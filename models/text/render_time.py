"""How long chat templates may take: one rendering alone, and all those that one request needs.

A chat is rendered several times, to see what a longer one shares with it. A template that takes as long as it may would
otherwise take that each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

MAX_RENDER_SECONDS = 3.0
"""Of the processor."""


@dataclass
class _Allowance:
    """What is left of the time that renderings share."""

    seconds: float


_shared: ContextVar[_Allowance | None] = ContextVar("shared render time", default=None)


@contextmanager
def sharing_render_time(seconds: float | None = None) -> Iterator[None]:
    """Let all renderings within a block take so long together, by default as long as one alone may.

    A block within another one has no more than what that one has left.
    """
    outer = _shared.get()
    wanted = MAX_RENDER_SECONDS if seconds is None else seconds
    given = wanted if outer is None else min(wanted, outer.seconds)
    inner = _Allowance(given)
    token = _shared.set(inner)
    try:
        yield
    finally:
        _shared.reset(token)
        if outer is not None:
            outer.seconds -= given - inner.seconds


def render_seconds() -> float:
    """How long the next rendering may take."""
    shared = _shared.get()
    return MAX_RENDER_SECONDS if shared is None else min(MAX_RENDER_SECONDS, shared.seconds)


def take_render_time(seconds: float) -> None:
    """Take what a rendering took from the time that it shares."""
    shared = _shared.get()
    if shared is not None:
        shared.seconds -= seconds
