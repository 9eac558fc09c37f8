"""Programs of every device: the batches of rows that they run, and the protocols of their abilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ContextLengthError, RequestError
from localinfer.kernels.kv_layout import LOG_ROWS
from localinfer.kernels.ops import NUM_AXES, Buffer, Rows
from localinfer.types import FloatArray, Record


@dataclass(frozen=True)
class StateStep:
    """Recurrent states that a segment reads and writes; `KVLayout` says how blocks of them are laid out.

    All addresses are multiples of 64. Nothing that is read is written: `source` is no target, and `log` not `new_log`.
    """

    source: int
    """Address of the states before the first row; 0 for zeros, where a sequence begins."""
    targets: Sequence[tuple[int, int]] = ()
    """Pairs of rows and address: states after this many of the segment's rows are written there; rows rise from 0,
    which means after the logged rows."""
    log: int = 0
    """Address of a log whose first rows come after `source` and before the segment's rows; 0 for none."""
    num_logged: int = 0
    """Rows of that log to repeat."""
    new_log: int = 0
    """Address of a log that gets the segment's rows, at most LOG_ROWS; 0 for none."""


@dataclass(frozen=True)
class MediaRows:
    """Pictures and sounds of a segment: what its rows have in place of token ids, or of positions in a row."""

    embeddings: Sequence[tuple[int, FloatArray]] = ()
    """First row and embeddings float32[rows, media_width] of each run of rows that stand for no token; their ids are
    negative, and nothing is looked up by them."""
    positions: NDArray[np.int64] | None = None
    """[rows, 3]: positions of every row in time, rows and columns, for rotation; None for those that it has in the
    sequence."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one sequence in a batch."""

    start_position: int
    num_rows: int
    page_addresses: NDArray[np.int64]
    """One address per page of the sequence, for every position up to the last row's except the dropped ones."""
    dropped_tokens: int = 0
    """Positions, whole pages of them, that are no longer attended to."""
    attention_sums: FloatArray | None = None
    """float32[pages] to which the rows' attention to each page is added, for tapes that were made to measure it."""
    windowed_addresses: NDArray[np.int64] | None = None
    """[pages]: addresses of the windowed layers' part of each page, for layouts that keep it apart; 0 for pages that
    those layers no longer see."""
    state: StateStep | None = None
    """For models with recurrent layers."""
    carried: tuple[int, int] = (0, 0)
    """For models with draft layers, addresses of the hidden states float32[hidden_size] of the row before, 0 for zeros,
    and of the memory for those of the last row, 0 for none."""
    aside: tuple[NDArray[np.int64], NDArray[np.int64] | None] | None = None
    """Tables like page_addresses and windowed_addresses by which the first row alone stores its keys and values, for a
    position that is computed again while its page is shared; None for the segment's own."""
    media: MediaRows | None = None
    """For models that take pictures or sounds; None for words at their own positions."""
    key_ends: NDArray[np.int64] | None = None
    """[rows]: the position after the last one that each row sees, behind its own and within the segment, in ops that
    take it; None for those that rows see otherwise. Windows then bound only what lies before a row."""
    key_starts: NDArray[np.int64] | None = None
    """[rows]: the first position that each row sees, with key_ends; None for 0."""
    window_starts: NDArray[np.int64] | None = None
    """[rows]: the position, of the segment and up to its own, from which on each row sees what its window no longer
    holds, in ops that take key_ends; None for rows that see what their window holds."""

    @property
    def has_ranges(self) -> bool:
        """True if it says which positions its rows see."""
        return self.key_ends is not None or self.key_starts is not None or self.window_starts is not None

    def ranges(self) -> NDArray[np.int64]:
        """Per row the first position that it sees, the one after the last, and the one from which on it sees what its
        window no longer holds, int64[3, rows], counted from the first position that was not dropped."""
        own = np.arange(self.start_position, self.start_position + self.num_rows)
        starts = np.zeros_like(own) if self.key_starts is None else self.key_starts
        ends = own + 1 if self.key_ends is None else self.key_ends
        found = np.stack((starts, ends, own if self.window_starts is None else self.window_starts))
        return np.maximum(found - self.dropped_tokens, 0)


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass."""

    token_ids: NDArray[np.int32]
    segments: Sequence[Segment]
    """Sequences that the rows belong to, in order."""
    output_rows: NDArray[np.int32]
    """Rows whose logits are wanted."""
    token_types: NDArray[np.int32] | None = None
    """Per row, for models with such a table; None for type 0 throughout."""


class BatchLimits(Record):
    """Limits of a program's batches: rows, rows with logits, token ids, positions and token types below these."""

    max_rows: int
    max_output_rows: int
    num_tokens: int
    num_positions: int
    page_tokens: int
    has_states: bool = False
    num_token_types: int = 1
    needs_whole_texts: bool = False
    """True if segments must begin with the first position."""
    media_width: int = 0
    """Columns of the embeddings that rows may have instead of a token; 0 where none may."""
    takes_ranges: bool = False
    """True if segments may say which positions their rows see."""

    def check(self, batch: Batch) -> None:
        """Raise RequestError or ContextLengthError for a batch that kernels, which check nothing, must not get."""
        rows, outputs = len(batch.token_ids), len(batch.output_rows)
        if not 0 < rows <= self.max_rows or outputs > self.max_output_rows:
            raise RequestError(
                f"a batch of {rows} rows with {outputs} outputs; at most {self.max_rows} and {self.max_output_rows} "
                "fit, so split it"
            )
        lowest, highest = _extremes(batch.token_ids)
        if lowest < 0:
            self._check_embedded(batch)
        if highest >= self.num_tokens:
            raise RequestError(f"token id {highest} is not in the vocabulary of {self.num_tokens} entries")
        if batch.token_types is not None:
            self._check_types(batch.token_types, rows)
        if outputs:
            lowest, highest = _extremes(batch.output_rows)
            if lowest < 0 or highest >= rows:
                raise RequestError(f"output rows must lie in 0..{rows - 1}")
        total = 0
        for index, segment in enumerate(batch.segments):
            self._check_segment(index, segment)
            if segment.media is not None:
                self._check_media(index, segment, segment.media)
            total += segment.num_rows
            if total > rows:
                raise RequestError(f"the segments hold more than the batch's {rows} token ids")
        if self.has_states and len(batch.segments) > 1:
            _check_apart([segment.state for segment in batch.segments])
        if total != rows:
            raise RequestError(f"the segments hold {total} rows, the batch {rows} token ids")

    def _check_types(self, types: NDArray[np.int32], num_rows: int) -> None:
        if len(types) != num_rows:
            raise RequestError(f"{len(types)} token types were given for {num_rows} token ids")
        lowest, highest = _extremes(types)
        if lowest < 0 or highest >= self.num_token_types:
            found = lowest if lowest < 0 else highest
            raise RequestError(f"token type {found} is not among the {self.num_token_types} of the model")

    def _check_embedded(self, batch: Batch) -> None:
        """Prove that every negative id is of a row with an embedding. Raises: RequestError."""
        embedded = np.zeros(len(batch.token_ids), np.bool_)
        start = 0
        for segment in batch.segments:
            for first, rows in () if segment.media is None else segment.media.embeddings:
                embedded[start + first : start + first + len(rows)] = True
            start += segment.num_rows
        lacking = batch.token_ids[(batch.token_ids < 0) & ~embedded]
        if lacking.size:
            raise RequestError(f"token id {lacking[0]} is not in the vocabulary of {self.num_tokens} entries")

    def _check_media(self, index: int, segment: Segment, media: MediaRows) -> None:
        """Prove the shapes of a segment's embeddings and positions. Raises: RequestError."""
        if not self.media_width:
            raise RequestError(
                "the program computes words only, no pictures or sounds; load the model with what makes embeddings of "
                "them"
            )
        for first, rows in media.embeddings:
            is_right = rows.ndim == 2 and rows.shape[1] == self.media_width and rows.dtype == np.float32
            if not is_right or not rows.flags.c_contiguous:
                raise RequestError(
                    f"segment {index} has embeddings {rows.dtype}{list(rows.shape)}; float32[rows, {self.media_width}] "
                    "in one run are wanted"
                )
            if not 0 <= first <= segment.num_rows - len(rows):
                raise RequestError(f"segment {index} of {segment.num_rows} rows has embeddings of others")
        positions = media.positions
        if positions is not None and (positions.shape != (segment.num_rows, NUM_AXES) or positions.min() < 0):
            raise RequestError(f"segment {index}'s positions are not {segment.num_rows} times {NUM_AXES} from 0 on")

    def check_settled(self, step: StateStep) -> None:
        """Raise RequestError for a step without rows that kernels must not get."""
        if not self.has_states:
            raise RequestError("this model has no recurrent layers, whose states could be computed")
        if step.new_log:
            raise RequestError("a step without rows has none to log")
        _check_step("a step without rows", 0, step)

    def _check_segment(self, index: int, segment: Segment) -> None:
        count, start, dropped = segment.num_rows, segment.start_position, segment.dropped_tokens
        end, num_pages = start + count, len(segment.page_addresses)
        if self.has_states:
            _check_state(index, segment)
        if count <= 0 or start < 0:
            raise RequestError(f"segment {index} of {count} rows from position {start} is not a run of positions")
        if not 0 <= dropped <= start or dropped % self.page_tokens:
            raise RequestError(
                f"segment {index} from position {start} lacks {dropped} positions, which are not whole pages"
            )
        if end - dropped > num_pages * self.page_tokens:
            raise RequestError(f"segment {index} ends at position {end}, but {num_pages} pages were given for it")
        if segment.key_ends is not None or segment.key_starts is not None or segment.window_starts is not None:
            self._check_ranges(index, segment)
        if start and self.needs_whole_texts:
            raise RequestError(f"segment {index} begins at position {start}; this model computes whole texts only")
        if end > self.num_positions:
            raise ContextLengthError(f"position {end - 1} is beyond the {self.num_positions} the model has learned")

    def _check_ranges(self, index: int, segment: Segment) -> None:
        """Prove that every row of a segment sees its own position, and none that is not there. Raises: RequestError."""
        if not self.takes_ranges:
            raise RequestError(
                f"segment {index} says which positions its rows see, which this program does not take; compute it with "
                "rows that see what is before them"
            )
        start, end = segment.start_position, segment.start_position + segment.num_rows
        own = np.arange(start, end)
        ends = own + 1 if segment.key_ends is None else segment.key_ends
        starts = np.zeros_like(own) if segment.key_starts is None else segment.key_starts
        windows = own if segment.window_starts is None else segment.window_starts
        arrays = (ends, starts, windows)
        is_whole = all(one.shape == own.shape and one.dtype.kind == "i" for one in arrays)
        if not is_whole or np.any(starts < 0) or np.any(starts > own) or np.any(ends <= own) or np.any(ends > end):
            raise RequestError(
                f"segment {index} from position {start} has {segment.num_rows} rows; wanted for each a range "
                f"of positions from 0 to {end} that holds its own"
            )
        # Of what lies before the segment, windowed layers may keep no more than their windows hold.
        if np.any(windows < start) or np.any(windows > own):
            raise RequestError(
                f"segment {index} from position {start} has rows that see beyond their window from position "
                f"{int(windows.min())} on; wanted positions of the segment, up to the row's own"
            )


