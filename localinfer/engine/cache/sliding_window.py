"""Which sliding-window blocks of its pages a sequence still needs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class SlidingWindow:
    """Which sliding-window blocks a sequence still needs: the one rule that sequences, tree and disk go by.

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

        Those before its end and before three places that others may continue from, and those of a batch.
        """
        num_pages = -(-length // self.page_tokens)
        if not self.tokens:
            return num_pages
        return min(num_pages, 4 * (-(-self.tokens // self.page_tokens) + 2) + -(-batch_tokens // self.page_tokens) + 1)
