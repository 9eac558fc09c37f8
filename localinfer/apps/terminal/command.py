"""One command of a chat, as its table holds it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


def _complete_nothing(_: str) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Command:
    """A command that starts with '/': its name, its help, and a function of the rest of the line.

    arguments: how help writes what may follow the name. complete: gives what the rest of the line may become, from what
    is typed of it.
    """

    name: str
    help: str
    run: Callable[[str], None]
    arguments: str = ""
    complete: Callable[[str], Iterable[str]] = _complete_nothing


def beginning_with(typed: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that begin like what is typed."""
    return [candidate for candidate in candidates if candidate.startswith(typed)]


class Exit(Exception):
    """The user asked to end the chat."""
