"""A finished CUDA tape: it writes a batch into the device's memory and starts its kernels, of few rows as one graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import BackendUnavailableError, ContextLengthError, RequestError
from localinfer.kernels.compile_ahead import ProgressCallback
from localinfer.kernels.cuda.device import Device, Launch, Step
from localinfer.kernels.cuda.kernel_cache import KernelKey
from localinfer.kernels.cuda.shape import Shape
from localinfer.kernels.cuda.tape_memory import SMALL_ROWS
from localinfer.kernels.ops import Batch, FloatArray, Segment

_CHUNK = 128
_FEWEST_CHUNKS = 4
_SLICES = 64
"""Blocks that look for the best token of a row; that of `compiled.sampling`."""
_FEWEST_PAGES = 64


@dataclass(frozen=True)
class TapeRecord:
    """What a tape has recorded: the steps for any shape, and where they leave the logits."""

    device: Device
    page_tokens: int
    max_batch_rows: int
    max_output_rows: int
    build: Callable[[Shape], Sequence[Step]]
    logits: int
    logits_stride: int
    vocab_size: int
    num_tokens: int | None
    num_positions: int | None
    progress: ProgressCallback | None


class CudaProgram:
    """Runs batches; `ops.Program` and `ops.GreedyProgram`. One caller at a time.

    Batches of up to SMALL_ROWS rows are padded to a power of two and replayed as graphs, captured when they are first
    needed; longer ones launch their kernels one by one.
    """

    def __init__(self, record: TapeRecord) -> None:
        self._record = record
        self._device = record.device
        self.max_batch_rows = record.max_batch_rows
        self.max_output_rows = record.max_output_rows
        self._num_tokens = 1 << 62 if record.num_tokens is None else record.num_tokens
        self._num_positions = 1 << 62 if record.num_positions is None else record.num_positions
        rows = max(record.max_batch_rows, SMALL_ROWS)
        self._headers = {
            capacity: (np.zeros(4 * capacity, np.int64), self._device.allocate(32 * capacity))
            for capacity in {SMALL_ROWS, rows}
        }
        self._capacities = sorted(self._headers)
        self._tables: list[tuple[int, int]] = []
        self._pages: list[NDArray[np.int64] | None] = []
        self._bests = self._device.allocate(16 * _SLICES * max(record.max_output_rows, SMALL_ROWS))
        self._chosen = self._device.allocate(4 * max(record.max_output_rows, SMALL_ROWS))
        self._replays: dict[tuple[int, int, int, bool], Callable[[], None]] = {}
        self._logits = np.empty((record.max_output_rows, record.vocab_size), np.float32)
        self._chosen_here = np.empty(record.max_output_rows, np.int32)
        self._device.prepare(self._first_kernels(), record.progress)

    def run(self, batch: Batch) -> FloatArray:
        """Compute a batch; see `ops.Program.run`.

        Raises RequestError or ContextLengthError for a batch that it cannot hold.
        """
        self._start(batch, is_greedy=False)
        outputs = len(batch.output_rows)
        if not outputs:
            return self._logits[:0]
        stride = self._record.logits_stride // 4
        if stride == self._record.vocab_size:
            self._device.read(self._record.logits, self._logits[:outputs])
        else:
            rows = np.empty((outputs, stride), np.float32)
            self._device.read(self._record.logits, rows)
            self._logits[:outputs] = rows[:, : self._record.vocab_size]
        return self._logits[:outputs]

    def run_greedy(self, batch: Batch) -> NDArray[np.int32]:
        """Compute a batch and return the likeliest token of each output row; see `ops.GreedyProgram`."""
        self._start(batch, is_greedy=True)
        chosen = self._chosen_here[: len(batch.output_rows)]
        if chosen.size:
            self._device.read(self._chosen, chosen)
        return chosen

    def close(self) -> None:
        """Release the device's memory."""
        self._replays.clear()
        self._device.close()

    def _start(self, batch: Batch, *, is_greedy: bool) -> None:
        shape = self._write(batch)
        if max(shape.batch_rows, shape.output_rows) > SMALL_ROWS:
            self._device.run(self._steps(shape, is_greedy))
            return
        key = (shape.batch_rows, shape.output_rows, shape.num_chunks, is_greedy)
        if key not in self._replays:
            steps = self._steps(shape, is_greedy)
            # Once outside the graph: loading kernels and warming up are not allowed inside it.
            self._device.run(steps)
            self._replays[key] = self._device.capture(steps)
            return
        self._replays[key]()

    def _steps(self, shape: Shape, is_greedy: bool) -> list[Step]:
        steps = list(self._record.build(shape))
        if is_greedy and shape.output_rows:
            words = (self._record.logits, self._record.logits_stride, self._record.vocab_size, self._bests)
            rows = shape.output_rows
            steps.append(Launch("sampling.best_of_slices", (), (_SLICES, rows, 1), 128, words))
            steps.append(Launch("sampling.best_of_row", (), (1, rows, 1), 128, (self._bests, self._chosen)))
        return steps

    def _first_kernels(self) -> list[KernelKey]:
        """The kernels that decoding one token takes."""
        _, address = self._headers[SMALL_ROWS]
        steps = self._steps(_shape(1, 1, _FEWEST_CHUNKS, SMALL_ROWS, address), is_greedy=True)
        return list(dict.fromkeys(step.key for step in steps if isinstance(step, Launch)))

    def _write(self, batch: Batch) -> Shape:
        """Prove a batch and put it where the kernels read it."""
        rows, outputs = len(batch.token_ids), len(batch.output_rows)
        if not 0 < rows <= self.max_batch_rows or outputs > self.max_output_rows:
            raise RequestError(
                f"a batch of {rows} rows with {outputs} outputs; at most {self.max_batch_rows} and "
                f"{self.max_output_rows} fit, so split it"
            )
        lowest, highest = int(batch.token_ids.min()), int(batch.token_ids.max())
        if lowest < 0 or highest >= self._num_tokens:
            found = lowest if lowest < 0 else highest
            raise RequestError(f"token id {found} is not in the vocabulary of {self._num_tokens} entries")
        if outputs and not all(0 <= row < rows for row in batch.output_rows.tolist()):
            raise RequestError(f"output rows must lie in 0..{rows - 1}")
        capacity = next(capacity for capacity in self._capacities if capacity >= max(rows, outputs))
        numbers, address = self._headers[capacity]
        parts = numbers.reshape(4, capacity)
        parts[:] = 0
        parts[0, :rows] = batch.token_ids
        parts[3, :outputs] = batch.output_rows
        row = longest = 0
        for index, segment in enumerate(batch.segments):
            end = row + segment.num_rows
            table = self._page_table(index, segment, rows - row)
            parts[1, row:end] = np.arange(segment.start_position, segment.start_position + segment.num_rows)
            parts[2, row:end] = table
            longest = max(longest, segment.start_position + segment.num_rows)
            row = end
        if row != rows:
            raise RequestError(f"the segments hold {row} rows, the batch {rows} token ids")
        self._device.write(address, numbers)
        chunks = _FEWEST_CHUNKS
        while chunks * _CHUNK < longest:
            chunks *= 2
        return _shape(_padded(rows), _padded(outputs), chunks, capacity, address)

    def _page_table(self, index: int, segment: Segment, room: int) -> int:
        """Where a segment's page addresses lie on the device; they are written only when they changed."""
        count, start, pages = segment.num_rows, segment.start_position, segment.page_addresses
        if segment.dropped_tokens or segment.page_mass is not None:
            raise BackendUnavailableError(
                "dropping pages from the middle of a context runs on the CPU only in this version; take device 'cpu'"
            )
        if count <= 0 or start < 0:
            raise RequestError(f"segment {index} of {count} rows from position {start} is not a run of positions")
        if start + count > len(pages) * self._record.page_tokens:
            raise RequestError(f"segment {index} ends at position {start + count}, but {len(pages)} pages were given")
        if start + count > self._num_positions:
            raise ContextLengthError(
                f"position {start + count - 1} is beyond the {self._num_positions} the model has learned"
            )
        if count > room:
            raise RequestError("the segments hold more rows than the batch has token ids")
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
    """Rows that are computed: a power of two up to SMALL_ROWS, so that few graphs serve all batches."""
    return rows if rows == 0 or rows > SMALL_ROWS else 1 << (rows - 1).bit_length()


def _shape(rows: int, outputs: int, chunks: int, capacity: int, header: int) -> Shape:
    token_ids, positions, tables, selected = (header + 8 * capacity * part for part in range(4))
    return Shape(rows, outputs, chunks, token_ids, positions, tables, selected)