def _check_state(index: int, segment: Segment) -> None:
    """Prove that a segment comes with the states before it. Raises: RequestError."""
    step = segment.state
    if step is None or (not step.source and segment.start_position > step.num_logged):
        raise RequestError(f"segment {index} from position {segment.start_position} comes without the states before it")
    _check_step(f"segment {index}", segment.num_rows, step)


def _check_step(name: str, num_rows: int, step: StateStep) -> None:
    """Prove the addresses and numbers of a step of recurrent states. Raises: RequestError."""
    rows = [count for count, _ in step.targets]
    addresses = [step.source, *(place for _, place in step.targets)]
    is_rising = all(first < second for first, second in zip(rows, rows[1:], strict=False))
    if not is_rising or any(not 0 <= count <= num_rows for count in rows):
        raise RequestError(f"{name} of {num_rows} rows cannot write states after rows {rows}")
    if any(place % 64 for place in (*addresses, step.log, step.new_log)):
        raise RequestError(f"{name} has states or logs at addresses that are not multiples of 64")
    if 0 in addresses[1:] or len(set(addresses)) != len(addresses):
        raise RequestError(f"{name} reads and writes the same states, or writes some nowhere")
    if not 0 <= step.num_logged <= LOG_ROWS or (step.num_logged and not step.log):
        raise RequestError(f"{name} repeats {step.num_logged} rows of a log, which holds {LOG_ROWS} at most")
    if step.new_log and (step.new_log == step.log or num_rows > LOG_ROWS):
        raise RequestError(f"{name} logs {num_rows} rows; {LOG_ROWS} fit, in a log that is not read")


