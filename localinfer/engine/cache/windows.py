"""The positions that a sequence keeps: sliding-window blocks of its pages, and KV eviction where its memory is bounded.

KV eviction keeps attention sinks, recent pages and heavy hitters. The first page holds the attention sinks
(StreamingLLM, arXiv 2309.17453); of the pages between it and the recent half, those stay that got most attention so far
(heavy hitters as in H2O, arXiv 2306.14048, for all heads and layers together and by whole pages). Kept pages keep their
positions, so nothing is rotated again, and the context's end is unchanged. This is an approximation: what is computed
after a page was dropped is not what the model says to the whole text.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class SlidingWindow:
    """Rule of the sliding-window blocks that a sequence still needs, shared by sequences, tree and disk.

    Layers with a sliding window see the last `tokens` positions only, so their block of a page is needed no more once
    the window has passed it, unless another sequence may continue from before. A sequence can continue from a length
    if every page that overlaps the window before it still has that block; of several such lengths the longest is
    taken. tokens: 0 for a model without such layers; then all is kept.
    """

    tokens: int
    page_tokens: int

    def first_page(self, length: int) -> int:
        """The first page whose sliding-window block is kept for a sequence of `length` positions.

        One page more than the next position sees, so that a text can also continue a little before its end, and
        drafts be rolled back.
        """
        if not self.tokens:
            return 0
        return max(0, (length - self.tokens + 1) // self.page_tokens - 1)

    def kept(self, num_pages: int, *lengths: int) -> BoolArray:
        """bool[num_pages]: whether a page's sliding-window block is kept for continuing from any of these lengths.

        Pages after the first of them are kept too: they are being written.
        """
        kept = np.zeros(num_pages, np.bool_)
        kept[self.first_page(lengths[0]) :] = True
        for length in lengths[1:]:
            kept[self.first_page(length) : -(-length // self.page_tokens)] = True
        return kept

    def usable_length(self, windowed: BoolArray, length: int) -> int:
        """The longest prefix of `length` positions from which a sequence can continue; windowed: which pages have
        their sliding-window block."""
        if not self.tokens or windowed.all():
            return length
        missing = np.flatnonzero(~windowed)
        # Runs of pages that have one: where each begins, and the last length inside it.
        begins = np.concatenate(([0], (missing + 1) * self.page_tokens))
        lengths = np.concatenate((missing * self.page_tokens, [length]))
        seen = np.maximum(lengths - self.tokens + 1, 0)
        return int(lengths[np.flatnonzero(seen // self.page_tokens * self.page_tokens >= begins)[-1]])

    def most_pages(self, length: int, batch_tokens: int) -> int:
        """Most sliding-window blocks that a sequence of `length` positions ever holds at once.

        Those before its end and before three positions that others may continue from, and those of a batch.
        """
        num_pages = -(-length // self.page_tokens)
        if not self.tokens:
            return num_pages
        return min(num_pages, 4 * (-(-self.tokens // self.page_tokens) + 2) + -(-batch_tokens // self.page_tokens) + 1)


LEAST_TOKENS = 128
"""Below this there is no page between the first and the recent ones."""


@dataclass(frozen=True)
class KVEviction:
    """Bound of the positions that a sequence holds between two batches: at most `tokens`, in whole pages."""

    tokens: int
    page_tokens: int
    batch_tokens: int
    """The most that one batch adds, so that `max_tokens` is what a sequence ever holds."""
    sink_pages: int = 1
    """Pages kept at the beginning."""
    recent_share: float = 0.5
    """Share of all pages that are kept at the end; the others are for heavy hitters."""

    def __post_init__(self) -> None:
        if self.tokens < LEAST_TOKENS:
            raise RequestError(
                f"kv_window is {self.tokens} tokens; it must be at least {LEAST_TOKENS}: a page at the start, recent "
                "ones, and one between"
            )

    @property
    def num_pages(self) -> int:
        """Pages kept between two batches."""
        return self.tokens // self.page_tokens

    @property
    def recent_pages(self) -> int:
        """Pages at the end that are always kept."""
        return min(math.ceil(self.recent_share * self.num_pages), self.num_pages - self.sink_pages)

    @property
    def max_tokens(self) -> int:
        """Positions that a sequence ever holds memory for."""
        return (self.num_pages + 1) * self.page_tokens + self.batch_tokens

    @property
    def most_tokens(self) -> int:
        """Positions that memory is held for while a text runs: its own, and at most as many of its beginning, which the
        prefix cache keeps."""
        return 2 * self.max_tokens

    def surplus(self, attention_sums: NDArray[np.float32]) -> NDArray[np.int64]:
        """Indices, in order, of the pages to drop of a sequence whose pages got this much attention, float32[n]."""
        count = attention_sums.size - self.num_pages
        if count <= 0:
            return np.zeros(0, np.int64)
        between = attention_sums[self.sink_pages : attention_sums.size - self.recent_pages]
        # Of pages without attention, the oldest goes first.
        lightest = np.argsort(between, kind="stable")[:count]
        return np.sort(lightest) + self.sink_pages
