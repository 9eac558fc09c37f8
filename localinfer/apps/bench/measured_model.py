"""A model run on given token ids, step by step, and the time of each of its ops: for measurements only."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.errors import BackendUnavailableError
from localinfer.kernels.ops import Rows
from localinfer.kernels.program import Batch, MeasurableProgram, OpCost
from localinfer.models.load.loader import load_model
from localinfer.types import Closing, ProgressCallback

_EMPTY_RUNS = 201
_LEAST_SECONDS = 1e-7


class LeastWork(NamedTuple):
    """The least work of a computation: bytes read from memory, and multiplications."""

    weight_bytes: int
    kv_bytes: int
    """Of the KV cache, and of recurrent states, read and written."""
    multiply_adds: int
    """With weights."""
    kv_multiply_adds: int
    """With the KV cache."""


class OperationTime(NamedTuple):
    """One op of a tape in one run: its name, work and time."""

    operation: OpCost
    work: LeastWork
    seconds: float


class MeasuredModel(Closing):
    """One sequence of a loaded model, computed from any position. A context manager that closes the model.

    model: as loaded; the other arguments are those of `load_model`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        context_length: int | None = None,
        device: str = "cpu",
        progress: ProgressCallback | None = None,
    ) -> None:
        self.model = load_model(path, threads=threads, context_length=context_length, device=device, progress=progress)
        config = self.model.config
        self.vocab_size = config.vocab_size
        pool = PagePool(self.model.kv_layout)
        self._cache = SequenceCache(pool, max_length=config.context_length, keeps_unseen=True)
        self._computed = np.empty(0, np.int32)

    @property
    def num_threads(self) -> int:
        """CPU threads."""
        return self._program.num_threads

    def compute(
        self,
        start: int,
        token_ids: Sequence[int],
        num_outputs: int = 1,
        run: Callable[[Batch], NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Compute token ids at positions from `start` on, overwriting the cache there; return the last batch's output.

        num_outputs: its rows, at most one per token of the last batch. run: computes a batch; None: `Program.run`, for
        logits float32[num_outputs, vocab_size]. Valid until the next call.
        """
        program = self.model.program
        run = run or program.run
        tokens = np.array(token_ids, np.int32)
        while (left := self._cache.truncate(start)) < start:
            # The states of recurrent layers are held at few positions only.
            missing = self._computed[left:start][: program.max_batch_rows]
            forward(program.run, (self._cache,), (missing,), np.empty(0, np.int32))
        self._cache.keep_state()
        self._computed = np.concatenate((self._computed[:start], tokens))
        found = np.empty((0, self.vocab_size), np.float32)
        for first in range(0, tokens.size, program.max_batch_rows):
            chunk = tokens[first : first + program.max_batch_rows]
            is_last = first + chunk.size == tokens.size
            outputs = np.arange(chunk.size - num_outputs if is_last else chunk.size, chunk.size, dtype=np.int32)
            found = forward(run, (self._cache,), (chunk,), outputs)
        return found

    def work(self, start: int, num_rows: int, num_outputs: int = 1) -> LeastWork:
        """The work of computing `num_rows` tokens from position `start`, in all ops together."""
        works = [work_of(operation, start, num_rows, num_outputs) for operation in self._program.operations()]
        return LeastWork(*map(sum, zip(*works, strict=True)))

    def time_operations(self, start: int, token_ids: Sequence[int], repetitions: int) -> list[OperationTime]:
        """Time every op at its position in the tape: medians over runs that compute one batch op by op.

        The time of an empty run is subtracted, so times are accurate to about a microsecond.
        """
        self.compute(start, token_ids)
        program, clock = self._program, time.perf_counter
        run, operations = program.run_operations, program.operations()
        samples = np.empty((repetitions, len(operations)))
        empty = np.empty(_EMPTY_RUNS)
        for index in range(_EMPTY_RUNS):
            began = clock()
            run(0, 0)
            empty[index] = clock() - began
        for repetition in range(repetitions):
            for index in range(len(operations)):
                began = clock()
                run(index, 1)
                samples[repetition, index] = clock() - began
        seconds = np.maximum(np.median(samples, axis=0) - np.median(empty), _LEAST_SECONDS).tolist()
        return [
            OperationTime(operation, work_of(operation, start, len(token_ids), 1), value)
            for operation, value in zip(operations, seconds, strict=True)
        ]

    def close(self) -> None:
        """Release threads and memory."""
        self._cache.close()
        self.model.close()

    @property
    def _program(self) -> MeasurableProgram:
        if not isinstance(self.model.program, MeasurableProgram):
            raise BackendUnavailableError("ops cannot be timed apart on this device; measure on device 'cpu'")
        return self.model.program


def work_of(operation: OpCost, start: int, num_rows: int, num_outputs: int) -> LeastWork:
    """The work of one op for rows at positions start to start + num_rows - 1 of one sequence."""
    rows = num_outputs if operation.rows is Rows.OUTPUT else num_rows
    end = start + num_rows
    window = operation.window or end
    attended = sum(min(position + 1, window) for position in range(start, end))
    return LeastWork(
        weight_bytes=min(operation.weight_bytes, rows * operation.row_weight_bytes),
        kv_bytes=operation.kv_bytes * min(end, window + num_rows - 1) + operation.state_bytes,
        multiply_adds=rows * operation.multiply_adds,
        kv_multiply_adds=operation.kv_multiply_adds * attended,
    )
