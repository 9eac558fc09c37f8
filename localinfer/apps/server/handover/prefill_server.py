"""Who computes prompts for a decode server, and what they answer, however they are reached."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

ROUTE = "/prefill"
CONNECT_SECONDS = 2.0
"""For a server to take a prompt on."""
SILENT_SECONDS = 5.0
"""A server that says nothing for so long has gone: it tells how far it is four times a second."""


class PrefillFailed(Exception):
    """A prefill server did not do what it was asked; the text says why, and names no part of the prompt."""


class PrefillCancelled(Exception):
    """Nobody waits for the prompt any more."""


@dataclass(frozen=True)
class PrefillAnswer:
    """What a prefill server has done. stored_tokens: leading ids that it wrote; cached_tokens: that it knew before;
    problem: why not all are written; has_failed: because it cannot write, and not for this prompt only."""

    stored_tokens: int
    cached_tokens: int
    problem: str | None = None
    has_failed: bool = False


class PrefillServer(Protocol):
    """Somebody who computes prompts, one or several at a time. name: as it is logged."""

    @property
    def name(self) -> str: ...

    def ask(self, body: bytes, *, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        """Have a prompt computed and written, and wait for the end; blocks the thread. Leaving early stops the work.

        body: of the route. deadline: on the monotonic clock. is_cancelled: asked four times a second at least.
        Raises: PrefillFailed, PrefillCancelled.
        """
        ...


def read_line(line: bytes) -> PrefillAnswer | None:
    """What a line of the route's answer says: what was done, or None for how far it is. Raises: PrefillFailed."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise TypeError
        if "error" in found:
            raise PrefillFailed(_message(found))
        if "stored_tokens" not in found:
            return None
        problem = found.get("problem")
        return PrefillAnswer(
            int(found["stored_tokens"]), int(found["cached_tokens"]), problem, bool(found.get("has_failed", problem))
        )
    except (ValueError, TypeError, KeyError):
        raise PrefillFailed("its answer is none of a prefill server") from None


def refusal(status: int, content: bytes) -> PrefillFailed:
    """Why a server refused, in its own words."""
    try:
        return PrefillFailed(_message(json.loads(content)))
    except (ValueError, TypeError, KeyError):
        return PrefillFailed(f"it answers with status {status}; is it a server of --role prefill?")


def silence(deadline: float, now: float) -> PrefillFailed:
    """Why nothing more is waited for, at a time."""
    return PrefillFailed("it is slower than the deadline" if now >= deadline else "it does not answer")


def _message(value: dict[str, Any]) -> str:
    return " ".join(str(value["error"]["message"]).split())[:500]
