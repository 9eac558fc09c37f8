"""The last exchange of a saved conversation, shown where it goes on."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from localinfer.apps.terminal.reply_output import terminal_columns, text_renderer
from localinfer.apps.terminal.typed_ahead import sent
from localinfer.terminal import has_colour, neutralise_controls

_MOST_LINES = 12
"""Of a question; the rest is counted."""


def last_exchange(turns: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The last message of the user and what follows it; the last turn where the user said nothing."""
    questions = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    return turns[questions[-1] :] if questions else turns[-1:]


def show_last_exchange(turns: Sequence[Mapping[str, Any]], output: TextIO, notices: TextIO) -> None:
    """Show the question's beginning, to `notices`, and the whole reply, to `output`, as they were shown at first."""
    for turn in last_exchange(turns):
        if turn["role"] == "user":
            lines = neutralise_controls(turn["content"]).splitlines() or [""]
            left = [f"({len(lines) - _MOST_LINES:,} more lines)"] if len(lines) > _MOST_LINES else []
            for line in lines[:_MOST_LINES] + left:
                notices.write(f"{sent(line, has_styles=has_colour(notices))}\n")
            notices.flush()
        elif turn["role"] == "assistant":
            renderer = text_renderer(output, terminal_columns)
            text = renderer.feed(turn["content"]) + renderer.end()
            output.write(text if text.endswith("\n") or not text else f"{text}\n")
            output.flush()
