"""What the launches of a batch depend on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localinfer.kernels.cuda.device import Step
from localinfer.kernels.ops import Rows


@dataclass(frozen=True)
class Shape:
    """What the launches of a batch depend on: how many rows, how long a context, and where its numbers lie.

    Addresses are of int64[rows]: token ids, positions, the page table of each row (0 for rows that only fill up the
    batch), and the rows that want logits.
    """

    batch_rows: int
    output_rows: int
    num_chunks: int
    token_ids: int
    positions: int
    page_tables: int
    output_row_numbers: int
    segment_rows: tuple[int, ...] = ()

    def rows(self, kind: Rows) -> int:
        """Rows of the buffers of a kind."""
        return self.batch_rows if kind is Rows.BATCH else self.output_rows


Builder = Callable[[Shape], Iterator[Step]]
"""An op of a tape: the steps it takes for a batch of some shape."""
