"""Attention and its cache: RoPE, storing keys and values, masks, biases, and the choice of positions."""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops.records import Buffer, OpRecord
from localinfer.types import FloatArray, Record


class Pairing(Enum):
    """Pairs of elements of a head that RoPE rotates together (RoFormer, arXiv 2104.09864, section 3.2)."""

    ADJACENT = "adjacent"
    """(2i, 2i + 1): the Llama family as stored in GGUF."""
    HALVES = "halves"
    """(i, i + rotary_size / 2): GPT-NeoX, Qwen, Phi, Gemma."""


class RopeTable(OpRecord):
    """Angles of RoPE per position."""

    inverse_frequencies: NDArray[np.float64]
    """[rotary_size / 2], with every scaling (linear, YaRN, Llama 3, LongRoPE) already in it."""
    pairing: Pairing
    magnitude: float = 1.0
    """Factor on sine and cosine (YaRN's attention factor); 1 for the rest."""
    axes: NDArray[np.int64] | None = None
    """[rotary_size / 2]: which of a row's three positions (time, row, column) turns each pair, where a batch gives them
    (Qwen2-VL's M-RoPE, arXiv 2409.12191, section 2.1); None if the one position turns all."""


NUM_AXES = 3
"""Positions of a row under M-RoPE: time, row and column."""


class Rope(OpRecord):
    """Rotate, in place, elements offset .. offset + rotary_size of every head of x by the row's position."""

    x: Buffer
    table: RopeTable
    head_size: int
    offset: int = 0


class RotateByRow(OpRecord):
    """Rotate, in place, elements from `offset` on of every head of x by angles that a buffer holds for the row.

    angles: cosines of as many pairs as are rotated, then their sines. Rows with positions in two dimensions have others
    than those of one position (`Rope`).
    """

    x: Buffer
    angles: Buffer
    head_size: int
    pairing: Pairing
    offset: int = 0


class KVLayerShape(Record):
    """Keys and values that one layer keeps per position."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int = 0
    """Positions that it sees, where its part of a page is a block of its own that is freed once no row will see it;
    0 for a layer in the block of the others."""


class StoreKV(OpRecord):
    """Write the rows' keys and values into the cache pages of `layer`; no values where it keeps keys alone."""

    layer: int
    keys: Buffer
    values: Buffer | None


_UNBOUNDED = 1 << 40
"""More positions than any text has."""


class AttentionShape(OpRecord):
    """One layer's attention: sizes, mask and score transform."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    """Factor on q.k."""
    softcap: float = 0.0
    """Greater than 0: a score s becomes softcap * tanh(s / softcap)."""
    window: int = 0
    """Greater than 0: a position sees itself and the window - 1 before it."""
    chunk: int = 0
    """Greater than 0: a position sees only its own chunk of positions."""
    sinks: FloatArray | None = None
    """float32[num_heads]: exp(sink) is added to the softmax's denominator."""
    alibi_slopes: FloatArray | None = None
    """float32[num_heads]: slope * |key position - query position| is subtracted from a score."""
    excludes_own: bool = False
    """A row sees only the positions before its own, of which there must be one."""
    bidirectional: bool = False
    """A position also sees those after it, up to the last row of its segment in the batch, so a text is computed in one
    batch; a window then reaches window // 2 positions on either side."""

    @property
    def reach(self) -> tuple[int, int]:
        """Number of positions up to its own that a row sees, 0 for all of them, and number of those after it."""
        if not self.bidirectional:
            return self.window, 0
        return (self.window // 2 + 1, self.window // 2) if self.window else (0, _UNBOUNDED)


class SparseSelection(OpRecord):
    """Positions that rows attend to, as numbers of blocks of positions, counted from position 0."""

    blocks: Buffer
    """Per row one list for all KV heads, or one for each, of `count` rising whole numbers, -1 after the last."""
    count: int
    block_size: int = 1

    @property
    def num_lists(self) -> int:
        """Lists of a row."""
        return self.blocks.width // self.count


class Relative(OpRecord):
    """Relative position bias: a number per head and bucket of distances, which is added to a score."""

    buckets: NDArray[np.int64]
    """[2 * reach + 1]: the bucket of every distance key position - row position from -reach on; greater distances are
    in the bucket of the greatest."""
    num_buckets: int
    table: FloatArray | None = None
    """float32[num_heads, num_buckets], added as it is (T5, arXiv 1910.10683, section 2.1)."""
    by_row: Buffer | None = None
    """num_buckets values per head of the row that attends, multiplied by the scale of scores first (DeBERTa, arXiv
    2006.03654, section 3.1)."""
    by_key: Buffer | None = None
    """The same of the key's row."""


class Attention(OpRecord):
    """Attention of every row over its sequence's cache, in chunks of absolute positions merged in order.

    Rows see positions up to their own, or up to the last of their segment (`AttentionShape.bidirectional`).
    """

    out: Buffer
    queries: Buffer
    layer: int
    shape: AttentionShape
    chosen: SparseSelection | None = None
    """Of the positions that a row sees, those it attends to; None for all."""
    relative: Relative | None = None
    """For bidirectional attention only, whose segments are whole texts."""
    takes_ranges: bool = False
    """True if a segment may say which positions each row sees (`program.Segment.ranges`)."""


class ChooseBlocks(OpRecord):
    """Choose the best blocks of a row's positions by the keys of a layer of the cache that keeps keys alone.

    The score of a position is scale times query . key, or with weights [num_heads] the sum over heads of weight *
    max(0, scale * query . key); of a block, the largest of its positions up to the row's. A row's own block and the
    num_local - 1 before it come first; of equal scores the lower block wins. Rows of no more than `chosen.count` blocks
    choose all of them.
    """

    chosen: SparseSelection
    queries: Buffer
    layer: int
    num_heads: int
    key_size: int
    max_positions: int
    """Positions of a sequence that scores have room for."""
    scale: float = 1.0
    weights: Buffer | None = None
    """Makes one list of a row; without, each head has one."""
    num_local: int = 0
