"""Where recurrent states are kept as snapshots, from which a later text with the same beginning goes on.

A recurrent layer keeps one state per sequence, so a text can only be continued from positions whose states were kept.
Those are the places where texts are likely to part: ends of prompts, of turns and of replies, somewhat before prompts
end, where texts parted before; and a sparse grid, for edits anywhere else.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotPolicy:
    """How many states are kept.

    grid_tokens: distance of places on the grid. grid_share: of all bytes that the cache holds, the most for snapshots
    of the grid; of those that it may hold, for a model whose texts take nothing else. near_tokens: so close after
    another one a snapshot is not worth its memory: what it saves costs less than a step.
    """

    grid_tokens: int = 512
    grid_share: float = 0.15
    near_tokens: int = 16

    def before_end(self, length: int, page_tokens: int) -> int:
        """The first end of a page that is no further before the end of a prompt than a step of the grid; 0 for none.

        Prompts with a common beginning often part shortly before their ends, such as examples before a question.
        """
        return max(0, -(-(length - self.grid_tokens) // page_tokens) * page_tokens)

    def most_of_grid(self, num_bytes: int, state_bytes: int) -> int:
        """How many snapshots of the grid there may be in a cache of so many bytes and one state more."""
        return int(self.grid_share * (num_bytes + state_bytes)) // state_bytes


DEFAULT_POLICY = SnapshotPolicy()


def tokens_saved(before: int, position: int, after: int) -> int:
    """What a snapshot is worth between those before and after it: tokens that it saves, over edits at every place."""
    return (position - before) * (after - position)


@dataclass(eq=False, slots=True)
class Snapshot:
    """States that the prefix tree holds: their slot, and when they were made or last continued from."""

    slot: int
    last_used: int
