"""The threads that run a tape, and a finished tape as a program.

Every thread of a `ThreadPool` walks the same ops, with a barrier after each. Python is left once per run. The calling
thread is thread 0, unless the pool works in the background; the others spin for about a millisecond after a run, since
the next token usually comes within it, and then sleep on a lock, so an idle process uses no CPU. The control block is
int64 words, one cache line apart where threads contend.

A `CpuProgram` writes a batch into the header that every op reads, and lets the threads walk the ops.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, RequestError
from localinfer.kernels.address_space import shortage
from localinfer.kernels.cpu import guard, kernel_abi
from localinfer.kernels.cpu.crash_reports import HANDLER, REPORTS, install_if_asked
from localinfer.kernels.cpu.memory import address, aligned_zeros, placed, zeros
from localinfer.kernels.cpu.parameters import BATCH, SEGMENT
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.cpu.worker_threads import (
    FINISH_RUN,
    POOL_KERNELS as _THREAD_KERNELS,
    START_RUN,
    Priority,
    ThreadChoice,
    WorkerThreads,
)
from localinfer.kernels.ops import NUM_AXES, Buffer, Rows
from localinfer.kernels.program import Batch, MediaRows, OpCost, Segment, StateStep
from localinfer.types import FloatArray, Record

if TYPE_CHECKING:
    from localinfer.kernels.cpu.deferred_packing import DeferredPacking

__all__ = ["POOL_KERNELS", "CpuProgram", "ThreadPool", "stretches"]

logger = logging.getLogger(__name__)

POOL_KERNELS = (*_THREAD_KERNELS, HANDLER)

_CALLER_ID = (kernel_abi.SLEEPING + kernel_abi.THREAD_ID) // 8
"""Word of a control block that says which thread of the system is thread 0."""
_STACK_BYTES = 8 << 20
"""Stack of a thread on most systems."""


class _PoolSettings(Record):
    """num_threads: None for as many as the pool was made with."""

    num_threads: int | None
    priority: Priority


class ThreadPool:
    """`num_threads` threads (the caller among them) that run tapes, one at a time.

    `num_threads` and `priority` may change between two batches of a program, never beyond `max_threads`, for which
    programs have memory. has_own_count: a number was asked for since, which holds for batches of any size.
    computing_seconds: processor time that the first thread had in the last run that was to be measured.
    performance_cores: see `ProcessorLimits`; a number of threads to be tried.
    Raises: OutOfMemoryError if the system does not start as many.
    """

    def __init__(self, num_threads: int, *, priority: Priority = "normal", performance_cores: int = 0) -> None:
        assert 1 <= num_threads <= kernel_abi.MAX_THREADS, "the loader checks the thread count"
        self.num_threads = self._first_count = num_threads
        self.max_threads = max(num_threads, min(os.cpu_count() or 1, kernel_abi.MAX_THREADS))
        self.has_own_count = False
        self.performance_cores = performance_cores
        self.computing_seconds = 0.0
        self.process = os.getpid()
        self._closed = False
        self._settings = self._asked = _PoolSettings(None, priority)
        self._asking = threading.Lock()
        self._control = aligned_zeros(kernel_abi.SLEEPING + kernel_abi.LINE_BYTES * (self.max_threads + 1)).view(
            np.int64
        )
        self.control_address = address(self._control)
        self._workers = WorkerThreads(self._control, priority)
        if not self._workers.start(num_threads):
            self._workers.stop()
            raise shortage(_STACK_BYTES * (num_threads - 1), f"starting {num_threads} threads")
        REPORTS.add_pool(self._control, self.max_threads + 1)
        install_if_asked()
        self._finalizer = weakref.finalize(self, _end, self._workers, self.control_address)

    @property
    def priority(self) -> Priority:
        """The priority of the threads at present."""
        return self._settings.priority

    def ask_threads(self, num_threads: int | None) -> None:
        """Let batches from the next on be run by so many threads, None for as many as at first. Any thread may ask."""
        assert num_threads is None or 1 <= num_threads <= self.max_threads, "checked by the caller"
        with self._asking:
            self._asked = replace(self._asked, num_threads=num_threads)

    def ask_priority(self, priority: Priority) -> None:
        """Let batches from the next on be run by threads of this priority. Any thread may ask, and waits for nothing.

        In the background the thread that calls `run` computes nothing: its priority is the host program's to choose.
        """
        with self._asking:
            self._asked = replace(self._asked, priority=priority)

    def settle(self) -> None:
        """Take over what was asked for; between two runs, by the thread that makes the next."""
        asked = self._asked
        if asked is self._settings or self._closed or os.getpid() != self.process:
            return
        if asked.priority != self._settings.priority:
            self._workers.stop()
            self._workers.priority = asked.priority
        wanted = self._first_count if asked.num_threads is None else asked.num_threads
        if not self._workers.start(wanted):
            logger.warning("the system starts %d threads, not %d", self._workers.num_threads, wanted)
        self.num_threads = min(wanted, self._workers.num_threads)
        self.has_own_count = asked.num_threads is not None
        self._settings = asked

    def run(
        self, ops_address: int, num_ops: int, batch_address: int, num_threads: int = 0, *, is_measured: bool = False
    ) -> None:
        """Run ops (pairs of function and parameter address) over a batch header; blocks without the GIL.

        num_threads: how many of the threads take part; 0 for all. Raises: ClosedError after `close`, and in a forked
        child.
        """
        control = self._control
        if self._closed or control[kernel_abi.STOPPING // 8]:
            raise ClosedError("the model was closed; load it again")
        if os.getpid() != self.process:
            raise ClosedError("the model was loaded in the parent process; load it again in this one")
        control[kernel_abi.OPS // 8] = ops_address
        control[kernel_abi.NUM_OPS // 8] = num_ops
        control[kernel_abi.BATCH // 8] = batch_address
        num_threads = num_threads or self.num_threads
        control[kernel_abi.NUM_THREADS // 8] = num_threads
        if self._workers.leader is not None:
            self.computing_seconds = self._workers.run(num_threads)
            return
        began = time.thread_time() if is_measured else 0.0
        control[_CALLER_ID] = threading.get_ident()
        if num_threads == 1:
            FINISH_RUN.call(self.control_address)
            if is_measured:
                self.computing_seconds = time.thread_time() - began
            return
        before = int(control[kernel_abi.STATE // 8])
        try:
            self._workers.wake(int(START_RUN.call(self.control_address, num_threads)))
            FINISH_RUN.call(self.control_address)
        except BaseException:
            # Ctrl-C came between two of these steps. Workers that were started may be in the midst of the run.
            if control[kernel_abi.STATE // 8] != before:
                self._workers.wake_all(num_threads)
                FINISH_RUN.call(self.control_address)
            raise
        if is_measured:
            self.computing_seconds = time.thread_time() - began

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._closed = True
        self._finalizer()


def _end(workers: WorkerThreads, control_address: int) -> None:
    """End a pool's threads; its control block may go."""
    REPORTS.remove_pool(control_address)
    workers.stop()


