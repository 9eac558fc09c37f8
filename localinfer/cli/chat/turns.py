"""The turns of a conversation as plain data: where exchanges begin, what the model reads, calls without a result."""

from collections.abc import Sequence
from typing import Any

from localinfer.chat.parser import ToolCall

Turn = dict[str, Any]
"""A message with `role` and `content`; replies have `reasoning`, `finish_reason` and `tool_calls` where there are any,
results of calls `tool_call_id` and `name`; `is_summary` marks what stands before a summary."""

SUMMARY_REQUEST = (
    "Summarise our conversation so far, so that it can go on from your summary alone: what was asked, found and "
    "decided, with all names and numbers, and what is still open. Answer with the summary only."
)
"""What the model is asked for a summary."""

SUMMARY_TURN: Turn = {"role": "user", "content": "Summarise our conversation so far.", "is_summary": True}
"""Stands before a summary, in place of the request; what the model reads begins with the last of them."""

_FOR_THE_MODEL = ("role", "content", "tool_calls", "tool_call_id", "name")


def message_of(turn: Turn) -> dict[str, Any]:
    """The part of a turn that the model reads."""
    return {name: turn[name] for name in _FOR_THE_MODEL if name in turn}


def exchange_starts(turns: Sequence[Turn], first: int = 0) -> list[int]:
    """The places of the user messages from `first` on, each of which begins an exchange."""
    return [place for place in range(first, len(turns)) if turns[place]["role"] == "user"]


def summary_start(turns: Sequence[Turn]) -> int:
    """The place from which the last summary stands, 0 where there is none."""
    places = [place for place, turn in enumerate(turns) if turn.get("is_summary")]
    return places[-1] if places else 0


def open_calls(turns: Sequence[Turn]) -> list[ToolCall]:
    """The calls of the last reply that have no result behind it."""
    place = next((place for place in reversed(range(len(turns))) if turns[place]["role"] != "tool"), None)
    if place is None or not turns[place].get("tool_calls"):
        return []
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in turns[place]["tool_calls"]
    ]
    return calls[len(turns) - place - 1 :]
