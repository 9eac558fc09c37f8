"""What a server has computed since it was started, all models together; `/metrics` shows it under llama.cpp's names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats


@dataclass
class ComputedWork:
    """Tokens of prompts that were computed, and tokens that were generated after the first of each text, in time."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    later_tokens: int = 0
    later_seconds: float = 0.0

    def add(self, other: "ComputedWork") -> None:
        """Count more work."""
        self.prompt_tokens += other.prompt_tokens
        self.prompt_seconds += other.prompt_seconds
        self.later_tokens += other.later_tokens
        self.later_seconds += other.later_seconds


@dataclass
class ReplyTotals:
    """Sums over the texts that have ended; used on the event loop.

    num_passes: of the model, as if each text had run alone. num_running: texts that ran when one ended, summed up.
    num_drafts: with at least one token. accepted_by_position: by place in the draft. recent: work since `take_recent`.
    """

    work: ComputedWork = field(default_factory=ComputedWork)
    recent: ComputedWork = field(default_factory=ComputedWork)
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_texts: int = 0
    num_running: int = 0
    num_passes: int = 0
    longest_tokens: int = 0
    num_drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def count_text(self, stats: "Stats", num_running: int) -> None:
        """Count a text that was generated. num_running: texts that ran just before it ended."""
        computed = max(0, stats.prompt_tokens - stats.cached_tokens)
        later, rate = max(0, stats.completion_tokens - 1), stats.decode_tokens_per_second
        prompt_seconds = max(0.0, stats.time_to_first_token_seconds - stats.waited_seconds)
        self._count(ComputedWork(computed, prompt_seconds, later, later / rate if rate > 0 else 0.0))
        self.cached_tokens += stats.cached_tokens
        self.completion_tokens += stats.completion_tokens
        self.num_texts += 1
        self.num_running += num_running
        self.num_passes += 1 + round(later / max(1.0, stats.tokens_per_pass))
        self.longest_tokens = max(self.longest_tokens, stats.prompt_tokens + stats.completion_tokens)
        self.num_drafts += stats.drafted_by_position[0] if stats.drafted_by_position else 0
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self._count_positions(stats.accepted_by_position)

    def count_prompts(self, num_tokens: int, seconds: float) -> None:
        """Count texts that were read for their vectors or scores."""
        self._count(ComputedWork(prompt_tokens=num_tokens, prompt_seconds=seconds))
        self.num_passes += 1

    def take_recent(self) -> ComputedWork:
        """The work since the last call."""
        recent, self.recent = self.recent, ComputedWork()
        return recent

    def _count(self, work: ComputedWork) -> None:
        self.work.add(work)
        self.recent.add(work)

    def _count_positions(self, counts: Sequence[int]) -> None:
        missing = len(counts) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, missing)
        for position, count in enumerate(counts):
            self.accepted_by_position[position] += count
