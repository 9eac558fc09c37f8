"""A scripted model with a recurrent state, with or without pages, whose logits are those of the plain scripted model.

Its state is the hash of all ids so far, from which those logits are made. Wherever it has pages too, the ids in them
must hash to its state; a state says how many ids it stands for, and a log which position each row is of. What a step
does not promise to write is filled with nonsense, so a wrong slot, log, order or length fails at once.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.kv_layout import LOG_ROWS
from localinfer.kernels.program import Batch, Segment, StateStep
from tests.engine.fakes import (
    PAGE_TOKENS,
    FakeConfig,
    FakeLayout,
    FakeModel,
    FakeProgram,
    Logits,
    hashed_logits,
    logits_of_hash,
)

STATE_BYTES = 64
LOG_BYTES = 16 * (LOG_ROWS + 2)
_SEED, _PRIME = 1469598103934665603, 1099511628211
_NONSENSE = 0xDEADBEEF

State = tuple[int, int]
"""Hash of the ids, and how many they are."""


def recurrent_layout(page_bytes: int = 64) -> FakeLayout:
    return FakeLayout(page_bytes=page_bytes, state_bytes=STATE_BYTES, log_bytes=LOG_BYTES)


def advanced(state: State, token_id: int) -> State:
    return (state[0] ^ (token_id + 1)) * _PRIME % 2**64, state[1] + 1


def state_of(token_ids: Sequence[int]) -> State:
    state = _SEED, 0
    for token_id in token_ids:
        state = advanced(state, token_id)
    return state


def words(address: int, num_bytes: int) -> NDArray[np.uint64]:
    assert address and address % 64 == 0, "a slot is not aligned, or is none"
    return np.ctypeslib.as_array((ctypes.c_uint64 * (num_bytes // 8)).from_address(address))


def read_state(address: int) -> State:
    if not address:
        return _SEED, 0
    block = words(address, STATE_BYTES)
    assert int(block[2]) == int(block[0]) ^ int(block[1]), "a state was read that nobody has written"
    return int(block[0]), int(block[1])


def write_state(address: int, state: State) -> None:
    words(address, STATE_BYTES)[:] = [state[0], state[1], state[0] ^ state[1], *[_NONSENSE] * 5]


def repeated(step: StateStep) -> State:
    """The state after the source and its logged rows."""
    state = read_state(step.source)
    rows = words(step.log, LOG_BYTES)[: 2 * LOG_ROWS] if step.num_logged else ()
    for row in range(step.num_logged):
        assert int(rows[2 * row + 1]) == state[1], "a row of a log does not come after the state"
        state = advanced(state, int(rows[2 * row]))
    return state


@dataclass
class FakeRecurrentProgram(FakeProgram):
    """As FakeProgram, over states. has_pages: it keeps ids in pages, too. num_settled: calls of `settle`."""

    has_pages: bool = True
    num_settled: int = 0
    starts: list[int] = field(default_factory=list)

    def run(self, batch: Batch) -> Logits:
        assert not self.closed, "a closed program was run"
        assert 0 < batch.token_ids.size <= self.max_batch_rows and batch.output_rows.size <= self.max_output_rows
        self.batch_sizes.append(batch.token_ids.size)
        self._check_apart(batch.segments)
        logits: list[Logits] = []
        row = 0
        for segment in batch.segments:
            ids = batch.token_ids[row : row + segment.num_rows].tolist()
            states = self._run_segment(segment, ids)
            wanted = [r - row for r in batch.output_rows.tolist() if row <= r < row + len(ids)]
            logits += [self._logits(segment, states[r]) for r in wanted]
            row += segment.num_rows
        return np.array(logits, np.float32).reshape(len(logits), self.vocab_size)

    def settle(self, step: StateStep) -> None:
        self.num_settled += 1
        assert not step.new_log and all(rows == 0 for rows, _ in step.targets)
        for _, address in step.targets:
            assert address not in (step.source, step.log)
            write_state(address, repeated(step))

    def _run_segment(self, segment: Segment, ids: list[int]) -> list[State]:
        step, start = segment.state, segment.start_position
        assert step is not None, "a segment without its states"
        self.starts.append(start)
        state = repeated(step)
        assert state[1] == start, f"states of {state[1]} positions at {start}"
        targets = dict(step.targets)
        assert list(targets) == sorted(targets) and all(0 <= count <= len(ids) for count in targets)
        assert not step.new_log or len(ids) <= LOG_ROWS
        # What a step that ends early leaves behind.
        for address in targets.values():
            words(address, STATE_BYTES)[:] = _NONSENSE
        if step.new_log:
            words(step.new_log, LOG_BYTES)[:] = _NONSENSE
        if 0 in targets:
            write_state(targets[0], state)
        states = []
        for offset, token_id in enumerate(ids):
            position = start + offset
            if self.has_pages:
                self._store(segment, position, token_id)
            if position in self.fails_at:
                raise MemoryError("scripted failure")
            state = advanced(state, token_id)
            states.append(state)
            if self.has_pages and not segment.dropped_tokens:
                assert state_of(self._held(segment, position + 1)) == state, "states and pages are of different texts"
            if step.new_log:
                words(step.new_log, LOG_BYTES)[2 * offset : 2 * offset + 2] = [token_id, position]
            if offset + 1 in targets:
                write_state(targets[offset + 1], state)
        return states

    def _store(self, segment: Segment, position: int, token_id: int) -> None:
        place = position - segment.dropped_tokens
        page_of(segment, place)[place % PAGE_TOKENS] = token_id

    def _held(self, segment: Segment, length: int) -> list[int]:
        """Ids in a segment's pages."""
        pages = [page_of(segment, first) for first in range(0, length, PAGE_TOKENS)]
        ids: list[int] = np.concatenate(pages)[:length].tolist()
        return ids

    def _logits(self, segment: Segment, state: State) -> Logits:
        if self.has_pages and not segment.dropped_tokens:
            return self.logits_of(np.array(self._held(segment, state[1]), np.int32), self.vocab_size)
        return logits_of_hash(state[0], self.vocab_size)

    def _check_apart(self, segments: Sequence[Segment]) -> None:
        written: list[int] = []
        read: set[int] = set()
        for segment in segments:
            step = segment.state
            assert step is not None
            written += [address for _, address in step.targets] + [step.new_log] * bool(step.new_log)
            read |= {step.source, step.log if step.num_logged else 0}
        assert len(set(written)) == len(written), "two segments write one slot"
        assert not read & set(written), "a slot is read and written"


def page_of(segment: Segment, position: int) -> NDArray[np.int32]:
    address = int(segment.page_addresses[position // PAGE_TOKENS])
    return np.ctypeslib.as_array((ctypes.c_int32 * PAGE_TOKENS).from_address(address))


def recurrent_model(
    logits_of: Callable[[NDArray[np.int32], int], Logits] = hashed_logits,
    *,
    page_bytes: int = 64,
    vocab_size: int = 260,
    context_length: int = 64,
    max_batch_rows: int = 5,
    max_output_rows: int = 3,
) -> FakeModel:
    """As `fake_model`, with a state. page_bytes: 0 for a model without pages, whose logits are those of a hash."""
    program = FakeRecurrentProgram(vocab_size, logits_of, max_batch_rows, max_output_rows, has_pages=page_bytes > 0)
    return FakeModel(program, FakeConfig(vocab_size, context_length), kv_layout=recurrent_layout(page_bytes))