def _strike_out(tapes: Sequence[int]) -> None:
    for entries in tapes:
        REPORTS.remove_tape(entries)


_NUM_ROWS, _NUM_OUTPUT_ROWS, _NUM_SEGMENTS = map(BATCH.fields.index, ("num_rows", "num_output_rows", "num_segments"))
_PARTIALS, _PARTIALS_BYTES = map(BATCH.fields.index, ("partials", "partials_bytes"))
_MEDIA, _AXES = map(BATCH.fields.index, ("media", "axes"))

DECODE_ROWS = 2
"""Batches of up to this many rows read memory more than they multiply, which fewer threads may do as fast. Four tokens
to verify took 28 ms on one thread of a machine where one took 20 ms, and 18 ms on two."""

OP_BYTES = 16
"""Of an entry of the tape: the address of a kernel, and that of its parameters."""
INTERRUPTIBLE_ROWS = 32
"""Batches of at least this many rows may be left undone. Smaller ones are over soon."""
STRETCHES = 64
"""Stretches of equal work that such a batch is run in. Going back to Python between two of them takes some 10 us."""
SHORT_RUN_SECONDS = 1e-3
UNMEASURED_RUNS = 3
"""After a run that is over sooner than that, so many are not measured."""


class Stretch(NamedTuple):
    """Ops that run before the caller is asked again: the first, how many, and the shares of all work before and in
    them."""

    first: int
    num_ops: int
    done_before: float
    share: float


