"""Tool calls as a caller sees them: whole, or piece by piece while they are generated."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asks for.

    id: told apart by it, nine letters and digits, random. arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """What became known of one call.

    index: which call of the reply, counted from 0. The first delta of a call has its id and name and no arguments; each
    later one has a piece of the arguments' JSON text and neither.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that deltas spell out, in order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.arguments)
    return tuple(calls)