def _check_apart(steps: Sequence[StateStep | None]) -> None:
    """Prove that no states or logs are written twice, or read by another segment. Raises: RequestError."""
    present = [step for step in steps if step is not None]
    written = [place for step in present for _, place in step.targets]
    written += [step.new_log for step in present if step.new_log]
    read = {place for step in present for place in (step.source, step.log)}
    if len(set(written)) != len(written) or not read.isdisjoint(written):
        raise RequestError("two segments of a batch write the same states, or one reads what another writes")


def _extremes(values: NDArray[np.int32]) -> tuple[int, int]:
    """The lowest and the highest; of one alone, as in every batch of a decoded token, without NumPy's reductions."""
    if len(values) == 1:
        only = values.item()
        return only, only
    return int(values.min()), int(values.max())


class OpCost(Record):
    """Bytes that one op of a finished tape reads, and multiplications, for measurements."""

    kernel: str
    """Its name."""
    rows: Rows = Rows.BATCH
    weights: tuple[str, ...] = ()
    """Names of the tensors it reads."""
    weight_bytes: int = 0
    """All of them."""
    row_weight_bytes: int = 0
    """Those that a single row reads: fewer for embeddings and experts."""
    multiply_adds: int = 0
    """With weights, per row."""
    kv_bytes: int = 0
    """Per position that a row attends to."""
    kv_multiply_adds: int = 0
    """Per position that a row attends to."""
    window: int = 0
    """Positions that a row attends to at most; 0 for all."""
    state_bytes: int = 0
    """Recurrent states that are read and written, per segment."""


