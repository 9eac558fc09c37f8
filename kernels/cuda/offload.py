"""A model whose first layers run on the CPU and the others, with the output head, on a device.

Hidden states are copied once per batch. Logits are computed and tokens sampled on the device.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.memory import Addresses, SplitKVLayout
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.sampling import Draw
from localinfer.kernels.program import Batch, Program, Segment
from localinfer.types import FloatArray


class SplitProgram:
    """Runs batches; a `Program` and `sampling.DrawingProgram`. One caller at a time.

    first: returns hidden states. rest: receives them.
    """

    def __init__(self, first: Program, rest: CudaProgram, layout: SplitKVLayout) -> None:
        assert first.max_output_rows == first.max_batch_rows, "every row has an output"
        self._first = first
        self._rest = rest
        self._layout = layout
        self.max_batch_rows = min(first.max_batch_rows, rest.max_batch_rows)
        self.max_output_rows = min(rest.max_output_rows, self.max_batch_rows)
        self._every_row = np.arange(self.max_batch_rows, dtype=np.int32)
        # The last pages of each segment and their places: both programs compare arrays by identity.
        self._places: list[tuple[Addresses, Addresses, Addresses]] = []

    def run(self, batch: Batch) -> FloatArray:
        """Compute a batch; see `Program.run`."""
        return self._rest.run(self._pass_on(batch))

    def run_greedy(self, batch: Batch) -> NDArray[np.int32]:
        """Compute a batch and return the likeliest token of each output row; see `GreedyProgram`."""
        return self._rest.run_greedy(self._pass_on(batch))

    def run_drawn(self, batch: Batch, draws: Sequence[Draw]) -> NDArray[np.int32]:
        """Compute a batch and sample a token of each output row; see `sampling.DrawingProgram`."""
        return self._rest.run_drawn(self._pass_on(batch), draws)

    def logits_of(self, row: int) -> FloatArray:
        """The logits of one output row of the last batch; see `sampling.DrawingProgram`."""
        return self._rest.logits_of(row)

    def close(self) -> None:
        """Release the device's memory and the threads."""
        self._rest.close()
        self._first.close()

    def _pass_on(self, batch: Batch) -> Batch:
        """Compute the first layers; return the batch with the device's page addresses."""
        on_host: list[Segment] = []
        on_device: list[Segment] = []
        for index, segment in enumerate(batch.segments):
            host, device = self._find(index, segment.page_addresses)
            start, count, dropped = segment.start_position, segment.num_rows, segment.dropped_tokens
            on_host.append(Segment(start, count, host, dropped))
            on_device.append(Segment(start, count, device, dropped, segment.attention_sums))
        rows = self._every_row[: len(batch.token_ids)]
        self._rest.hand_over(self._first.run(Batch(batch.token_ids, on_host, rows)))
        return Batch(batch.token_ids, on_device, batch.output_rows)

    def _find(self, index: int, pages: Addresses) -> tuple[Addresses, Addresses]:
        if index == len(self._places):
            self._places.append((pages, *self._layout.places(pages)))
        elif self._places[index][0] is not pages:
            self._places[index] = (pages, *self._layout.places(pages))
        return self._places[index][1:]