class Entries(NamedTuple):
    """Ops of a tape that one kind of batch runs."""

    ops: NDArray[np.int64]
    """[ops, 2], see OP_BYTES."""
    address: int
    """Of these."""
    num_ops: int
    """Number of these."""
    stretches: "list[Stretch]"
    """Their parts of equal work."""


class CpuProgram:
    """Runs batches; `ops.Program`, `ops.AbortableProgram` and `ops.MeasurableProgram`. One caller at a time.

    `decode_threads` of its `num_threads` run batches of up to DECODE_ROWS rows; the loader measures how many are best.
    Where a pool was asked for another number since, that holds. Fewer run while other programs take the processors, see
    `ThreadChoice`, unless `adapts` is False. is_measured: `decode_threads` is what is best on a free machine.
    """

    def __init__(self, tape: CpuTape) -> None:
        self.tape = tape
        self._limits = tape.limits
        self.max_batch_rows = tape.limits.max_rows
        self.max_output_rows = tape.limits.max_output_rows
        self.hidden = tape.hidden
        self._pool = tape.pool
        self.decode_threads = self._last_threads = tape.pool.num_threads
        self.is_measured = self.adapts = True
        self.deferred: DeferredPacking | None = None
        """Packs matrices of a program that has run no batch or one, and has one kind of batch; else None."""
        self._choices: dict[int, ThreadChoice] = {}
        self._choice: ThreadChoice | None = None
        self._work = 1
        self._unmeasured = 0
        addresses = zip(tape.kernels, tape.parameters, strict=True)
        plain = placed(np.array([[kernel.address, address(words)] for kernel, words in addresses], np.int64))
        self._num_ops = len(plain)
        ranged = plain
        if tape.ranged_kernels:
            ranged = placed(plain.copy())
            for index, kernel in tape.ranged_kernels.items():
                ranged[index, 0] = kernel.address
        self._recurrent_ops = placed(np.ascontiguousarray(plain[tape.recurrent_kernels]))
        tapes = [(self._recurrent_ops, [tape.descriptions[index] for index in tape.recurrent_kernels])]
        self._entries: dict[tuple[bool, bool], Entries] = {}
        every, without = range(len(plain)), [index for index in range(len(plain)) if index not in tape.typed_kernels]
        # The stages of a program on several devices are run one by one, with all of their ops.
        are_left_out = len(without) < len(plain) and len(tape.stage_starts) == 1
        for is_ranged, ops in ((False, plain), *(((True, ranged),) if tape.ranged_kernels else ())):
            for is_typed, kept in ((True, every), *(((False, without),) if are_left_out else ())):
                taken = ops if is_typed else placed(np.ascontiguousarray(ops[kept]))
                parts = stretches([tape.operations[index] for index in kept])
                self._entries[is_ranged, is_typed] = Entries(taken, address(taken), len(taken), parts)
                tapes.append((taken, [tape.descriptions[index] for index in kept]))
            self._entries.setdefault((is_ranged, False), self._entries[is_ranged, True])
        for is_typed in (False, True):
            self._entries.setdefault((True, is_typed), self._entries[False, is_typed])
        self._has_kinds = len(tapes) > 2
        self._ops, self._running = plain, self._entries[False, False]
        for entries, descriptions in tapes:
            REPORTS.add_tape(entries, descriptions)
        self._forget = weakref.finalize(self, _strike_out, tuple(address(entries) for entries, _ in tapes))
        self._fills = tuple(tape.memory.fills)
        rows = self.max_batch_rows
        self._token_ids = zeros(rows, np.int64)
        self._positions = zeros(rows, np.int64)
        self._token_types = zeros(rows, np.int64)
        self._media = zeros(rows if tape.limits.media_width else 0, np.int64)
        self._axes = zeros((len(self._media), NUM_AXES), np.int64)
        self._has_media = False
        self._page_tables = zeros(rows, np.int64)
        self._windowed_tables = zeros(rows, np.int64)
        self._output_rows = zeros(self.max_output_rows, np.int64)
        self._segments = zeros((rows, len(SEGMENT.fields)), np.int64)
        self._key_ranges = zeros((3, rows if tape.limits.takes_ranges else 0), np.int64)
        self._scratch = aligned_zeros(self._pool.max_threads * kernel_abi.SCRATCH_BYTES)
        self._header = BATCH.pack(
            num_rows=0,
            num_output_rows=0,
            control=self._pool.control_address,
            token_ids=address(self._token_ids),
            positions=address(self._positions),
            page_tables=address(self._page_tables),
            output_rows=address(self._output_rows),
            scratch=address(self._scratch),
            segments=address(self._segments),
            num_segments=0,
            partials=0,
            partials_bytes=0,
            windowed_tables=address(self._windowed_tables),
            token_types=address(self._token_types),
            media=0,
            axes=0,
            key_starts=address(self._key_ranges[0]),
            key_ends=address(self._key_ranges[1]),
            window_starts=address(self._key_ranges[2]),
        )
        self._header_address = address(self._header)
        self._partials: NDArray[np.uint8] = aligned_zeros(0)
        self._reserve_partials(0)
        self._window, self._page_tokens = tape.kv_layout.window, tape.kv_layout.page_tokens
        self._exact_tables: dict[int, NDArray[np.int64]] = {}
        self._targets: dict[int, NDArray[np.int64]] = {}
        self._last_pages: NDArray[np.int64] | None = None
        self._last_table = 0

    @property
    def num_threads(self) -> int:
        """Threads of the pool that run batches at present."""
        return self._pool.num_threads

    @property
    def performance_cores(self) -> int:
        """See `ThreadPool`."""
        return self._pool.performance_cores

    def run(self, batch: Batch) -> FloatArray:
        """Compute a batch; see `ops.Program.run`.

        Raises RequestError or ContextLengthError for a batch that it cannot hold.
        """
        self.begin(batch)
        self._run_part(0, self._running.num_ops, 1.0)
        return self._result(batch)

    def begin(self, batch: Batch) -> None:
        """Check a batch and write it where the ops read it; see `program.StagedProgram`."""
        self._limits.check(batch)
        self._pool.settle()
        rows, outputs = len(batch.token_ids), len(batch.output_rows)
        token_ids = batch.token_ids
        if self._limits.media_width:
            token_ids = self._set_media(batch)
        self._token_ids[:rows] = token_ids
        for fill in self._fills:
            fill(token_ids)
        if self._limits.num_token_types > 1:
            self._token_types[:rows] = 0 if batch.token_types is None else batch.token_types
        self._output_rows[:outputs] = batch.output_rows
        is_ranged = self._limits.takes_ranges and self._set_ranges(batch.segments)
        if self._has_kinds:
            is_typed = batch.token_types is not None and bool(batch.token_types.any())
            self._ops, self._running = self._entries[is_ranged, True].ops, self._entries[is_ranged, is_typed]
        row = chunks = 0
        for index, segment in enumerate(batch.segments):
            row = self._set_segment(index, segment, row)
            chunks += ((segment.start_position - segment.dropped_tokens) // kernel_abi.CHUNK + 2) * segment.num_rows
        header = self._header
        header[_NUM_SEGMENTS] = len(batch.segments)
        header[_NUM_ROWS] = rows
        header[_NUM_OUTPUT_ROWS] = outputs
        self._choose(rows)
        if rows <= kernel_abi.SPLIT_ROWS and self._pool.num_threads > 1:
            self._reserve_partials(chunks)
        if self.tape.attention_sums is not None:
            self.tape.attention_sums[: len(batch.segments)] = 0
        if self.deferred is not None:
            self._running = self.deferred.entries(self._entries[False, False])

    def run_stage(self, stage: int) -> None:
        """Compute one stage of the batch; see `program.StagedProgram`."""
        first, end = (*self.tape.stage_starts, self._num_ops)[stage : stage + 2]
        if first < end:
            place = self._running.address + OP_BYTES * first
            self._pool.run(place, end - first, self._header_address, self._last_threads)

    def download(self, buffer: Buffer, num_rows: int) -> FloatArray:
        """Rows of a buffer; see `program.StagedProgram`."""
        return self.tape.memory.rows(buffer)[:num_rows]

    def upload(self, buffer: Buffer, rows: FloatArray) -> None:
        """Fill rows of a buffer; see `program.StagedProgram`."""
        self.tape.memory.rows(buffer)[: len(rows)] = rows

    def run_abortable(
        self, batch: Batch, should_abort: Callable[[float], bool], *, least_rows: int = INTERRUPTIBLE_ROWS
    ) -> FloatArray | None:
        """Compute a batch, or leave it undone; see `ops.AbortableProgram.run_abortable`.

        least_rows: a batch of fewer is computed in one go.
        """
        if len(batch.token_ids) < least_rows:
            return self.run(batch)
        self.begin(batch)
        for stretch in self._running.stretches:
            if stretch.done_before and should_abort(stretch.done_before):
                return None
            self._run_part(stretch.first, stretch.num_ops, stretch.share)
        return self._result(batch)

    def settle(self, step: StateStep) -> None:
        """Compute states without any row; see `program.StatefulProgram`. Raises: RequestError."""
        self._limits.check_settled(step)
        self._segments[0, :5] = 0
        self._set_state(0, step)
        self._header[_NUM_SEGMENTS], self._header[_NUM_ROWS], self._header[_NUM_OUTPUT_ROWS] = 1, 0, 0
        # One state is copied as it is computed: memory limits that as it limits a decoded token.
        self._choose(1)
        self._pool.run(address(self._recurrent_ops), len(self._recurrent_ops), self._header_address, self._last_threads)

    def operations(self) -> Sequence[OpCost]:
        """Every op, in the order they run."""
        return self.tape.operations

    def run_operations(self, first: int, count: int) -> None:
        """Run some ops again over the last batch; see `ops.MeasurableProgram`."""
        assert 0 <= first <= first + count <= self._num_ops, "ops outside the tape"
        if self.deferred is not None:
            self.deferred.finish(self._pool)
        self._pool.run(address(self._ops[first:]), count, self._header_address, self._last_threads)

    def close(self) -> None:
        """End the pool's threads, and give up the memory of this program, however long it is referred to."""
        if self.deferred is not None:
            self.deferred.close()
            self.deferred = None
        self._pool.close()
        self._forget()
        if os.getpid() != self._pool.process:
            return
        self.tape.release()
        self._fills = ()
        self._partials = aligned_zeros(0)

    def _result(self, batch: Batch) -> FloatArray:
        if self.deferred is not None:
            self.deferred.check()
            self.deferred = None if self.deferred.is_done else self.deferred
        sums = self.tape.attention_sums
        if sums is not None:
            for index, segment in enumerate(batch.segments):
                if segment.attention_sums is not None:
                    segment.attention_sums[:] += sums[index, :, : segment.attention_sums.size].sum(axis=0)
        return self.tape.logits[: len(batch.output_rows)]

    def _choose(self, rows: int) -> None:
        """Settle how many threads run the batch."""
        most = usual = self._pool.num_threads
        # Whether slow cores help with many rows is measured by nobody else.
        is_sure = self._pool.has_own_count or not 0 < self._pool.performance_cores < most
        if rows <= DECODE_ROWS and not self._pool.has_own_count:
            usual, is_sure = min(self.decode_threads, most), self.is_measured
        self._last_threads, self._choice = usual, None
        # Of few rows memory is read once, however many they are.
        self._work = rows if rows >= INTERRUPTIBLE_ROWS else 1
        if not self.adapts or most == 1:
            return
        kind = 0 if rows <= DECODE_ROWS else 1 if rows < INTERRUPTIBLE_ROWS else 2
        choice = self._choices.get(kind)
        if choice is None or choice.given != (usual, most, is_sure):
            choice = self._choices[kind] = ThreadChoice(
                usual, most, is_sure=is_sure, performance_cores=self._pool.performance_cores
            )
        self._choice, self._last_threads = choice, choice.next_count()

    def _run_part(self, first: int, num_ops: int, share: float) -> None:
        """Run ops that are a share of the batch's work, with as many threads as are best by then."""
        choice, pool, ops_address = self._choice, self._pool, self._running.address + OP_BYTES * first
        if choice is None or self._unmeasured:
            self._unmeasured -= choice is not None
            pool.run(ops_address, num_ops, self._header_address, self._last_threads)
            return
        began = time.perf_counter()
        pool.run(ops_address, num_ops, self._header_address, self._last_threads, is_measured=True)
        seconds = time.perf_counter() - began
        choice.observe(seconds, pool.computing_seconds, share * self._work)
        self._last_threads = choice.next_count()
        # That took some 4 us.
        self._unmeasured = UNMEASURED_RUNS if seconds < SHORT_RUN_SECONDS else 0

    def _reserve_partials(self, num_chunks: int) -> None:
        """Make room for what rows that see so many chunks in all keep of them, and for more than that next time."""
        needed = kernel_abi.PARTIAL_COUNTER_BYTES + num_chunks * self.tape.partial_bytes
        if needed > self._partials.size:
            self._partials = aligned_zeros(2 * needed)
            self._header[_PARTIALS] = address(self._partials)
            self._header[_PARTIALS_BYTES] = self._partials.size

    def _set_media(self, batch: Batch) -> NDArray[np.int32]:
        """Write which rows have embeddings, and positions on several axes; returns ids of which all may be looked up.

        What is looked up for a row that has an embedding is replaced, but for inputs of single layers (Gemma 3n's and
        4's), which are those of the first token, the padding, there (transformers, modeling_gemma3n.py).
        """
        token_ids, header = batch.token_ids, self._header
        has_media = any(segment.media is not None for segment in batch.segments)
        if has_media or self._has_media:
            header[_MEDIA] = header[_AXES] = 0
            self._has_media = has_media
        if not has_media:
            return token_ids
        self._media[: len(token_ids)] = 0
        row = 0
        for segment in batch.segments:
            end = row + segment.num_rows
            media = MediaRows() if segment.media is None else segment.media
            for first, embeddings in media.embeddings:
                place, stride = embeddings.ctypes.data, embeddings.strides[0]
                self._media[row + first : row + first + len(embeddings)] = place + stride * np.arange(len(embeddings))
                header[_MEDIA] = address(self._media)
            if media.positions is None:
                start = segment.start_position
                self._axes[row:end] = np.arange(start, start + segment.num_rows)[:, None]
            else:
                self._axes[row:end] = media.positions
                header[_AXES] = address(self._axes)
            row = end
        return np.maximum(token_ids, 0)

    def _set_ranges(self, segments: Sequence[Segment]) -> bool:
        """Write ranges of positions, where a segment gives some; return whether one does."""
        if not any(segment.has_ranges for segment in segments):
            return False
        row = 0
        for segment in segments:
            self._key_ranges[:, row : row + segment.num_rows] = segment.ranges()
            row += segment.num_rows
        return True

    def _set_segment(self, index: int, segment: Segment, row: int) -> int:
        """Write one segment's rows, the first of them `row`; returns the row after its last."""
        count, start, pages = segment.num_rows, segment.start_position, segment.page_addresses
        dropped = segment.dropped_tokens
        if pages is not self._last_pages:
            if pages.dtype != np.int64 or not pages.flags.c_contiguous:
                raise RequestError(f"segment {index}'s page addresses are not one run of int64")
            self._last_pages, self._last_table = pages, pages.ctypes.data
        sums = self.tape.attention_sums
        if sums is not None and len(pages) > sums.shape[2]:
            raise RequestError(f"segment {index} has {len(pages)} pages, but attention is summed for {sums.shape[2]}")
        table = self._last_table
        windowed_table = self._windowed_table(index, segment) if self._window else table
        if guard.IS_ON:
            table = self._exact_table(index, pages, segment)
            windowed = segment.windowed_addresses
            windowed_table = table if windowed is None else self._exact_table(~index, windowed, segment)
        self._segments[index, :5] = row, count, start - dropped, table, windowed_table
        if self.hidden is not None:
            self._segments[index, -2:] = segment.carried
        if self._limits.has_states and segment.state is not None:
            self._set_state(index, segment.state)
        # What stores a row looks its page up by position: such a table begins where the dropped pages' entries were.
        skipped = 8 * (dropped // self._page_tokens)
        if count == 1:
            self._positions[row] = start
            self._page_tables[row] = table - skipped
            self._windowed_tables[row] = windowed_table - skipped
        else:
            self._positions[row : row + count] = np.arange(start, start + count)
            self._page_tables[row : row + count] = table - skipped
            self._windowed_tables[row : row + count] = windowed_table - skipped
        if segment.aside is not None:
            self._page_tables[row], self._windowed_tables[row] = self._tables_aside(index, segment)
        return row + count

    def _tables_aside(self, index: int, segment: Segment) -> tuple[int, int]:
        """The tables by which a segment's first row stores."""
        assert segment.aside is not None, "it has some"
        pages, windowed = segment.aside
        tables = [pages, windowed if self._window else pages]
        tail, found = segment.start_position // self._page_tokens, []
        for table in tables:
            is_there = table is not None and len(table) > tail and table[tail] and not segment.dropped_tokens
            if table is None or not is_there or table.dtype != np.int64 or not table.flags.c_contiguous:
                raise RequestError(f"segment {index} has no page aside for position {segment.start_position}")
            found.append(int(table.ctypes.data))
        return found[0], found[1]

    def _set_state(self, index: int, step: StateStep) -> None:
        """Write how a segment takes its states further, which `BatchLimits.check` has proven."""
        targets = placed(np.array(step.targets, np.int64).reshape(-1, 2))
        self._targets[index] = targets
        words = step.source, step.log, step.num_logged, step.new_log, address(targets), len(targets)
        self._segments[index, 5:-2] = words

    def _exact_table(self, key: int, pages: NDArray[np.int64], segment: Segment) -> int:
        """Address of a copy of the entries that a segment's rows may use, in guard mode."""
        length = segment.start_position - segment.dropped_tokens + segment.num_rows
        copy = self._exact_tables[key] = placed(pages[: -(-length // self._page_tokens)])
        return address(copy)

    def _windowed_table(self, index: int, segment: Segment) -> int:
        """The table of a segment's sliding-window blocks, with an entry for every page that those layers will see."""
        table, page_tokens = segment.windowed_addresses, self._page_tokens
        start = segment.start_position - segment.dropped_tokens
        if table is None or table.dtype != np.int64 or not table.flags.c_contiguous:
            raise RequestError(f"segment {index}'s addresses of windowed layers are not one run of int64")
        first = max(0, start - self._window + 1) // page_tokens
        last = -(-(start + segment.num_rows) // page_tokens)
        if len(table) < last or not table[first:last].all():
            raise RequestError(
                f"segment {index} from position {segment.start_position} needs the sliding-window blocks of the "
                f"{self._window} positions before it, and lacks some; compute them again"
            )
        return int(table.ctypes.data)


def stretches(operations: Sequence[OpCost]) -> list[Stretch]:
    """Cut a tape after every op that fills another STRETCHES-th part of what a row multiplies by weights."""
    work = [operation.multiply_adds if operation.rows is Rows.BATCH else 0 for operation in operations]
    total = max(1, sum(work))
    found: list[Stretch] = []
    first = before = done = 0
    for index, amount in enumerate(work):
        done += amount
        if STRETCHES * (done - before) >= total or index == len(work) - 1:
            found.append(Stretch(first, index + 1 - first, before / total, (done - before) / total))
            first, before = index + 1, done
    return found
