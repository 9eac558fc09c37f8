"""`CudaProgram`: writes a batch into the device's memory and launches its kernels, for few rows as one graph."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.kernel_abi import SUMMED_ROWS
from localinfer.kernels.cuda.device import CudaDevice, Launch, Step
from localinfer.kernels.cuda.gemm import Builder, Shape
from localinfer.kernels.cuda.kernel_cache import KernelKey
from localinfer.kernels.cuda.media import MEDIA_ARRAYS, MediaInput, MediaShape
from localinfer.kernels.cuda.memory import SMALL_ROWS
from localinfer.kernels.cuda.page_sums import PageSums
from localinfer.kernels.cuda.sampling import Draw, SampleMode, TokenChoice
from localinfer.kernels.ops import Buffer
from localinfer.kernels.program import Batch, BatchLimits
from localinfer.types import FloatArray, ProgressCallback

_CHUNK = 128
_FEWEST_CHUNKS = 4
_FEWEST_PAGES = 64
_HEADER = (
    "token_ids",
    "positions",
    "page_tables",
    "output_row_numbers",
    "cache_positions",
    "sum_targets",
    "last_positions",
    "token_types",
)
"""Arrays int64[capacity] of a batch on the device, in order, by the fields of `Shape` that have their addresses."""


class CudaProgram:
    """Runs batches; a `Program` and `sampling.DrawingProgram`. One caller at a time.

    Batches of up to SMALL_ROWS rows are padded to a power of two and replayed as graphs, captured on first use; for
    longer ones kernels are launched one by one.
    """

    def __init__(
        self,
        device: CudaDevice,
        limits: BatchLimits,
        stages: Sequence[Sequence[Builder]],
        logits: tuple[int, int, int],
        place: Callable[[Buffer], tuple[int, int]],
        progress: ProgressCallback | None,
        *,
        samples: bool = True,
        page_sums: PageSums | None = None,
        embeddings: tuple[int, int] | None = None,
    ) -> None:
        """stages: of each its ops' steps for any shape. logits: address, row stride and width of what `run` returns.
        place: returns address and row stride of a buffer. samples: without it only `run` may be called.
        page_sums: where its ops sum attention by page, if they do. embeddings: see `MediaInput`."""
        self._device = device
        self._limits = limits
        self._stages = stages
        self._logits_place = logits
        self._place = place
        self._shape: Shape | None = None
        self.max_batch_rows = limits.max_rows
        self.max_output_rows = limits.max_output_rows
        rows = max(limits.max_rows, SMALL_ROWS)
        self._media = MediaInput(device, embeddings) if limits.media_width or limits.takes_ranges else None
        arrays = len(_HEADER) + (0 if self._media is None else MEDIA_ARRAYS)
        self._headers = {
            capacity: (np.zeros((arrays, capacity), np.int64), self._device.allocate(8 * arrays * capacity))
            for capacity in {SMALL_ROWS, rows}
        }
        self._capacities = sorted(self._headers)
        self._tables: list[tuple[int, int]] = []
        self._pages: list[NDArray[np.int64] | None] = []
        self._samples = samples
        self._page_sums = page_sums
        self._choice = TokenChoice(self._device, *logits, max(limits.max_output_rows, SMALL_ROWS) if samples else 0)
        self._replays: dict[tuple[int, int, int, int, MediaShape | None, bool, SampleMode], Callable[[], None]] = {}
        self._logits = np.empty((limits.max_output_rows, logits[2]), np.float32)
        most = _padded(limits.max_rows)
        sizes = [1 << power for power in range(SMALL_ROWS.bit_length()) if 1 << power < most]
        every = [key for rows in (*sizes, most) for key in self._kernels(rows)]
        if self._media is not None:
            every += [key for rows in (*sizes, most) for key in self._kernels(rows, MediaShape(1, 1, 1, 1))]
        self._device.prepare(self._kernels(1), every, progress)

    def run(self, batch: Batch) -> FloatArray:
        """Compute a batch; see `Program.run`.

        Raises RequestError or ContextLengthError for an invalid batch.
        """
        self._start(batch, SampleMode.NOTHING)
        return self.logits(len(batch.output_rows))

    def run_greedy(self, batch: Batch) -> NDArray[np.int32]:
        """Compute a batch and return the likeliest token of each output row; see `GreedyProgram`."""
        self._start(batch, SampleMode.LIKELIEST)
        return self.tokens(len(batch.output_rows))

    def run_drawn(self, batch: Batch, draws: Sequence[Draw]) -> NDArray[np.int32]:
        """Compute a batch and sample a token of each output row; see `sampling.DrawingProgram`."""
        assert len(draws) == len(batch.output_rows) <= self.max_output_rows, "one draw per output row"
        self.write_draws(draws)
        self._start(batch, SampleMode.DRAWN)
        return self.tokens(len(batch.output_rows))

    def logits_of(self, row: int) -> FloatArray:
        """The logits of one output row of the last batch; see `sampling.DrawingProgram`."""
        place, stride, _ = self._logits_place
        self._device.read(place + row * stride, self._logits[row])
        return self._logits[row]

    def begin(self, batch: Batch) -> None:
        """Check a batch and copy it to the device; see `program.StagedProgram`."""
        self._shape = self._write(batch)

    def run_stage(self, stage: int, chosen: SampleMode = SampleMode.NOTHING) -> None:
        """Start one stage of the batch; see `program.StagedProgram`. chosen: tokens of its logits, after the last."""
        shape = self._shape
        assert shape is not None, "a batch was begun"
        if max(shape.batch_rows, shape.output_rows) > SMALL_ROWS:
            self._device.run(self._steps(stage, shape, chosen))
            return
        key = (stage, shape.batch_rows, shape.output_rows, shape.num_chunks, shape.media, shape.is_typed, chosen)
        if key not in self._replays:
            steps = self._steps(stage, shape, chosen)
            if not steps:
                # Of a stage for output rows alone, in a batch without any.
                return
            # Run once before capturing: loading kernels is not allowed in a capture.
            self._device.run(steps)
            self._replays[key] = self._device.capture(steps)
            return
        self._replays[key]()

    def download(self, buffer: Buffer, num_rows: int) -> FloatArray:
        """Wait for the last stage and copy rows of a buffer; see `program.StagedProgram`."""
        place, stride = self._place(buffer)
        rows = np.empty((num_rows, stride // 4), np.float32)
        self._device.read(place, rows)
        return rows[:, : buffer.width]

    def upload(self, buffer: Buffer, rows: FloatArray) -> None:
        """Fill rows of a buffer after the last stage; see `program.StagedProgram`."""
        place, stride = self._place(buffer)
        assert rows.shape[1] == buffer.width, "rows of the buffer's width"
        if stride != 4 * buffer.width:
            padded = np.zeros((len(rows), stride // 4), np.float32)
            padded[:, : buffer.width] = rows
            rows = padded
        self._device.write(place, rows)

    def write_draws(self, draws: Sequence[Draw]) -> None:
        """Sampling parameters of the next output rows, where `run_stage` samples."""
        self._choice.write(draws)

    def logits(self, num_rows: int) -> FloatArray:
        """Wait for the last stage; the logits of so many output rows, valid until the next call."""
        if not num_rows:
            return self._logits[:0]
        place, stride, width = self._logits_place
        if stride == 4 * width:
            self._device.read(place, self._logits[:num_rows])
        else:
            rows = np.empty((num_rows, stride // 4), np.float32)
            self._device.read(place, rows)
            self._logits[:num_rows] = rows[:, :width]
        return self._logits[:num_rows]

    def tokens(self, num_rows: int) -> NDArray[np.int32]:
        """Wait for the last stage; the tokens that were chosen for so many output rows."""
        return self._choice.read(num_rows)

    def close(self) -> None:
        """Release the device's memory."""
        self._replays.clear()
        self._device.close()

    def _start(self, batch: Batch, chosen: SampleMode) -> None:
        self.begin(batch)
        assert len(self._stages) == 1, "a tape of several stages runs in a pipeline"
        self.run_stage(0, chosen)
        if self._page_sums is not None:
            self._page_sums.add_to(batch.segments)

    def _steps(self, stage: int, shape: Shape, chosen: SampleMode) -> list[Step]:
        steps = [step for build in self._stages[stage] for step in build(shape)]
        return [*steps, *self._choice.steps(chosen, shape.output_rows)]

    def _kernels(self, rows: int, media: MediaShape | None = None) -> list[KernelKey]:
        """The kernels of a batch of `rows`, with any way of sampling."""
        capacity = next(capacity for capacity in self._capacities if capacity >= rows)
        _, address = self._headers[capacity]
        shape = _shape(rows, min(rows, self.max_output_rows), _FEWEST_CHUNKS, capacity, address)
        shape = replace(shape, segment_rows=(rows,), media=media)
        stages = range(len(self._stages))
        likeliest = SampleMode.LIKELIEST if self._samples else SampleMode.NOTHING
        steps = [step for stage in stages for step in self._steps(stage, shape, likeliest)]
        steps += self._choice.steps(SampleMode.DRAWN, int(self._samples))
        return list(dict.fromkeys(step.key for step in steps if isinstance(step, Launch)))

    def _write(self, batch: Batch) -> Shape:
        """Check a batch and copy it to the device."""
        self._limits.check(batch)
        sums = self._page_sums
        targets = [0] * len(batch.segments) if sums is None else sums.begin(batch.segments)
        rows, outputs = len(batch.token_ids), len(batch.output_rows)
        capacity = next(capacity for capacity in self._capacities if capacity >= max(rows, outputs))
        whole, address = self._headers[capacity]
        numbers, media = whole[: len(_HEADER)], None
        if self._media is not None:
            further = address + numbers.nbytes
            media = self._media.write(batch.segments, whole[len(_HEADER) :], further)
        numbers[:] = 0
        words = dict(zip(_HEADER, numbers, strict=True))
        words["token_ids"][:rows] = batch.token_ids
        words["output_row_numbers"][:outputs] = batch.output_rows
        positions, kept = words["positions"], words["cache_positions"]
        row = longest = 0
        for index, segment in enumerate(batch.segments):
            end = row + segment.num_rows
            table = self._page_table(index, segment.page_addresses)
            positions[row:end] = np.arange(segment.start_position, segment.start_position + segment.num_rows)
            words["page_tables"][row:end] = table
            kept[row:end] = positions[row:end] - segment.dropped_tokens
            words["last_positions"][row:end] = kept[end - 1]
            words["sum_targets"][max(row, end - SUMMED_ROWS) : end] = targets[index]
            longest = max(longest, int(kept[end - 1]) + 1)
            row = end
        is_typed = batch.token_types is not None and bool(batch.token_types.any())
        if batch.token_types is not None:
            words["token_types"][:rows] = batch.token_types
        self._device.write(address, numbers if media is None else whole)
        chunks = _FEWEST_CHUNKS
        while chunks * _CHUNK < longest:
            chunks *= 2
        shape = replace(_shape(_padded(rows), _padded(outputs), chunks, capacity, address), is_typed=is_typed)
        if media is not None:
            shape = replace(shape, media=media)
        # Graphs are independent of the rows' sequences.
        return shape if rows <= SMALL_ROWS else replace(shape, segment_rows=tuple(s.num_rows for s in batch.segments))

    def _page_table(self, index: int, pages: NDArray[np.int64]) -> int:
        """Address of a segment's page table on the device, which is copied only when it has changed."""
        if index == len(self._tables):
            self._tables.append((0, 0))
            self._pages.append(None)
        address, capacity = self._tables[index]
        if self._pages[index] is not pages:
            if len(pages) > capacity:
                capacity = max(_FEWEST_PAGES, 1 << (len(pages) - 1).bit_length())
                if address:
                    self._device.free(address)
                address = self._device.allocate(8 * capacity)
                self._tables[index] = (address, capacity)
            self._device.write(address, np.ascontiguousarray(pages, np.int64))
            self._pages[index] = pages
        return address


def _padded(rows: int) -> int:
    """Rows to compute: a power of two up to SMALL_ROWS, so that few graphs suffice."""
    return rows if rows == 0 or rows > SMALL_ROWS else 1 << (rows - 1).bit_length()


def _shape(rows: int, outputs: int, chunks: int, capacity: int, header: int) -> Shape:
    addresses: dict[str, Any] = {name: header + 8 * capacity * index for index, name in enumerate(_HEADER)}
    return Shape(rows, outputs, chunks, **addresses)
