"""Pictures and sounds in a prompt: runs of token ids that no vocabulary has, with the embeddings they stand for.

The ids of a run are negative numbers made of its content and its encoder, so that the prefix tree, pages on disk and
session files treat a picture as they do words: equal ids are equal pictures, now and after a restart.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.types import FloatArray

FEWEST_CACHED_ROWS = 5
"""Rows of a run from which on its ids tell it from every other: 31 bits a row, so 155. Shorter runs, and what stands
behind them, are not taken from the prefix cache."""


@dataclass(frozen=True, eq=False)
class MediaRun:
    """Rows of one encoder input in a prompt."""

    ids: NDArray[np.int32]
    """int32[rows], see `media_ids`."""
    embed: Callable[[], FloatArray]
    """Computes the embeddings, float32[rows, width]; called only where rows have to be computed."""
    grid: tuple[int, int] | None
    """Rows and columns of the embeddings, for rotary positions in several dimensions; None elsewhere."""
    num_positions: int
    """Positions that it takes."""
    sees_itself: bool
    """True if its rows see each other in both directions, so that they are computed in one batch."""


def media_ids(identity: bytes, digest: bytes, num_rows: int) -> NDArray[np.int32]:
    """The ids int32[num_rows] of the rows of an encoder input: 31 bits of a SHA-256 each, less 2^31.

    identity: of the encoder. digest: of its input.
    """
    key = hashlib.sha256(len(identity).to_bytes(8, "little") + identity + digest).digest()
    blocks = (hashlib.sha256(key + index.to_bytes(8, "little")).digest() for index in range(-(-num_rows // 8)))
    words = np.frombuffer(b"".join(blocks), "<u4")[:num_rows]
    return (words | np.uint32(1 << 31)).view(np.int32).copy()
