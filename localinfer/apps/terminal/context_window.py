"""Which part of a conversation the model reads, so that a reply fits into its context behind it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localinfer.apps.terminal.turns import SUMMARY_REQUEST, message_of
from localinfer.generation.chat.turns import Turn, exchange_starts

if TYPE_CHECKING:
    from localinfer.llm import LLM

_REPLY_TOKENS = 1024
"""Reserved for a reply without a limit, at most a quarter of the context."""


@dataclass(frozen=True)
class ContextWindow:
    """Counts tokens of turns, and finds from which of them on they fit.

    max_tokens: of a reply. options: of the chat that change its prompt, such as tools.
    """

    llm: "LLM"
    system: str | None
    max_tokens: int | None
    options: dict[str, Any]

    @property
    def reply_tokens(self) -> int:
        """How many tokens are kept free for a reply."""
        return min(self.max_tokens or _REPLY_TOKENS, self.llm.context_length // 4)

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The system message, if any, and what the model reads of turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message_of(turn) for turn in turns]

    def count(self, turns: Sequence[Turn]) -> int:
        """Tokens of the prompt that turns make."""
        return self.llm.count_chat_tokens(self.messages(turns), **self.options)

    def fitting(self, turns: Sequence[Turn], first: int) -> int:
        """From which exchange on the turns leave room for a reply: `first`, or one that leaves half the context."""
        starts = exchange_starts(turns, first)
        if len(starts) < 2 or self.count(turns[first:]) <= self.llm.context_length - self.reply_tokens:
            return first
        return self._within_half(turns, starts)

    def shifted(self, turns: Sequence[Turn], first: int) -> int:
        """From which exchange behind the first on the turns take half the context at most; the last, if none does."""
        starts = exchange_starts(turns, first)
        return self._within_half(turns, starts[1:]) if len(starts) > 1 else first

    def summarised(self, turns: Sequence[Turn], first: int) -> tuple[int, int]:
        """The turns to sum up, from a first to an end: all but the last exchange, if that takes little of the context.

        The first is later than `first` where all do not fit beside the request and its answer.
        """
        starts = exchange_starts(turns, first)
        end = len(turns)
        if len(starts) > 1 and self.count(turns[starts[-1] :]) <= self.llm.context_length // 4:
            end = starts[-1]
        room = self.llm.context_length - self.reply_tokens
        ask: Turn = {"role": "user", "content": SUMMARY_REQUEST}
        places = [start for start in starts if start < end]
        found = bisect_left(places, True, key=lambda start: self.count([*turns[start:end], ask]) <= room)
        return (places[found] if found < len(places) else end), end

    def _within_half(self, turns: Sequence[Turn], starts: Sequence[int]) -> int:
        half = self.llm.context_length // 2
        return starts[bisect_left(starts[:-1], True, key=lambda start: self.count(turns[start:]) <= half)]
