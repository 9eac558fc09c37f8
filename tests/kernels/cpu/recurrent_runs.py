"""Run one recurrent op on the CPU over chosen rows of its inputs, with blocks of states and logs that start as NaN."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Rows
from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import table
from tests.kernels.recurrent_cases import OUTPUTS, RecurrentCase


class RecurrentProgram:
    """A program of two equal ops over the same inputs, so that neither's part of a block is all of it.

    Row i of a batch is row token_ids[i] of each input. Its results are both ops', side by side.
    """

    def __init__(self, pool: ThreadPool, case: RecurrentCase, inputs: dict[str, FloatArray], max_rows: int) -> None:
        tape = GraphBuilder()
        buffers = {name: tape.buffer(name, values.shape[1]) for name, values in inputs.items()}
        for name, values in inputs.items():
            tape.embed(buffers[name], table(values))
        width = case.widths["out"]
        names = [name for name in OUTPUTS if name in case.widths]
        both = tape.buffer("both", 2 * len(names) * width)
        for index in range(2):
            outs = {name: tape.buffer(f"{name} {index}", width) for name in names}
            case.write(tape, {**buffers, **outs}, np.random.default_rng(1))
            for part, out in enumerate(outs.values()):
                offset = (index * len(names) + part) * width
                tape.copy_heads(both, out, 1, width, both.width, width, out_offset=offset)
        selected = tape.buffer("selected", both.width, Rows.OUTPUT)
        tape.select_output(selected, both)
        graph = tape.finish(selected)
        self.layout = KVLayout("f32", [], graph.states)
        self.program = lower_to_cpu(graph, pool, self.layout, max_batch_rows=max_rows, max_output_rows=max_rows)
        for memory in self.program.tape.memory.buffers:
            memory[:] = 255
        self._kept: list[NDArray[np.uint8]] = []

    def block(self) -> int:
        """Address of a fresh block of states."""
        return self._fresh(self.layout.state_bytes)

    def log(self) -> int:
        """Address of a fresh log."""
        return self._fresh(self.layout.log_bytes)

    def states(self, place: int) -> NDArray[np.uint8]:
        """What a block holds."""
        memory = next(one for one in self._kept if address(one) == place)
        return memory[: self.layout.state_bytes]

    def run(self, *segments: tuple[range, StateStep]) -> list[FloatArray]:
        """One batch of some rows of the inputs for each segment, and the results of each."""
        ids = np.concatenate([np.array(rows, np.int32) for rows, _ in segments])
        pages = np.zeros(64, np.int64)
        found = self.program.run(
            Batch(
                ids,
                [Segment(rows.start, len(rows), pages, state=step) for rows, step in segments],
                np.arange(len(ids), dtype=np.int32),
            )
        )
        ends = np.cumsum([len(rows) for rows, _ in segments])
        return np.split(found.copy(), ends[:-1])

    def in_chunks(self, sizes: Sequence[int]) -> tuple[FloatArray, int]:
        """All rows in batches of these sizes; returns results, and the block of the states after them."""
        parts, source, start = [], 0, 0
        for size in sizes:
            target = self.block()
            parts += self.run((range(start, start + size), StateStep(source, [(size, target)])))
            source, start = target, start + size
        return np.concatenate(parts), source

    def _fresh(self, size: int) -> int:
        memory = aligned_zeros(size)
        memory[:] = 255
        self._kept.append(memory)
        return address(memory)
