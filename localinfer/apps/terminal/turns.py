"""What the model reads of a conversation's turns, and summaries, which stand for the turns before them."""

from collections.abc import Sequence
from typing import Any

from localinfer.generation.chat.turns import Turn

SUMMARY_REQUEST = (
    "Summarise our conversation so far, so that it can go on from your summary alone: what was asked, found and "
    "decided, with all names and numbers, and what is still open. Answer with the summary only."
)
"""What the model is asked for a summary."""

SUMMARY_TURN: Turn = {"role": "user", "content": "Summarise our conversation so far.", "is_summary": True}
"""Stands before a summary, in place of the request, marked by `is_summary`; what the model reads begins with the last
of them."""

_FOR_THE_MODEL = ("role", "content", "tool_calls", "tool_call_id", "name")


def message_of(turn: Turn) -> dict[str, Any]:
    """The part of a turn that the model reads."""
    return {name: turn[name] for name in _FOR_THE_MODEL if name in turn}


def summary_start(turns: Sequence[Turn]) -> int:
    """The place from which the last summary stands, 0 where there is none."""
    places = [place for place, turn in enumerate(turns) if turn.get("is_summary")]
    return places[-1] if places else 0
