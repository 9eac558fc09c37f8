"""A model whose ops run on several devices in turn: GPUs, of which the last has the output head, and the CPU.

A batch goes through the stages in order; between two of them the rows that the next one reads are copied through host
memory. Logits are computed and tokens sampled on the last GPU. Nothing waits for a batch without output rows, so the
last GPU computes one chunk of a prompt while the first is at the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.program import INTERRUPTIBLE_ROWS
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.sampling import Draw, SampleMode
from localinfer.kernels.cuda.sharded_pages import Addresses, ShardedKVLayout
from localinfer.kernels.program import Batch, PlacedStage, StagedProgram
from localinfer.types import FloatArray


class PipelineProgram:
    """Runs batches; an `AbortableProgram` and `sampling.DrawingProgram`. One caller at a time.

    parts: one program per device, in the order of the layout's parts. stages: in the order in which they run; the last
    is one of `last`, which is among the parts.
    """

    def __init__(
        self, parts: Sequence[StagedProgram], last: CudaProgram, stages: Sequence[PlacedStage], layout: ShardedKVLayout
    ) -> None:
        assert parts[stages[-1].part] is last, "logits come from the last stage"
        self._parts = parts
        self._stages = stages
        self._last = last
        self._layout = layout
        self.max_batch_rows = min(part.max_batch_rows for part in parts)
        self.max_output_rows = min(part.max_output_rows for part in parts)
        # The last pages of each segment and their addresses: programs compare arrays by identity.
        self._places: list[tuple[Addresses, list[Addresses]]] = []

    def run(self, batch: Batch) -> FloatArray:
        """Compute a batch; see `Program.run`."""
        self._run(batch, SampleMode.NOTHING)
        return self._last.logits(len(batch.output_rows))

    def run_abortable(self, batch: Batch, should_abort: Callable[[float], bool]) -> FloatArray | None:
        """Compute a batch, or leave it undone between two stages; see `program.AbortableProgram`."""
        if len(batch.token_ids) < INTERRUPTIBLE_ROWS:
            return self.run(batch)
        if not self._run(batch, SampleMode.NOTHING, should_abort):
            return None
        return self._last.logits(len(batch.output_rows))

    def run_greedy(self, batch: Batch) -> NDArray[np.int32]:
        """Compute a batch and return the likeliest token of each output row; see `GreedyProgram`."""
        self._run(batch, SampleMode.LIKELIEST)
        return self._last.tokens(len(batch.output_rows))

    def run_drawn(self, batch: Batch, draws: Sequence[Draw]) -> NDArray[np.int32]:
        """Compute a batch and sample a token of each output row; see `sampling.DrawingProgram`."""
        assert len(draws) == len(batch.output_rows) <= self.max_output_rows, "one draw per output row"
        self._last.write_draws(draws)
        self._run(batch, SampleMode.DRAWN)
        return self._last.tokens(len(batch.output_rows))

    def logits_of(self, row: int) -> FloatArray:
        """The logits of one output row of the last batch; see `sampling.DrawingProgram`."""
        return self._last.logits_of(row)

    def close(self) -> None:
        """Release the devices' memory and the threads."""
        for part in reversed(self._parts):
            part.close()

    def _run(self, batch: Batch, chosen: SampleMode, should_abort: Callable[[float], bool] | None = None) -> bool:
        """Run every stage of a batch, unless it is aborted; chosen: what the last one makes of its logits."""
        places = [self._find(index, segment.page_addresses) for index, segment in enumerate(batch.segments)]
        for number, part in enumerate(self._parts):
            segments = [
                replace(segment, page_addresses=found[number])
                for segment, found in zip(batch.segments, places, strict=True)
            ]
            part.begin(replace(batch, segments=segments))
        for number, stage in enumerate(self._stages):
            if should_abort is not None and number and should_abort(number / len(self._stages)):
                return False
            part = self._parts[stage.part]
            for buffer, source in stage.uploads:
                num_rows = len(batch.output_rows if buffer.is_output else batch.token_ids)
                if num_rows:
                    part.upload(buffer, self._parts[source].download(buffer, num_rows))
            if stage is self._stages[-1]:
                self._last.run_stage(stage.stage, chosen)
            else:
                part.run_stage(stage.stage)
        return True

    def _find(self, index: int, pages: Addresses) -> list[Addresses]:
        if index == len(self._places):
            self._places.append((pages, self._layout.places(pages)))
        elif self._places[index][0] is not pages:
            self._places[index] = (pages, self._layout.places(pages))
        return self._places[index][1]