class Program(Protocol):
    """A finished tape: runs batches."""

    max_batch_rows: int
    max_output_rows: int

    def run(self, batch: Batch) -> FloatArray:
        """Return logits float32[len(output_rows), vocab_size], valid until the next call."""

    def close(self) -> None:
        """Release threads and buffers."""


class StagedProgram(Program, Protocol):
    """A program that can compute a batch in stages, which end at its graph's `StageBoundary` ops."""

    def begin(self, batch: Batch) -> None:
        """Check a batch and write it where the ops read it. Raises: RequestError, ContextLengthError."""

    def run_stage(self, stage: int) -> None:
        """Compute one stage of the batch, or start to; every stage is run once, in order."""

    def download(self, buffer: Buffer, num_rows: int) -> FloatArray:
        """Rows of a buffer after the last stage that was run, float32[num_rows, width], valid until the next one."""

    def upload(self, buffer: Buffer, rows: FloatArray) -> None:
        """Fill a buffer before the next stage: float32[rows, width], copied at once."""


class PlacedStage(Record):
    """One stage of a graph that was cut for several devices."""

    part: int
    """Number of the device's program."""
    stage: int
    """Number of the stage in that program."""
    uploads: tuple[tuple[Buffer, int], ...] = ()
    """Buffers that are filled before it runs, and the number of the program that has each."""


@runtime_checkable
class GreedyProgram(Program, Protocol):
    """A program that finds the likeliest token where the logits are, so that they need not be brought to the host."""

    def run_greedy(self, batch: Batch) -> NDArray[np.int32]:
        """Return the token of the largest logit of every output row, of equal ones the lowest, valid until the next
        call; `protocol.NOT_FINITE` for a row with a NaN or +inf, `NOTHING_LEFT` where every logit is -inf."""


UNDECIDED = -3
"""Instead of a token id: the host must sample this row."""


@dataclass(frozen=True)
class Draw:
    """Sampling parameters of one row's token: that which `kernels.cpu.sampling.RowSampler.choose` samples.

    seed: its 64 bits, as an int of any sign.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


@runtime_checkable
class DrawingProgram(GreedyProgram, Protocol):
    """A program that samples tokens on the device."""

    def run_drawn(self, batch: Batch, draws: Sequence[Draw]) -> NDArray[np.int32]:
        """Return the sampled token of every output row, valid until the next call; or UNDECIDED, or a code as
        `run_greedy`."""

    def logits_of(self, row: int) -> FloatArray:
        """The logits float32[vocab_size] of one output row of the last batch."""


@runtime_checkable
class AbortableProgram(Program, Protocol):
    """A program that can leave a batch undone."""

    def run_abortable(self, batch: Batch, should_abort: Callable[[float], bool]) -> FloatArray | None:
        """As `run`, but ask between ops, of a batch of many rows, whether the rest is unwanted; None if it was.

        is_unwanted: called with the share of the work that is done, in (0, 1). After None, the pages' contents for the
        batch's positions are undefined; every position before them is as it was.
        """


@runtime_checkable
class StatefulProgram(Program, Protocol):
    """A program of a model with recurrent layers."""

    def settle(self, step: StateStep) -> None:
        """Compute states without any row: write the source and its logged rows to the targets, all of 0 rows."""


@runtime_checkable
class HiddenProgram(Program, Protocol):
    """A program that shows hidden states: float32[rows, hidden_size] of the last batch's output rows; None if its graph
    has none."""

    hidden: FloatArray | None


@runtime_checkable
class MeasurableProgram(Program, Protocol):
    """A program whose ops can be run and timed apart."""

    num_threads: int

    def operations(self) -> Sequence[OpCost]:
        """Every op, in the order they run."""

    def run_operations(self, first: int, count: int) -> None:
        """Run some ops again over the last batch; in turn from the first to the last they compute what `run` did."""
