"""Run a few ops on chosen rows: inputs come in through an embedding table, a result goes out through `select_output`.

Every buffer and page is filled with NaN first, so what a kernel reads beyond its rows or columns shows in its result.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import Arena, address
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import RowTable, pack
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import Buffer, EmbeddingTable, LinearWeight, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.types import FloatArray

NO_CACHE = KVLayout("f32", [])

Write = Callable[[GraphBuilder, list[Buffer]], Buffer]


def table(values: FloatArray) -> EmbeddingTable:
    """A float32 embedding table."""
    rows = np.ascontiguousarray(values, np.float32)
    num_rows, width = rows.shape
    packed = RowTable(Layout.F32, num_rows, width, rows.reshape(-1).view(np.uint8))
    return EmbeddingTable("table", num_rows, width, packed)


def linear(pool: ThreadPool, layout: Layout, data: NDArray[np.uint8], shape: tuple[int, ...]) -> LinearWeight:
    """A packed matrix [rows, columns] or stack [experts, rows, columns]."""
    num_experts = shape[0] if len(shape) == 3 else 1
    packed = pack(pool, layout, data, num_experts, shape[-2], shape[-1])
    return LinearWeight(f"weight in {layout.name}", shape[-2], shape[-1], packed, num_experts)


def random_rows(rows: int, columns: int, seed: int) -> FloatArray:
    """Normally distributed float32[rows, columns]."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


class RowProgram:
    """A program over rows of `inputs`: row i of a batch is row token_ids[i] of each input."""

    def __init__(
        self,
        pool: ThreadPool,
        inputs: Sequence[FloatArray],
        write: Write,
        max_rows: int,
        kv_layout: KVLayout = NO_CACHE,
        max_summed_tokens: int = 0,
    ) -> None:
        tape = GraphBuilder(kv_layout.layers)
        buffers = []
        for index, values in enumerate(inputs):
            buffers.append(tape.buffer(f"input {index}", values.shape[1]))
            tape.embed(buffers[-1], table(values))
        result = write(tape, buffers)
        if result.rows is Rows.BATCH:
            selected = tape.buffer("selected", result.width, Rows.OUTPUT)
            tape.select_output(selected, result)
            result = selected
        self.program = lower_to_cpu(
            tape.finish(result),
            pool,
            kv_layout,
            max_batch_rows=max_rows,
            max_output_rows=max_rows,
            max_summed_tokens=max_summed_tokens,
        )
        for memory in self.program.tape.memory.buffers:
            memory[:] = 255
        self._kv_layout = kv_layout
        self._pages: list[NDArray[np.uint8]] = []

    def pages(self, num_positions: int) -> NDArray[np.int64]:
        """Addresses of pages for one sequence, filled with NaN."""
        return self._pieces(num_positions, self._kv_layout.page_bytes)

    def windowed_pages(self, num_positions: int) -> NDArray[np.int64]:
        """The same, of the pieces of windowed layers."""
        return self._pieces(num_positions, self._kv_layout.windowed_bytes)

    def _pieces(self, num_positions: int, num_bytes: int) -> NDArray[np.int64]:
        count = -(-num_positions // self._kv_layout.page_tokens)
        # Each by itself, as in guard mode the cache's are.
        pages = [Arena(0).take(num_bytes) for _ in range(count)]
        for page in pages:
            page[:] = 255
        self._pages += pages
        return np.array([address(page) for page in pages], np.int64)

    def run(self, token_ids: Sequence[int], segments: Sequence[Segment]) -> FloatArray:
        """One batch; every row is an output row."""
        ids = np.array(token_ids, np.int32)
        return self.program.run(Batch(ids, segments, np.arange(len(ids), dtype=np.int32))).copy()


def run_rows(
    pool: ThreadPool,
    inputs: Sequence[FloatArray],
    write: Write,
    splits: Sequence[int] = (),
    kv_layout: KVLayout = NO_CACHE,
) -> FloatArray:
    """All rows of the inputs as one sequence, at once or in batches of the given sizes."""
    sizes = list(splits) or [len(inputs[0])]
    assert sum(sizes) == len(inputs[0]), "the batches cover the rows"
    program = RowProgram(pool, inputs, write, max(sizes), kv_layout)
    pages = program.pages(sum(sizes))
    parts, start = [], 0
    for size in sizes:
        parts.append(program.run(range(start, start + size), [Segment(start, size, pages)]))
        start += size
    return np.concatenate(parts)


def assert_same_bits(found: FloatArray, wanted: FloatArray) -> None:
    """Equal as numbers are printed, and equal to the last bit; no NaN."""
    assert found.dtype == wanted.dtype == np.float32
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def relative_error(found: FloatArray, wanted: NDArray[np.float64]) -> float:
    """L2 norm of the difference over that of the wanted values."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
