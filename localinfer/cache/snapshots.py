"""Where recurrent states are kept as snapshots, from which a later text with the same beginning goes on.

A recurrent layer keeps one state per sequence, so a text can only be continued from positions whose states were kept.
Those are the places where texts are likely to part: ends of prompts, of turns and of replies, places where texts parted
before; and a sparse grid, for edits anywhere else.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotPolicy:
    """How many states are kept.

    grid_tokens: distance of places on the grid. grid_share: of all bytes that the cache holds, the most for snapshots
    of the grid. near_tokens: so close after another one a snapshot is not worth its memory: what it saves costs less
    than a step.
    """

    grid_tokens: int = 512
    grid_share: float = 0.15
    near_tokens: int = 16

    def grid_number(self, position: int) -> int:
        """The last place of the grid at or before a position."""
        return position // self.grid_tokens

    def most_of_grid(self, held_bytes: int, state_bytes: int) -> int:
        """How many snapshots of the grid there may be in a cache that holds so many bytes, one state more included."""
        return int(self.grid_share * (held_bytes + state_bytes)) // state_bytes


DEFAULT_POLICY = SnapshotPolicy()


def grid_rank(number: int) -> int:
    """How long a place on the grid stays: where the grid is thinned out, every other place goes first."""
    return (number & -number).bit_length()


@dataclass(eq=False, slots=True)
class Snapshot:
    """States that the prefix tree holds: their slot, and when they were made or last continued from."""

    slot: int
    last_used: int
